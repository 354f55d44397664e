"""Two models on the same documents: the difference of their error rates, with its bootstrap interval."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxthd.inference.wer import Errors

DRAWS = 10_000
"""Resamplings of the documents."""
_AT_ONCE = 250
"""Resamplings that are drawn together: their indices take 2 kB a document."""


class Comparison(NamedTuple):
    """Rates of all errors over all references, as shares. low, high: of the 95% interval of after - before.

    documents: those with words, which count.
    """

    before: float
    after: float
    low: float
    high: float
    documents: int

    @property
    def difference(self) -> float:
        return self.after - self.before

    @property
    def verdict(self) -> str:
        """ "worse", "better", or "no difference" where the interval holds 0."""
        return "worse" if self.low > 0 else "better" if self.high < 0 else "no difference"

    def figures(self) -> dict[str, Any]:
        """The fields, with the difference and the verdict: for summary.json."""
        return {**self._asdict(), "difference": self.difference, "verdict": self.verdict}


def compare(before: Sequence[Errors], after: Sequence[Errors], seed: int = 0) -> Comparison | None:
    """Compares two models by their errors, document by document; None where no reference has a word.

    Documents are drawn with replacement, both models' errors of one together (Bisani and Ney, 2004): what is
    hard for both does not widen the interval.
    """
    errors_D2 = np.array([(b.wrong, a.wrong) for b, a in zip(before, after, strict=True) if b.total])
    words_D = np.array([errors.total for errors in before if errors.total])
    count = len(words_D)
    if not count:
        return None
    rng = np.random.default_rng(seed)
    differences = []
    for _ in range(DRAWS // _AT_ONCE):
        drawn = rng.integers(0, count, (_AT_ONCE, count))
        wrong = errors_D2[drawn].sum(1)
        differences.append((wrong[:, 1] - wrong[:, 0]) / words_D[drawn].sum(1))
    low, high = np.quantile(np.concatenate(differences), (0.025, 0.975))
    rates = errors_D2.sum(0) / words_D.sum()
    return Comparison(float(rates[0]), float(rates[1]), float(low), float(high), count)
