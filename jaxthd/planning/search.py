"""Searches for buffer settings: compares the costs of a range of settings for a data set."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jaxthd.config import Config, DataConfig
from jaxthd.config.values import Unset
from jaxthd.errors import UserError
from jaxthd.planning.layouts import LayoutCost, compare_layouts
from jaxthd.planning.lengths import Lengths, slots_of
from jaxthd.planning.parameters import PARTS, parameter_groups
from jaxthd.planning.simulate import Outcome, padded, simulate

SLACKS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
"""Extra audio capacity to try, as a share of the mean audio of a buffer whose token slots are full."""
BINS = (2, 4, 8, 16, 32, 64)
"""Numbers of buffers that the packer keeps open."""
SIZES = ("capacity", "max_documents", "audio_capacity")
"""Settings of data that are derived where they are not given."""
TOLERANCE = 0.005
"""Extra overhead accepted for a smaller maximum of documents, or for fewer open buffers."""
CAPACITY_TOLERANCE = 0.05
"""Extra work accepted for the configured capacity, or for a smaller one. Twice the slots need twice the
memory, and on CPUs a step of over 2 GiB pays for new pages (docs/decisions/host_memory.md)."""
AS_MANY = 0.95
"""Share of the documents of a buffer that one with fewer slots must hold to be taken in its place."""
CAPACITIES = (0.125, 0.25, 0.5, 1, 2, 4)
"""Capacities to try, in times the configured one."""


class Plan(NamedTuple):
    """The settings tried and recommended; see make_plan.

    work: see flops_per_slot. configured: the outcome of the configured settings.
    by_capacity: outcomes of capacities without a maximum of documents, each with its best audio capacity.
    by_audio, by_maximum: outcomes of audio capacities and maxima of documents at the recommended capacity.
    by_packer: outcomes of packers with all recommended sizes.
    layouts: costs of the context layouts, if there are several context ranks.
    rows: documents of a recommended buffer. in_order, by_length: outcomes of padded batches of as many
    documents, see jaxthd.planning.simulate.padded.
    curves: for each way of batching, by its name, the outcome at each capacity of by_capacity.
    """

    stream: Lengths
    work: tuple[float, float]
    configured: Outcome
    by_capacity: list[Outcome]
    by_audio: list[Outcome]
    by_maximum: list[Outcome]
    by_packer: list[Outcome]
    recommended: Outcome
    layouts: list[LayoutCost]
    rows: int
    in_order: Outcome
    by_length: Outcome
    curves: dict[str, list[Outcome]]


def make_plan(stream: Lengths, config: Config, epoch: int, needed: tuple[int, int] = (0, 0)) -> Plan:
    """Tries settings around the configured ones and recommends the best.

    stream: documents in an order of training. epoch: number of documents of an epoch, within which length
        buckets are made. needed: token slots and audio frames that the recommended buffer has at least.
    Capacity: candidates skip the fewest documents, with work within CAPACITY_TOLERANCE of the best;
    the configured capacity is chosen if it is one of them, else the smallest. A still smaller one is taken
    in its place where its buffers hold AS_MANY of the documents, so that slots would be empty. Audio
    capacity: that of least overhead. Maximum of documents: the number that suffices for 99% of buffers if
    that costs at most TOLERANCE, else for all. Packer: the fewest open buffers within TOLERANCE of the best.
    """
    work = flops_per_slot(config)

    def run(base: Config, **settings: Any) -> Outcome:
        """Packs the stream with these settings of data."""
        return simulate(stream, with_data(base, **settings), work)

    by_capacity, chosen, by_maximum, bounded = _sizes(stream, config, run)
    bounded = with_needed(bounded, needed)
    audio = audio_sizes(stream, chosen.config, config.data.capacity)
    by_audio = [run(chosen.config, audio_capacity=a) for a in audio]
    packers = [("first_fit", 1), *product(("first_fit", "best_fit"), BINS)]
    by_packer = [run(bounded, packing=p, packing_bins=b) for p, b in packers]
    overhead = min(o.overhead for o in by_packer)
    fewest = sorted(by_packer, key=lambda o: o.data.packing_bins)
    recommended = next(o for o in fewest if o.overhead <= overhead + TOLERANCE)
    rows = round(recommended.documents.mean())
    return Plan(
        stream=stream,
        work=work,
        configured=run(with_unset(config, bounded.data)),
        by_capacity=by_capacity,
        by_audio=by_audio,
        by_maximum=by_maximum,
        by_packer=by_packer,
        recommended=recommended,
        layouts=compare_layouts(stream, recommended.config, work) if config.mesh.context > 1 else [],
        rows=rows,
        in_order=padded(stream, config, rows, work),
        by_length=padded(stream, config, rows, work, epoch=epoch),
        curves=_curves(stream, by_capacity, work, epoch, run),
    )


def with_recommended_sizes(stream: Lengths, config: Config) -> Config:
    """The config with the capacity, audio capacity and maximum of documents that make_plan recommends.

    Raises UserError where no document of the stream fits a buffer.
    """
    work = flops_per_slot(config)
    return _sizes(stream, config, lambda base, **sizes: simulate(stream, with_data(base, **sizes), work))[-1]


def _sizes(
    stream: Lengths, config: Config, run: Callable[..., Outcome]
) -> tuple[list[Outcome], Outcome, list[Outcome], Config]:
    """(Plan.by_capacity, the best of them, Plan.by_maximum, the config with the recommended sizes)."""
    by_capacity = _by_capacity(stream, config, run)
    if not by_capacity:
        raise UserError(
            "no document fits a buffer of the sizes that are tried; expected documents: correct data.manifest"
        )
    skipped, overhead = min(map(preference, by_capacity))
    most = (1 + overhead) * (1 + CAPACITY_TOLERANCE)
    good = [o for o in by_capacity if preference(o)[0] == skipped and 1 + o.overhead <= most]
    chosen = next((o for o in good if o.data.capacity == config.data.capacity), good[0])
    chosen = next(o for o in good if o.documents.mean() >= AS_MANY * chosen.documents.mean())
    maxima = {*percentiles(chosen.documents), config.data.max_documents}
    by_maximum = [run(chosen.config, max_documents=m) for m in sorted(maxima)]
    return (
        by_capacity,
        chosen,
        by_maximum,
        with_data(chosen.config, max_documents=_maximum(chosen, by_maximum)),
    )


def with_needed(config: Config, needed: tuple[int, int], *, unit: int = 1) -> Config:
    """The config with a capacity and an audio capacity of at least `needed` (token slots, audio frames).

    unit: slots that the capacity is a multiple of, besides what mesh and data.round_to ask for.
    """
    (slots, frames), data, front_end = needed, config.data, config.model.encoder
    return with_data(
        config,
        capacity=_multiple(max(data.capacity, slots), math.lcm(_slot_unit(config), unit)),
        audio_capacity=_multiple(max(data.audio_capacity, frames), front_end.unit[0] if front_end else 1),
    )


def with_unset(config: Config, sizes: DataConfig) -> Config:
    """The config with those of `sizes` that were not given."""
    data = config.data
    unset = {name: getattr(sizes, name) for name in SIZES if isinstance(getattr(data, name), Unset)}
    return with_data(config, **unset) if unset else config


def _by_capacity(stream: Lengths, config: Config, run: Callable[..., Outcome]) -> list[Outcome]:
    """Plan.by_capacity, without capacities that fill no buffer."""
    packing = "first_fit" if config.data.packing == "padded" else config.data.packing
    best = []
    for capacity in capacities(stream, config):
        base = with_data(config, capacity=capacity, max_documents=capacity, packing=packing)
        audio = audio_sizes(stream, base, config.data.capacity)
        outcomes = (run(base, audio_capacity=a) for a in audio)
        best.append(min(outcomes, key=preference))
    return [outcome for outcome in best if outcome.buffers]


def _maximum(chosen: Outcome, by_maximum: list[Outcome]) -> int:
    """The recommended maximum of documents. chosen: the outcome without one."""
    _, _, p99, most = percentiles(chosen.documents)
    at_p99 = next(o for o in by_maximum if o.data.max_documents == p99)
    enough = p99 if at_p99.overhead <= chosen.overhead + TOLERANCE else most
    return min(_multiple(enough, 8), chosen.data.capacity)


def _curves(
    stream: Lengths,
    by_capacity: list[Outcome],
    work: tuple[float, float],
    epoch: int,
    run: Callable[..., Outcome],
) -> dict[str, list[Outcome]]:
    """See Plan.curves."""
    curves = {
        "concatenation": [run(o.config, packing="first_fit", packing_bins=1) for o in by_capacity],
        "first fit": [run(o.config, packing="first_fit") for o in by_capacity],
        "best fit": [run(o.config, packing="best_fit") for o in by_capacity],
    }
    for name, sort in (("padded, random", 0), ("padded, by length", epoch)):
        counts = [(o.config, round(o.documents.mean())) for o in by_capacity]
        curves[name] = [padded(stream, c, n, work, epoch=sort) for c, n in counts]
    return curves


def flops_per_slot(config: Config) -> tuple[float, float]:
    """(active parameters of a token slot, of an audio frame): a measure of work without attention."""
    active = {part: 0.0 for part in PARTS}
    for group in parameter_groups(config):
        active[group.part] += group.active
    if (front_end := config.model.encoder) is None:
        return active["LLM"], 0.0
    frames, outputs = front_end.unit
    return active["LLM"], (
        active["encoder"] * front_end.positions_per_unit + active["adapter"] * outputs
    ) / frames


def with_data(config: Config, **settings: Any) -> Config:
    """The config with these settings of data."""
    return replace(config, data=replace(config.data, **settings))


def audio_mean(stream: Lengths, config: Config) -> float:
    """Mean audio frames of the documents that fill a buffer's token slots."""
    return float(config.data.capacity * stream.frames.sum() / slots_of(stream, config).sum())


