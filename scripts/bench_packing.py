"""What packing gains: real tokens a second, packed and padded, in one run.

    python scripts/bench_packing.py [--check] [--manifest MANIFEST] [--capacity 4096] [--rounds 2]

There are two data sets: the recordings of a manifest (without one, the synthetic speech; at most 600), and a
text-like mix of documents of up to 4,096 tokens. One model is trained by the real step (forward, backward,
update) on all the documents of each, in three ways:

- packed: one buffer a step;
- random: one document a row in random order; a batch has as many rows as a buffer holds documents on average;
- sorted: the same, sorted by length as length buckets do: the order with the least padding.

A padded batch is as long as its longest document needs, rounded up to one of at most 6 lengths, chosen for
the least padding of these batches. Batches are made, and programs compiled and run once, before the clock
starts. Then the three ways alternate, batch by batch, so that other load on the machine affects them alike.
The time of a way is the sum over its batches of each batch's median over the rounds.

The ideal is padded slots / real tokens: the gain if every slot cost the same. Two things keep packing below
it. In padded batches too, attention, vocabulary and their backward pass skip padding. And a step's fixed cost
(15 to 35 ms here) weighs more on the smaller step, hence --capacity. One thing raises packing above it:
padded batches need so much memory that allocating it slows the machine (6 GB at --capacity 2048, 12 GB at
4096). Attention is one narrow head: its share of the work is small, as in real models. --check exits 1 when a
claim fails: packed must be at least 0.9 of the ideal times as fast as random, and on the mix 3.8 times.
"""

import math
import statistics
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.config import FrontEnd

sys.path.insert(0, str(Path(__file__).parents[1]))

import grain
import jax
import numpy as np

from jaxthd.config import Config, DataConfig, EncoderConfig, LLMConfig, ModelConfig
from jaxthd.data.packer import PackDocuments
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.registry import open_source
from jaxthd.data.sources.source import SourceSetting
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.models.blocks import MLP, Attention, Mamba2
from jaxthd.models.front_ends.fastconformer.settings import SUBSAMPLING
from jaxthd.packing.batch import Batch, concatenate_rows, with_rows
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.run.startup import keep_freed_memory
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import init_state
from jaxthd.steps.training import make_train_step
from scripts.benchmark import Claim, benchmark, by_turns, conclude, memory, table

RUNGS = 6
"""The most lengths a padded batch can have."""
STEP = 16
"""These lengths are multiples of this."""
TEXT_LONGEST, TEXT_DOCUMENTS, MOST_RECORDINGS = 4096, 140, 600
MODEL = ModelConfig(
    encoder=EncoderConfig(layers=2, dim=64, ffn_dim=256, subsampling_channels=16),
    llm=LLMConfig(
        pattern="M-M*-",
        dim=192,
        blocks={"-": MLP(inner=768), "*": Attention(heads=1, kv_heads=1), "M": Mamba2(heads=4, head_dim=96)},
    ),
)
"""A model small enough for two cores."""


class Side(NamedTuple):
    """The result of one way of batching over all documents.

    slots, frames: token slots and mel frames of its batches; real_tokens, real_frames: those in use.
    seconds: time of one pass. memory: bytes of the largest program: arguments, results and temporaries.
    """

    steps: int
    programs: int
    slots: int
    real_tokens: int
    frames: int
    real_frames: int
    memory: int
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.real_tokens / self.seconds


