"""Kernels on a GPU: Mamba2's scan and packed attention, in error and in time.

    python scripts/bench_kernels.py scan [--tokens 8192 32768] [--chunks 128 256] [--check]
    python scripts/bench_kernels.py scan --interpret   # without a GPU: errors only, the kernels interpreted
    python scripts/bench_kernels.py attention [--tiny]

The scan: the Pallas kernels against the XLA scan, in Nemotron-3-Nano's shape (64 heads of 64, state 128, 8
groups, bfloat16). GB/s count the bytes that must move (each argument read once, each result written once),
TFLOP/s the products of the chunked scan with scan chunks of 128 over pairs that the causal mask allows, so
that back-ends and chunk sizes are compared fairly. `memory`: what the program needs besides arguments and
results. --check exits 1 where an error is above its bound.

Attention: every admitted back-end; bfloat16, 32 query heads over 8 key/value heads of dim 128, recordings in
8k and 32k tokens, and two documents of 16k. TFLOP/s count allowed pairs only (2 products forward, 5
backward); the share is of the rate of a large bfloat16 matrix product here. The reason is printed for all
that is not run.

Documents are as long as recordings. Times are medians over repeats of back-to-back calls, without
compilation. Needs none of jaxthd's other dependencies.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxthd.kernels.admission import admit
from jaxthd.kernels.attention_probe import attention_kernels
from jaxthd.kernels.machine import this_machine
from jaxthd.kernels.scan_probe import error_bound, probe_errors, row_of
from jaxthd.ops.attention.contract import AttentionShape
from jaxthd.ops.attention.ring import packed_attention
from jaxthd.ops.scan.backends import scan
from jaxthd.ops.scan.contract import ScanInputs, ScanShape
from jaxthd.ops.scan.pallas import ssd_pallas
from jaxthd.packing.segments import Segments, make_segments
from scripts.benchmark import Claim, benchmark, by_turns, conclude, show

NANO = ScanShape("bfloat16", heads=64, groups=8, head_dim=64, state=128, chunk=128)
SMALL = ScanShape("bfloat16", heads=4, groups=2, head_dim=16, state=16, chunk=128)
CALLS = 5
"""Calls timed together in one repeat."""


def recordings(tokens: int, seed: int = 0) -> list[int]:
    """Document lengths in tokens, 12.5 a second and some text: 1 s to a minute, half of them under 10 s."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        seconds = float(np.clip(rng.lognormal(np.log(8), 0.8), 1, 60))
        lengths.append(min(round(16 * seconds), tokens - sum(lengths)))
    return lengths


def inputs(shape: ScanShape, tokens: int) -> tuple[Any, ...]:
    """(ids, positions, x, dt, a, B, C, dy)."""
    rng = np.random.default_rng(0)

    def normal(*size: int, dtype: Any = shape.dtype) -> jax.Array:
        return jnp.asarray(rng.standard_normal(size, np.float32), dtype)

    x, dy = (normal(tokens, shape.heads, shape.head_dim) for _ in range(2))
    b, c = (normal(tokens, shape.groups, shape.state) for _ in range(2))
    dt = jnp.asarray(np.exp(rng.uniform(np.log(1e-3), np.log(0.1), (tokens, shape.heads))), jnp.float32)
    a = -jnp.asarray(rng.uniform(1, 16, shape.heads), jnp.float32)
    return *row_of(recordings(tokens), 0), x, dt, a, b, c, dy.astype(jnp.float32)


def forward(backend: Any, chunk: int, ids: Any, positions: Any, *given: Any) -> Any:
    segments = make_segments(ids, positions, block=128, axis=None)
    x, dt, a, b, c, *_ = given
    return scan(ScanInputs(x, dt, a, b, c), segments, chunk=chunk, backend=backend)


def both(backend: Any, chunk: int, ids: Any, positions: Any, *given: Any) -> Any:
    y, pull = jax.vjp(partial(forward, backend, chunk, ids, positions), *given[:5])
    return y, pull(given[5].astype(y.dtype))


def seconds(call: Callable[[], Any], repeats: int, calls: int = CALLS) -> float:
    """Median time of one call among `calls` back-to-back ones."""
    return by_turns({"it": [call]}, repeats, wait=jax.block_until_ready, calls=calls)["it"]


def work(shape: ScanShape, tokens: int, backward: bool) -> tuple[float, float]:
    """(floating-point operations, bytes that must move) of the scan."""
    h, g, p, s, pairs = shape.heads, shape.groups, shape.head_dim, shape.state, 129 / 2
    flops = 2 * tokens * (g * pairs * s + h * (pairs * p + 2 * s * p))
    given = 2 * (h * p + 2 * g * s) + 4 * h
    # y is float32; backward moves all arguments again, y's cotangent, and their gradients.
    moved = given + 4 * h * p + (2 * given + 4 * h * p if backward else 0)
    return flops * (3 if backward else 1), float(tokens * moved)


def timed(tokens: int, chunks: list[int], repeats: int) -> Iterator[list[Any]]:
    """Rows of the scan's table."""
    arguments = inputs(NANO, tokens)
    for backend, chunk in [("xla", 128), *(("pallas", chunk) for chunk in chunks)]:
        for backward, function in enumerate((forward, both)):
            compiled = jax.jit(partial(function, backend, chunk)).lower(*arguments).compile()
            sizes: Any = compiled.memory_analysis()
            memory = f"{sizes.temp_size_in_bytes / 2**20:.0f} MiB"
            took = seconds(partial(compiled, *arguments), repeats)
            flops, moved = work(NANO, tokens, bool(backward))
            rates = f"{1e3 * took:.3f}", f"{moved / took / 1e9:.0f}", f"{flops / took / 1e12:.1f}"
            what = "forward+backward" if backward else "forward"
            yield [f"{backend}, chunk {chunk}", tokens, what, *rates, memory]


