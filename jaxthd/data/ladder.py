"""A ladder of buffer sizes: a batch takes the first rung that holds what was packed for it.

The largest rung alone decides which documents share a row, so the ladder changes neither the documents nor
the position of a stream; a run may go on with another ladder. A rung is a shape, hence a program: all rows of
a batch, in all processes, take the same one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxthd.config import DataConfig
from jaxthd.data.packer import PackDocuments, PackedRow
from jaxthd.data.runs import RowDocuments


@dataclass(frozen=True)
class Ladder:
    """rungs: the packers of every size, in the order of preference; the last one chooses the documents."""

    rungs: tuple[PackDocuments, ...]

    @classmethod
    def of(cls, pack: PackDocuments, data: DataConfig) -> "Ladder":
        """pack: of the largest size, that of `data`."""
        lower = (
            replace(
                pack,
                capacity=rung.capacity,
                max_documents=rung.max_documents,
                audio_capacity=min(rung.audio_capacity, pack.audio_capacity),
            )
            for rung in data.ladder[:-1]
        )
        return cls((*lower, pack))

    def holding(self, rows: Sequence[RowDocuments | None]) -> list[int]:
        """The numbers of the rungs that hold all of these rows. None: a row without documents."""
        *lower, top = [pack.limits for pack in self.rungs]
        if not lower:
            return [0]
        fits = [list(map(top.fit, row.documents)) for row in rows if row]
        return [*(n for n, limits in enumerate(lower) if all(map(limits.holds, fits))), len(lower)]

    def row(self, row: RowDocuments | None, rung: int) -> PackedRow:
        """The row, packed at a rung that holds it."""
        pack = self.rungs[rung]
        if row is None:
            return pack.row([])
        # Where documents lie on the context ranks was chosen for the largest rung.
        return pack.placed_row(row) if rung == len(self.rungs) - 1 else pack.row(row.documents)
