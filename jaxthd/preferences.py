"""Preference lines from sampled hypotheses: chosen and rejected by word error rate.

    jaxthd preferences runs/my --manifest train.jsonl --out pairs.jsonl
    jaxthd preferences runs/my@best --manifest train.jsonl --out pairs.jsonl --samples 16 --temperature 1.2
    jaxthd preferences runs/my --manifest train.jsonl --out pairs.jsonl --by insertions

For each item of the manifest, several hypotheses are sampled. Of those that ended by themselves, the one with
the lowest word error rate becomes chosen, the one with the highest rejected; with --by insertions, those with
the fewest and the most inserted words. --out receives a line for each item where these differ, in the
manifest's order: the fields of its own line, and
    item                        its line number and name
    chosen, rejected            the two hypotheses
    chosen_wer, rejected_wer    their word error rates, after train.normaliser
    hypotheses                  all of them: text, wer, and whether it ended by itself

jaxthd train takes these lines with --train.objective dpo or kto (docs/data.md). Beside --out lie
    OUT.without_spread.jsonl    items whose hypotheses are all equally good: reference and hypotheses
    OUT.skipped.jsonl           items that cannot be used, with the reason
    OUT.settings.json           what the lines depend on
    OUT.report.txt              how many pairs there are, some of them, the command that trains on them

Killed, the same command continues; what is in the files is not sampled again. What is sampled depends on
--seed, the item and the number of the hypothesis alone.
"""

import os
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from jaxthd.config import Config
from jaxthd.data.example import Example
from jaxthd.data.packer import OnSkip
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.columns import require_columns
from jaxthd.data.sources.lines import entries_of
from jaxthd.data.sources.manifest import ManifestSource
from jaxthd.data.sources.registry import open_source, read_source
from jaxthd.data.sources.source import SourceSetting
from jaxthd.data.text.answers import answer_form
from jaxthd.errors import UserError, readable_errors
from jaxthd.files.atomic import write_atomically
from jaxthd.files.jsonl import naming
from jaxthd.files.unread_output import goes_on_unread
from jaxthd.inference.chat import say
from jaxthd.inference.generator import Generator, check_sampling
from jaxthd.inference.model import load
from jaxthd.inference.preferences import By, Item, PreferenceFiles, measured, pair_lines
from jaxthd.inference.wer import make_normaliser
from jaxthd.run.evaluations import checkpoint_of, evaluated_settings
from jaxthd.terminal.arguments import SAMPLING, WEIGHTS, CommandLine, parse_command_line

SECONDS = 5.0
"""Time between two lines on progress."""
OPTIONS: dict[str, dict[str, Any]] = {
    "weights": WEIGHTS,
    "manifest": {"metavar": "FILE", "help": "items with transcripts, as in data.manifest"},
    "out": {"type": Path, "metavar": "FILE", "help": "JSONL file for the preference lines"},
    "items": {"type": int, "metavar": "N", "help": "only the first N items of the manifest"},
    "by": {
        "choices": get_args(By),
        "default": "wer",
        "help": "what tells hypotheses apart: wer (the default), or insertions",
    },
    "samples": {"type": int, "default": 8, "help": "hypotheses of each item, 8 by default"},
    **SAMPLING,
    "temperature": {"type": float, "default": 1.0, "help": "temperature of sampling, 1 by default"},
    "max-new-tokens": {"type": int, "default": 256, "help": "most tokens of a hypothesis, 256 by default"},
    "batch": {"type": int, "default": 32, "help": "most hypotheses decoded together, 32 by default"},
}


@goes_on_unread()
def main(argv: list[str] | None = None) -> None:
    """Runs the command with these arguments; None: those of the process."""
    line = parse_command_line("preferences", argv, OPTIONS, __doc__)
    config, options, weights = line.config, line.options, line.weights()
    line.require("manifest", "out")
    line.require_least(items=1, samples=2, batch=1, max_new_tokens=1)
    check_sampling(options.temperature, options.top_k, options.top_p)
    if not options.temperature:
        raise UserError(
            "--temperature is 0, with which all hypotheses are the same; expected more: leave it out, or 0.8"
        )
    items, skipped, digest = _items(config, options)
    sizes = {name: getattr(options, name) for name in ("samples", "max_new_tokens")}
    by = {} if options.by == "wer" else {"by": options.by}  # files of before this setting go on
    sources, settings = _settings(config, weights, {"manifest": digest} | line.sampling() | sizes | by)
    with PreferenceFiles(options.out, options.manifest, settings, options.by) as out:
        for item in skipped:
            out.skip(*item)
        rest = [item for item in items if item.example.key not in out.done]
        if out.done:
            say(f"{len(items) - len(rest)} of {len(items)} items are done already")
        if rest:
            model = load(sources, config, batch=options.batch, max_new_tokens=options.max_new_tokens)
            make_preferences(model.generator, rest, out, options, line.sampling())
    parts = [out.summary(), *pair_lines(options.out), *_next(line, out.pairs)]
    report = options.out.with_suffix(".report.txt")
    with naming(report):
        write_atomically(report, "\n".join(parts) + "\n")
    print("\n".join(parts))


