"""Expert matrix products whose cost follows the tokens routed, not the number of experts.

Assignments (token, expert) are sorted by expert and laid out in blocks of one expert each. A loop multiplies
only the blocks in use, one after the other; or, for devices that want few large kernels, in rounds: the n-th
block of every expert in one batched product. (jax.lax.ragged_dot multiplies every row by every expert, on
CPUs and, as XLA of jax 0.11.2 compiles it, on an H100.)

Legend: N tokens, k experts a token, E experts, D in, F out, M rows of the layout, B rows of a block.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.ops.fp8 import ACTIVATIONS, GRADIENTS, einsum8
from jaxthd.ops.numerics import accumulation_dtype


class ExpertLayout(NamedTuple):
    """The row of each assignment. M is fixed: N * k rows, plus one block for each expert.

    rows: row of token n's j-th assignment (M where the token is not routed).
    tokens: token of each row (N where the row is not used).
    expert: expert of each block.
    used: blocks in use; they come first.
    ranges: first block of each expert, and the end of its blocks; None without IN_ROUNDS.
    load: assignments of each expert.
    """

    rows: Int32[Array, "N k"]
    tokens: Int32[Array, " M"]
    expert: Int32[Array, " blocks"]
    used: Int32[Array, ""]
    load: Int32[Array, " E"]
    ranges: Int32[Array, "E 2"] | None = None


IN_ROUNDS = 0
"""In place of a block's rows: blocks are multiplied in rounds, and a block has as many rows as an expert with
an even load needs, and a quarter more; a multiple of 64."""


def expert_layout(
    chosen_Nk: Int32[Array, "N k"], routed_N: Bool[Array, " N"], experts: int, block: int
) -> ExpertLayout:
    """Lays out the routed assignments in blocks of `block` rows. Tokens with routed False take no row.

    block: or IN_ROUNDS.
    """
    n, k = chosen_Nk.shape
    in_rounds, block = block == IN_ROUNDS, block or 64 * -(-5 * n * k // (4 * 64 * experts))
    chosen_A = jnp.where(routed_N[:, None], chosen_Nk, experts).reshape(-1)
    load_E1 = jnp.bincount(chosen_A, length=experts + 1)
    blocks_E = -(-load_E1[:experts] // block)
    end_E = jnp.cumsum(blocks_E)
    order_A = jnp.argsort(chosen_A, stable=True)
    rank_A = jnp.arange(n * k) - (jnp.cumsum(load_E1) - load_E1)[chosen_A[order_A]]
    capacity = -(-n * k // block) + min(experts, n * k)
    first_row_E1 = jnp.append((end_E - blocks_E) * block, capacity * block)
    sorted_rows_A = jnp.minimum(first_row_E1[chosen_A[order_A]] + rank_A, capacity * block)
    rows_A = jnp.zeros_like(sorted_rows_A).at[order_A].set(sorted_rows_A)
    token_A = jnp.arange(n * k, dtype=jnp.int32) // k
    tokens_M = jnp.full(capacity * block, n, jnp.int32).at[rows_A].set(token_A, mode="drop")
    expert_b = jnp.searchsorted(end_E, jnp.arange(capacity), side="right")
    return ExpertLayout(
        rows=rows_A.reshape(n, k).astype(jnp.int32),
        tokens=tokens_M,
        expert=jnp.minimum(expert_b, experts - 1).astype(jnp.int32),
        used=end_E[-1].astype(jnp.int32),
        load=load_E1[:experts].astype(jnp.int32),
        ranges=jnp.stack([end_E - blocks_E, end_E], axis=1).astype(jnp.int32) if in_rounds else None,
    )


_FORWARD, _OF_INPUTS, _OF_WEIGHTS = (
    (ACTIVATIONS, ACTIVATIONS),
    (GRADIENTS, ACTIVATIONS),
    (ACTIVATIONS, GRADIENTS),
)
"""Dtypes of the operands of the three products in FP8."""


def _einsum(product: str, a: Array, b: Array, in_fp8: tuple[Any, Any] | None) -> Array:
    """As jnp.einsum, in the accumulation dtype. in_fp8: dtypes that the operands are rounded to."""
    if in_fp8 is not None:
        return einsum8(product, a, in_fp8[0], b, in_fp8[1])
    return jnp.einsum(product, a, b, preferred_element_type=accumulation_dtype(a))


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def grouped_matmul(
    x_MD: Float[Array, "M D"],
    w_EDF: Float[Array, "E D F"],
    expert: Int32[Array, " blocks"],
    used: Int32[Array, ""],
    ranges: Int32[Array, "E 2"] | None = None,
    in_fp8: bool = False,
) -> Float[Array, "M F"]:
    """The rows of block b times w[expert[b]], for the first `used` blocks; 0 in the others. Differentiable.

    ranges: the layout's; with them the blocks are multiplied in rounds. in_fp8: round the operands of the
    three products to 8 bits (ops/fp8.py), each block of an expert's rows by itself.
    """
    return _product(x_MD, w_EDF, expert, used, ranges, in_fp8)


def _product(
    x_MD: Array, w_EDF: Array, expert: Array, used: Array, ranges: Array | None, in_fp8: bool
) -> Array:
    dtypes = _FORWARD if in_fp8 else None
    if ranges is None:
        return _loop_blocks(x_MD, w_EDF, expert, used, dtypes)
    return _loop_rounds(x_MD, w_EDF, ranges, len(expert), "ebd,edf->ebf", dtypes)


def _loop_blocks(x_MD: Array, w_EDF: Array, expert: Array, used: Array, in_fp8: Any) -> Array:
    x_bBD = x_MD.reshape(len(expert), -1, x_MD.shape[-1])

    def step(b: Array, y_bBF: Array) -> Array:
        """Writes the product of block b."""
        y_BF = _einsum("bd,df->bf", x_bBD[b], w_EDF[expert[b]], in_fp8)
        return y_bBF.at[b].set(y_BF.astype(y_bBF.dtype))

    y_bBF = jnp.zeros((*x_bBD.shape[:2], w_EDF.shape[-1]), x_MD.dtype)
    return jax.lax.fori_loop(0, used, step, y_bBF).reshape(len(x_MD), -1)


def _of_round(n: Array, ranges: Array, blocks: int) -> Array:
    """The n-th block of each expert, `blocks` for experts with fewer."""
    nth_E = ranges[:, 0] + n
    return jnp.where(nth_E < ranges[:, 1], nth_E, blocks)


def _rounds(ranges: Array) -> Array:
    return jnp.max(ranges[:, 1] - ranges[:, 0])


def _taken(x_bBD: Array, at_E: Array) -> Array:
    return jnp.take(x_bBD, at_E, axis=0, mode="fill", fill_value=0)


def _loop_rounds(x_MD: Array, w_EDF: Array, ranges: Array, blocks: int, product: str, in_fp8: Any) -> Array:
    """product: as einsum writes it, of a block of every expert and its matrix."""
    x_bBD = x_MD.reshape(blocks, -1, x_MD.shape[-1])

    def step(n: Array, y_bBF: Array) -> Array:
        """Writes the products of the n-th block of each expert."""
        at_E = _of_round(n, ranges, blocks)
        y_EBF = _einsum(product, _taken(x_bBD, at_E), w_EDF, in_fp8)
        return y_bBF.at[at_E].set(y_EBF.astype(y_bBF.dtype), mode="drop")

    width = w_EDF.shape[-1 if product.endswith("f") else 1]
    y_bBF = jnp.zeros((*x_bBD.shape[:2], width), x_MD.dtype)
    return jax.lax.fori_loop(0, _rounds(ranges), step, y_bBF).reshape(len(x_MD), -1)


def _backward_in_rounds(in_fp8, residuals, dy_MF):
    x_MD, w_EDF, expert, _, ranges = residuals
    of_inputs, of_weights = (_OF_INPUTS, _OF_WEIGHTS) if in_fp8 else (None, None)
    dx_MD = _loop_rounds(dy_MF, w_EDF, ranges, len(expert), "ebf,edf->ebd", of_inputs)
    x_bBD, dy_bBF = (x.reshape(len(expert), -1, x.shape[-1]) for x in (x_MD, dy_MF))
    acc = accumulation_dtype(x_MD)

    def step(n: Array, dw_EDF: Array) -> Array:
        """Adds what the n-th block of each expert gives to its matrix."""
        x_EBD, dy_EBF = (_taken(x, _of_round(n, ranges, len(expert))) for x in (x_bBD, dy_bBF))
        return dw_EDF + _einsum("ebd,ebf->edf", x_EBD, dy_EBF, of_weights)

    dw_EDF = jax.lax.fori_loop(0, _rounds(ranges), step, jnp.zeros(w_EDF.shape, acc))
    return dx_MD, dw_EDF.astype(w_EDF.dtype), None, None, None


def _grouped_forward(x_MD, w_EDF, expert, used, ranges, in_fp8):
    y_MF = _product(x_MD, w_EDF, expert, used, ranges, in_fp8)
    return y_MF, (x_MD, w_EDF, expert, used, ranges)


def _grouped_backward(in_fp8, residuals, dy_MF):
    x_MD, w_EDF, expert, used, ranges = residuals
    if ranges is not None:
        return _backward_in_rounds(in_fp8, residuals, dy_MF)
    of_inputs, of_weights = (_OF_INPUTS, _OF_WEIGHTS) if in_fp8 else (None, None)
    dx_MD = _loop_blocks(dy_MF, w_EDF.swapaxes(1, 2), expert, used, of_inputs)
    x_bBD, dy_bBF = (x.reshape(len(expert), -1, x.shape[-1]) for x in (x_MD, dy_MF))
    acc = accumulation_dtype(x_MD)

    def step(b: Array, dw_EDF: Array) -> Array:
        """Adds the gradient that block b gives to its expert's matrix."""
        return dw_EDF.at[expert[b]].add(_einsum("bd,bf->df", x_bBD[b], dy_bBF[b], of_weights))

    dw_EDF = jax.lax.fori_loop(0, used, step, jnp.zeros(w_EDF.shape, acc))
    return dx_MD, dw_EDF.astype(w_EDF.dtype), None, None, None


grouped_matmul.defvjp(_grouped_forward, _grouped_backward)


def dispatch(x_ND: Float[Array, "N D"], layout: ExpertLayout) -> Float[Array, "M D"]:
    """The tokens in the order of the layout's rows; 0 in unused rows."""
    return jnp.take(x_ND, layout.tokens, axis=0, mode="fill", fill_value=0)


def combine(
    y_MD: Float[Array, "M D"], weights_Nk: Float[Array, "N k"], layout: ExpertLayout
) -> Float[Array, "N D"]:
    """The weighted sum of each token's rows; 0 for tokens that are not routed."""
    y_NkD = jnp.take(y_MD, layout.rows, axis=0, mode="fill", fill_value=0)
    return jnp.einsum("nkd,nk->nd", y_NkD, weights_Nk.astype(y_MD.dtype))
