"""The context layouts side by side, on buffers as the loader packs them.

    python scripts/bench_layouts.py [--manifest MANIFEST] [--capacity 8192] [--buffers 40] [--contexts 2 4 8]
        [--long] [--clock]

Documents are the recordings of a manifest, if one is given, and a text-like mix of lengths (log-normal, 2 to
12,000 tokens). "whole, attention even" cuts documents until attention alone is even; "whole" only until a
step of Nemotron-3-Nano's shape is.

Without --clock all is counted. Bytes are what a rank receives for a buffer in one attention and one Mamba2
layer of that shape, forward and backward, in bfloat16, with a ring. Steps skipped: of a ring's remote steps,
those without a query-key pair. Most: what "whole" could skip at most, if the documents that no rank can hold
whole filled buffers by themselves. Uneven: the busiest rank over the mean, in attention's query-key pairs and
in all of a step's work; the mean over the buffers, and the highest.

--clock takes the loss and gradient of a small model on simulated devices, buffer by buffer, the layouts in
turn, and prints the time of each over the median of "buffer": the median, and the quarters below and above.
Simulated devices share the processor and its memory: this says what the programs cost, nothing of a network.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import grain
import numpy as np

from jaxthd.config import ComputeConfig, Config, DataConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.data.packer import PackDocuments
from jaxthd.data.sources.manifest import read_manifest
from jaxthd.packing.assignment import slot_work
from jaxthd.packing.balance import attention_work, imbalance
from jaxthd.packing.batch import Batch, with_rows
from jaxthd.packing.cuts import cut_widths
from jaxthd.packing.document import Document, encoder_frames
from jaxthd.packing.layout import LayoutKind
from jaxthd.planning.layouts import state_bytes, whole_state_bytes
from jaxthd.run.startup import simulate_devices
from jaxthd.terminal.tables import show

NANO = LLMConfig(
    pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    dim=2688,
    q_heads=32,
    kv_heads=2,
    head_dim=128,
    mamba_heads=64,
    mamba_head_dim=64,
    mamba_state=128,
    mamba_groups=8,
    expert_dim=1856,
)
TIMED = LLMConfig(
    pattern="M*M*",
    dim=128,
    q_heads=4,
    kv_heads=2,
    head_dim=32,
    mamba_heads=8,
    mamba_head_dim=32,
    mamba_state=32,
    mamba_groups=1,
)
CUTS = 8
LONG = 131_072


NAMES = {"recordings": "Recordings", "text": "A text-like mix", "long": "Few long documents"}


class Row(NamedTuple):
    """A buffer under a layout."""

    padding: float
    cut: int
    skipped: float
    received: float
    attention: float
    step: float


def token_lengths(manifest: str) -> list[int]:
    """Tokens of each document: encoder frames + bytes of text + end; or 1,000 seeded log-normal lengths."""
    if not manifest:
        return np.random.default_rng(0).lognormal(math.log(300), 1.2, 1000).astype(int).clip(1).tolist()
    utterances, _ = read_manifest(manifest)
    timed = [(u.text, u.duration) for u in utterances if u.duration is not None]
    return [encoder_frames(round(100 * seconds)) + len(text.encode()) + 1 for text, seconds in timed]


def long_lengths() -> list[int]:
    """1,000 seeded log-normal lengths, 8,000 tokens in the middle."""
    lengths = np.random.default_rng(0).lognormal(math.log(8000), 1.2, 1000)
    return lengths.astype(int).clip(1, LONG).tolist()


def packed(lengths: Sequence[int], capacity: int, count: int, **settings: Any) -> list[Batch]:
    """The first buffers of an endless shuffled stream of such documents."""
    pack = PackDocuments(capacity=capacity, audio_capacity=0, max_documents=capacity, **settings)
    fitting = [n for n in lengths if n <= capacity]
    times = math.ceil((pack.packing_bins + count + 2) * capacity / sum(fitting))
    stream = np.random.default_rng(0).permutation(np.tile(fitting, times))
    documents = [
        Document(str(i), np.zeros(n, np.int32), np.zeros(n, bool), np.ones(n, bool))
        for i, n in enumerate(stream)
    ]
    return [row.batch for row in islice(grain.MapDataset.source(documents).pipe(pack), count)]


def skipped_steps(batch: Batch, context: int) -> float:
    """The share of remote ring steps in which no query sees a key."""
    ids, positions = (x.reshape(context, -1) for x in (batch.segment_ids, batch.positions))
    documents = ids.max() + 1
    first, last = np.full((context, documents), ids.size), np.full((context, documents), -1)
    for rank in range(context):
        np.minimum.at(first[rank], ids[rank], positions[rank])
        np.maximum.at(last[rank], ids[rank], positions[rank])
    sees = (last[:, None, 1:] > first[None, :, 1:]).any(-1)  # [queries' rank, keys' rank]
    others = sees & ~np.eye(context, dtype=bool)
    return float(1 - others.sum() / (context * (context - 1)))


def received(batch: Batch, layout: str, context: int, capacity: int) -> float:
    """Bytes for a buffer in an attention and a Mamba2 layer, forward and backward."""
    share = capacity // context
    kv = 2 * NANO.kv_heads * NANO.head_dim

    def ring(slots: int) -> float:
        """Keys and values around, and again with their float32 gradients, which travel one hop more."""
        return slots * kv * ((context - 1) * (2 + 2 + 4) + 4)

    if layout == "buffer":
        return ring(share) + state_bytes(NANO, context, 2)
    cuts = np.asarray(batch.cuts)
    taken = 2 * int(cuts.sum())
    if not taken:
        return 0.0
    width = next(width for width in cut_widths(share) if taken <= width)
    return ring(width) + whole_state_bytes(NANO, context, 2, int((cuts > 0).sum()), CUTS)


def measured(batch: Batch, layout: str, context: int, capacity: int) -> Row:
    work = attention_work(batch.positions, batch.segment_ids, context)
    step = work + slot_work(Config(model=ModelConfig(llm=NANO))) * (capacity // context)
    cut = 0 if batch.cuts is None else int((np.asarray(batch.cuts) > 0).sum())
    return Row(
        padding=float((batch.segment_ids == 0).mean()),
        cut=cut,
        skipped=skipped_steps(batch, context),
        received=received(batch, layout, context, capacity),
        attention=imbalance(work),
        step=imbalance(step),
    )


def most_skipped(lengths: Sequence[int], capacity: int, context: int) -> float:
    """Under "whole": the share of ring steps that full buffers could skip at most. In a buffer with a
    document that no rank holds whole, which is cut, every step has pairs."""
    fitting = np.array([n for n in lengths if n <= capacity])
    long = fitting[fitting > capacity // context]
    buffers = fitting.sum() / capacity
    return float(1 - max(long.sum() / capacity, len(long) / CUTS) / buffers)


def compare(lengths: Sequence[int], kind: str, capacity: int, count: int, contexts: Sequence[int]) -> None:
    rows = []
    for context in contexts:
        of_nano = slot_work(Config(model=ModelConfig(llm=NANO)))
        layouts: dict[str, dict[str, Any]] = {
            "buffer": {},
            "whole": {"layout": "whole", "slot_work": of_nano, "cuts": CUTS},
            "whole, attention even": {"layout": "whole", "cuts": CUTS},
        }
        for layout, settings in layouts.items():
            batches = packed(lengths, capacity, count, context=context, **settings)
            found = [measured(b, layout.split(",")[0], context, capacity) for b in batches]
            mean = Row(*np.mean(found, axis=0).tolist())
            free = np.mean([row.received == 0 for row in found])
            highest = [max(getattr(row, field) for row in found) for field in ("attention", "step")]
            cells = [f"{mean.padding:.1%}", f"{mean.cut:.1f}", f"{free:.0%}", f"{mean.skipped:.0%}"]
            uneven = [f"{mean.attention:.3f}", f"{highest[0]:.2f}", f"{mean.step:.3f}", f"{highest[1]:.3f}"]
            most = f"{most_skipped(lengths, capacity, context):.0%}" if layout.startswith("whole") else "-"
            rows.append([kind, context, layout, *cells, most, f"{mean.received / 1e6:.1f}", *uneven])
    quantiles = ", ".join(f"{np.percentile(lengths, p):,.0f}" for p in (0, 50, 90, 99, 100))
    show(
        f"{NAMES[kind]}: documents of {quantiles} tokens (min, P50, P90, P99, max); {count} buffers of "
        f"{capacity:,}",
        "documents|context|layout|padding|cut|exchange nothing|steps skipped|most|MB received"
        "|attention uneven|most|step uneven|most",
        rows,
    )


def clock(lengths: Sequence[int], kind: str, capacity: int, count: int, contexts: Sequence[int]) -> None:
    import jax

    from jaxthd.parallel.mesh import make_mesh, put_batch
    from jaxthd.steps.blueprint import Blueprint
    from jaxthd.steps.training import loss_and_gradient
    from scripts.comparison.weights import random_state

    layouts: tuple[LayoutKind, ...] = ("buffer", "whole")
    rows = []
    for context in contexts:
        runs: list[tuple[Any, Any, list[Any]]] = []
        for layout in layouts:
            compute = ComputeConfig(context_layout=layout, context_cuts=CUTS)
            data = DataConfig(rows=1, capacity=capacity, audio_capacity=0)
            model = ModelConfig(None, TIMED)
            config = Config(mesh=MeshConfig(context=context), data=data, model=model, compute=compute)
            settings: dict[str, Any] = {"layout": layout, "cuts": CUTS}
            batches = packed(
                lengths, capacity, count, context=context, slot_work=slot_work(config), **settings
            )
            mesh, blueprint = make_mesh(config.mesh), Blueprint(config)
            state = jax.tree.map(np.float32, random_state(blueprint.model)[1:])
            program = jax.jit(loss_and_gradient(blueprint, mesh))
            runs.append((program, state, [put_batch(with_rows(batch), mesh) for batch in batches]))
            jax.block_until_ready(program(*state, runs[-1][2][0]))
        seconds = np.zeros((len(runs), count))
        for number in range(count):
            for which, (program, state, batches) in enumerate(runs):
                start = time.perf_counter()
                jax.block_until_ready(program(*state, batches[number]))
                seconds[which, number] = time.perf_counter() - start
        for of_layout, layout in zip(seconds, layouts, strict=True):
            ratios = np.percentile(of_layout / np.median(seconds[0]), (50, 25, 75))
            rows.append([kind, context, layout, f"{np.median(of_layout):.3f}", *(f"{x:.2f}" for x in ratios)])
    title = f"{NAMES[kind]}: loss and gradient on simulated devices, {count} buffers of {capacity:,}, in turn"
    show(title, "documents|context|layout|seconds|of buffer|least quarter|highest quarter", rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--manifest", default="", help="recordings, besides the text-like mix")
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--buffers", type=int, default=40)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--long", action="store_true", help=f"also few long documents in buffers of {LONG:,}")
    parser.add_argument("--clock", action="store_true", help="time a small model, and count nothing")
    options = parser.parse_args(argv)
    if options.clock:
        simulate_devices(max(options.contexts))
    measure = clock if options.clock else compare
    for manifest in dict.fromkeys((options.manifest, "")):
        kind = "recordings" if manifest else "text"
        measure(token_lengths(manifest), kind, options.capacity, options.buffers, options.contexts)
    if options.long:
        measure(long_lengths(), "long", LONG, options.buffers, options.contexts)


if __name__ == "__main__":
    main()
