"""Depthwise convolutions over packed tokens: no tap ever reaches another document, but for a document that
continues another one (packing/prefixes.py) its prefix.

Legend: N tokens, K taps, C channels, R rows, S context chunks of a row on a rank, L tokens of a context
chunk, k = K - 1; D documents of a row, after whose prompts decoding goes on; P prefixes of a row; F = R D k.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.ops import activations
from jaxthd.ops.neighbours import Neighbours, extended
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.ops.scan.state_passing import gathered_chunks
from jaxthd.packing.segments import Segments


def causal_conv(
    x_NC: Float[Array, "N C"],
    w_KC: Float[Array, "K C"],
    bias_C: Float[Array, " C"],
    segments: Segments,
    *,
    silu: bool = False,
) -> Float[Array, "N C"]:
    """y[i] = bias + sum_j w[K - 1 - j] x[i - j] over the taps j that stay inside the document; or SiLU of it.

    Where a document continues a prefix, its first taps reach the prefix's last tokens. On the context axis a
    context chunk needs the K - 1 tokens before it, its halo. Differentiable.
    Raises ValueError when a context chunk is shorter than its halo.
    """
    segments = segments.for_mixers
    reach = len(w_KC) - 1
    own = segments if segments.splits is None else segments.splits.on_rank
    x_RSLC = own.split(x_NC)
    if x_RSLC.shape[2] < reach and own.context > 1:
        raise ValueError(
            f"a context chunk has {x_RSLC.shape[2]} tokens but a convolution of {reach + 1} taps needs "
            f"{reach} from the chunk before; raise data.capacity or lower mesh.context"
        )
    halo_RSkC = _halo(x_RSLC, reach, own)
    more = _both(_from_prefixes(x_NC, w_KC, own), _from_chunks(x_NC, w_KC, segments))
    y_RSLC = _convolved(silu, x_RSLC, halo_RSkC, w_KC, bias_C, more, own.split(own.positions))
    return y_RSLC.reshape(x_NC.shape)


class _More(NamedTuple):
    """Additions to the sums of some tokens. at: the tokens of this rank; N for none."""

    at: Int32[Array, " F"]
    values: Float[Array, "F C"]

    def to(self, y_RSLC: Array) -> Array:
        """y [R, S, L, C] with the values added."""
        values_FC, tokens = self.values.astype(y_RSLC.dtype), math.prod(y_RSLC.shape[:3])
        # Read by each token, and not written to a few: so it is part of the loop that sums the taps.
        number_F = jnp.arange(len(self.at), dtype=jnp.int32)
        none_N = jnp.full(tokens, len(self.at), jnp.int32)
        number_N = none_N.at[self.at].set(number_F, mode="drop")
        more_NC = values_FC.at[number_N].get(mode="fill", fill_value=0)
        return y_RSLC + more_NC.reshape(y_RSLC.shape)

    def back(self, dy_RSLC: Array) -> "_More":
        """The gradients of the fields; None for `at`."""
        dy_NC = dy_RSLC.reshape(-1, dy_RSLC.shape[-1])
        dvalues_FC = dy_NC.at[self.at].get(mode="fill", fill_value=0)
        return _More(None, dvalues_FC.astype(self.values.dtype))  # type: ignore[arg-type]


def _from_prefixes(x_NC: Array, w_KC: Array, segments: Segments) -> _More | None:
    """Additions of the prefixes' last tokens to the first k tokens of documents that continue them; None
    without prefixes. Documents that continue the same one get the same, so it is computed once for each
    prefix.
    """
    prefixes, (taps, channels) = segments.prefixes, w_KC.shape
    if prefixes is None or taps == 1:
        return None
    reach = taps - 1
    last_EkC = last_inputs(x_NC, prefixes.first, prefixes.last, taps, segments)
    if segments.context > 1:
        last_EkC = jax.lax.psum(last_EkC, segments.axis)
    added_EkC = _added_by(last_EkC, w_KC)
    here_F = segments.local_index(prefixes.first_tokens(reach))
    values_FC = added_EkC[prefixes.of_segment.reshape(-1)].reshape(-1, channels)
    return _More(jnp.where(here_F >= 0, here_F, len(x_NC)), values_FC)


def _added_by(last_EkC: Array, w_KC: Array) -> Array:
    """Additions of the k inputs before some token to it and to the k - 1 tokens after it."""
    reach, acc = len(w_KC) - 1, accumulation_dtype(last_EkC)
    return jnp.stack(
        [(w_KC[: reach - i].astype(acc) * last_EkC[:, i:].astype(acc)).sum(1) for i in range(reach)],
        axis=1,
    )


def _from_chunks(x_NC: Array, w_KC: Array, segments: Segments) -> _More | None:
    """Under the layout "whole": what the last tokens of the context chunk before add to the first k tokens of
    each context chunk of a split document. Exchanged only if there are split documents.
    """
    split, (taps, channels) = segments.splits, w_KC.shape
    if split is None or taps == 1:
        return None
    reach = taps - 1
    at_REk = split.begin[..., None] + jnp.arange(reach, dtype=jnp.int32)
    at_REk = jnp.where(split.begin[..., None] >= 0, at_REk, -1)
    here_F = split.on_rank.local_index(at_REk.reshape(segments.rows, -1))

    def exchanged(x_NC: Array, w_KC: Array) -> Array:
        """Additions [E, k, C], from the last tokens of the context chunks before."""
        last_EkC = last_inputs(x_NC, split.begin, split.end, taps, split.on_rank)
        last_RK2kC = last_EkC.reshape(*split.slots.chunk.shape, 2, *last_EkC.shape[1:])
        last, (first, second) = gathered_chunks(last_RK2kC, 2, segments)
        before = jnp.pad(last, [(1, 0)] + [(0, 0)] * (last.ndim - 1))
        before_RK2kC = jnp.stack([before[first], before[second]], axis=2)
        return _added_by(before_RK2kC.reshape(last_EkC.shape), w_KC)

    def none(x_NC: Array, w_KC: Array) -> Array:
        """Zeros in their place: no document is split."""
        return jnp.zeros((split.end.size, reach, channels), accumulation_dtype(x_NC))

    added_EkC = jax.lax.cond(split.width > 0, exchanged, none, x_NC, w_KC)
    return _More(jnp.where(here_F >= 0, here_F, len(x_NC)), added_EkC.reshape(-1, channels))


def _both(one: _More | None, other: _More | None) -> _More | None:
    if one is None or other is None:
        return other if one is None else one
    return _More(*(jnp.concatenate(pair) for pair in zip(one, other, strict=True)))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolved(
    silu: bool,
    x_RSLC: Array,
    halo_RSkC: Array,
    w_KC: Array,
    bias_C: Array,
    more: _More | None,
    positions_RSL: Array,
) -> Array:
    """XLA compiles this to one loop over elements, and the backward pass to two and the sums for w and bias.
    Only x is kept for the backward pass; autodiff would keep what each tap saw.
    """
    y_RSLC = _sum_of_taps(_seen(x_RSLC, halo_RSkC, positions_RSL), w_KC, bias_C, more)
    return (activations.silu(y_RSLC) if silu else y_RSLC).astype(x_RSLC.dtype)


def _seen(x_RSLC: Array, halo_RSkC: Array, positions_RSL: Array) -> list[Array]:
    """For each j = 0 .. k, the tokens j before each token; 0 where those belong to another document."""
    reach, length = halo_RSkC.shape[2], x_RSLC.shape[2]
    longer_RSMC = jnp.concatenate([halo_RSkC, x_RSLC], axis=2)
    back = [longer_RSMC[:, :, reach - j : reach - j + length] for j in range(reach + 1)]
    return [jnp.where(positions_RSL[..., None] >= j, each, 0) for j, each in enumerate(back)]


def _sum_of_taps(seen: list[Array], w_KC: Array, bias_C: Array, more: _More | None) -> Array:
    """The convolution, in the accumulation dtype."""
    acc = accumulation_dtype(bias_C)
    y = bias_C.astype(acc) + sum(w_C.astype(acc) * x for w_C, x in zip(w_KC[::-1], seen, strict=True))
    return y if more is None else more.to(y)


def _convolved_forward(silu: bool, *given: Any) -> tuple[Array, tuple[Any, ...]]:
    return _convolved(silu, *given), given


def _convolved_backward(silu: bool, given: tuple[Any, ...], dy_RSLC: Array) -> tuple[Any, ...]:
    x_RSLC, halo_RSkC, w_KC, bias_C, more, positions_RSL = given
    seen = _seen(x_RSLC, halo_RSkC, positions_RSL)
    acc, reach = accumulation_dtype(x_RSLC), len(seen) - 1
    dz_RSLC = dy_RSLC.astype(acc)
    if silu:
        dz_RSLC = dz_RSLC * activations.silu_slope(_sum_of_taps(seen, w_KC, bias_C, more))
    # The barrier has what the taps saw computed again. Otherwise XLA keeps it for both uses, in k + 1 arrays.
    # And dz goes through memory in x's dtype; the sums over it are in `acc`.
    dz_RSLC = dz_RSLC.astype(x_RSLC.dtype)
    x_RSLC, halo_RSkC, dz_RSLC = jax.lax.optimization_barrier((x_RSLC, halo_RSkC, dz_RSLC))
    seen = _seen(x_RSLC, halo_RSkC, positions_RSL)
    dw_KC = jnp.stack([(dz_RSLC.astype(acc) * x).sum((0, 1, 2)) for x in seen[::-1]])
    dbias_C = dz_RSLC.sum((0, 1, 2), dtype=acc)
    dmore = more and more.back(dz_RSLC)
    # The gradient of token i that token i + j sends back, halo included.
    around = [(0, 0), (0, 0), (reach, reach)]
    dz_RSWC, positions_RSW = jnp.pad(dz_RSLC, [*around, (0, 0)]), jnp.pad(positions_RSL, around)
    dpadded_RSMC, longer = jnp.zeros((), acc), reach + x_RSLC.shape[2]
    for j, w_C in enumerate(w_KC[::-1]):
        reached = positions_RSW[:, :, j : j + longer, None] >= j
        dpadded_RSMC += jnp.where(reached, w_C.astype(acc) * dz_RSWC[:, :, j : j + longer], 0)
    dhalo_RSkC, dx_RSLC = jnp.split(dpadded_RSMC.astype(x_RSLC.dtype), [reach], axis=2)
    return dx_RSLC, dhalo_RSkC, dw_KC.astype(w_KC.dtype), dbias_C.astype(bias_C.dtype), dmore, None


_convolved.defvjp(_convolved_forward, _convolved_backward)


def last_inputs(
    x_NC: Float[Array, "N C"],
    first_RD: Int32[Array, "R D"],
    last_RD: Int32[Array, "R D"],
    taps: int,
    segments: Segments,
) -> Float[Array, "R_D k C"]:
    """State of a causal convolution after a token: its k = taps - 1 inputs up to there, newest
    last.

    first, last: indices in the row of the document's first token, and of the token to go on after; -1 for
    none. Inputs are 0 before the document, and 0 where another rank holds them.
    """
    index_RDk = last_RD[..., None] - jnp.arange(taps - 2, -1, -1, dtype=jnp.int32)
    index_RDk = jnp.where(index_RDk >= first_RD[..., None], index_RDk, -1)
    here = segments.local_index(index_RDk.reshape(len(index_RDk), -1))
    x_DkC = jnp.where(here[:, None] >= 0, x_NC[here], 0)
    return x_DkC.reshape(first_RD.size, taps - 1, x_NC.shape[1])


def next_inputs(
    last_nkC: Float[Array, "n k C"], new_nLC: Float[Array, "n L C"]
) -> tuple[Float[Array, "n_L K C"], Float[Array, "n L k C"]]:
    """The inputs of the taps at each of L more tokens of n documents, and the state after each of them.

    last: the state before the first of them (last_inputs).
    """
    taps, inputs_nC = last_nkC.shape[1] + 1, jnp.concatenate([last_nkC, new_nLC], axis=1)
    taken_nLKC = jnp.stack([inputs_nC[:, i : i + taps] for i in range(new_nLC.shape[1])], axis=1)
    return taken_nLKC.reshape(-1, *taken_nLKC.shape[2:]), taken_nLKC[:, :, 1:]


def _halo(x_RSLC: Array, reach: int, segments: Segments) -> Array:
    """The `reach` tokens before each context chunk, zeros before the row: [R, S, reach, C].
    DualChunkSwap.before says which ranks hold them.
    """
    if segments.context == 1:
        return jnp.zeros((*x_RSLC.shape[:2], reach, x_RSLC.shape[-1]), x_RSLC.dtype)
    tail_RSkC = x_RSLC[:, :, x_RSLC.shape[2] - reach :]
    context, rank = segments.context, jax.lax.axis_index(segments.axis)
    if segments.uniform_program:
        first_RkC = jax.lax.ppermute(tail_RSkC[:, 0], segments.axis, segments.swap.moves(0))
        second_RkC = jax.lax.ppermute(tail_RSkC[:, 1], segments.axis, segments.swap.moves(1))
    else:
        tail_cRSkC = jax.lax.all_gather(tail_RSkC, segments.axis)
        before_first, before_second = segments.swap.before(rank)
        first_RkC = jnp.where(rank > 0, tail_cRSkC[before_first, :, 0], 0)
        second_RkC = tail_cRSkC[before_second % context, :, 1]
    # The last rank's second chunk follows its own first one.
    is_last = rank == context - 1
    return jnp.stack([first_RkC, jnp.where(is_last, tail_RSkC[:, 0], second_RkC)], axis=1)


def centered_conv(
    x_NC: Float[Array, "N C"],
    w_KC: Float[Array, "K C"],
    segments: Segments,
    neighbours: Neighbours | None = None,
) -> Float[Array, "N C"]:
    """y[i] = sum_d w[d + K // 2] x[i + d], |d| <= K // 2, over the taps that stay inside the document.

    K is odd. The encoder's documents are clips. neighbours: of the ranks that clips are split over; None:
    clips lie whole on this rank.
    """
    assert segments.context == 1
    if neighbours is None:
        return _centered(_Rows(segments.rows, ()), x_NC, w_KC, segments.positions, segments.remaining, None)
    rows = _Rows(segments.rows, neighbours.axes)
    return _centered(rows, x_NC, w_KC, segments.positions, neighbours.remaining, neighbours.is_split)


class _Rows(NamedTuple):
    """axes: of the mesh, over which clips may be split; () where none is."""

    rows: int
    axes: tuple[str, ...]

    def around(self, x_NC: Array, half: int, is_split: Array | None) -> Array:
        """The rows' tokens and `half` more before and after: [R, M, C], or of all rows together [1, M, C]."""
        if is_split is None:
            return jnp.pad(x_NC, ((half, half), (0, 0)))[None]
        return extended(x_NC.reshape(self.rows, -1, x_NC.shape[1]), half, half, is_split, self.axes)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _centered(
    rows: _Rows, x_NC: Array, w_KC: Array, positions_N: Array, remaining_N: Array, is_split: Array | None
) -> Array:
    """Only x is kept for the backward pass, as in _convolved."""
    around_RMC = rows.around(x_NC, len(w_KC) // 2, is_split)
    return _sum_of(w_KC, _seen_around(around_RMC, len(w_KC), positions_N, remaining_N))


def _seen_around(around_RMC: Array, taps: int, positions_N: Array, remaining_N: Array) -> list[Array]:
    """For each tap, the tokens that it sees; 0 where those are of another clip."""
    half, length = taps // 2, around_RMC.shape[1] - taps + 1
    seen = []
    for i in range(taps):
        inside_N = positions_N >= half - i if i < half else remaining_N >= i - half
        there_NC = around_RMC[:, i : i + length].reshape(len(positions_N), -1)
        seen.append(jnp.where(inside_N[:, None], there_NC, 0))
    return seen


def _sum_of(w_KC: Array, seen: list[Array]) -> Array:
    y_NC = jnp.zeros_like(seen[0])
    for w_C, x_NC in zip(w_KC, seen, strict=True):
        y_NC = y_NC + w_C * x_NC
    return y_NC


def _centered_forward(rows: _Rows, x_NC: Array, *given: Any) -> tuple[Array, tuple[Any, ...]]:
    w_KC, positions_N, remaining_N, is_split = given
    around_RMC = rows.around(x_NC, len(w_KC) // 2, is_split)
    y_NC = _sum_of(w_KC, _seen_around(around_RMC, len(w_KC), positions_N, remaining_N))
    return y_NC, (x_NC if is_split is None else around_RMC, *given)


def _centered_backward(rows: _Rows, given: tuple[Any, ...], dy_NC: Array) -> tuple[Any, ...]:
    """A token is seen by those that it sees, through the taps in reverse."""
    kept, w_KC, positions_N, remaining_N, is_split = given
    taps = len(w_KC)
    # As in _convolved: what the taps saw is computed again, and is not kept for both passes.
    kept, dy_NC = jax.lax.optimization_barrier((kept, dy_NC))
    around_RMC = rows.around(kept, taps // 2, None) if is_split is None else kept
    seen = _seen_around(around_RMC, taps, positions_N, remaining_N)
    # Not jnp.sum: where that widens its sums, a GPU's kernel computes fewer of them at a time.
    zero = jnp.zeros((), dy_NC.dtype)
    dw_KC = jnp.stack([jax.lax.reduce(dy_NC * x_NC, zero, jax.lax.add, (0,)) for x_NC in seen])
    around_RMC = rows.around(dy_NC, taps // 2, is_split)
    dx_NC = _sum_of(w_KC[::-1], _seen_around(around_RMC, taps, positions_N, remaining_N))
    return dx_NC, dw_KC, None, None, None


_centered.defvjp(_centered_forward, _centered_backward)
