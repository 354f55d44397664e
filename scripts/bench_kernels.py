"""Kernels on a GPU: Mamba2's scan and packed attention, in error and in time.

    python scripts/bench_kernels.py scan [--tokens 8192 32768] [--chunks 128 256] [--check]
    python scripts/bench_kernels.py scan --interpret   # without a GPU: errors only, the kernels interpreted
    python scripts/bench_kernels.py attention [--tiny]

The scan: the Pallas kernels against the XLA scan, in Nemotron-3-Nano's shape (64 heads of 64, state 128, 8
groups, bfloat16). GB/s count the bytes that must move (each argument read once, each result written once),
TFLOP/s the products of the chunked scan with scan chunks of 128 over pairs that the causal mask allows, so
that back-ends and chunk sizes are compared fairly. `memory`: what the program needs besides arguments and
results. --check exits 1 where an error is above its bound. mamba_ssm's Triton kernels are timed too where
torch can import them.

Attention: every admitted back-end, and PyTorch's FlexAttention where torch sees a GPU; bfloat16, 32 query
heads over 8 key/value heads of dim 128, recordings in 8k and 32k tokens, and two documents of 16k. TFLOP/s
count allowed pairs only (2 products forward, 5 backward); the share is of the rate of a large bfloat16 matrix
product here. FlexAttention's output is first compared with xla's. The reason is printed for all that is not
run.

Documents are as long as recordings. Times are medians over repeats of back-to-back calls, without
compilation. Needs none of jaxthd's other dependencies.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxthd.kernels.admission import admit, error
from jaxthd.kernels.attention_probe import attention_kernels
from jaxthd.kernels.machine import Machine
from jaxthd.kernels.scan_probe import (
    PROBE_PADDING,
    QUANTITIES,
    error_bound,
    outputs_and_gradients,
    probe_errors,
    probe_inputs,
    probe_lengths,
    row_of,
)
from jaxthd.ops.attention.contract import AttentionShape
from jaxthd.ops.attention.ring import packed_attention
from jaxthd.ops.scan.backends import scan
from jaxthd.ops.scan.contract import ScanInputs, ScanShape
from jaxthd.ops.scan.pallas import ssd_pallas
from jaxthd.ops.scan.ssd import ssd
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


def seconds(call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int, calls: int = CALLS) -> float:
    """Median time of one call among `calls` back-to-back ones. wait: blocks until a result is ready."""
    return by_turns({"it": [call]}, repeats, wait=wait, calls=calls)["it"]


def work(shape: ScanShape, tokens: int, backward: bool) -> tuple[float, float]:
    """(floating-point operations, bytes that must move) of the scan."""
    h, g, p, s, pairs = shape.heads, shape.groups, shape.head_dim, shape.state, 129 / 2
    flops = 2 * tokens * (g * pairs * s + h * (pairs * p + 2 * s * p))
    given = 2 * (h * p + 2 * g * s) + 4 * h
    # y is float32; backward moves all arguments again, y's cotangent, and their gradients.
    moved = given + 4 * h * p + (2 * given + 4 * h * p if backward else 0)
    return flops * (3 if backward else 1), float(tokens * moved)


def row_of_times(name: str, tokens: int, backward: bool, took: float, memory: str = "") -> list[Any]:
    """A row of the scan's table. took: seconds."""
    flops, moved = work(NANO, tokens, backward)
    rates = f"{1e3 * took:.3f}", f"{moved / took / 1e9:.0f}", f"{flops / took / 1e12:.1f}"
    return [name, tokens, "forward+backward" if backward else "forward", *rates, memory]


def timed(tokens: int, chunks: list[int], repeats: int) -> Iterator[list[Any]]:
    """Rows of the scan's table."""
    arguments = inputs(NANO, tokens)
    for backend, chunk in [("xla", 128), *(("pallas", chunk) for chunk in chunks)]:
        for backward, function in enumerate((forward, both)):
            compiled = jax.jit(partial(function, backend, chunk)).lower(*arguments).compile()
            sizes: Any = compiled.memory_analysis()
            memory = f"{sizes.temp_size_in_bytes / 2**20:.0f} MiB"
            took = seconds(partial(compiled, *arguments), jax.block_until_ready, repeats)
            yield row_of_times(f"{backend}, chunk {chunk}", tokens, bool(backward), took, memory)


