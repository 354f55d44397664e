"""Recommends buffer sizes for a data set, from its lengths, and shows what each choice costs.

    jaxthd plan configs/cp2.py
    jaxthd plan runs/my --data.capacity 4096

Reads the training manifests. Recordings are not decoded: a duration comes from the manifest, else from the
file's header. The lengths are packed as the loader would pack them, for a range of settings. Of more than
100,000 documents a seeded sample is read.
"""

from pathlib import Path
from typing import Any

from jaxthd.errors import readable_errors
from jaxthd.planning.lengths import draw, measure, read_examples
from jaxthd.planning.report import describe_plan
from jaxthd.planning.search import make_plan
from jaxthd.terminal.arguments import parse_command_line

OPTIONS: dict[str, dict[str, Any]] = {
    "out": {
        "type": Path,
        "metavar": "FILE",
        "help": "where the picture of lengths, buffers and padding goes; by default plan.png in the workdir",
    },
}


def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    config, path, run, options, _ = parse_command_line("plan", argv, OPTIONS, __doc__)
    print(f"{path}: mesh (data, context, pipeline, tensor) = {config.mesh.sizes}")
    found, unusable = zip(*(measure(examples, config) for examples in read_examples(config)), strict=True)
    if sum(unusable):
        print(f"{sum(unusable):,} documents cannot be used; a training run lists them in skipped.jsonl")
    stream = draw(found, config.data)
    plan = make_plan(stream, config, epoch=sum(len(lengths.tokens) for lengths in found))
    print(f"\n{describe_plan(plan)}")
    from jaxthd.figures.plan import draw_plan  # matplotlib takes a while to load

    out = options.out or (path if run else Path("runs") / path.stem) / "plan.png"
    out.parent.mkdir(parents=True, exist_ok=True)
    draw_plan(plan, out)
    print(f"\n{out}")


if __name__ == "__main__":
    with readable_errors():
        main()
