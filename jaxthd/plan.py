"""Which buffer sizes suit a data set, and what each choice costs: from its lengths alone.

    python -m jaxthd.plan --config configs/cp2.py [--out plan.png] [--data.capacity 4096 ...]

Reads the training manifests; recordings are not decoded (durations are the manifest's, else the file's
header's). Packs the lengths as the loader would, for a range of settings, and recommends. Above 100,000
documents a seeded sample stands for all.
"""

import argparse
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile
from jaxtyping import Int

from jaxthd.config import Config
from jaxthd.data.audio.features import HOP, SAMPLE_RATE
from jaxthd.data.audio.recordings import MIN_SAMPLES, chunk_audio, open_recording
from jaxthd.data.example import Clip, Example, Samples
from jaxthd.data.sources.registry import read_source, training_sources
from jaxthd.data.text.prompt import PromptTemplate
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.describe import parameter_groups
from jaxthd.errors import UserError, readable_errors
from jaxthd.packing.document import SUBSAMPLING, encoder_frames
from jaxthd.planning.layouts import (
    LAYOUT_COSTS,
    MULTIPLY_ADDS_PER_BYTE,
    LayoutCost,
    compare_layouts,
    layout_recommendation,
)
from jaxthd.planning.simulate import COSTS, Lengths, Outcome, balance, padded, simulate, slots_of
from jaxthd.terminal.command_line import parse_command_line
from jaxthd.terminal.tables import table

MOST_READ = 100_000
"""Documents whose lengths are measured; of more, a seeded sample."""
LEAST_DRAWN = 20_000
"""Documents that are packed: whole epochs, each in an order of its own, until there are as many."""
SLACKS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4)
"""Room for audio over what a full buffer of tokens holds on average."""
BINS = (2, 4, 8, 16, 32, 64)
"""Buffers open at a time."""
TOLERANCE = 0.005
"""Overhead that is given for a smaller maximum of documents, or for fewer open buffers."""


def read_examples(config: Config) -> list[list[Example]]:
    """The usable lines of each training data set; a sample of them where there are more than MOST_READ.

    Raises UserError without a manifest, or where data.weights are not as many; and as reading them does.
    """
    data, sources = config.data, []
    if not data.manifest or len(data.weights) not in (0, len(data.manifest)):
        raise UserError(
            f"{len(data.manifest)} manifests and {len(data.weights)} weights; expected one manifest or more, "
            "and no weights or one each: correct data.manifest or data.weights"
        )
    for number, source in enumerate(training_sources(data)):
        examples, skipped = read_source(source, data, number)
        print(f"{source.title}: {len(examples):,} documents, {len(skipped):,} lines skipped")
        sources.append(examples)
    total = sum(map(len, sources))
    if total <= MOST_READ:
        return sources
    print(f"measured: a random sample of {MOST_READ:,} of {total:,} documents (seed {data.seed})")
    rng = np.random.default_rng(data.seed)
    return [
        [x[i] for i in rng.choice(len(x), math.ceil(MOST_READ * len(x) / total), replace=False)]
        for x in sources
    ]


