"""Expert parallelism: experts sharded over ranks, tokens sent to them and back. No token is dropped.

Assignments (token, expert) are exchanged by all-to-all in rounds. A round has C slots
for each pair of ranks, somewhat more than an even load needs. Assignments without a slot go with the next
round. There are as many rounds as the fullest pair needs: usually one. Only the memory of a round is bounded.

Legend: N tokens, k experts for each token, A = N * k assignments, r ranks, E experts, e = E / r experts of
this rank, C slots of a pair of ranks, S = r * C slots of a round, D token dim, F inner dim.
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
    capacity: float,
    block: int,
) -> Float[Array, "N D"]:
    """The weighted sum of each token's expert outputs, on whichever ranks; 0 for tokens that are not routed.

    local: this rank's experts, rank-major over `axes`.
    capacity: the slots of a pair of ranks in a round, divided by the pair's mean load.
    Differentiable in x, local and weight. Every rank of `axes` must call it at the same time.
    """
    (n, k), experts, ranks = chosen_Nk.shape, len(local.up), jax.lax.axis_size(axes)
    slots = min(math.ceil(capacity * n * k / ranks), n * min(k, experts))
    # Sort the assignments by destination rank; number those of each rank.
    rank_A = jnp.where(routed_N[:, None], chosen_Nk // experts, ranks).reshape(-1)
    order_A = jnp.argsort(rank_A, stable=True)
    load_r1 = jnp.bincount(rank_A, length=ranks + 1)
    number_A = jnp.arange(n * k) - (jnp.cumsum(load_r1) - load_r1)[rank_A[order_A]]
    number_A = jnp.zeros_like(number_A).at[order_A].set(number_A)
    rounds = jax.lax.pmax(-(-load_r1[:ranks].max() // slots), axes)
    slot_A = jnp.where(rank_A < ranks, rank_A * slots + number_A % slots, ranks * slots)
    where = (slot_A, jnp.where(rank_A < ranks, number_A // slots, -1), chosen_Nk.reshape(-1) % experts)
    out_AD = _all_rounds(x_ND, local, where, rounds, form, axes, slots, block)
    return jnp.einsum("nkd,nk->nd", out_AD.reshape(n, k, -1), weight_Nk.astype(out_AD.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _all_rounds(x_ND, local, where, rounds, form, axes, slots, block):
    """The result of each assignment [A, D]; 0 for assignments that are not sent."""
    return _all_rounds_forward(x_ND, local, where, rounds, form, axes, slots, block)[0]


def _all_rounds_forward(x_ND, local, where, rounds, form, axes, slots, block):
    a = len(where[0])

    def one(i: Array, out_AD: Array) -> Array:
        """Adds the results of round i, [A, D]."""
        send = _Round(where, i, len(x_ND), axes, slots)
        layout = send.layout(len(local.up), block)
        y_SD = _rows_through_experts(send.there(x_ND), local, layout, form)
        return out_AD + send.results(send.back(y_SD))

    out_AD = jax.lax.fori_loop(0, rounds, one, jnp.zeros((a, x_ND.shape[1]), x_ND.dtype))
    return out_AD, (x_ND, local, where, rounds)


def _all_rounds_backward(form, axes, slots, block, residuals, dout_AD):
    x_ND, local, where, rounds = residuals

    def one(i: Array, sums: tuple[Array, Experts]) -> tuple[Array, Experts]:
        """Adds the gradients of x and of the experts that round i gives."""
        send = _Round(where, i, len(x_ND), axes, slots)
        layout = send.layout(len(local.up), block)
        through = partial(_rows_through_experts, layout=layout, form=form)
        _, pull = jax.vjp(through, send.there(x_ND), local)
        dx_SD, d_own = pull(send.exchanged(send.placed(dout_AD)))
        dx_ND = send.to_tokens(send.back(dx_SD))
        return sums[0] + dx_ND, jax.tree.map(jnp.add, sums[1], d_own)

    zeros = jax.tree.map(jnp.zeros_like, (x_ND, local))
    return *jax.lax.fori_loop(0, rounds, one, zeros), None, None


_all_rounds.defvjp(_all_rounds_forward, _all_rounds_backward)


def _rows_through_experts(x_SD: Array, experts: Experts, layout: ExpertLayout, form: FFNForm) -> Array:
    """Applies to each received row [S, D] the one expert that it is for; 0 for unused slots."""
    ones_S1 = jnp.ones((len(x_SD), 1), x_SD.dtype)
    return combine(expert_mlp(dispatch(x_SD, layout), experts, layout, form), ones_S1, layout)


class _Round:
    """One round: which assignments are exchanged, in which slots. S = r * C slots are sent and received."""

    def __init__(self, where: Any, i: Array, tokens: int, axes: tuple[str, ...], slots: int) -> None:
        slot_A, round_A, self._expert_A = where
        self._axes, self._size, self._tokens = axes, jax.lax.axis_size(axes) * slots, tokens
        # The slot of each assignment, S if it is not in this round; the assignment of each slot, A if none.
        self._slot_A = jnp.where(round_A == i, slot_A, self._size)
        a = len(slot_A)
        self._sent_S = jnp.full(self._size, a).at[self._slot_A].set(jnp.arange(a), mode="drop")
        self._of_token = a // tokens

    def exchanged(self, x_S: Array) -> Array:
        """All-to-all: slots for rank j become slots from rank j. It is its own inverse."""
        return jax.lax.all_to_all(x_S, self._axes, 0, 0, tiled=True)

    back = exchanged

    def there(self, x_ND: Array) -> Array:
        """Sends the tokens' rows to their experts' ranks; returns the rows that arrive here."""
        sent = jnp.take(x_ND, self._sent_S // self._of_token, axis=0, mode="fill", fill_value=0)
        return self.exchanged(sent)

    def layout(self, experts: int, block: int) -> ExpertLayout:
        """The expert layout of the rows that arrive here."""
        expert_S = jnp.take(self._expert_A, self._sent_S, mode="fill", fill_value=-1).astype(jnp.int32)
        arrived_S = self.exchanged(expert_S)
        return expert_layout(jnp.maximum(arrived_S, 0)[:, None], arrived_S >= 0, experts, block)

    def placed(self, x_AD: Array) -> Array:
        """[A, D] -> [S, D], in the slots of this round; 0 in unused slots."""
        return jnp.take(x_AD, self._sent_S, axis=0, mode="fill", fill_value=0)

    def results(self, y_SD: Array) -> Array:
        """[S, D] -> [A, D]; 0 for assignments of other rounds."""
        return jnp.take(y_SD, self._slot_A, axis=0, mode="fill", fill_value=0)

    def to_tokens(self, dx_SD: Array) -> Array:
        """[S, D] -> [N, D], summed over a token's assignments."""
        return self.results(dx_SD).reshape(self._tokens, self._of_token, -1).sum(1)