def rival() -> Callable[..., Any] | None:
    """mamba_ssm's scan with documents, on torch tensors [1, tokens, ...]; None if it is not available."""
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined
    except ImportError as missing:
        print(f"mamba_ssm: not run ({missing})")
        return None
    return lambda x, dt, a, b, c, ids, chunk: mamba_chunk_scan_combined(
        x, dt, a, b, c, chunk_size=chunk, seq_idx=ids
    )


def rival_run(run: Callable[..., Any], ids: Any, given: tuple[Any, ...], dy: Any, chunk: int) -> Any:
    """(forward, forward+backward) on torch tensors made from jax arrays."""
    import torch

    def tensor(array: Any) -> Any:
        made = torch.tensor(np.asarray(array, np.float32), device="cuda")
        return made.bfloat16() if array.dtype == jnp.bfloat16 else made

    x, dt, a, b, c = (tensor(array).requires_grad_() for array in given)
    dy, ids = tensor(dy)[None], torch.tensor(np.asarray(ids), device="cuda", dtype=torch.int32)

    def one() -> Any:
        return run(x[None], dt[None], a, b[None], c[None], ids, chunk)

    def two() -> Any:
        y = one()
        return y, *torch.autograd.grad(y, (x, dt, a, b, c), dy.to(y.dtype))

    return one, two


def rival_timed(run: Callable[..., Any], tokens: int, repeats: int) -> Iterator[list[Any]]:
    """Rows of mamba_ssm's scan."""
    import torch

    ids, _, *given, dy = inputs(NANO, tokens)
    for chunk in (128, 256):
        for backward, call in enumerate(rival_run(run, ids, tuple(given), dy, chunk)):
            took = seconds(call, lambda _: torch.cuda.synchronize(), repeats)
            yield row_of_times(f"mamba_ssm, chunk {chunk}", tokens, bool(backward), took)


def rival_errors(run: Callable[..., Any], shape: ScanShape) -> dict[str, float]:
    """As probe_errors. Outputs in padding, which mamba_ssm treats as one document, are set to 0."""
    *given, dy = probe_inputs(shape)
    ids, _ = row_of(probe_lengths(shape), PROBE_PADDING)
    found = rival_run(run, ids, tuple(given), dy, shape.chunk)[1]()
    y, *gradients = (x.detach().float().cpu().numpy().astype(np.float64) for x in found)
    y = y[0] * (np.asarray(ids[0]) > 0)[:, None, None]
    exact = tuple(x.astype(jnp.float32) for x in (*given, dy))
    with jax.default_matmul_precision("highest"):
        want = outputs_and_gradients(ssd, shape, exact)
    return {q: error(a, b) for q, a, b in zip(QUANTITIES, (y, *gradients), want, strict=True)}


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
        run, rows = rival(), list[list[Any]]()
        for tokens in options.tokens:
            rows += timed(tokens, options.chunks, options.repeats)
            rows += rival_timed(run, tokens, options.repeats) if run is not None else ()
        show("Mamba2's scan, bfloat16", "back-end|tokens|what|ms|GB/s|TFLOP/s|memory", rows)
        if run is not None:
            name, bound = "mamba_ssm bfloat16", error_bound(shape.dtype)
            print(claim_of(name, rival_errors(run, shape), bound).text)
    return claims


MOST = 0.03
"""How far FlexAttention's output may be off, relative to the largest value."""


def matrix_rate(n: int) -> float:
    """FLOP/s of a product of two bfloat16 matrices [n, n]."""
    a, b = (jax.random.normal(jax.random.key(i), (n, n), jnp.bfloat16) for i in range(2))
    return 2 * n**3 / seconds(partial(jax.jit(jnp.matmul), a, b), jax.block_until_ready, 20)


class Shape(NamedTuple):
    """The attention shape: query heads, key/value heads and their dim."""

    q_heads: int
    kv_heads: int
    head_dim: int


