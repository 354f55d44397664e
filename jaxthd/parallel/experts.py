"""Expert parallelism: experts sharded over ranks, tokens sent to them and back. No token is dropped.

Assignments (token, expert) are exchanged by all-to-all in rounds. A round has C slots
for each pair of ranks, somewhat more than an even load needs. Assignments without a slot go with the next
round. There are as many rounds as the fullest pair needs: usually one. Only the memory of a round is bounded.

Tensor ranks hold the same tokens, and a part of the columns of the same experts. So they deal the
assignments out: each of t exchanges every t-th row that one rank has for another, and a row crosses the
network once, not t times. Where the experts are, tensor ranks gather the rows from one another, and
afterwards sum and scatter the outputs, over links inside a machine. (Megatron-LM's dispatcher does so with
tokens that sequence parallelism has divided. Dealt out after routing, the loads of tensor ranks differ by one
row at most, so that no more rounds are needed. Dividing the features instead would need dims that t divides.)

Legend: N tokens, k experts for each token, A = N * k assignments, r ranks, E experts, e = E / r experts of
this rank, t tensor ranks, C slots of a pair of ranks, S = r * C slots that a rank sends in a round, R = t * S
rows of a round that arrive, D token dim, F inner dim.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.config import MeshConfig
from jaxthd.ops.ffn import FFNForm
from jaxthd.ops.grouped_matmul import ExpertLayout, combine, dispatch, expert_layout, grouped_matmul
from jaxthd.parallel.mesh import CONTEXT, DATA, ranks_of
from jaxthd.parallel.params import ShardedDim


def expert_sharding(experts: int, mesh: MeshConfig) -> ShardedDim | None:
    """Shards experts over data and context, or over one of them if both do not divide their number.

    None if no choice divides it, or if neither axis has several ranks.
    """
    dims = [ShardedDim(axes, experts) for axes in ((DATA, CONTEXT), (DATA,), (CONTEXT,))]
    return max((d for d in dims if d.is_sharded(mesh)), key=lambda d: ranks_of(mesh, d.axes), default=None)


class Experts(NamedTuple):
    """Weights of experts. gate: None for experts without one. Biases: None for experts without them; in the
    parameters' dtype.
    """

    up: Float[Array, "E D F"]
    down: Float[Array, "E F D"]
    gate: Float[Array, "E D F"] | None = None
    up_bias: Float[Array, "E F"] | None = None
    down_bias: Float[Array, "E D"] | None = None
    gate_bias: Float[Array, "E F"] | None = None


def expert_mlp(
    x_MD: Float[Array, "M D"], experts: Experts, layout: ExpertLayout, form: FFNForm
) -> Float[Array, "M D"]:
    """Applies its expert to every row. With biases the result is not 0 in rows that no assignment has."""

    def product(x: Array, w: Array, bias_EF: Array | None) -> Array:
        """Each row [M, ...] times its expert's matrix, plus its bias."""
        y_MF = grouped_matmul(x, w, layout.expert, layout.used, layout.ranges, form.in_fp8)
        if bias_EF is None:
            return y_MF
        bias_b1F = bias_EF[layout.expert][:, None].astype(x.dtype)
        return (y_MF.reshape(len(bias_b1F), -1, y_MF.shape[-1]) + bias_b1F).reshape(y_MF.shape)

    up_MF = product(x_MD, experts.up, experts.up_bias)
    gate_MF = None if experts.gate is None else product(x_MD, experts.gate, experts.gate_bias)
    return product(form.inner(up_MF, gate_MF), experts.down, experts.down_bias)