def measure(examples: Sequence[Example], config: Config) -> tuple[Lengths, int]:
    """(lengths of the documents that the loader would make of `examples`, number of those unusable).

    Exact, but for a manifest whose durations are rounded beyond the end of the file: an encoder frame more.
    """
    tokenizer = load_tokenizer(config.data.tokenizer)
    template = PromptTemplate(config.data, tokenizer)
    chunk_samples = round(config.model.audio_encoder.chunk_seconds * 100) * HOP
    clips = [clip for example in examples for clip in example.clips]
    with ThreadPoolExecutor(16) as threads:
        samples = iter(list(threads.map(clip_samples, clips)))
    rows: list[tuple[int, float, list[int]]] = []
    for example in examples:
        found = [next(samples) for _ in example.clips]
        try:
            written, _ = template(example.turns)
        except ValueError:
            continue
        if any(n < MIN_SAMPLES for n in found):
            continue
        pieces = [chunk_audio(np.broadcast_to(np.float32(0), n), chunk_samples) for n in found]
        mels = [len(piece) // HOP for piece in chain(*pieces)]
        slots = [encoder_frames(f) for f in mels]
        rows.append(
            (len(written) - len(found) + sum(slots), sum(mels) / 100, [SUBSAMPLING * n for n in slots])
        )
    tokens, seconds, chunks = (list(column) for column in zip(*rows, strict=True)) if rows else ([], [], [])
    frames = np.array([sum(c) for c in chunks], int)
    return Lengths(np.array(tokens, int), frames, np.array(seconds, float), chunks), len(examples) - len(rows)


def clip_samples(clip: Clip | Samples) -> int:
    """Samples at 16 kHz of a recording, from the manifest or the file's header; 0 for an unreadable file."""
    if clip.duration is not None:
        return round(clip.duration * SAMPLE_RATE)
    assert isinstance(clip, Clip)
    try:
        with open_recording(clip.path, clip.member) as header:
            rate, frames = header.samplerate, header.frames
    except (soundfile.SoundFileError, OSError, TypeError):
        return 0
    return max(round((frames - round(clip.offset * rate)) * SAMPLE_RATE / rate), 0)


def draw(sources: Sequence[Lengths], weights: Sequence[float], seed: int) -> Lengths:
    """Documents in a random order such as the loader draws them in: a stream to pack.

    Whole epochs of everything, at least LEAST_DRAWN documents; with weights as many, in that proportion.
    Raises UserError for a source without documents.
    """
    rng, sizes = np.random.default_rng(seed), [len(source.chunks) for source in sources]
    if not all(sizes):
        raise UserError(f"the manifests give {sizes} usable documents; expected at least one of each")
    count = math.ceil(LEAST_DRAWN / sum(sizes)) * sum(sizes)
    if not weights:
        sizes, weights = [sum(sizes)], [1.0]
    source_of = rng.choice(len(sizes), count, p=np.array(weights) / sum(weights))
    drawn, first = np.zeros(count, int), 0
    for source, size in enumerate(sizes):
        places = np.flatnonzero(source_of == source)
        epochs = [rng.permutation(size) for _ in range(0, len(places), size)]
        drawn[places] = first + np.array(list(chain(*epochs)), int)[: len(places)]
        first += size
    tokens, frames, seconds = (np.concatenate([s[i] for s in sources])[drawn] for i in range(3))
    chunks = list(chain(*(source.chunks for source in sources)))
    return Lengths(tokens, frames, seconds, [chunks[i] for i in drawn])


def slot_work(config: Config) -> tuple[float, float]:
    """Parameters that a token slot and a mel frame meet: a measure of work that leaves attention out."""
    groups = parameter_groups(config)
    decoder = sum(g.active for g in groups if g.part == "LLM")
    return float(decoder), sum(g.parameters for g in groups if g.part != "LLM") / SUBSAMPLING


def with_data(config: Config, **settings: Any) -> Config:
    return replace(config, data=replace(config.data, **settings))


def audio_mean(stream: Lengths, config: Config) -> float:
    """Mel frames of the documents that fill a buffer's tokens, on average."""
    return float(config.data.capacity * stream.frames.sum() / slots_of(stream, config).sum())


def audio_sizes(stream: Lengths, config: Config) -> list[int]:
    """Audio capacities to try at config's capacity; 0 where there is no audio.

    The mean with each of SLACKS, what the longest audio needs, and eight frames a slot: none can need more.
    """
    ranks, data = config.mesh.audio_ranks, config.data
    if not stream.frames.any():
        return [0]
    chunk = SUBSAMPLING * encoder_frames(config.model.audio_encoder.chunk_frames)
    longest = int(stream.frames[slots_of(stream, config) <= data.capacity].max(initial=0))
    wanted = [audio_mean(stream, config) * (1 + slack) for slack in SLACKS]
    wanted += [longest, SUBSAMPLING * data.capacity]
    return sorted({max(_multiple(size, SUBSAMPLING * ranks), ranks * chunk) for size in wanted})


def capacities(stream: Lengths, config: Config) -> list[int]:
    """Capacities to try: a quarter of the configured one to four times it, or to the longest document."""
    unit = math.lcm(2 * config.mesh.context if config.mesh.context > 1 else 1, config.data.round_to)
    wanted = [config.data.capacity * times for times in (0.25, 0.5, 1, 2, 4)]
    wanted[-1] = max(wanted[-1], int(slots_of(stream, config).max()))
    return sorted({_multiple(size, unit) for size in wanted})


def _multiple(size: float | int, unit: int) -> int:
    return math.ceil(size / unit) * unit


def preference(outcome: Outcome) -> tuple[float, float]:
    """Best first: nothing left out, then the least overhead."""
    return round(outcome.left_out, 4), outcome.overhead


def percentiles(x: Int[np.ndarray, " n"]) -> list[int]:
    """P50, P90, P99, max."""
    return np.percentile(x, (50, 90, 99, 100)).astype(int).tolist()


class Plan(NamedTuple):
    """What was tried, and what is recommended; see make_plan.

    configured: the settings as they are. by_capacity: any number of documents, each with the audio capacity
    of least overhead. by_audio, by_maximum: at the recommended capacity. by_packer: with all its sizes.
    layouts: over the context ranks, where there are several. rows: documents of a recommended buffer.
    in_order, by_length: batches of so many, see `padded`.
    curves: ways of batching, by name, at each capacity of by_capacity.
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


def make_plan(stream: Lengths, config: Config, epoch: int) -> Plan:
    """Tries settings around the configured ones and recommends.

    stream: documents in an order of training. epoch: documents of an epoch, in which length buckets are made.

    Capacity: the configured one, else the smallest, of those that leave least out at an overhead within 0.02
    of the best. Audio capacity: the least overhead. Maximum of documents: what 99% of buffers hold, if that
    costs at most TOLERANCE, else what all hold. Packer: the fewest open buffers within TOLERANCE of the best.
    """
    work = slot_work(config)
    packing = "first_fit" if config.data.packing == "padded" else config.data.packing

    def run(config: Config, **settings: Any) -> Outcome:
        return simulate(stream, with_data(config, **settings), work)

    by_capacity = []
    for capacity in capacities(stream, config):
        base = with_data(config, capacity=capacity, max_documents=capacity, packing=packing)
        by_capacity.append(
            min((run(base, audio_capacity=a) for a in audio_sizes(stream, base)), key=preference)
        )
    by_capacity = [outcome for outcome in by_capacity if outcome.buffers]
    left_out, overhead = min(map(preference, by_capacity))
    good = [o for o in by_capacity if preference(o)[0] == left_out and o.overhead <= overhead + 0.02]
    chosen = next((o for o in good if o.data.capacity == config.data.capacity), good[0])

    base, (_, _, p99, most) = chosen.config, percentiles(chosen.documents)
    by_audio = [run(base, audio_capacity=a) for a in audio_sizes(stream, base)]
    maxima = {*percentiles(chosen.documents), config.data.max_documents}
    by_maximum = [run(base, max_documents=m) for m in sorted(maxima)]
    at_p99 = next(o for o in by_maximum if o.data.max_documents == p99)
    most = p99 if at_p99.overhead <= chosen.overhead + TOLERANCE else most
    base = with_data(base, max_documents=min(_multiple(most, 8), base.data.capacity))
    packers = [("first_fit", 1), *product(("first_fit", "best_fit"), BINS)]
    by_packer = [run(base, packing=p, packing_bins=b) for p, b in packers]
    overhead = min(o.overhead for o in by_packer)
    fewest = sorted(by_packer, key=lambda o: o.data.packing_bins)
    recommended = next(o for o in fewest if o.overhead <= overhead + TOLERANCE)
    rows = round(recommended.documents.mean())
    curves = {
        "concatenation": [run(o.config, packing="first_fit", packing_bins=1) for o in by_capacity],
        "first fit": [run(o.config, packing="first_fit") for o in by_capacity],
        "best fit": [run(o.config, packing="best_fit") for o in by_capacity],
    }
    for name, sort in (("padded, random", 0), ("padded, by length", epoch)):
        counts = [(o.config, round(o.documents.mean())) for o in by_capacity]
        curves[name] = [padded(stream, c, n, work, epoch=sort) for c, n in counts]
    return Plan(
        stream=stream,
        work=work,
        configured=run(config),
        by_capacity=by_capacity,
        by_audio=by_audio,
        by_maximum=by_maximum,
        by_packer=by_packer,
        recommended=recommended,
        layouts=compare_layouts(stream, recommended.config, work) if config.mesh.context > 1 else [],
        rows=rows,
        in_order=padded(stream, config, rows, work),
        by_length=padded(stream, config, rows, work, epoch=epoch),
        curves=curves,
    )


def describe_plan(plan: Plan) -> str:
    """The tables and the recommendation, as text."""
    stream, work, chosen = plan.stream, plan.work, plan.recommended
    limit, at = plan.configured.data.max_documents, f"at capacity {chosen.data.capacity:,}"
    mean, free = audio_mean(stream, chosen.config), plan.by_maximum[-1]

    def within(outcome: Outcome, maximum: int) -> str:
        return f"{np.mean(outcome.documents <= maximum):.1%}"

    lengths = [
        [name, *(f"{x:,.{digits}f}" for x in (of.mean(), *np.percentile(of, (50, 90, 99, 100))))]
        for name, of, digits in (("tokens", stream.tokens, 0), ("seconds of audio", stream.seconds, 2))
    ]
    by_capacity = [
        [o.data.capacity, o.data.audio_capacity, *percentiles(o.documents), within(o, limit), *o.costs]
        for o in plan.by_capacity
    ]
    by_maximum = [
        [o.data.max_documents, within(free, o.data.max_documents), *o.costs] for o in plan.by_maximum
    ]
    by_audio = [
        [o.data.audio_capacity, f"{o.data.audio_capacity / mean - 1:+.0%}", *o.costs]
        for o in plan.by_audio
        if mean
    ]
    by_packer: list[list[Any]] = [
        [o.data.packing, o.data.packing_bins, f"{o.documents.mean():.1f}", *o.costs] for o in plan.by_packer
    ]
    for name, o in (("random", plan.in_order), ("by length", plan.by_length)):
        by_packer.append([f"padded, {name}", "", plan.rows, *o.costs])
    sections = [
        table("Documents", "|mean|P50|P90|P99|max", lengths),
        table(
            "Capacities with any number of documents, each with the audio capacity of least overhead",
            f"capacity|audio_capacity|documents P50|P90|P99|max|{limit} or fewer|{COSTS}",
            by_capacity,
        ),
        "  Overhead is work on padding over work on documents, a slot counting as the parameters it meets:\n"
        f"  {work[0]:,.0f} a token slot, {SUBSAMPLING * work[1]:,.0f} an encoder frame (eight mel frames).",
        table(
            f"Maxima of documents {at}; the share of buffers that would hold no more anyway",
            f"max_documents|no more|{COSTS}",
            by_maximum,
        ),
        table(
            f"Packers {at}, and batches of as many documents padded to their longest",
            f"packer|open buffers|documents|{COSTS}",
            by_packer,
        ),
        "  One open buffer is concatenation: what does not fit closes the buffer and opens the next.",
        *([layout_section(plan)] if plan.layouts else []),
        recommendation(plan),
    ]
    if by_audio:
        title = (
            f"Audio capacities {at} for {chosen.config.mesh.audio_ranks} ranks; against a full buffer's mean"
        )
        sections.insert(4, table(title, f"audio_capacity|over it|{COSTS}", by_audio))
    return "\n\n".join(sections)


def layout_section(plan: Plan) -> str:
    context = plan.recommended.config.mesh.context
    title = f"Context layouts over {context} ranks; costs of the worst, in million multiply-adds a real token"
    explained = (
        "  Bytes are those a rank receives in a Mamba2 layer and step. An exchanged byte counts as\n"
        f"  {MULTIPLY_ADDS_PER_BYTE} multiply-adds. Attention exchanges the same under both."
    )
    rows = [cost.cells for cost in plan.layouts]
    return "\n".join(
        [table(title, LAYOUT_COSTS, rows), explained, f"  {layout_recommendation(plan.layouts)}"]
    )


def recommendation(plan: Plan) -> str:
    """What to put on the command line or in a config file, why, and what it costs."""
    chosen, data, now = plan.recommended, plan.recommended.data, plan.configured
    names = ("capacity", "audio_capacity", "max_documents", "packing", "packing_bins")
    settings = ", ".join(f"{name}={getattr(data, name)!r}" for name in names)
    chosen, data, now = plan.recommended, plan.recommended.data, plan.configured
    mean = audio_mean(plan.stream, chosen.config)
    tight = min(plan.by_audio, key=lambda o: abs(o.data.audio_capacity - mean))
    one, least = plan.by_packer[0], min(plan.by_packer, key=lambda o: o.overhead)
    _, _, p99, most = percentiles(plan.by_maximum[-1].documents)
    reasons = [
        (
            f"capacity {data.capacity}",
            "overhead " + ", ".join(f"{o.overhead:.1%} at {o.data.capacity:,}" for o in plan.by_capacity),
        ),
        (
            f"audio-capacity {data.audio_capacity}",
            f"cuts {chosen.cut:.1%} of buffers, pads {chosen.audio_padding:.1%} of mel frames; "
            f"{tight.data.audio_capacity} cuts {tight.cut:.1%}, pads {tight.audio_padding:.1%}",
        ),
        (
            f"max-documents {data.max_documents}",
            f"99% of buffers hold {p99} or fewer, none more than {most}; a training step pays nothing for "
            "places, decoding in validation has one for each",
        ),
        (
            f"packing {data.packing} --data.packing-bins {data.packing_bins}",
            f"overhead {chosen.overhead:.1%}; {one.overhead:.1%} with one open buffer, {least.overhead:.1%} "
            f"with {least.data.packing_bins} ({least.data.packing}), whose documents wait on the host",
        ),
    ]
    lines = [
        f"Recommended: overhead {chosen.overhead:.1%}, {chosen.left_out:.2%} of documents left out",
        *(f"  --data.{setting:<{max(len(s) for s, _ in reasons)}}  {reason}" for setting, reason in reasons),
        f"  DataConfig({settings})",
        f"As configured: overhead {now.overhead:.1%}, {now.left_out:.2%} of documents left out",
    ]
    if chosen.config.mesh.context > 1:
        before, after = balance(plan.stream, chosen)
        lines.append(
            f"Attention work of the worst of {chosen.config.mesh.context} context ranks over the mean: "
            f"{before:.2f} as packed, {after:.2f} as the loader orders the documents"
        )
    return "\n".join(lines)


def draw_plan(plan: Plan, path: Path) -> None:
    """Lengths, documents a buffer, and padding against capacity, as a PNG of 1500 x 480 pixels.

    Raises OSError when it cannot be written.
    """
    # matplotlib takes a while to load.
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator, PercentFormatter, StrMethodFormatter

    from jaxthd.figures.curves import HUES, INK

    figure = Figure(figsize=(15, 4.8), dpi=100, layout="constrained")
    lengths, held, padding = figure.subplots(1, 3)
    tokens, data, documents = plan.stream.tokens, plan.recommended.data, plan.by_maximum[-1].documents

    def titled(axes: Axes, title: str, x: str, y: str) -> None:
        axes.set_title(title, loc="left", fontweight="bold", color=INK)
        axes.set(xlabel=x, ylabel=y)
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.spines[["top", "right"]].set_visible(False)

    def histogram(axes: Axes, x: np.ndarray, edges: np.ndarray, bound: str, at: int) -> None:
        """Shares; percentiles and the bound marked, the names one below the other to stay legible."""
        axes.hist(x, edges.tolist(), weights=np.full(len(x), 1 / len(x)), color=HUES[0])
        axes.set_ylim(top=1.35 * axes.get_ylim()[1])
        marks = [*zip(("P50", "P90", "P99", "max"), percentiles(x), strict=True), (bound, at)]
        for place, (name, value) in enumerate(marks):
            axes.axvline(value, color=HUES[1], linewidth=1)
            look: dict[str, Any] = {"ha": "right", "fontsize": 9, "transform": axes.get_xaxis_transform()}
            axes.text(value, 0.96 - 0.05 * place, f"{name} {value:,} ", color=INK, **look)

    titled(lengths, "Documents", "tokens of a document, audio slots included", "share of documents")
    edges = np.unique(np.geomspace(tokens.min(), tokens.max() + 1, 40).astype(int))
    histogram(lengths, tokens, edges, "capacity", data.capacity)
    lengths.set_xscale("log")
    lengths.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))

    titled(held, f"Buffers of {data.capacity:,} slots", "documents in a buffer", "share of buffers")
    edges = np.arange(documents.min(), documents.max() + 2) - 0.5
    histogram(held, documents, edges, "max_documents", data.max_documents)

    padding.set(xscale="log", yscale="log")
    titled(padding, "Padding", "capacity: token slots of a buffer", "share of slots that are padding")
    for place, (name, outcomes) in enumerate(plan.curves.items()):
        shares = {o.data.capacity: max(o.padding, 1e-4) for o in outcomes}
        look = {"color": HUES[place], "linewidth": 6 - place, "markersize": 9 - place}  # none hides another
        padding.plot(shares.keys(), shares.values(), "o-", label=name, **look)
    padding.set_xticks([o.data.capacity for o in plan.by_capacity])
    padding.xaxis.set_minor_locator(NullLocator())
    padding.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    figure.legend(loc="outside lower right", ncols=len(plan.curves), frameon=False)
    figure.savefig(path)


def main(argv: list[str] | None = None) -> None:
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--out", type=Path)
    options, rest = own.parse_known_args(argv)
    config, path, _ = parse_command_line("plan", rest)
    mesh = config.mesh
    print(f"{path}: mesh (data, context, pipeline, tensor) = {mesh.sizes}")
    found, unusable = zip(*(measure(examples, config) for examples in read_examples(config)), strict=True)
    if sum(unusable):
        print(f"{sum(unusable):,} documents cannot be used; a training run lists them in skipped.jsonl")
    stream, epoch = draw(found, config.data.weights, config.data.seed), sum(len(x.tokens) for x in found)
    plan = make_plan(stream, config, epoch)
    print(f"\n{describe_plan(plan)}")
    if options.out:
        draw_plan(plan, options.out)
        print(f"\n{options.out}")


if __name__ == "__main__":
    with readable_errors():
        main()
