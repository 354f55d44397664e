"""Recommends buffer sizes for a data set, from its lengths, and shows what each choice costs.

    jaxthd plan configs/cp2.py
    jaxthd plan runs/my --data.capacity 4096

Reads the training manifests. Recordings are not decoded: a duration comes from the manifest, else from the
file's header. The lengths are packed as the loader would pack them, for a range of settings. Of more than
100,000 documents a seeded sample is read.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxthd.config import Rung
from jaxthd.data.mixing import mixing_weights
from jaxthd.errors import readable_errors
from jaxthd.planning.compiled_step import measure as measure_step
from jaxthd.planning.lengths import draw, measure, read_examples
from jaxthd.planning.report import describe_plan, rungs_table
from jaxthd.planning.search import Plan, make_plan
from jaxthd.run.startup import simulate_devices
from jaxthd.terminal.arguments import parse_command_line

OPTIONS: dict[str, dict[str, Any]] = {
    "out": {
        "type": Path,
        "metavar": "FILE",
        "help": "where the picture of lengths, buffers and padding goes; by default plan.png in the workdir",
    },
    "compile": {
        "action": "store_true",
        "help": "also compile the step at every size of the largest ladder, which takes a minute or more for "
        "each: what another size costs as a program",
    },
}


def main(argv: list[str] | None = None) -> None:
    config, path, run, options, _ = parse_command_line("plan", argv, OPTIONS, __doc__)
    if options.compile:
        jax.config.update("jax_platforms", "cpu")
        simulate_devices(config.mesh.devices)
    print(f"{path}: mesh (data, context, pipeline, tensor) = {config.mesh.sizes}")
    found, unusable = zip(*(measure(examples, config) for examples in read_examples(config)), strict=True)
    if sum(unusable):
        print(f"{sum(unusable):,} documents cannot be used; a training run lists them in skipped.jsonl")
    weights = mixing_weights(config.data, [len(lengths.tokens) for lengths in found])
    stream = draw(found, weights or (), config.data.seed)
    plan = make_plan(stream, config, epoch=sum(len(lengths.tokens) for lengths in found))
    print(f"\n{describe_plan(plan)}")
    if options.compile:
        print(f"\n{rungs_table(list(compiled_rungs(plan)))}")
    from jaxthd.figures.plan import draw_plan  # matplotlib takes a while to load

    out = options.out or (path if run else Path("runs") / path.stem) / "plan.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_plan(plan, out)
    print(f"\n{out}")


def compiled_rungs(plan: Plan) -> Iterator[tuple[Rung, float]]:
    """(size of buffers, seconds that its step takes to compile) for the largest ladder that was compared."""
    config = plan.ladders[-1].config if plan.ladders else plan.recommended.config
    for rung in config.data.ladder:
        yield rung, measure_step(config.at(rung)).seconds


if __name__ == "__main__":
    with readable_errors():
        main()
