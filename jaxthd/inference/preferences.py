"""Preference lines from hypotheses: the best and the worst of an item's, by their errors; and their files.

The files are appended to as lines are made, continued after a kill, and never overwritten.
"""

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxthd.data.example import Example
from jaxthd.data.skipped import SkipLog
from jaxthd.data.sources.recordings import LISTS, in_folder
from jaxthd.errors import UserError
from jaxthd.files.atomic import write_atomically
from jaxthd.files.jsonl import append_line, keep_lines, naming, read_lines
from jaxthd.inference.generator import Answer
from jaxthd.inference.wer import Errors, errors_of
from jaxthd.run.evaluations import changed_lines
from jaxthd.run.on_failure import RemovedOnFailure
from jaxthd.run.report import SAMPLES, one_line

Line = dict[str, Any]
By = Literal["wer", "insertions"]
"""What tells hypotheses apart: all word errors, or inserted words, and of equals all errors."""
ITEM = "item"
"""The field of a line that names the item it was made of, by its key."""


class Item(NamedTuple):
    """An item of a manifest. example: its conversation, which ends with the reference. entry: its line.

    folder: that of the manifest, from which paths in the entry are taken.
    """

    example: Example
    entry: Line
    folder: Path

    @property
    def prompt(self) -> Example:
        """The conversation without the reference."""
        return Example(self.example.key, self.example.turns[:-1])

    @property
    def reference(self) -> str:
        return str(self.example.turns[-1].parts[0])


class Hypothesis(NamedTuple):
    """A hypothesis with its word errors. ended: whether it ended by itself; else it was cut off."""

    text: str
    errors: Errors
    ended: bool

    @property
    def is_answer(self) -> bool:
        """Whether it can be trained on: it is not empty, and its end is its own."""
        return self.ended and bool(self.text.strip())

    def line(self) -> Line:
        return {"text": self.text, "wer": self.errors.rate, "ended": self.ended}


def measured(reference: str, answers: Sequence[Answer], normalise: Callable[[str], str]) -> list[Hypothesis]:
    """The answers with their word errors against the reference, both normalised."""
    texts = [normalise(answer.text) for answer in answers]
    errors = errors_of([normalise(reference)] * len(answers), texts)
    return [Hypothesis(a.text, e, a.end == "stop") for a, e in zip(answers, errors, strict=True)]


def best_and_worst(hypotheses: Sequence[Hypothesis], by: By = "wer") -> tuple[Hypothesis, Hypothesis] | None:
    """The hypotheses with the fewest and with the most errors, of equals the first; None where all have as
    many (insertions, if they are told apart by these), or fewer than two can be trained on.
    """

    def errors(hypothesis: Hypothesis) -> tuple[int, int]:
        wrong, inserted = hypothesis.errors.wrong, hypothesis.errors.insertions
        return (inserted, wrong) if by == "insertions" else (wrong, 0)

    answers = [hypothesis for hypothesis in hypotheses if hypothesis.is_answer]
    if not answers:
        return None
    best, worst = (choose(answers, key=errors) for choose in (min, max))
    return (best, worst) if errors(best)[0] < errors(worst)[0] else None


def preference_line(item: Item, hypotheses: Sequence[Hypothesis], out: Path, by: By = "wer") -> Line | None:
    """The line of an item, with the fields that it had; None where its hypotheses have no spread.

    out: the file that the line is for: its paths are taken from that file's folder.
    """
    found = best_and_worst(hypotheses, by)
    if found is None:
        return None
    chosen, rejected = found
    return {
        **_prompt_fields(item, out.parent),
        ITEM: item.example.key,
        "chosen": chosen.text,
        "rejected": rejected.text,
        "chosen_wer": chosen.errors.rate,
        "rejected_wer": rejected.errors.rate,
        "hypotheses": [hypothesis.line() for hypothesis in hypotheses],
    }


def without_spread_line(item: Item, hypotheses: Sequence[Hypothesis]) -> Line:
    """The line of an item whose hypotheses have no spread."""
    found = [hypothesis.line() for hypothesis in hypotheses]
    return {ITEM: item.example.key, "reference": item.reference, "hypotheses": found}


def _prompt_fields(item: Item, folder: Path) -> Line:
    """The entry's fields, a conversation without its answer as the field prompt."""
    entry = dict(item.entry)
    is_conversation = "conversations" in entry or "messages" in entry
    if entry.get("audio_filepath") and not is_conversation:
        path = in_folder(item.folder)(entry["audio_filepath"]).path
        return entry | {"audio_filepath": _from(path, folder)}
    for name in ("conversations", "messages", "audio_filepath", *LISTS):
        entry.pop(name, None)
    messages = [
        {"role": turn.role, "content": [_content(part, folder) for part in turn.parts]}
        for turn in item.prompt.turns
    ]
    return entry | {"prompt": messages}


def _content(part: Any, folder: Path) -> Line:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    timed = {"offset": part.offset} if part.offset else {}
    timed |= {} if part.duration is None else {"duration": part.duration}
    return {"type": "audio", "path": _from(part.path, folder), **timed}


def _from(path: Path, folder: Path) -> str:
    """A path as it is written in a file of that folder. An absolute one stays."""
    return str(path) if path.is_absolute() else os.path.relpath(path, folder)


