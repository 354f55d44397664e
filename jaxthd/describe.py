"""What a configuration amounts to: parameters by group, and the bytes of state on a device.

    python -m jaxthd.describe --config configs/nemotron3_nano.py [--mesh.data 16 ...] [--names]

--names: every parameter by the name that adapt.freeze takes, and whether it trains. Shapes only: no parameter
is made, and no device of the mesh is needed.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from flax import nnx

from jaxthd.config import Config, MeshConfig
from jaxthd.errors import readable_errors
from jaxthd.models.adapt import dotted, projections, split, trained
from jaxthd.models.mixers import LAYER_KINDS
from jaxthd.parallel.mesh import bytes_of, on_device
from jaxthd.parallel.params import Buffer
from jaxthd.steps.blueprint import Blueprint, specs_of
from jaxthd.steps.optimizer import make_optimizer
from jaxthd.terminal.command_line import parse_command_line
from jaxthd.terminal.tables import aligned, size_text
from jaxthd.validate import DeviceFacts, findings

PARTS = ("LLM", "encoder", "adapter")

_LETTERS = {"M": "M Mamba2", "*": "* attention", "-": "- MLP", "E": "E"}
_EXPERTS = {
    "up": "routed experts",
    "down": "routed experts",
    "router": "router",
    "shared": "shared expert",
    "latent_in": "latent projection",
    "latent_out": "latent projection",
}
_CONFORMER = {"ffn1": "feed-forward", "ffn2": "feed-forward", "attention": "attention", "conv": "convolution"}
_ORDER = (
    "embedding",
    *_LETTERS.values(),
    "RMSNorms",
    "head",
    "MTP",
    "subsampling",
    *_CONFORMER.values(),
    "LayerNorms",
)

Path = tuple[Any, ...]
"""Names and numbers, from the root of the module tree to a parameter."""


@dataclass
class Group:
    """Parameters that belong together.

    part: one of PARTS. copies: blocks that hold the group. parameters: over all copies, LoRA's included.
    trained: of these.
    active: parameters that one token of the LLM meets: of the routed experts those it is sent to, of the
        embedding one row; for encoder and adapter, which see frames, all.
    largest: name and shape of the largest array, in one block.
    """

    part: str
    name: str
    copies: int
    parameters: int = 0
    trained: int = 0
    active: int = 0
    largest: tuple[str, tuple[int, ...]] = ("", ())


def parameter_groups(config: Config) -> list[Group]:
    """The model's parameters, part by part; counted from the shapes of the model that would be trained."""
    groups: dict[tuple[str, str], Group] = {}
    model = Blueprint(replace(config, mesh=MeshConfig())).model
    is_trained = nnx.traversals.flatten_mapping(trained(model, config.adapt))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        part, name, copies = _group(path, config)
        group = groups.setdefault((part, name), Group(part, name, copies))
        size, is_stacked = math.prod(variable.shape), bool({"layers", "blocks", "depths"} & set(path))
        share = _active_share(name, config)
        group.parameters += size
        group.trained += size * is_trained[path]
        group.active += round(size * share)
        shape = tuple(variable.shape[1:] if is_stacked else variable.shape)
        if math.prod(shape) > math.prod(group.largest[1]) or not group.largest[1]:
            group.largest = (_array_name(path), shape)
    return sorted(groups.values(), key=lambda g: (PARTS.index(g.part), _place(g.name)))


