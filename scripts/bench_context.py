"""What context parallelism costs: memory, bytes exchanged and work, without timing anything.

    python scripts/bench_context.py [--check] [--quick] [--manifest MANIFEST]

Everything is read from programs compiled for 8 simulated CPU devices (set up here) or counted in packed
batches. --check exits 1 and lists the claims that fail:

- memory of loss + gradient on one rank grows at most 2.2 times from 16k to 32k tokens, and the part of it
  that grows is, on each of 4 ranks, at most 0.3 of that on one rank;
- a Mamba layer exchanges the same bytes at 8k and 64k tokens, and as many as a formula gives; so does a layer
  of the gated delta rule;
- under the layout "whole" a layer exchanges nothing for a buffer in which no document is split (padding,
  steps skipped and evenness: docs/decisions/context_layouts.md);
- attention executes the smallest number of blocks that the mask allows;
- 64 experts cost at most 1.3 times the flops of 8.

Bytes are those the busiest device receives with the usual ring algorithms, in float32. Collectives inside a
branch, or a loop of unknown length, are refused: the program's text does not tell how often they run.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from jaxthd.config import ComputeConfig, DataConfig, LLMConfig
from jaxthd.data.sources.registry import open_source
from jaxthd.data.sources.source import SourceSetting
from jaxthd.models.blocks import Mamba2
from jaxthd.packing.batch import Batch
from jaxthd.packing.layout import attention_work, imbalance
from jaxthd.planning.program import compiled
from scripts.benchmark import Claim, benchmark, conclude, show
from tests.context_costs import (
    COMPUTE,
    TINY,
    buffers,
    executed_blocks,
    expert_flops,
    layer_bytes,
    layout_row,
    least_blocks,
    passed_bytes,
    temporary_memory,
)

NANO = LLMConfig(dim=2688, blocks={"M": Mamba2(heads=64, head_dim=64, state=128, groups=8)})
EXPERT_DIM = 1856
"""Inner dim of its experts."""


def growing_part(at: dict[int, int]) -> float:
    """The part of the longer length's bytes that grows with tokens. at: {tokens: bytes} at two lengths."""
    (short, least), (long, most) = sorted(at.items())
    return (most - least) / (long - short) * long


def all_to_all_bytes(llm: LLMConfig, context: int, activation: int, *, gate: bool) -> float:
    """Bytes per token of the buffer if the scan were sharded by heads, not by tokens; forward + backward.

    x, B, C and dt are sent (and the gate z where the whole in-projection is), and y comes back.
    """
    scan = llm.blocks["M"].scan(1)
    assert scan
    inner = scan.heads * scan.head_dim
    width = (3 if gate else 2) * inner + 2 * scan.groups * scan.state + scan.heads
    return 2 * width * activation * (context - 1) / context**2