def text_documents(count: int, longest: int = TEXT_LONGEST) -> list[Document]:
    """Documents of random tokens in a seeded random order; the last two thirds of each are supervised.

    Their lengths are the quantiles of a log-normal distribution of median 200 and sigma 1.2, clipped at
    `longest`. This resembles instruction data: many are short, a few reach the limit.
    """
    normal = statistics.NormalDist(math.log(200), 1.2)
    lengths = [min(round(math.exp(normal.inv_cdf((i + 0.5) / count))), longest) for i in range(count)]
    rng = np.random.default_rng(0)
    return [
        Document(str(i), rng.integers(4, 260, n).astype(np.int32), np.zeros(n, bool), np.arange(n) >= n // 3)
        for i, n in enumerate(rng.permutation(lengths).tolist())
    ]


def speech_documents(manifest: str, config: Config) -> list[Document]:
    """At most MOST_RECORDINGS documents of a manifest, in a seeded random order; faulty ones are skipped."""
    documents = SpeechDocuments(config, load_tokenizer(config.data.tokenizer), train=False)
    examples, _ = open_source(SourceSetting(str(manifest))).read(DataConfig())
    order = np.random.default_rng(0).permutation(len(examples))[:MOST_RECORDINGS]
    made = [documents(examples[i], 0) for i in order]
    return [document for document in made if not isinstance(document, Skipped)]


def ladder(needed: Sequence[tuple[int, float]], rungs: int = RUNGS, step: int = STEP) -> tuple[int, ...]:
    """At most `rungs` lengths, multiples of `step`, with the least padding. needed: (longest document,
    weight) of each batch."""
    weights: dict[int, float] = {}
    for length, weight in needed:
        rung = multiple(length, step)
        weights[rung] = weights.get(rung, 0.0) + weight
    lengths = sorted(weights)

    @cache
    def best(top: int, rungs: int) -> tuple[float, tuple[int, ...]]:
        """(cost, ladder) for lengths[:top + 1], the last of which is the ladder's top."""
        found: list[tuple[float, tuple[int, ...]]] = [
            (lengths[top] * sum(weights[n] for n in lengths[: top + 1]), (lengths[top],))
        ]
        for below in range(top if rungs > 1 else 0):
            cost, rest = best(below, rungs - 1)
            cost += lengths[top] * sum(weights[n] for n in lengths[below + 1 : top + 1])
            found.append((cost, (*rest, lengths[top])))
        return min(found)

    return best(len(lengths) - 1, rungs)[1]


def packed_batches(documents: Sequence[Document], wanted: int, front_end: FrontEnd) -> list[Batch]:
    """As many buffers as `wanted` token slots each would make, filled best-fit with all of them open.

    They have 1% more slots and 5% more mel frames than the documents need, and room for the longest document.
    In real training the stream goes on; here the end of a small data set must not leave half a buffer empty.
    """
    tokens, frames = [len(d) for d in documents], [front_end.taken(d.pieces) for d in documents]
    buffers = math.ceil(sum(tokens) / wanted)
    pack = PackDocuments(
        capacity=multiple(max(1.01 * sum(tokens) / buffers, *tokens), STEP),
        audio_capacity=multiple(max(1.05 * sum(frames) / buffers, *frames), SUBSAMPLING),
        max_documents=len(documents),
        front_end=front_end,
        packing="best_fit",
        packing_bins=2 * buffers,
    )
    return [with_rows(row.batch) for row in grain.MapDataset.source(documents).pipe(pack)]


def multiple(size: float, unit: int) -> int:
    return math.ceil(size / unit) * unit


def padded_batches(
    documents: Sequence[Document], rows: int, front_end: FrontEnd
) -> tuple[list[Batch], list[Batch]]:
    """(batches in the given order, batches sorted by length), one document a row; both use the same lengths.

    The mel frames of a length are the most that any document needs in a batch of that length. The last batch
    of each order is filled up with empty rows.
    """
    orders = documents, sorted(documents, key=len)
    sides = [[x[i : i + rows] for i in range(0, len(x), rows)] for x in orders]
    needed = [[max(map(len, group)) for group in groups] for groups in sides]
    rungs = ladder([(n, 1 / sum(lengths)) for lengths in needed for n in lengths])
    frames: dict[int, int] = {}

    def rung(group: Sequence[Document]) -> int:
        return rungs[bisect_left(rungs, max(map(len, group)))]

    for group in chain(*sides):
        frames[rung(group)] = max(frames.get(rung(group), 0), *(front_end.taken(d.pieces) for d in group))

    def batch(group: Sequence[Document]) -> Batch:
        pack = PackDocuments(
            capacity=rung(group),
            audio_capacity=frames[rung(group)],
            max_documents=1,
            front_end=front_end,
            packing="padded",
        )
        filled = [pack.row([d]).batch for d in group] + [pack.row([]).batch] * (rows - len(group))
        return concatenate_rows(filled)

    in_order, by_length = ([batch(group) for group in groups] for groups in sides)
    return in_order, by_length


def batches_of(documents: Sequence[Document], capacity: int, front_end: FrontEnd) -> dict[str, list[Batch]]:
    """The three ways. A padded batch has as many rows as a packed buffer holds documents on average."""
    packed = packed_batches(documents, capacity, front_end)
    in_order, by_length = padded_batches(documents, round(len(documents) / len(packed)), front_end)
    return {"packed": packed, "random": in_order, "sorted": by_length}


def measure(sides: Mapping[str, Sequence[Batch]], config: Config, rounds: int) -> dict[str, Side]:
    """Trains one model on all batches of all ways, `rounds` times, alternating between the ways.

    All ways have the same tokens, and as many targets."""
    targets = {name: sum(float(b.weights.sum()) for b in batches) for name, batches in sides.items()}
    assert len(set(targets.values())) == 1, targets
    mesh = make_mesh(config.mesh)
    step: Any = make_train_step(Blueprint(config), mesh)
    state = init_state(Blueprint(config), mesh)
    placed = {name: [put_batch(batch, mesh) for batch in batches] for name, batches in sides.items()}
    programs: dict[Any, Any] = {}
    for batch in (batch for batches in placed.values() for batch in batches):
        if shapes(batch) not in programs:
            programs[shapes(batch)] = step.lower(state, batch).compile()

    def train(batch: Any) -> Any:
        nonlocal state
        state, metrics = programs[shapes(batch)](state, batch)
        return state, metrics

    calls = {name: [partial(train, batch) for batch in batches] for name, batches in placed.items()}
    first = {shapes(b): partial(train, b) for batches in placed.values() for b in batches}
    seconds = by_turns(calls, rounds, wait=jax.block_until_ready, warm_up=first.values())
    return {
        name: Side(
            steps=len(batches),
            programs=len({shapes(b) for b in batches}),
            slots=sum(b.tokens.size for b in batches),
            real_tokens=sum(int((b.segment_ids > 0).sum()) for b in batches),
            frames=sum(b.frame_mask.size for b in batches if b.has_audio),
            real_frames=sum(int(b.frame_mask.sum()) for b in batches if b.has_audio),
            memory=max(memory(programs[shapes(b)]) for b in placed[name]),
            seconds=seconds[name],
        )
        for name, batches in sides.items()
    }


def shapes(batch: Batch) -> tuple[tuple[int, ...], ...]:
    """The shapes of a batch's arrays. Rows without a recording have no arrays of audio."""
    return tuple(x.shape for x in jax.tree.leaves(batch))


def report(title: str, sides: Mapping[str, Side], least: float) -> list[Claim]:
    """Prints a data set's table and ratios. least: how many times as fast as random packed must be."""
    rows = []
    for name, side in sides.items():
        frames = f"{1 - side.real_frames / side.frames:.1%}" if side.frames else "-"
        padding = f"{1 - side.real_tokens / side.slots:.1%}"
        taken = f"{side.memory / 1e6:,.0f}", f"{side.seconds:.2f}", f"{side.tokens_per_second:,.0f}"
        rows.append([name, side.steps, side.programs, side.slots, padding, frames, *taken])
    columns = "|steps|compilations|slots|padding|of mel frames|memory MB|seconds|real tokens/s"
    print(f"\n{table(title, columns, rows)}\n")
    ratios, claims, packed = [], [], sides["packed"]
    for name in ("random", "sorted"):
        ideal = sides[name].slots / sides[name].real_tokens
        gain = packed.tokens_per_second / sides[name].tokens_per_second
        ratios.append([f"packed over {name}", f"{gain:.2f}", f"{ideal:.2f}", f"{gain / ideal:.2f}"])
        if name == "random":
            wanted = max(0.9 * ideal, least)
            text = (
                f"{title.split(':')[0]}: packed is {gain:.2f} times as fast as random (at least {wanted:.2f})"
            )
            claims.append(Claim(text, gain >= wanted))
    print(table("Ratios", "|times as fast|ideal|of the ideal", ratios), flush=True)
    return claims


def main(argv: list[str] | None = None) -> None:
    parser = benchmark(__doc__, manifest=True, rounds=2)
    parser.add_argument(
        "--capacity", type=int, default=4096, help="tokens of a buffer of recordings; the mix: twice as many"
    )
    options = parser.parse_args(argv)

    config = Config(model=MODEL)
    speech, text = speech_documents(options.manifest, config), text_documents(TEXT_DOCUMENTS)
    speech_capacity = multiple(max(map(len, speech)), options.capacity)
    claims: list[Claim] = []
    for name, documents, capacity, least in (
        ("recordings", speech, speech_capacity, 0.0),
        ("text", text, 2 * options.capacity, 3.8),
    ):
        sides = batches_of(documents, capacity, config.model.audio_encoder)
        lengths = [len(d) for d in documents]
        title = (
            f"{name}: {len(documents):,} documents of {min(lengths)} to {max(lengths):,} tokens, "
            f"{sum(lengths):,} in all; buffers of {sides['packed'][0].tokens.size:,}; "
            f"{len(sides['random'][0].tokens)} rows a padded batch"
        )
        claims += report(title, measure(sides, config, options.rounds), least)
    conclude(claims, check=options.check)


if __name__ == "__main__":
    keep_freed_memory()  # as jaxthd train does on CPUs
    main()
