"""Packed attention on a GPU: every admitted back-end, and PyTorch's FlexAttention, in TFLOP/s.

    python scripts/bench_attention.py [--tiny]

bfloat16, 32 query heads over 8 key/value heads of dim 128; documents as long as recordings in 8k and 32k
tokens, and two of 16k. TFLOP/s count allowed pairs only (2 products forward, 5 backward); the share is of the
rate of a large bfloat16 matrix product here. Times are measured as in bench_scan. FlexAttention runs
compiled, with the documents as its block mask, where torch sees a GPU; its output is first compared with
xla's. The reason is printed for everything that is not run.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
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
from jaxthd.ops.attention.contract import AttentionShape
from jaxthd.ops.attention.ring import packed_attention
from jaxthd.packing.segments import Segments, make_segments
from jaxthd.terminal.tables import show
from scripts.bench_scan import CALLS, recordings, row_of, seconds

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


def measure(tiny: bool, peak: float, tell: Callable[[dict[str, Any]], Any]) -> None:
    """Shows a table. peak: FLOP/s that shares refer to. tell: is called with each row at once."""
    shape = Shape(4, 2, 32) if tiny else Shape(32, 8, 128)
    sizes, long = ((128, 512), 256) if tiny else ((8192, 32768), 16384)
    cases = {f"recordings, {size} tokens": recordings(size) for size in sizes}
    cases[f"2 documents of {long} tokens"] = [long, long]
    admitted, flex, found = list(backends(shape)), flex_attention(), []
    for case, lengths in cases.items():
        given = inputs(lengths, shape)
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


def inputs(lengths: Sequence[int], shape: Shape) -> tuple[Any, ...]:
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small, to try the script on a CPU")
    tiny = parser.parse_args().tiny
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs some of the memory
    measure(tiny, matrix_rate(256 if tiny else 8192), lambda row: None)


if __name__ == "__main__":
    main()