def token_lengths(manifest: str) -> list[int]:
    """Tokens of each document: encoder frames + bytes of text + end; or 1,000 seeded log-normal lengths."""
    if not manifest:
        return np.random.default_rng(0).lognormal(math.log(300), 1.2, 1000).astype(int).clip(1).tolist()
    utterances, _ = open_source(SourceSetting(str(manifest))).read(DataConfig())
    timed = [(u.text, u.duration) for u in utterances if u.duration is not None]
    return [-(-(round(100 * seconds)) // 8) + len(text.encode()) + 1 for text, seconds in timed]


def ragged_dot_flops(experts: int, rows: int, dim: int, inner: int) -> float:
    """The same for jax.lax.ragged_dot on this backend, as the compiler counts them."""
    shapes = ((rows, dim), jnp.float32), ((experts, dim, inner), jnp.float32), ((experts,), jnp.int32)
    program = compiled(jax.lax.ragged_dot, *(jax.ShapeDtypeStruct(*s) for s in shapes))
    return 2 * program.cost_analysis()["flops"]


def work(batch: Batch, context: int) -> np.ndarray:
    """Attention's query-key pairs of each rank."""
    return attention_work(batch.positions[0], batch.segment_ids[0], context)


def memory_section(contexts: Sequence[int], lengths: tuple[int, int]) -> list[Claim]:
    at = {c: {t: temporary_memory(c, t) for t in lengths} for c in contexts}
    short, long = lengths
    growing = {c: growing_part(at[c]) for c in contexts}
    rows = []
    for c in contexts:
        megabytes = (x / 1e6 for x in (at[c][short], at[c][long], at[c][long] - growing[c], growing[c]))
        shares = (f"{x:.3f}" for x in (growing[c] / growing[1], at[c][long] / at[1][long]))
        rows.append([c, *(f"{x:.2f}" for x in megabytes), *shares])
    show(
        f"Temporary memory of loss + gradient, MB a device; pattern {TINY.llm.pattern}, recomputation on",
        f"context|{short:,} tokens|{long:,} tokens|fixed|growing|of context 1|fixed included",
        rows,
    )
    times, share = at[1][long] / at[1][short], growing[4] / growing[1]
    return [
        Claim(
            f"memory at context 1: {times:.2f} times from {short:,} to {long:,} tokens (<= 2.2)", times <= 2.2
        ),
        Claim(f"activation memory at context 4: {share:.3f} of context 1 (<= 0.3)", share <= 0.3),
    ]


def bytes_section(contexts: Sequence[int], lengths: tuple[int, int]) -> list[Claim]:
    layers = [
        ("M", "M", COMPUTE),
        ("D", "D", COMPUTE),
        ("* ring", "*", COMPUTE),
        ("* all_gather", "*", replace(COMPUTE, context_exchange="all_gather")),
        ("-", "-", COMPUTE),
        ("E", "E", COMPUTE),
    ]
    rows, claims = [], []
    for name, kind, compute in layers:
        for context in contexts:
            short, long = (layer_bytes(kind, context, t, compute=compute) for t in lengths)
            again = layer_bytes(kind, context, lengths[0], compute=compute, recompute=True)
            rows.append([name, context, short, again, long])
            if kind in "MD":
                formula = passed_bytes(kind, TINY.llm, context)
                text = f"{kind} at context {context}: {short:,} bytes at {lengths[0]:,} tokens, {long:,} at"
                claims.append(Claim(f"{text} {lengths[1]:,}, formula {formula:,}", short == long == formula))
    show(
        "Bytes a device receives in a layer, all parameters its own, forward + backward (float32, tiny dims)",
        f"layer|context|at {lengths[0]:,} tokens|with recomputation|at {lengths[1]:,} tokens",
        rows,
    )
    return claims


def layouts_section(contexts: Sequence[int], tokens: int) -> list[Claim]:
    """What a layer exchanges under each layout; under "whole", of a buffer with no, one or the most split
    documents."""
    whole = replace(COMPUTE, context_layout="whole")
    rows, claims = [], []
    for kind in "M*":
        for context in contexts:
            received = partial(layer_bytes, kind, context, tokens)
            taken = partial(received, compute=whole)
            none, one, most = taken(), taken(width=1, split=1), taken(width=2, split=whole.context_splits)
            rows.append([kind, context, received(), none, one, most])
            text = f"{kind} at context {context} exchanges {none:,} bytes under whole where nothing is split"
            claims.append(Claim(text, not none))
    show(
        f"Bytes a device receives in a layer for a buffer of {tokens:,} tokens, by layout; as above",
        "layer|context|buffer|whole, nothing split|one, up to a quarter of the slots|most",
        rows,
    )
    return claims


def blocks_section(
    contexts: Sequence[int], capacities: Sequence[int], manifest: str, count: int, block: int
) -> list[Claim]:
    lengths, rows, wrong = token_lengths(manifest), [], 0
    for capacity in capacities:
        packed = buffers(lengths, capacity, count)
        for context in contexts:
            given, batches = (
                [layout_row(documents, capacity, context, ordered=ordered) for documents in packed]
                for ordered in (False, True)
            )
            executed = [executed_blocks(batch, context, block) for batch in batches]
            least = [least_blocks(batch, context, block) for batch in batches]
            wrong += sum(int((e != n).sum()) for e, n in zip(executed, least, strict=True))
            skipped = np.mean([e[:, 1:] == 0 for e in executed])
            pairs = sum(work(batch, 1).sum() for batch in batches) / (np.sum(executed) * block**2)
            uneven = [
                np.mean([imbalance(work(b, context)) for b in laid_out]) for laid_out in (given, batches)
            ]
            uneven.append(np.mean([imbalance(e.sum(1)) for e in executed]))
            full = np.mean([batch.segment_ids > 0 for batch in batches])
            rows.append([capacity, context, sum(map(len, packed)), f"{full:.1%}", f"{skipped:.0%}"])
            rows[-1] += [
                int(np.sum(executed)),
                int(np.sum(least)),
                f"{pairs:.0%}",
                *(f"{x:.3f}" for x in uneven),
            ]
    quantiles = ", ".join(f"{np.percentile(lengths, p):,.0f}" for p in (0, 50, 90, 99, 100))
    source = Path(manifest).parent.name if manifest else "log-normal"
    show(
        f"Attention in blocks of {block}, {count} buffers a capacity; {source} documents of {quantiles}\n"
        "tokens (min, P50, P90, P99, max). Uneven: worst rank / mean, of predicted work as documents come,\n"
        "then ordered; and of the blocks",
        "capacity|context|documents|full|steps skipped|blocks|least|pairs allowed|uneven|ordered|in blocks",
        rows,
    )
    return [
        Claim(
            f"attention executes the least blocks on {source} batches, {wrong} ring steps differ", not wrong
        )
    ]


def show_crossover(contexts: Sequence[int], tokens: int = 32768) -> None:
    rows = []
    for context in contexts:
        states = passed_bytes("M", NANO, context, ComputeConfig(dtype="bfloat16"))
        lean, whole = (all_to_all_bytes(NANO, context, 2, gate=gate) for gate in (False, True))
        rows.append(
            [
                context,
                *(f"{x / 1e6:.1f}" for x in (states, lean * tokens, whole * tokens)),
                *(math.ceil(states / x) for x in (lean, whole)),
            ]
        )
    show(
        "Nemotron-3-Nano's Mamba layer, MB a device receives (bfloat16 activations, float32 states)",
        f"context|states|all-to-all at {tokens:,}|with gate|states win from tokens|with gate",
        rows,
    )


def experts_section(tokens: int) -> list[Claim]:
    dim, inner, block = NANO.dim, EXPERT_DIM, COMPUTE.blocks.experts
    rows, claims = [], []
    for per_token in (2, 6):
        cost = partial(expert_flops, per_token=per_token, tokens=tokens, block=block, dim=dim, inner=inner)
        few = cost(8)
        assigned = tokens * per_token
        for experts in (8, 64, 128):
            ragged = ragged_dot_flops(experts, assigned, 512, 512) * (dim / 512) * (inner / 512)
            ideal = assigned * 4 * dim * inner
            rows.append([experts, per_token, f"{cost(experts) / 1e12:.3f}", f"{cost(experts) / few:.3f}"])
            rows[-1] += [f"{cost(experts) / ideal:.3f}", f"{ragged / ideal:.2f}"]
        ratio = cost(64) / few
        text = f"64 experts cost {ratio:.3f} times the flops of 8 at top-{per_token} (at most 1.3)"
        claims.append(Claim(text, ratio <= 1.3))
    show(
        f"Routed experts, forward, {tokens:,} tokens, {dim} x {inner}, blocks of {block}",
        "experts|top-k|Tflop|of 8 experts|of the least|ragged_dot of the least",
        rows,
    )
    return claims


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter buffers")
    parser.add_argument("--manifest", default="", help="take durations from it; else log-normal lengths")
    options = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

    quick = options.quick
    contexts = (4,) if quick else (2, 4, 8)
    claims = [
        *memory_section((1, *contexts), (4096, 8192) if quick else (16384, 32768)),
        *bytes_section(contexts, (2048, 8192) if quick else (8192, 65536)),
        *layouts_section(contexts, 2048 if quick else 8192),
        *blocks_section(contexts, (8192,) if quick else (8192, 16384, 32768), options.manifest, 3, 128),
        *experts_section(4096),
    ]
    show_crossover((2, 4, 8))
    conclude(claims, check=options.check)


if __name__ == "__main__":
    main()