def attention(tiny: bool, peak: float, tell: Callable[[dict[str, Any]], Any]) -> None:
    """Shows a table. peak: FLOP/s that shares refer to. tell: is called with each row at once."""
    shape = Shape(4, 2, 32) if tiny else Shape(32, 8, 128)
    sizes, long = ((128, 512), 256) if tiny else ((8192, 32768), 16384)
    cases = {f"recordings, {size} tokens": recordings(size) for size in sizes}
    cases[f"2 documents of {long} tokens"] = [long, long]
    admitted, flex, found = list(backends(shape)), flex_attention(), []
    for case, lengths in cases.items():
        given = attention_inputs(lengths, shape)
        runs = [
            (name, both, partial(jax_call(name, both), *given), jax.block_until_ready)
            for name in admitted
            for both in (False, True)
        ]
        if flex is not None:
            runs += flex(given, lengths, jax_call("xla", False)(*given))
        pairs = sum(n * (n + 1) / 2 for n in lengths)
        for name, both, call, wait in runs:
            slow = name == "xla"  # a loop over blocks, thousands in long documents
            try:
                took = seconds(call, wait, 3 if tiny or slow else 10, 1 if slow else CALLS)
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


def backends(shape: Shape) -> Iterator[str]:
    """The back-ends admitted here; prints why others are not."""
    for kernel in attention_kernels(AttentionShape("bfloat16", *shape)):
        refusal = admit(kernel, Machine.of_this()).refusal
        print(f"{kernel.name}: {f'not run, {refusal}' if refusal else 'admitted'}", flush=True)
        if refusal is None:
            yield kernel.name


def attention_inputs(lengths: Sequence[int], shape: Shape) -> tuple[Any, ...]:
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


def flex_attention() -> Callable[..., Any] | None:
    """(inputs, lengths, expected output) -> its runs: (name, with the backward pass, call, wait). There are
    no runs where it fails. None where it cannot be run at all.
    """
    try:
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    except ImportError as missing:
        print(f"FlexAttention: not run, {missing}", flush=True)
        return None
    if not torch.cuda.is_available():
        print("FlexAttention: not run, torch sees no GPU", flush=True)
        return None
    run: Any = torch.compile(flex_attention)

    def calls(given: tuple[Any, ...], lengths: Sequence[int], exact: Array) -> Any:
        def tensor(x: Array) -> Any:
            """[N, H, D] -> [1, H, N, D]."""
            return torch.tensor(np.asarray(x, np.float32), device="cuda").bfloat16().transpose(0, 1)[None]

        q, k, v = (tensor(x).contiguous().requires_grad_() for x in given[1:4])
        dout, tokens = tensor(given[4]).contiguous(), sum(lengths)
        ids = torch.repeat_interleave(torch.tensor(lengths, device="cuda"))

        def allowed(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i >= j) & (ids[i] == ids[j])

        mask = create_block_mask(allowed, None, None, tokens, tokens, device="cuda", _compile=True)

        def one() -> Any:
            return run(q, k, v, block_mask=mask, enable_gqa=True)

        def two() -> Any:
            out = one()
            return out, *torch.autograd.grad(out, (q, k, v), dout)

        found = one().detach()[0].transpose(0, 1).float().cpu().numpy()
        off = error(found, np.asarray(exact, np.float32))
        if off > MOST:
            raise RuntimeError(f"its output is off from xla's by {off:.1e} of the largest value")
        return [
            ("FlexAttention", both, call, lambda _: torch.cuda.synchronize())
            for both, call in ((False, one), (True, two))
        ]

    def calls_or_none(*arguments: Any) -> Any:
        try:
            return calls(*arguments)
        except Exception as fault:  # torch's compiler may raise anything
            print(f"FlexAttention: not run, {type(fault).__name__}: {str(fault)[:300]}", flush=True)
            return []

    return calls_or_none


def main(argv: Sequence[str] | None = None) -> None:
    parser = benchmark(__doc__)
    parser.add_argument("kernel", choices=("scan", "attention"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768], help="of the scan")
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--interpret", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="attention in small, to try it on a CPU")
    options = parser.parse_args(argv)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs some of the memory
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}")
    if options.kernel == "scan":
        conclude(compare_scans(options), check=options.check)
    else:
        attention(options.tiny, matrix_rate(256 if options.tiny else 8192), lambda row: None)


if __name__ == "__main__":
    main()
