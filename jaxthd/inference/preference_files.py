"""The files of preference lines: appended to as they are made, continued after a kill, never overwritten."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxthd.data.skipped import SkipLog
from jaxthd.errors import UserError
from jaxthd.files.atomic import write_atomically
from jaxthd.files.jsonl import append_line, keep_lines, naming
from jaxthd.inference.preference_lines import ITEM, Hypothesis, Item, preference_line, without_spread_line


class PreferenceFiles:
    """The preference lines of a manifest in the file `path`, and the files beside it.

    settings: what the lines depend on, as JSON. done: keys of the items that have been sampled. pairs: number
    of preference lines.
    Raises UserError where the files hold lines that were made with other settings.
    """

    def __init__(self, path: Path, manifest: str, settings: dict[str, Any]) -> None:
        self.path, self._manifest = path, manifest
        self._without_spread = path.with_suffix(".without_spread.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        self._require_same(json.loads(json.dumps(settings)))
        self._skipped = SkipLog(path.with_suffix(".skipped.jsonl"))
        self.done: set[str] = set()
        self.pairs = self._all_right = self._all_wrong = 0
        self._chosen = self._rejected = 0.0
        for line in _kept(path):
            self._count_pair(line[ITEM], line["chosen_wer"], line["rejected_wer"])
        for line in _kept(self._without_spread):
            self._count_other(line[ITEM], [hypothesis["wer"] for hypothesis in line["hypotheses"]])

    def add(self, item: Item, hypotheses: Sequence[Hypothesis]) -> None:
        """Appends an item's line to the file that it belongs to."""
        line, key = preference_line(item, hypotheses, self.path), item.example.key
        if line is None:
            append_line(self._without_spread, without_spread_line(item, hypotheses))
            self._count_other(key, [hypothesis.errors.rate for hypothesis in hypotheses])
        else:
            append_line(self.path, line)
            self._count_pair(key, line["chosen_wer"], line["rejected_wer"])

    def skip(self, key: str, reason: str) -> None:
        """Lists an item that cannot be used."""
        self._skipped.add(self._manifest, key, reason)

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
        path = self.path.with_suffix(".settings.json")
        if not path.exists():
            if self.path.exists():
                raise UserError(
                    f"{self.path} exists, and {path}, which would say how it was made, does not; expected a "
                    "new file, or one that this command made: choose another --out"
                )
            with naming(path):
                write_atomically(path, json.dumps(settings, indent=2) + "\n")
            return
        found = json.loads(path.read_text())
        changed = [name for name in {**found, **settings} if found.get(name) != settings.get(name)]
        if changed:
            lines = "".join(f"\n  {n}: {found.get(n)} there, {settings.get(n)} now" for n in changed)
            raise UserError(
                f"{self.path} was made with other settings:{lines}\nNothing is overwritten; expected "
                "the same settings, to continue it, or a new file: choose another --out"
            )


def _kept(path: Path) -> list[dict[str, Any]]:
    """The lines of items, once a line that a kill cut short is removed."""
    return [line for line in keep_lines(path, lambda line: True) if ITEM in line]
