"""The gated delta rule in chunks against a scan token by token: time, memory and difference of both.

    python scripts/bench_delta.py [--tokens 2048 8192] [--chunk 64] [--value-heads 4] [--dim 64]

Both sides are compiled for this machine's device and run in turn, in float32: forward, and forward and
backward with the gradients of all inputs. Memory is what the compiled program needs besides arguments and
results. The scan keeps a state a token for the backward pass, or with recomputation one every --chunk tokens.
Documents have 300 tokens on average.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxthd.ops.delta.rule import DeltaInputs, gated_delta_rule
from jaxthd.packing.segments import Segments, segments_of
from jaxthd.terminal.tables import show

MEAN_TOKENS = 300
REPEATS = 3


def token_by_token(inputs: DeltaInputs, segments: Segments, *, chunk: int) -> Any:
    """The rule as it is written down, [N, H, V]. chunk: tokens of which one state is kept; 1 keeps all."""
    heads, key_heads = inputs.v.shape[1], inputs.k.shape[1]
    q_NHK, k_NHK = (jnp.repeat(x, heads // key_heads, axis=1) for x in inputs[:2])
    kept_NH = jnp.where(segments.positions[:, None] == 0, 0, jnp.exp(inputs.decay))

    def step(state_HKV: Any, given: Any) -> tuple[Any, Any]:
        q_HK, k_HK, v_HV, kept_H, rate_H = given
        state_HKV = kept_H[:, None, None] * state_HKV
        written_HV = rate_H[:, None] * (v_HV - jnp.einsum("hkv,hk->hv", state_HKV, k_HK))
        state_HKV = state_HKV + k_HK[..., None] * written_HV[:, None]
        return state_HKV, jnp.einsum("hkv,hk->hv", state_HKV, q_HK)

    def run(state_HKV: Any, of_chunk: Any) -> tuple[Any, Any]:
        return jax.lax.scan(step, state_HKV, of_chunk)

    zero = jnp.zeros((heads, k_NHK.shape[-1], inputs.v.shape[-1]), inputs.v.dtype)
    given = q_NHK, k_NHK, inputs.v, kept_NH, inputs.rate
    if chunk == 1:
        return run(zero, given)[1]
    chunks = jax.tree.map(lambda x: x.reshape(-1, chunk, *x.shape[1:]), given)
    return jax.lax.scan(jax.checkpoint(run), zero, chunks)[1].reshape(inputs.v.shape)


def inputs_of(tokens: int, options: argparse.Namespace) -> tuple[DeltaInputs, Segments]:
    rng = np.random.default_rng(0)
    dim, heads = options.dim, options.value_heads
    q, k = rng.normal(size=(2, tokens, max(heads // 2, 1), dim))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    decay = -rng.exponential(0.1, size=(tokens, heads))
    arrays = q, k, rng.normal(size=(tokens, heads, dim)), decay, rng.uniform(size=(tokens, heads))
    lengths = rng.integers(1, 2 * MEAN_TOKENS, tokens // MEAN_TOKENS // 2).tolist()
    lengths.append(tokens - sum(lengths))
    return DeltaInputs(*(jnp.asarray(x, jnp.float32) for x in arrays)), segments_of(lengths)


def measured(run: Callable[..., Any], *given: Any) -> tuple[float, int, Any]:
    """(seconds, bytes, what it returns)."""
    program = jax.jit(run).lower(*given).compile()
    out, seconds = jax.block_until_ready(program(*given)), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(program(*given))
        seconds.append(time.perf_counter() - start)
    memory: Any = program.memory_analysis()
    return min(seconds), memory.temp_size_in_bytes, out


def with_gradients(rule: Callable[..., Any]) -> Callable[..., Any]:
    def run(inputs: DeltaInputs, segments: Segments) -> Any:
        y_NHV, pull = jax.vjp(lambda x: rule(x, segments), inputs)
        return y_NHV, pull(jnp.ones_like(y_NHV))[0]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192], help="multiples of --chunk")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--value-heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64, help="of keys and of values")
    options = parser.parse_args()
    sides: dict[str, Callable[..., Any]] = {
        "in chunks": lambda x, segments: gated_delta_rule(x, segments, chunk=options.chunk),
        "token by token": lambda x, segments: token_by_token(x, segments, chunk=1),
        "the same, recomputed": lambda x, segments: token_by_token(x, segments, chunk=options.chunk),
    }
    rows = []
    for tokens in options.tokens:
        given, want = inputs_of(tokens, options), None
        for name, rule in sides.items():
            forward, _, _ = measured(rule, *given)
            both, memory, out = measured(with_gradients(rule), *given)
            want = out if want is None else want
            pairs = zip(jax.tree.leaves(out), jax.tree.leaves(want), strict=True)
            apart = max(float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in pairs)
            times = f"{1e3 * forward:.1f}", f"{1e3 * both:.1f}", f"{memory / 1e6:.1f}"
            rows.append([f"{tokens:,}", name, *times, f"{apart:.0e}"])
    show(
        f"The gated delta rule, {options.value_heads} value heads of {options.dim}, scan chunks of "
        f"{options.chunk}, float32, {jax.devices()[0].device_kind}",
        "tokens|side|forward, ms|with gradients, ms|memory of the latter, MB|apart from the first",
        rows,
    )


if __name__ == "__main__":
    main()
