"""Pipeline schedules as tables: what each rank does at each tick.

In a tick, every rank can run one forward pass and one backward pass of a stage. A rank sends its results at
the end of a tick, and the next rank uses them in the next tick. Nothing waits in between.

Legend: M microbatches, P pipeline ranks, V pipeline chunks (stages) of a rank.

1F1B: rank r runs microbatch m forward at tick m + r and backward at tick m + 2 (P - 1) - r. So rank r holds
the inputs of at most 2 (P - 1 - r) + 1 microbatches, for any M. Interleaved (Narayanan et al., 2021): a rank
has V chunks and works on groups of P microbatches, one chunk after the other.

A tick without any forward pass costs only the backward passes, and the reverse. So a step takes M V + P - 1
times a forward and a backward pass of one stage. M V of them are work; the other P - 1 are the bubble.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32


class Work(NamedTuple):
    """The microbatch, the rank's pipeline chunk and the slot that holds what its stage keeps from the forward
    pass to the backward pass, for every tick and rank, or for one of them.

    All three are -1 where the rank idles.
    """

    microbatch: Any
    chunk: Any
    slot: Any

    @property
    def busy(self) -> Int32[np.ndarray, " ticks"]:
        """1 where any rank works."""
        return (self.microbatch >= 0).any(axis=1).astype(np.int32)


class Tick(NamedTuple):
    """What is done in a tick, or in every tick: int32, [ticks, ranks] in forward and backward, else [ticks].

    embed, head, back: the microbatch that enters the first stage, leaves the last stage, or finishes its
        backward pass through the first stage; -1 for none.
    """

    forward: Work
    backward: Work
    embed: Any
    head: Any
    back: Any

    def on(self, rank: Any) -> "Tick":
        """This tick with the passes of one rank only."""
        forward, backward = (Work(*(x[rank] for x in of_all)) for of_all in (self.forward, self.backward))
        return self._replace(forward=forward, backward=backward)


class Schedule(NamedTuple):
    """The table of what every rank does in every tick. slots: the most inputs that a rank keeps at once."""

    ranks: int
    chunks: int
    microbatches: int
    slots: int
    table: Tick

    @property
    def ticks(self) -> int:
        """The number of ticks."""
        return len(self.table.embed)

    @property
    def in_flight(self) -> int:
        """The most microbatches that have entered but not finished their backward pass: consecutive ones."""
        entered, gone = (np.cumsum(ticks >= 0) for ticks in (self.table.embed, self.table.back))
        return int((entered - np.append(0, gone[:-1])).max())

    @property
    def bubble(self) -> float:
        """The share of the step's time in which a rank idles, if all stages cost the same."""
        busy = self.table.forward.busy.sum() + self.table.backward.busy.sum()
        work = 2 * self.microbatches * self.chunks
        return float(1 - work / busy)


def make_schedule(microbatches: int, ranks: int, chunks: int = 1, *, backward: bool = True) -> Schedule:
    """1F1B if a rank has one chunk, interleaved if it has several.

    microbatches: any number. An interleaved schedule wastes ticks where it is not a multiple of the ranks.
    backward: False makes a schedule of forward passes only (evaluation).
    """
    m, p, v = microbatches, ranks, chunks
    group = p if v > 1 else m
    order = [(chunk, first + i) for first in range(0, m, group) for chunk in range(v) for i in range(group)]
    turn = v * p - 1  # the tick at which the first microbatch leaves the last stage
    ticks = (turn if backward else 0) + len(order) + p - 1
    forward, back = (Work(*np.full((3, ticks, p), -1, np.int32)) for _ in range(2))
    for r in range(p):
        for k, (chunk, micro) in enumerate(order):
            if micro < m:
                forward.microbatch[k + r, r], forward.chunk[k + r, r] = micro, chunk
        for k, (chunk, micro) in enumerate(order if backward else ()):
            if micro < m:
                tick = turn + k + p - 1 - r
                back.microbatch[tick, r], back.chunk[tick, r] = micro, v - 1 - chunk
    slots = max(_assign_slots(forward, back, r) for r in range(p)) if backward else 1
    if not backward:
        forward.slot[forward.microbatch >= 0] = 0

    def where(work: Work, rank: int, chunk: int) -> Int32[np.ndarray, " ticks"]:
        """The microbatch that this rank's chunk works on in each tick; -1 for none."""
        return np.where(work.chunk[:, rank] == chunk, work.microbatch[:, rank], -1).astype(np.int32)

    used = forward.busy + back.busy > 0
    table = Tick(
        forward=Work(*(x[used] for x in forward)),
        backward=Work(*(x[used] for x in back)),
        embed=where(forward, 0, 0)[used],
        head=where(forward, p - 1, v - 1)[used],
        back=where(back, 0, 0)[used],
    )
    return Schedule(ranks=p, chunks=v, microbatches=m, slots=slots, table=table)


def _assign_slots(forward: Work, back: Work, rank: int) -> int:
    """Gives each input a slot from its forward pass to its backward pass; returns the number of slots."""
    free: list[int] = []
    held: dict[tuple[int, int], int] = {}
    count = 0
    for tick in range(len(forward.microbatch)):
        key = (forward.microbatch[tick, rank], forward.chunk[tick, rank])
        if key[0] >= 0:
            if not free:
                free.append(count)
                count += 1
            held[key] = forward.slot[tick, rank] = free.pop()
        key = (back.microbatch[tick, rank], back.chunk[tick, rank])
        if key[0] >= 0:
            back.slot[tick, rank] = held.pop(key)
            free.append(back.slot[tick, rank])
    return count