def _group(path: Path, config: Config) -> tuple[str, str, int]:
    """(part, name, copies) of the group that the parameter at `path` of the module tree belongs to."""
    letters, layers = config.model.llm.letters, config.model.audio_encoder.layers
    match path:
        case ("decoder", "layers", str(kind), "mixer", str(name), *_):
            letter = next(k.letter for k in LAYER_KINDS.values() if k.name == kind)
            label = f"E {_EXPERTS.get(name, name)}" if letter == "E" else _LETTERS[letter]
            return "LLM", label, letters.count(letter)
        case ("mtp", "layers", "moe", "mixer", "up" | "down", *_):
            return "LLM", "MTP routed experts", config.model.llm.mtp_modules
        case ("mtp", *_):
            return "LLM", "MTP", config.model.llm.mtp_modules
        case ("decoder", *_):
            return "LLM", "RMSNorms", len(letters) + 1
        case ("encoder", "blocks", str(name), *_):
            return "encoder", _CONFORMER.get(name, "LayerNorms" if name.startswith("norm") else name), layers
        case ("encoder", str(name), *_):
            return "encoder", name, 1
        case _:
            return ("adapter" if path[0] == "adapter" else "LLM"), str(path[0]), 1


def _active_share(name: str, config: Config) -> float:
    llm = config.model.llm
    routed = llm.experts_per_token / llm.experts
    shares = {
        "embedding": 1 / llm.vocab_size,
        "E routed experts": routed,
        "MTP routed experts": routed,
    }
    return shares.get(name, 1.0)


def _array_name(path: Path) -> str:
    """The last names of a path, without those of the tree around the group and of a Linear's matrix."""
    if path[:2] in (("decoder", "layers"), ("mtp", "layers")):
        path = path[3 + (path[3] == "mixer") :]
    names = [str(p) for p in path if p not in ("blocks", "decoder", "encoder", "mtp", "depths")]
    return ".".join(names[:-1] if names[-1] == "w" else names)


def _place(name: str) -> int:
    """Where a group is listed; the expert groups lie together."""
    first = name if name in _ORDER else name.split()[0]
    return _ORDER.index(first) if first in _ORDER else len(_ORDER)


def state_bytes(config: Config) -> dict[str, int]:
    """Bytes of the training state and of the gradients on a device of config.mesh; all hold as much.

    Raises ValueError where the pattern cannot be divided into the pipeline's stages.
    """
    model = Blueprint(config).model
    params, buffers = (
        on_device(nnx.to_pure_dict(nnx.state(model, kind)), specs, config.mesh)
        for kind, specs in zip((nnx.Param, Buffer), specs_of(model), strict=True)
    )
    own, _ = split(params, trained(model, config.adapt))
    moments = jax.eval_shape(make_optimizer(Blueprint(config)).init, own)
    return {
        "parameters": bytes_of(params),
        "gradients": bytes_of(own),
        "AdamW moments": bytes_of(moments),
        "batch statistics, router biases": bytes_of(buffers),
    }


def describe(config: Config) -> str:
    """The parameter table, the totals, and the bytes on a device, as aligned text."""
    groups = parameter_groups(config)
    total = sum(g.parameters for g in groups)
    rows: list[tuple[str, ...]] = [
        ("", "group", "copies", "parameters", "share", "trained", "active a token", "largest array")
    ]

    def numbers(copies: str, of: Sequence[Group], has_active: bool = False) -> tuple[str, ...]:
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
    return f"{aligned(rows, left=(0, 1, 7))}\n\n{_memory(config)}"


def names(config: Config) -> str:
    """Every parameter's name and shape (a stack's dim first), and whether it trains; then the projections."""
    model = Blueprint(replace(config, mesh=MeshConfig())).model
    is_trained = nnx.traversals.flatten_mapping(trained(model, config.adapt))
    rows = [
        (dotted(path), " x ".join(map(str, variable.shape)), "trained" if is_trained[path] else "frozen")
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
        "Activations, the batch, weights gathered for use and copies in the compute dtype come on top."
    )


def main(argv: list[str] | None = None) -> None:
    names_only = {"action": "store_true", "help": "names of parameters and projections"}
    config, path, options = parse_command_line("describe", argv, {"names": names_only})
    for finding in findings(
        config, DeviceFacts(platform="gpu", devices=config.mesh.devices, kind="as many as the mesh needs")
    ):
        print(f"warning: {finding}", file=sys.stderr)
    print(f"{path}\n\n{names(config) if options.names else describe(config)}")


if __name__ == "__main__":
    with readable_errors():
        main()
