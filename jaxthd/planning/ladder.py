"""Proposes ladders of buffer sizes from simulated buffers, and says what each leaves of the padding."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jaxthd.config import Config, Rung
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.packing.fit import BufferLimits, Fit
from jaxthd.planning.lengths import Lengths, slots_of
from jaxthd.planning.simulate import Outcome, fits_of

QUANTILES = np.linspace(0, 1, 17)
"""Rungs are made of these quantiles of what batches need."""
MOST_BATCHES = 2000
"""Batches that a ladder is compared on, of rows drawn at random: each row is a stream of its own."""
GAIN = 0.02
"""Overhead that another rung must save to be proposed: it is one more program."""


class LadderCost(NamedTuple):
    """A ladder, and what it costs.

    config: the recommended one with these rungs. shares: of the batches at each rung, in order. padding,
    audio_padding, overhead: as in Outcome.
    """

    config: Config
    shares: list[float]
    padding: float
    audio_padding: float
    overhead: float

    @property
    def costs(self) -> list[str]:
        """Cells for the columns padding, of mel frames, and overhead."""
        return [f"{share:.1%}" for share in (self.padding, self.audio_padding, self.overhead)]


class Needs(NamedTuple):
    """What batches need, and what they hold.

    fits: of each buffer's documents. rows: numbers of the buffers of each batch. slots, documents, frames:
    the most that a row of each batch takes. real: tokens and mel frames of a batch that hold something, the
    mean.
    """

    fits: list[list[Fit]]
    rows: Int[np.ndarray, "B R"]
    slots: Int[np.ndarray, " B"]
    documents: Int[np.ndarray, " B"]
    frames: Int[np.ndarray, " B"]
    real: Float[np.ndarray, "2"]


def compare_ladders(stream: Lengths, outcome: Outcome, work: tuple[float, float]) -> list[LadderCost]:
    """Ladders of 1, 2, ... up to data.most_rungs sizes, the largest of which is the outcome's.

    Each has one rung more than the one before: that which saves the most work. work: of a token slot and of a
    mel frame (jaxthd.planning.search.slot_work).
    """
    config, needs = outcome.config, batch_needs(stream, outcome)
    top = replace(config, data=replace(config.data, rungs=()))
    lower: list[Rung] = []
    found = [ladder_cost(top, needs, work)]
    wanted = _candidates(needs, top)
    while len(lower) + 1 < config.data.most_rungs and wanted:
        ladders = [_in_order([*lower, rung], top, work) for rung in wanted]
        costs = [_mean_work(needs, ladder, top, work) for ladder in ladders]
        if min(costs) >= _mean_work(needs, lower, top, work):
            break
        lower = ladders[int(np.argmin(costs))]
        wanted = [rung for rung in wanted if rung not in lower]
        made = replace(top, data=replace(top.data, rungs=tuple((*rung,) for rung in lower)))
        found.append(ladder_cost(made, needs, work))
    return found


def proposed(ladders: Sequence[LadderCost]) -> LadderCost:
    """The one with the most rungs each of which saves GAIN or more; the first: one size alone."""
    chosen = ladders[0]
    for before, ladder in pairwise(ladders):
        if ladder.overhead > before.overhead - GAIN:
            break
        chosen = ladder
    return chosen


def batch_needs(stream: Lengths, outcome: Outcome) -> Needs:
    """Of batches of an outcome's buffers."""
    slots, fits, buffers = slots_of(stream, outcome.config), fits_of(stream, outcome.config), outcome.buffers
    taken = np.array([(slots[b].sum(), len(b), stream.frames[b].sum()) for b in buffers])
    real = np.array([(stream.tokens[b].sum(), 100 * stream.seconds[b].sum()) for b in buffers])
    count, rows = min(MOST_BATCHES, len(buffers)), outcome.data.rows
    chosen = np.random.default_rng(0).integers(len(buffers), size=(count, rows))
    if rows == 1:
        chosen = np.arange(count)[:, None]
    of_buffers = [[fits[document] for document in buffer] for buffer in buffers]
    slots_B, documents_B, frames_B = taken[chosen].max(1).T
    return Needs(of_buffers, chosen, slots_B, documents_B, frames_B, real[chosen].sum(1).mean(0))


def ladder_cost(config: Config, needs: Needs, work: tuple[float, float]) -> LadderCost:
    """The cost of config.data's ladder for these batches; ranks must be able to share what a rung holds."""
    ladder = config.data.ladder
    limits = [BufferLimits.of(config.at(rung)) for rung in ladder]
    held = [{n for n, rung in enumerate(limits[:-1]) if rung.holds(fits)} for fits in needs.fits]
    batches = [set.intersection(*(held[buffer] for buffer in batch)) for batch in needs.rows.tolist()]
    used = [min(holding, default=len(ladder) - 1) for holding in batches]
    shares = np.bincount(used, minlength=len(ladder)) / len(used)
    sizes = [(rung.capacity, of_rung.array_frames) for rung, of_rung in zip(ladder, limits, strict=True)]
    taken = needs.rows.shape[1] * (shares @ np.array(sizes))
    padding, audio_padding = (1 - x / n if n else 0.0 for x, n in zip(needs.real, taken, strict=True))
    overhead = float(taken @ work / (needs.real @ work)) - 1
    return LadderCost(config, shares.tolist(), float(padding), float(audio_padding), overhead)


def _candidates(needs: Needs, config: Config) -> list[Rung]:
    """Rungs below the largest, of the quantiles of slots and of mel frames; documents cost a step nothing."""
    data, mesh = config.data, config.mesh
    shared = mesh.context * mesh.tensor if config.compute.sequence_sharded else 1
    unit = math.lcm(2 * mesh.context, 8, data.round_to, shared)
    capacities = _rounded(needs.slots, unit, data.capacity)
    audio = _rounded(needs.frames, SUBSAMPLING, data.audio_capacity)
    rungs = [Rung(c, min(data.max_documents, c), a) for c in capacities for a in audio]
    return [rung for rung in rungs if rung[:1] + rung[2:] != (data.capacity, data.audio_capacity)]


def _rounded(needed: Int[np.ndarray, " B"], unit: int, most: int) -> list[int]:
    """Quantiles of it, rounded up to multiples of the unit, and the most."""
    wanted = np.quantile(needed, QUANTILES, method="higher")
    return sorted({min(-(-int(n) // unit) * unit, most) for n in wanted} | {most})


def _in_order(rungs: Sequence[Rung], config: Config, work: tuple[float, float]) -> list[Rung]:
    return sorted(rungs, key=lambda rung: (_work(rung, config, work), rung))


def _work(rung: Rung, config: Config, work: tuple[float, float]) -> float:
    return work[0] * rung.capacity + work[1] * BufferLimits.of(config.at(rung)).array_frames


def _mean_work(needs: Needs, lower: Sequence[Rung], config: Config, work: tuple[float, float]) -> float:
    """The mean over batches, where the ranks can share whatever a buffer holds."""
    least: Float[np.ndarray, " B"] = np.full(len(needs.slots), _work(config.data.ladder[-1], config, work))
    for rung in lower:
        holds = (needs.slots <= rung.capacity) & (needs.documents <= rung.max_documents)
        holds &= needs.frames <= rung.audio_capacity
        least = np.where(holds, np.minimum(least, _work(rung, config, work)), least)
    return float(least.mean())