def claim_of(name: str, errors: dict[str, float], bound: float) -> Claim:
    shown = ", ".join(f"{quantity} {value:.1e}" for quantity, value in errors.items())
    holds = all(value <= bound for value in errors.values())
    return Claim(f"{name}: {shown}; off from the XLA scan in float32 by at most {bound:.0e}", holds)


def compare_scans(options: Any) -> list[Claim]:
    """Errors as claims; shows the table of times where there is a GPU."""
    has_gpu = jax.default_backend() == "gpu"
    if not has_gpu and not options.interpret:
        print("no GPU here, nothing was run; --interpret compares errors on a CPU")
        return []
    shape = NANO if has_gpu else SMALL
    probes = [replace(shape, chunk=chunk) for chunk in options.chunks] + [replace(SMALL, dtype="float32")]
    claims = [
        claim_of(f"pallas {p.dtype}, chunk {p.chunk}", probe_errors(ssd_pallas, p), error_bound(p.dtype))
        for p in probes
    ]
    if has_gpu:
        rows = [row for tokens in options.tokens for row in timed(tokens, options.chunks, options.repeats)]
        show("Mamba2's scan, bfloat16", "back-end|tokens|what|ms|GB/s|TFLOP/s|memory", rows)
    return claims


def matrix_rate(n: int) -> float:
    """FLOP/s of a product of two bfloat16 matrices [n, n]."""
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    return 2 * n**3 / seconds(partial(jax.jit(jnp.matmul), a, b), 20)


def attention(tiny: bool, peak: float, tell: Callable[[dict[str, Any]], Any]) -> None:
    """Shows a table. peak: FLOP/s that shares refer to. tell: is called with each row at once."""
    shape = AttentionShape("bfloat16", *((4, 2, 32) if tiny else (32, 8, 128)))
    sizes, long = ((128, 512), 256) if tiny else ((8192, 32768), 16384)
    cases = {f"recordings, {size} tokens": recordings(size) for size in sizes}
    cases[f"2 documents of {long} tokens"] = [long, long]
    admitted, found = list(backends(shape)), []
    for case, lengths in cases.items():
        given = attention_inputs(lengths, shape)
        pairs = sum(n * (n + 1) / 2 for n in lengths)
        of_case = replace(shape, tokens=sum(lengths), documents=len(lengths))
        unfit = {kernel.name: kernel.unfit(this_machine()) for kernel in attention_kernels(of_case)}
        for name in (x for x in admitted if unfit[x]):
            print(f"{name}, {case}: not run, {unfit[name]}", flush=True)
        for name, both in product([x for x in admitted if not unfit[x]], (False, True)):
            slow = name == "xla"  # a loop over blocks, thousands in long documents
            call = partial(jax_call(name, both), *given)
            try:
                took = seconds(call, 3 if tiny or slow else 10, 1 if slow else CALLS)
            except Exception as fault:
                first = (str(fault).splitlines() or [""])[0][:300]
                print(f"{name}, {case}: not run ({type(fault).__name__}: {first})", flush=True)
                continue
            rate = (7 if both else 2) * 2 * shape.head_dim * shape.q_heads * pairs / took
            row = {
                "back-end": name,
                "documents": case,
                "what": "forward+backward" if both else "forward",
                "ms": f"{1e3 * took:.3f}",
                "TFLOP/s": f"{rate / 1e12:.1f}",
                "share": f"{rate / peak:.3f}",
            }
            found.append(row)
            tell(row)
        jax.clear_caches()
    show("Packed attention, bfloat16", "|".join(found[0]), [list(row.values()) for row in found])


def backends(shape: AttentionShape) -> Iterator[str]:
    """The back-ends admitted here; prints why others are not."""
    for kernel in attention_kernels(shape):
        refusal = admit(kernel, this_machine()).refusal
        print(f"{kernel.name}: {f'not run, {refusal}' if refusal else 'admitted'}", flush=True)
        if refusal is None:
            yield kernel.name


def attention_inputs(lengths: Sequence[int], shape: AttentionShape) -> tuple[Any, ...]:
    """(segments of one row without padding, q, k, v, the output's cotangent)."""
    rng, tokens = np.random.default_rng(0), sum(lengths)

    def normal(heads: int) -> Array:
        return jnp.asarray(rng.standard_normal((tokens, heads, shape.head_dim), np.float32), jnp.bfloat16)

    made = jax.jit(partial(make_segments, block=128, axis=None, documents=len(lengths)))
    segments = made(*row_of(lengths, 0))
    heads = shape.q_heads, shape.kv_heads, shape.kv_heads, shape.q_heads
    return segments, *map(normal, heads)


def jax_call(backend: str, both: bool) -> Callable[..., Any]:
    """A compiled (segments, q, k, v, dout) -> output, or output and gradients."""

    def forward(segments: Segments, q: Array, k: Array, v: Array) -> Array:
        scale = q.shape[-1] ** -0.5
        return packed_attention(q, k, v, segments, scale=scale, exchange="ring", backend=backend)

    def run(segments: Segments, q: Array, k: Array, v: Array, dout: Array) -> Any:
        if not both:
            return forward(segments, q, k, v)
        out, pull = jax.vjp(partial(forward, segments), q, k, v)
        return out, pull(dout)

    return jax.jit(run)


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark(__doc__)
    parser.add_argument("kernel", choices=("scan", "attention"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="of the scan")
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="attention in small, to try it on a CPU")
    options = parser.parse_args(argv)
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    if options.kernel == "scan":
        conclude(compare_scans(options), check=options.check)
    else:
        attention(options.tiny, matrix_rate(256 if options.tiny else 8192), lambda row: None)


if __name__ == "__main__":
    main()
