"""In which order the keys of the other context ranks come round: as a ring, or in pairs of neighbours.

In a ring everything moves one rank up in every step: rank r meets the keys of r, r - 1, r - 2, ... Such a
send names all ranks of the mesh, so all must take part in it at the same time. Pipeline stages that differ
do not.

In pairs two neighbours exchange what they hold, with one group of ranks for each pair, which no other rank
has to join. Pairs alternate: 0-1, 2-3, ... in one step, 1-2, 3-4, ..., the last with 0, in the next:

    rank      0   1   2   3
    step 0    0   1   2   3     whose keys it holds
    step 1    1   0   3   2
    step 2    2   3   0   1
    step 3    3   2   1   0

So the keys of even ranks always move up, those of odd ranks always down. After as many steps as in a ring
each rank has met all keys, and one step further all are at home again. Each step moves as many bytes as one
of a ring. Pairs need an even number of ranks.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class RingOrder:
    """ranks: context ranks. in_pairs: False is a ring."""

    ranks: int
    in_pairs: bool

    @classmethod
    def of(cls, ranks: int, *, uniform_program: bool) -> "RingOrder":
        """A ring in a uniform program; elsewhere pairs, or with an odd number of ranks a ring, in which then
        nothing can be sent."""
        return cls(ranks, in_pairs=not uniform_program and ranks % 2 == 0)

    def source(self, rank: Any, step: Any) -> Any:
        """The rank whose keys `rank` holds in step `step`, from 0 (its own). Both may be traced."""
        if not self.in_pairs:
            return (rank - step) % self.ranks
        return (rank + step * (1 - 2 * ((rank + step) % 2 == 0))) % self.ranks

    def sources(self, rank: Any) -> Any:
        """source of each step after step 0, an array."""
        return self.source(rank, np.arange(1, self.ranks, dtype=np.int32))

    def pairs(self, step: int) -> list[list[int]]:
        """The neighbours that exchange what they hold to begin step `step`, from 1 on; with `ranks` it is the
        way home. The first of a pair is the one below."""
        lower = range((step - 1) % 2, self.ranks, 2)
        return [[rank, (rank + 1) % self.ranks] for rank in lower]

    def is_upper(self, rank: Any, step: int) -> Any:
        """Whether `rank` is the second of its pair: 1 or 0."""
        return (rank - (step - 1)) % 2
