"""Mamba2's scan on a GPU: the Pallas kernels against the XLA scan, in error and in time.

    python scripts/bench_scan.py [--tokens 8192 32768] [--chunks 128 256] [--repeats 20] [--sweep] [--check]
    python scripts/bench_scan.py --interpret     # without a GPU: errors only, the kernels interpreted

The shapes are Nemotron-3-Nano's (64 heads of 64, state 128, 8 groups, bfloat16), the documents as long as
recordings. Times are medians over repeats of back-to-back calls, without compilation. GB/s count the bytes
that must move (each argument read once, each result written once), TFLOP/s the products of the chunked scan
with scan chunks of 128 over pairs that the causal mask allows, so that back-ends and chunk sizes are compared
fairly. `memory`: what the program needs besides arguments and results.

--sweep times each kernel alone with other numbers of warps and stages. --check exits 1 where an error is
above its bound. Where torch and mamba_ssm can be imported, mamba_ssm's Triton kernels are timed too.
Needs none of jaxthd's other dependencies.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxthd.kernels.admission import error
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
from jaxthd.ops.scan import pallas_launches as launches
from jaxthd.ops.scan.backends import scan
from jaxthd.ops.scan.contract import ScanShape
from jaxthd.ops.scan.pallas import ssd_pallas
from jaxthd.ops.scan.ssd import ssd
from jaxthd.packing.segments import make_segments

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
    return scan(x, dt, a, b, c, segments, chunk=chunk, backend=backend)


def both(backend: Any, chunk: int, ids: Any, positions: Any, *given: Any) -> Any:
    y, pull = jax.vjp(partial(forward, backend, chunk, ids, positions), *given[:5])
    return y, pull(given[5].astype(y.dtype))


def seconds(call: Callable[[], Any], wait: Callable[[Any], Any], repeats: int, calls: int = CALLS) -> float:
    """Median time of one call among `calls` back-to-back ones. wait: blocks until a result is ready."""
    wait(call())
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            last = call()
        wait(last)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def work(shape: ScanShape, tokens: int, backward: bool) -> tuple[float, float]:
    """(floating-point operations, bytes that must move)."""
    h, g, p, s, pairs = shape.heads, shape.groups, shape.head_dim, shape.state, 129 / 2
    flops = 2 * tokens * (g * pairs * s + h * (pairs * p + 2 * s * p))
    given = 2 * (h * p + 2 * g * s) + 4 * h
    # y is float32; backward moves all arguments again, y's cotangent, and their gradients.
    moved = given + 4 * h * p + (2 * given + 4 * h * p if backward else 0)
    return flops * (3 if backward else 1), float(tokens * moved)


def line(*cells: Any) -> None:
    widths = (26, 8, 18, 10, 9, 9, 12)
    print("".join(f"{cell!s:<{width}}" for cell, width in zip(cells, widths, strict=False)))


def report(name: str, tokens: int, backward: bool, took: float, memory: str = "") -> None:
    flops, moved = work(NANO, tokens, backward)
    what = "forward+backward" if backward else "forward"
    line(
        name,
        tokens,
        what,
        f"{1e3 * took:.3f}",
        f"{moved / took / 1e9:.0f}",
        f"{flops / took / 1e12:.1f}",
        memory,
    )


def timed(tokens: int, chunks: list[int], repeats: int) -> None:
    arguments = inputs(NANO, tokens)
    for backend, chunk in [("xla", 128), *(("pallas", chunk) for chunk in chunks)]:
        for backward, function in enumerate((forward, both)):
            compiled = jax.jit(partial(function, backend, chunk)).lower(*arguments).compile()
            sizes: Any = compiled.memory_analysis()
            memory = f"{sizes.temp_size_in_bytes / 2**20:.0f} MiB"
            took = seconds(partial(compiled, *arguments), jax.block_until_ready, repeats)
            report(f"{backend}, chunk {chunk}", tokens, bool(backward), took, memory)


def sweep(tokens: int, chunks: list[int], repeats: int) -> None:
    """Times each kernel alone, in milliseconds, by (warps, stages)."""
    _, positions, x, dt, a, b, c, dy = inputs(NANO, tokens)
    dy = dy.astype(x.dtype)
    for chunk in chunks:
        sizes = launches.Sizes(1, tokens // chunk, chunk, 64)
        dt_HN = dt.T
        la_HN = dt_HN * a[:, None]
        decay_HN = jnp.exp(la_HN)
        to_tile_HnN = jnp.broadcast_to(decay_HN[:, None], (len(a), sizes.tiles, tokens))
        total_HC = decay_HN[:, ::chunk]
        token = launches.Tokens(positions[0], dt_HN, la_HN, decay_HN, to_tile_HnN)
        states, _ = launches.states(sizes, b, x, dt_HN, total_HC)
        dcb = jnp.zeros((tokens // chunk, NANO.groups, chunk, chunk), x.dtype)
        parts: dict[str, tuple[Any, ...]] = {
            "states": (b, x, dt_HN, total_HC),
            "outputs": (c, b, x, token, decay_HN, states, None),
            "inputs_grad": (c, b, x, dy, token, decay_HN, states, None),
            "scores_grad": (c, b, x, dy, token),
            "shared_grad": (c, b, dy, decay_HN, dcb, states, None),
        }
        for name, given in parts.items():
            usual, found = launches.WARPS_AND_STAGES[name], []
            for choice in [(warps, stages) for warps in (4, 8) for stages in (1, 2, 3)]:
                launches.WARPS_AND_STAGES[name] = choice
                fixed = {"reverse": False} if name == "shared_grad" else {}
                program = jax.jit(partial(getattr(launches, name), sizes, **fixed))
                try:
                    one = seconds(partial(program, *given), jax.block_until_ready, repeats)
                    took = f"{1e3 * one:.3f}"
                except jax.errors.JaxRuntimeError as failed:  # too much shared memory
                    took = str(failed).splitlines()[0][:40]
                found.append(f"{choice}{'*' * (choice == usual)} {took}")
            launches.WARPS_AND_STAGES[name] = usual
            print(f"{name}, chunk {chunk}, {tokens} tokens: {'; '.join(found)}")


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


def rival_timed(run: Callable[..., Any], tokens: int, repeats: int) -> None:
    import torch

    ids, _, *given, dy = inputs(NANO, tokens)
    for chunk in (128, 256):
        for backward, call in enumerate(rival_run(run, ids, tuple(given), dy, chunk)):
            took = seconds(call, lambda _: torch.cuda.synchronize(), repeats)
            report(f"mamba_ssm, chunk {chunk}", tokens, bool(backward), took)


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


def show_errors(name: str, errors: dict[str, float], bound: float) -> bool:
    shown = ", ".join(f"{quantity} {value:.1e}" for quantity, value in errors.items())
    holds = all(value <= bound for value in errors.values())
    print(f"{name}: {shown}; bound {bound:.0e}: {'holds' if holds else 'FAILS'}")
    return holds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--chunks", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--interpret", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs some of the memory
    device, has_gpu = jax.devices()[0], jax.default_backend() == "gpu"
    print(f"jax {jax.__version__}, {device.device_kind}")
    if not has_gpu and not options.interpret:
        print("no GPU here, nothing was run; --interpret compares errors on a CPU")
        return
    print("errors against the XLA scan in float32, largest difference / largest value:")
    shape = NANO if has_gpu else SMALL
    probes = [replace(shape, chunk=chunk) for chunk in options.chunks] + [replace(SMALL, dtype="float32")]
    found = [
        show_errors(f"pallas {p.dtype}, chunk {p.chunk}", probe_errors(ssd_pallas, p), error_bound(p.dtype))
        for p in probes
    ]
    holds = all(found)
    if has_gpu:
        run = rival()
        if run is not None:
            show_errors("mamba_ssm bfloat16", rival_errors(run, shape), error_bound(shape.dtype))
        line("back-end", "tokens", "what", "ms", "GB/s", "TFLOP/s", "memory")
        for tokens in options.tokens:
            timed(tokens, options.chunks, options.repeats)
            if run is not None:
                rival_timed(run, tokens, options.repeats)
        if options.sweep:
            for tokens in options.tokens:
                sweep(tokens, options.chunks, options.repeats)
    if options.check and not holds:
        sys.exit(1)


if __name__ == "__main__":
    main()
