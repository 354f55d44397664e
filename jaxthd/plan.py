"""Recommends buffer sizes for a data set: a command line to train with, and what it saves.

    jaxthd plan configs/cp2.py
    jaxthd plan runs/my --data.capacity 4096 --details

Reads the training and validation manifests. Recordings are not decoded: a duration comes from the manifest,
else from the file's header. The lengths are packed as the loader would pack them, for a range of settings. Of
more than 100,000 documents a seeded sample is read. A run keeps the sizes that it began with, so where the
workdir holds one the command begins another.
"""

import shlex
import sys
from itertools import count
from pathlib import Path
from typing import Any

from jaxthd.config import Config
from jaxthd.errors import UserError, readable_errors
from jaxthd.files.run_folder import holds_a_run, source_of
from jaxthd.objectives.answers import draws_answers
from jaxthd.planning.lengths import MOST_READ, Lengths, draw, measure, read_examples
from jaxthd.planning.report import describe_plan, describe_saving, recommended_settings
from jaxthd.planning.search import make_plan
from jaxthd.planning.sizes import held_out, needed_sizes
from jaxthd.run.on_failure import RemovedOnFailure
from jaxthd.steps.forward import objective_of
from jaxthd.terminal.arguments import CommandLine, parse_command_line, units

OPTIONS: dict[str, dict[str, Any]] = {
    "details": {"action": "store_true", "help": "also the tables of what was tried, and the reasons"},
    "out": {
        "type": Path,
        "metavar": "FILE",
        "help": "where the picture of lengths, buffers and padding goes; by default plan.png in the workdir",
    },
}


def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    line = parse_command_line("plan", argv, OPTIONS, __doc__)
    config = line.config
    if draws_answers(objective_of(config)):
        raise UserError(
            f"the objective {config.train.objective} draws its answers, whose lengths are not known; "
            "expected a config that trains on documents: choose sizes by what a run prints of its padding"
        )
    sources = read_examples(config, say=_say)
    found, unusable = zip(*(measure(examples, config) for examples in sources), strict=True)
    if sum(unusable):
        _say(f"{sum(unusable):,} documents cannot be used; a training run lists them in skipped.jsonl")
    is_all = sum(map(len, sources)) < MOST_READ
    needed = needed_sizes(config, found, _validated(config), is_all=is_all)
    _say("packing them under a range of settings")
    stream = draw(found, config.data)
    plan = make_plan(stream, config, sum(len(lengths.tokens) for lengths in found), needed)
    print(command_line(line, recommended_settings(plan, config)))
    print(describe_saving(plan, config))
    if line.options.details:
        print(f"\n{describe_plan(plan)}\n")
    from jaxthd.figures.plan import draw_plan  # matplotlib takes a while to load

    out = line.options.out or workdir_of(line) / "plan.png"
    with RemovedOnFailure(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        draw_plan(plan, out)
    print(out if line.options.details else f"{out}; --details lists what was tried, and the reasons")


def _validated(config: Config) -> list[Lengths]:
    """The lengths of the validation sets' documents; none where they cannot be read, which is said."""
    try:
        return held_out(config)
    except (UserError, OSError, ImportError) as error:
        _say(f"the validation sets are left out, since they cannot be read: {str(error).splitlines()[0]}")
        return []


def workdir_of(line: CommandLine) -> Path:
    """The workdir that training with the command line's SOURCE has by default."""
    return line.path if line.run else Path("runs") / line.path.stem


def command_line(line: CommandLine, settings: dict[str, Any]) -> str:
    """The command that trains with what `line` gives and these settings of data, to be pasted into a shell.

    Where the workdir holds a run, it names another one.
    """
    flags = {f"--data.{name.replace('_', '-')}": f"{value}" for name, value in settings.items()}
    given = [x for x in units(line.settings) if x[0].partition("=")[0].replace("_", "-") not in flags]
    source = str(source_of(line.run)[0]) if line.run else str(line.path)
    words = ["jaxthd", "train", source, *(word for unit in given for word in unit)]
    words += [word for flag in flags.items() for word in flag]
    workdir = workdir_of(line)
    if holds_a_run(workdir):
        others = (workdir.with_name(f"{workdir.name}-{number}") for number in count(2))
        words += ["--workdir", str(next(other for other in others if not other.exists()))]
    return shlex.join(words)


def _say(text: str) -> None:
    """Prints on standard error: standard output begins with the command line."""
    print(text, file=sys.stderr)


if __name__ == "__main__":
    with readable_errors():
        main()
