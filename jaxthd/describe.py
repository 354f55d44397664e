"""Shows what a configuration amounts to: parameters by group, and bytes of state on a device.

    jaxthd describe configs/nemotron3_nano.py --mesh.data 16
    jaxthd describe runs/my --names

--names lists every parameter by the name that adapt.freeze takes, and whether it trains. Only shapes are
computed: no parameter is made, and no device of the mesh is needed.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from flax import nnx

from jaxthd.config import Config, MeshConfig
from jaxthd.config.model import TEXT_ONLY
from jaxthd.errors import readable_errors
from jaxthd.models.adapt import names_of, projections
from jaxthd.planning.parameters import PARTS, Group, parameter_groups, state_bytes
from jaxthd.steps.blueprint import Blueprint
from jaxthd.terminal.arguments import parse_command_line
from jaxthd.terminal.tables import aligned, size_text
from jaxthd.validate import DeviceFacts, findings


def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    names_only = {"action": "store_true", "help": "names of parameters and projections"}
    line = parse_command_line("describe", argv, {"names": names_only}, __doc__)
    config = line.config
    facts = DeviceFacts(platform="gpu", devices=config.mesh.devices, kind="as many as the mesh needs")
    for finding in findings(config, facts):
        print(f"warning: {finding}", file=sys.stderr)
    print(f"{line.path}\n\n{names(config) if line.options.names else describe(config)}")


def describe(config: Config) -> str:
    """The table of parameters, and the bytes of state on a device, as text."""
    groups = parameter_groups(config)
    total = sum(g.parameters for g in groups)
    rows: list[tuple[str, ...]] = [
        ("", "group", "copies", "parameters", "share", "trained", "active a token", "largest array")
    ]

    def numbers(copies: str, of: Sequence[Group], has_active: bool = False) -> tuple[str, ...]:
        """Cells of a row: copies, parameters, their share of the model, trained ones, active ones."""
        parameters, own = sum(g.parameters for g in of), sum(g.trained for g in of)
        share, active = f"{parameters / total:.2%}", f"{sum(g.active for g in of):,}" if has_active else ""
        some = f"{own:,}" if own else "none"
        return copies, f"{parameters:,}", share, "all" if own == parameters else some, active

    for part in PARTS:
        of_part = [g for g in groups if g.part == part]
        is_llm = part == "LLM"
        for g in of_part:
            name, shape = g.largest
            counts = numbers(f"{g.copies}", [g], is_llm)
            rows.append((part, g.name, *counts, f"{name} {' x '.join(map(str, shape))}"))
        if len(of_part) > 1:
            rows.append((part, "in all", *numbers("", of_part, is_llm), ""))
    rows.append(("model", "in all", *numbers("", groups), ""))
    note = f"\n\nThis is {TEXT_ONLY}." * (config.model.encoder is None)
    return f"{aligned(rows, left=(0, 1, 7))}{note}\n\n{_memory(config)}"


def names(config: Config) -> str:
    """Every parameter's name, shape (a stack's dim first), and whether it trains; then what can get LoRA."""
    blueprint = Blueprint(replace(config, mesh=MeshConfig()))
    model, is_trained = blueprint.model, nnx.traversals.flatten_mapping(blueprint.trained)
    rows = [
        (
            " or ".join(names_of(model, path)),
            " x ".join(map(str, variable.shape)),
            "trained" if is_trained[path] else "frozen",
        )
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param))
    ]
    can_adapt = "\n".join(projections(model))
    return f"{aligned([('parameter', 'shape', ''), *rows], left=(0, 1, 2))}\n\nprojections\n{can_adapt}"


def _memory(config: Config) -> str:
    mesh = config.mesh
    dtype = "float64" if config.compute.dtype == "float64" else "float32"
    rows = [(f"state ({dtype})", "one copy", f"on each of {mesh.devices} devices")]
    whole, part = (state_bytes(c) for c in (replace(config, mesh=MeshConfig()), config))
    for sizes in (whole, part):
        sizes["in all"] = sum(sizes.values())
    rows += [(name, size_text(size), size_text(part[name])) for name, size in whole.items()]
    return (
        f"{aligned(rows, left=(0,))}\n\n"
        f"Mesh (data, context, pipeline, tensor) = {mesh.sizes}: {mesh.devices} devices.\n"
        "Activations, the batch, gathered weights and copies in the compute dtype come on top."
    )


if __name__ == "__main__":
    with readable_errors():
        main()
