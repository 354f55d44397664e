"""Filters: which training items are used, by their seconds and by how much is said in them.

Worker processes import it, so it imports neither jax nor grain.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from jaxthd.config import FilterConfig
from jaxthd.data.example import Example
from jaxthd.data.skipped import FILTERED, Skipped
from jaxthd.data.text.tokenizer import Tokenizer


class _Measure(NamedTuple):
    """A bounded quantity. name: its setting. least, most: the values that are kept."""

    name: str
    least: float
    most: float

    def why(self, value: float, unit: str) -> str:
        """Why a value is dropped; "" if it is not."""
        if value < self.least:
            return f"{FILTERED}{self.name}: at least {self.least:g}, and this has {value:.4g}{unit}"
        if value > self.most:
            return f"{FILTERED}{self.name}: at most {self.most:g}, and this has {value:.4g}{unit}"
        return ""


class Filter:
    """Decides which items a run trains on (data.filter). It is false where nothing is filtered.

    An item without a recording is kept. Rates are of the answers' texts to all recordings of the item; items
    with alternatives, and prompts whose answer is not there, have none.
    """

    def __init__(self, config: FilterConfig, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._seconds, self._tokens, self._characters = (
            _Measure(name, least, most or math.inf) for name, (least, most) in asdict(config).items()
        )

    def __bool__(self) -> bool:
        return any(map(_bounds, (self._seconds, self._tokens, self._characters)))

    def why_dropped(self, example: Example, seconds: float, *, rates: bool = True) -> str:
        """Why an item is dropped, which names the setting; "" if it is kept. seconds: of its recordings."""
        if not self or not example.clips:
            return ""
        if (why := self._seconds.why(seconds, "")) or not seconds:
            return why
        if not rates or example.alternatives or example.turns[-1].role != "assistant":
            return ""
        text = example.text
        if why := self._characters.why(len(text) / seconds, f": {len(text)} in {seconds:.4g} s"):
            return why
        if not _bounds(self._tokens):
            return ""
        try:
            count = len(self._tokenizer.encode(text))
        except ValueError:
            return ""  # the document is skipped for it
        return self._tokens.why(count / seconds, f": {count} in {seconds:.4g} s")

    def why_too_long(self, example: Example, most_seconds: float) -> str:
        """Why an item with a recording of more than most_seconds, the most that fit, is dropped; "" if not.

        Whether it is dropped or unusable then does not depend on whether the data set says its duration.
        """
        if example.duration is not None or not self._seconds.most <= most_seconds:
            return ""
        return f"{FILTERED}seconds: at most {self._seconds.most:g}, and this has more than {most_seconds:.4g}"

    def sift(self, examples: Sequence[Example], *, rates: bool = True) -> tuple[list[Example], list[Skipped]]:
        """The items that are kept, and the others, as far as the data set says how long they are.

        rates: whether the bounds on tokens and characters a second count; not for prompts.
        """
        kept, dropped = [], []
        for example in examples:
            seconds = example.duration if self else None
            why = "" if seconds is None else self.why_dropped(example, seconds, rates=rates)
            if why:
                dropped.append(Skipped(example.key, why))
            else:
                kept.append(example)
        return kept, dropped


def _bounds(measure: _Measure) -> bool:
    return measure.least > 0 or measure.most < math.inf


def bounds_of(config: FilterConfig) -> dict[str, Any]:
    """The bounds that there are: min_ and max_ before the names of settings, as data positions hold them."""
    bounds = {name: dict(zip(("min", "max"), pair, strict=True)) for name, pair in asdict(config).items()}
    return {f"{end}_{name}": x for name, pair in bounds.items() for end, x in pair.items() if x}


def by_setting(reasons: Sequence[str]) -> str:
    """Counts of items that each bound has dropped, as text.

    Example: "seconds: at most 20 (12), seconds: at least 1 (3)".

    reasons: why items were dropped, from why_dropped.
    """
    counts = Counter(reason.removeprefix(FILTERED).partition(",")[0] for reason in reasons)
    return ", ".join(f"{name} ({count:,})" for name, count in counts.most_common())