def exchanged_experts(
    x_ND: Float[Array, "N D"],
    local: Experts,
    chosen_Nk: Int32[Array, "N k"],
    weight_Nk: Float[Array, "N k"],
    routed_N: Bool[Array, " N"],
    form: FFNForm,
    axes: tuple[str, ...],
    columns: tuple[str, ...],
    capacity: float,
    block: int,
) -> Float[Array, "N D"]:
    """The weighted sum of each token's expert outputs, on whichever ranks; 0 for tokens that are not routed.
    With several tensor ranks it is a partial sum: theirs have to be added.

    local: this rank's experts, rank-major over `axes`.
    columns: the axes of several ranks that have the same tokens and a part of every expert's columns; or ().
    capacity: the slots of a pair of ranks in a round, divided by the pair's mean load.
    Differentiable in x, local and weight; ranks of `columns` must have the same cotangents. Every rank of
    `axes` and `columns` must call it at the same time.
    """
    (n, k), experts, ranks = chosen_Nk.shape, len(local.up), jax.lax.axis_size(axes)
    parts = jax.lax.axis_size(columns) if columns else 1
    most = n * min(k, experts)
    slots = min(math.ceil(capacity * n * k / (ranks * parts)), -(-most // parts))
    # Sort the assignments by destination rank; number those of each rank.
    rank_A = jnp.where(routed_N[:, None], chosen_Nk // experts, ranks).reshape(-1)
    order_A = jnp.argsort(rank_A, stable=True)
    load_r1 = jnp.bincount(rank_A, length=ranks + 1)
    number_A = jnp.arange(n * k) - (jnp.cumsum(load_r1) - load_r1)[rank_A[order_A]]
    number_A = jnp.zeros_like(number_A).at[order_A].set(number_A)
    # Ranks that disagreed about the rounds would wait for one another for ever: all take part in the maximum.
    rounds = jax.lax.pmax(-(-load_r1[:ranks].max() // (slots * parts)), axes + columns)
    is_sent_A = rank_A < ranks
    if columns:
        is_sent_A &= number_A % parts == jax.lax.axis_index(columns)
        number_A = number_A // parts
    slot_A = jnp.where(is_sent_A, rank_A * slots + number_A % slots, ranks * slots)
    where = (slot_A, jnp.where(is_sent_A, number_A // slots, -1), chosen_Nk.reshape(-1) % experts)
    out_AD = _all_rounds(x_ND, local, where, rounds, form, _Ranks(axes, columns, slots), block)
    return jnp.einsum("nkd,nk->nd", out_AD.reshape(n, k, -1), weight_Nk.astype(out_AD.dtype))


class _Ranks(NamedTuple):
    """Who exchanges rows. axes, columns: as of exchanged_experts. slots: C, of a rank for one of `axes`."""

    axes: tuple[str, ...]
    columns: tuple[str, ...]
    slots: int

    def there(self, x_S: Array) -> Array:
        """[S, ...] -> [R, ...]: all that the ranks of `axes` and `columns` send to this rank's experts. It is
        the same on all ranks of `columns`.
        """
        x_S = self._exchanged(x_S)
        return jax.lax.all_gather(x_S, self.columns, axis=0, tiled=True) if self.columns else x_S

    def back(self, y_R: Array) -> Array:
        """[R, ...] -> [S, ...]: the transpose of `there`. Sums over the ranks of `columns`."""
        if self.columns:
            y_R = jax.lax.psum_scatter(y_R, self.columns, scatter_dimension=0, tiled=True)
        return self._exchanged(y_R)

    def _exchanged(self, x_S: Array) -> Array:
        """All-to-all: slots for rank j become slots from rank j. It is its own inverse."""
        return jax.lax.all_to_all(x_S, self.axes, 0, 0, tiled=True)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _all_rounds(x_ND, local, where, rounds, form, ranks, block):
    """The result of each assignment [A, D]; 0 for assignments that this rank does not send."""
    return _all_rounds_forward(x_ND, local, where, rounds, form, ranks, block)[0]


def _all_rounds_forward(x_ND, local, where, rounds, form, ranks, block):
    a = len(where[0])

    def one(i: Array, out_AD: Array) -> Array:
        """Adds the results of round i, [A, D]."""
        sent = _Round(where, i, len(x_ND), ranks)
        layout = sent.layout(len(local.up), block)
        y_RD = _rows_through_experts(ranks.there(sent.rows(x_ND)), local, layout, form)
        return out_AD + sent.results(ranks.back(y_RD))

    out_AD = jax.lax.fori_loop(0, rounds, one, jnp.zeros((a, x_ND.shape[1]), x_ND.dtype))
    return out_AD, (x_ND, local, where, rounds)


def _all_rounds_backward(form, ranks, block, residuals, dout_AD):
    """On a rank of `columns` dx is a partial sum too: of the assignments that it sends."""
    x_ND, local, where, rounds = residuals

    def one(i: Array, sums: tuple[Array, Experts]) -> tuple[Array, Experts]:
        """Adds the gradients of x and of the experts that round i gives."""
        sent = _Round(where, i, len(x_ND), ranks)
        layout = sent.layout(len(local.up), block)
        through = partial(_rows_through_experts, layout=layout, form=form)
        _, pull = jax.vjp(through, ranks.there(sent.rows(x_ND)), local)
        dx_RD, d_own = pull(ranks.there(sent.placed(dout_AD)))
        dx_ND = sent.to_tokens(ranks.back(dx_RD))
        return sums[0] + dx_ND, jax.tree.map(jnp.add, sums[1], d_own)

    zeros = jax.tree.map(jnp.zeros_like, (x_ND, local))
    return *jax.lax.fori_loop(0, rounds, one, zeros), None, None


_all_rounds.defvjp(_all_rounds_forward, _all_rounds_backward)


def _rows_through_experts(x_RD: Array, experts: Experts, layout: ExpertLayout, form: FFNForm) -> Array:
    """Applies to each received row [R, D] the one expert that it is for; 0 for unused slots."""
    ones_R1 = jnp.ones((len(x_RD), 1), x_RD.dtype)
    return combine(expert_mlp(dispatch(x_RD, layout), experts, layout, form), ones_R1, layout)


class _Round:
    """One round: which assignments this rank sends, in which of its S slots."""

    def __init__(self, where: Any, i: Array, tokens: int, ranks: _Ranks) -> None:
        slot_A, round_A, self._expert_A = where
        self._ranks, self._tokens = ranks, tokens
        size = jax.lax.axis_size(ranks.axes) * ranks.slots
        # The slot of each assignment, S if it is not in this round; the assignment of each slot, A if none.
        self._slot_A = jnp.where(round_A == i, slot_A, size)
        a = len(slot_A)
        self._sent_S = jnp.full(size, a).at[self._slot_A].set(jnp.arange(a), mode="drop")
        self._of_token = a // tokens

    def layout(self, experts: int, block: int) -> ExpertLayout:
        """The expert layout of the rows that arrive here."""
        expert_S = jnp.take(self._expert_A, self._sent_S, mode="fill", fill_value=-1).astype(jnp.int32)
        arrived_R = self._ranks.there(expert_S)
        return expert_layout(jnp.maximum(arrived_R, 0)[:, None], arrived_R >= 0, experts, block)

    def rows(self, x_ND: Array) -> Array:
        """[N, D] -> [S, D], the tokens' rows in the slots of this round; 0 in unused slots."""
        return jnp.take(x_ND, self._sent_S // self._of_token, axis=0, mode="fill", fill_value=0)

    def placed(self, x_AD: Array) -> Array:
        """[A, D] -> [S, D], in the slots of this round; 0 in unused slots."""
        return jnp.take(x_AD, self._sent_S, axis=0, mode="fill", fill_value=0)

    def results(self, y_SD: Array) -> Array:
        """[S, D] -> [A, D]; 0 for assignments that are not in this round."""
        return jnp.take(y_SD, self._slot_A, axis=0, mode="fill", fill_value=0)

    def to_tokens(self, dx_SD: Array) -> Array:
        """[S, D] -> [N, D], summed over a token's assignments."""
        return self.results(dx_SD).reshape(self._tokens, self._of_token, -1).sum(1)