def audio_sizes(stream: Lengths, config: Config, configured: int) -> list[int]:
    """Audio capacities to try at the config's capacity; only 0 where there is no audio.

    They are the mean times 1 + each of SLACKS, the need of the longest document, and the frames of as many
    outputs as there are token slots. The mean is bounded by the frames of as many outputs as there are slots,
    here or in `configured`: a short recording in a window of 30 s that is encoded whole has few tokens, and
    windows that fill a buffer with tokens would need too much memory. Where all pieces take the same frames,
    sizes are multiples of these.
    """
    data = config.data
    if not stream.frames.any():
        return [0]
    front_end = config.model.audio_encoder
    unit, outputs = front_end.unit
    longest = int(stream.frames[slots_of(stream, config) <= data.capacity].max(initial=0))
    filled, most = (-(-slots // outputs) * unit for slots in (data.capacity, max(data.capacity, configured)))
    wanted = [min(audio_mean(stream, config) * (1 + slack), most) for slack in SLACKS]
    sizes, least = set(chain(*stream.pieces)), front_end.longest_taken or 0
    whole = sizes.pop() if len(sizes) == 1 else unit
    return sorted({max(_multiple(size, whole), least) for size in (*wanted, longest, filled)})


def capacities(stream: Lengths, config: Config) -> list[int]:
    """Capacities to try: from an eighth of the configured one to four times it or the longest document."""
    unit = _slot_unit(config)
    wanted = [config.data.capacity * times for times in CAPACITIES]
    wanted[-1] = max(wanted[-1], int(slots_of(stream, config).max()))
    return sorted({_multiple(size, unit) for size in wanted})


def _slot_unit(config: Config) -> int:
    """A capacity is a multiple of this."""
    return math.lcm(2 * config.mesh.context if config.mesh.context > 1 else 1, config.data.round_to)


def _multiple(size: float | int, unit: int) -> int:
    return math.ceil(size / unit) * unit


def preference(outcome: Outcome) -> tuple[float, float]:
    """Sort key, best first: the fewest skipped documents, then the least overhead."""
    return round(outcome.skipped, 4), outcome.overhead


def percentiles(x: Int[np.ndarray, " n"]) -> list[int]:
    """P50, P90, P99, max."""
    return np.percentile(x, (50, 90, 99, 100)).astype(int).tolist()
