"""What a reference policy costs on a device: a copy, the base weights of LoRA, none. By compiled programs.

    python scripts/measure_reference.py [configs/first_run.py] [--mesh.data 2 ...]

For each kind the bytes of the training state and of its reference, and of the program that scores a batch by
the reference: its arguments, and its temporary memory (memory_analysis of the compiled programs, for
simulated CPU devices, in float32). Nothing of the run's size is allocated. The base weights of LoRA are the
reference without an array more: the state has none, and the program takes parameters that the state holds.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from jaxthd.config import AdaptConfig, Config, PostTrainingConfig
from jaxthd.errors import readable_errors
from jaxthd.models.adapt import without_lora
from jaxthd.parallel.mesh import bytes_of
from jaxthd.planning.compiled_step import abstract_inputs, as_wide, compilable
from jaxthd.planning.parameters import state_bytes
from jaxthd.planning.program import UNOPTIMIZED
from jaxthd.run.startup import simulate_devices
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.reference import is_base
from jaxthd.steps.scoring import make_scoring_step
from jaxthd.terminal.arguments import parse_command_line
from jaxthd.terminal.tables import aligned, size_text

KINDS: dict[str, tuple[AdaptConfig, str]] = {
    "all parameters train, copy": (AdaptConfig(), "copy"),
    "LoRA 16, copy of its matrices": (AdaptConfig(lora_rank=16, freeze=("*",)), "copy"),
    "LoRA 16, base weights": (AdaptConfig(lora_rank=16, freeze=("*",)), "auto"),
    "all parameters train, cached": (AdaptConfig(), "cached"),
}


class Cost(NamedTuple):
    """Bytes of a device. state: with the reference. arguments: of the scoring program, without its batch."""

    state: int
    reference: int
    arguments: int
    temporary: int


def cost(config: Config) -> Cost:
    """Of a config whose objective compares with a reference."""
    config = compilable(as_wide(config))
    blueprint, mesh, state, batch = abstract_inputs(config)
    sizes = state_bytes(config)
    whole = sum(size for name, size in sizes.items() if name != "gradients")
    reference = sizes.get("reference policy", 0)
    if config.posttraining.reference == "cached":
        return Cost(whole, reference, 0, 0)
    params = state.params
    if is_base(config):
        params, blueprint = without_lora(params), Blueprint(replace(config, adapt=AdaptConfig()))
    step: Any = make_scoring_step(blueprint, mesh)
    memory = step.lower(params, state.buffers, batch).compile(compiler_options=UNOPTIMIZED).memory_analysis()
    of_batch = sum(bytes_of_shards(x) for x in jax.tree.leaves(batch))
    arguments = memory.argument_size_in_bytes - of_batch
    return Cost(whole, reference, arguments, memory.temp_size_in_bytes)


def bytes_of_shards(x: Any) -> int:
    return bytes_of(jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype))


def kinds(config: Config) -> dict[str, Config]:
    """The config with each kind of reference."""
    dpo = replace(config, train=replace(config.train, objective="dpo", mtp_loss=0.0, ctc_loss=0.0))
    return {
        name: replace(dpo, adapt=adapt, posttraining=PostTrainingConfig(reference=kind))  # type: ignore[arg-type]
        for name, (adapt, kind) in KINDS.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv) or ["configs/first_run.py"]
    config = parse_command_line("measure_reference", words, None, __doc__).config
    jax.config.update("jax_platforms", "cpu")
    simulate_devices(config.mesh.devices)
    rows: list[tuple[str, ...]] = [
        ("reference", "state", "of it the reference", "arguments of its scores", "temporary")
    ]
    for name, each in kinds(config).items():
        found = cost(each)
        own = (found.state, found.reference, found.arguments, found.temporary)
        rows.append((name, *map(size_text, own)))
    print(aligned(rows, left=(0,)))


if __name__ == "__main__":
    with readable_errors():
        main()