class PreferenceFiles(AbstractContextManager["PreferenceFiles"]):
    """The preference lines of a manifest in the file `path`, and the files beside it.

    A context manager: where what is inside fails before the first line, new files are removed.

    settings: what the lines depend on, as JSON. by: what tells hypotheses apart. done: keys of the items that
    have been sampled. pairs: number of preference lines.
    Raises UserError where the files hold lines that were made with other settings.
    """

    def __init__(self, path: Path, manifest: str, settings: dict[str, Any], by: By = "wer") -> None:
        self.path, self._manifest, self._by = path, manifest, by
        self._without_spread = path.with_suffix(".without_spread.jsonl")
        self._settings, skipped = path.with_suffix(".settings.json"), path.with_suffix(".skipped.jsonl")
        self.done: set[str] = set()
        self._new = RemovedOnFailure(skipped, self._settings, unless=lambda: bool(self.done))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._require_same(settings)
        self._skipped = SkipLog(skipped)
        self.pairs = self._all_right = self._all_wrong = 0
        self._chosen = self._rejected = 0.0
        for line in _kept(path):
            self._count_pair(line[ITEM], line["chosen_wer"], line["rejected_wer"])
        for line in _kept(self._without_spread):
            self._count_other(line[ITEM], [hypothesis["wer"] for hypothesis in line["hypotheses"]])

    def __exit__(self, *error: Any) -> None:
        self._new.__exit__(*error)

    def add(self, item: Item, hypotheses: Sequence[Hypothesis]) -> None:
        """Appends an item's line to the file that it belongs to."""
        line, key = preference_line(item, hypotheses, self.path, self._by), item.example.key
        if line is None:
            append_line(self._without_spread, without_spread_line(item, hypotheses))
            self._count_other(key, [hypothesis.errors.rate for hypothesis in hypotheses])
        else:
            append_line(self.path, line)
            self._count_pair(key, line["chosen_wer"], line["rejected_wer"])

    def skip(self, key: str, reason: str) -> None:
        """Lists an item that cannot be used."""
        self._skipped.add(self._manifest, key, reason)

    def counts(self) -> str:
        """The numbers so far, for a line on progress."""
        without = self._all_right + self._all_wrong
        text = f"{self.pairs:,} pairs  {without:,} without spread  {self._skipped.total:,} skipped"
        if self.pairs:
            text += (
                f"  WER {self._chosen / self.pairs:.1%} chosen, {self._rejected / self.pairs:.1%} rejected"
            )
        return text

    def summary(self) -> str:
        """Counts of pairs, and of items without spread."""
        without, items = self._all_right + self._all_wrong, len(self.done)
        lines = [f"{self.path}: {self.pairs:,} pairs of {items:,} items"]
        if self.pairs:
            lines[0] += (
                f"; word error rate {self._chosen / self.pairs:.1%} of the chosen, "
                f"{self._rejected / self.pairs:.1%} of the rejected, on average"
            )
        if without:
            lines.append(
                f"{without:,} items ({without / items:.1%}) without spread: of {self._all_right:,} every "
                f"hypothesis is right, of {self._all_wrong:,} none is better than another, or fewer than two "
                f"ended; {self._without_spread} lists them"
            )
        if self._skipped.total:
            lines.append(f"{self._skipped.total:,} skipped items are listed in {self._skipped.path}")
        return "\n".join(lines)

    def _count_pair(self, key: str, chosen: float, rejected: float) -> None:
        self.done.add(key)
        self.pairs += 1
        self._chosen, self._rejected = self._chosen + chosen, self._rejected + rejected

    def _count_other(self, key: str, rates: Sequence[float]) -> None:
        self.done.add(key)
        is_right = not any(rates)
        self._all_right += is_right
        self._all_wrong += not is_right

    def _require_same(self, settings: dict[str, Any]) -> None:
        path = self._settings
        if not path.exists():
            if self.path.exists():
                raise UserError(
                    f"{self.path} exists, and {path}, which would say how it was made, does not; expected a "
                    "new file, or one that this command made: choose another --out"
                )
            with naming(path):
                write_atomically(path, json.dumps(settings, indent=2) + "\n")
            return
        if lines := changed_lines(json.loads(path.read_text()), settings):
            raise UserError(
                f"{self.path} was made with other settings:{lines}\nNothing is overwritten; expected "
                "the same settings, to continue it, or a new file: choose another --out"
            )


def pair_lines(path: Path) -> list[str]:
    """The first pairs of the file, for a report."""
    pairs = [line for line in read_lines(path) if ITEM in line][:SAMPLES]
    found = ["\nPairs (what was chosen, what was rejected, with their word error rates)"] * bool(pairs)
    for line in pairs:
        for side in ("chosen", "rejected"):
            found.append(
                f"  {' ' * 2 * (side != 'chosen')}{line[f'{side}_wer']:6.1%}  {one_line(line[side], 80)}"
            )
    return found


def _kept(path: Path) -> list[dict[str, Any]]:
    """The lines of items, once a line that a kill cut short is removed."""
    return [line for line in keep_lines(path, lambda line: True) if ITEM in line]