def _next(line: CommandLine, pairs: int) -> list[str]:
    """The command that trains on so many pairs, from the weights that answered."""
    if not pairs:
        more = line.options.samples * 2
        return [f"\nNo pair was found: give a new --out, and --samples {more} or a higher --temperature"]
    out, train = line.options.out, line.config.train
    source = line.path if line.run else f"{line.path} --train.before"
    words = [
        f"{source} --workdir {Path('runs') / out.stem}-dpo --train.init-from {' '.join(line.weights())}",
        f"--data.manifest {out} --train.objective dpo",
        # As in configs/dpo.py: the rate of a supervised run, 1e-3, would undo what the model has learned.
        "--train.learning-rate 1e-5 --train.steps 100 --train.warmup-steps 10",
        *["--train.ctc-loss 0"] * bool(train.ctc_loss),
        *["--train.mtp-loss 0"] * bool(train.mtp_loss and line.config.model.llm.mtp_pattern),
    ]
    return ["\nNext", f"  jaxthd train {' '.join(words)}"]


def make_preferences(
    generator: Generator,
    items: Sequence[Item],
    out: PreferenceFiles,
    options: Namespace,
    sampling: Mapping[str, Any],
) -> None:
    """Samples hypotheses of the items, and writes the lines. options: the command's. sampling: how."""
    read = answer_form(generator.config.data.answer).read
    words = make_normaliser(generator.config.train.normaliser)

    def normalise(answer: str) -> str:
        """The words of an answer's transcript."""
        return words(read(answer))

    at_once = max(1, 4 * options.batch // options.samples)
    began = told = time.perf_counter()
    for start in range(0, len(items), at_once):
        usable = list(_usable(generator, items[start : start + at_once], out.skip, normalise))
        asked = [
            Example(f"{item.example.key}/{number}", item.prompt.turns)
            for item in usable
            for number in range(options.samples)
        ]
        answers = generator.generate(asked, **sampling)
        for number, item in enumerate(usable):
            own = answers[number * options.samples : (number + 1) * options.samples]
            out.add(item, measured(item.reference, own, normalise))
        now, done = time.perf_counter(), min(start + at_once, len(items))
        if not start or now - told > SECONDS or done == len(items):
            told, left = now, tqdm.format_interval((now - began) / done * (len(items) - done))
            say(f"{done:,}/{len(items):,} items  ETA {left}  {out.counts()}")


def _items(config: Config, options: Namespace) -> tuple[list[Item], list[Skipped], str]:
    """The items to sample hypotheses of, those that cannot be used, and a digest of the manifest."""
    source = open_source(SourceSetting(options.manifest, "--manifest", columns=config.data.columns))
    if not isinstance(source, ManifestSource):
        raise UserError(
            f"--manifest {options.manifest} is no manifest; expected one with recordings in files: correct it"
        )
    examples, skipped = read_source(source, config.data)
    require_columns([source.columns])
    entries, items = entries_of(source.path), []
    for example in examples:
        if example.alternatives:
            skipped.append(Skipped(example.key, "it is a preference line; expected a transcript"))
        else:
            entry, folder = entries[int(example.key.partition(":")[0])]
            items.append(Item(example, source.renamed(entry), folder))
    return items[: options.items], skipped, source.digest()


def _settings(
    config: Config, weights: Sequence[str], asked: Mapping[str, Any]
) -> tuple[Sequence[str], dict[str, Any]]:
    """(the weights, of a run those of one checkpoint; what the lines depend on, as JSON).

    asked: the manifest's digest, and how hypotheses are sampled.
    """
    settings = evaluated_settings(config, weights)
    for name in ("sets", "tarred_audio"):
        del settings[name]
    settings |= asked
    of_run = checkpoint_of(weights)
    if of_run:  # a run that goes on may save another checkpoint meanwhile
        workdir, step = of_run
        weights = [f"{workdir}@{step}"]
        settings |= {"weights": [os.path.abspath(workdir)], "checkpoint": step}
    return weights, settings


def _usable(
    generator: Generator, items: Sequence[Item], skipped: OnSkip, normalise: Callable[[str], str]
) -> Iterator[Item]:
    """The items that can be used; the others are skipped."""
    for item in items:
        reason = generator.why_unusable(item.prompt)
        if not reason and not normalise(item.reference):
            reason = "its transcript has no words after train.normaliser; expected some, to count errors in"
        if reason:
            skipped(item.example.key, reason)
        else:
            yield item


if __name__ == "__main__":
    with readable_errors():
        main()
