"""Bounds of single settings, said once, in their annotations: validation and the reference read them."""

import math
from typing import Annotated, NamedTuple


class Range(NamedTuple):
    """A bound on a number, from `least` to `most`; `is_open`: less than `most`. A setting without one takes
    integers from 1 on, or real numbers from 0 on."""

    least: float
    most: float = math.inf
    is_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value is within the bound, and finite."""
        return self.least <= value < math.inf and (value < self.most if self.is_open else value <= self.most)

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"{self.least:g} or more"
        return (
            f"{self.least:g} or more and less than {self.most:g}"
            if self.is_open
            else f"{self.least:g} to {self.most:g}"
        )


Index = Annotated[int, Range(0)]
"""An integer that may be 0: for none, or the first of a count."""
Share = Annotated[float, Range(0, 1)]
"""A part of a whole."""
Decay = Annotated[float, Range(0, 1, is_open=True)]
"""What remains of an average at each step, or the part of something that is left out."""
DERIVED = "derived"
"""Marks, in an Annotated, a field that no command line takes: it is derived, and tests give others."""
