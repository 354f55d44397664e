"""Dense attention inside documents, for rows so short that all pairs of their tokens cost little.

It is a few large matrix products and no loop. Blockwise attention (blockwise.py) does less arithmetic in long
rows, and needs memory only for a block of pairs at a time.

Legend: R rows, E tokens of a row, S tokens of its keys, H heads, d content dim, X position dim, V value
dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32

from jaxthd.ops.numerics import accumulation_dtype


@partial(jax.custom_vjp, nondiff_argnums=(7,))
def dense_attention(
    q_REHd: Float[Array, "R E H d"],
    k_RSHd: Float[Array, "R S H d"],
    position_REHX: Float[Array, "R E H X"],
    waves_RSX: Float[Array, "R S X"],
    v_RSHV: Float[Array, "R S H V"],
    ids_RE: Int32[Array, "R E"],
    key_ids_RS: Int32[Array, "R S"],
    scale: float,
) -> Float[Array, "R E H V"]:
    """softmax(scale * (q . k + position . waves)) v over the keys with the query's id, in v's dtype.

    waves: what all heads share of the keys. ids, key_ids: documents by number; tokens of padding share one
    number, and see each other. A query needs a key. Differentiable in all but waves and ids. The backward
    pass keeps the logarithm of each softmax's sum, and computes the weights again, as in FlashAttention (Dao
    et al., 2022): keeping them would cost more than a matrix product.
    """
    return _forward(q_REHd, k_RSHd, position_REHX, waves_RSX, v_RSHV, ids_RE, key_ids_RS, scale)[0]


def _heads_first(x: Array) -> Array:
    return x.swapaxes(1, 2)


def _joined(q: Array, k: Array, position: Array, waves: Array) -> tuple[Array, Array]:
    """Queries [R, H, E, d + X] and keys [R, H, S, d + X] with both parts of the score.

    The waves are copied for each head. One product of all heads with the same waves would need its results,
    all pairs, in another order.
    """
    shape = len(waves), k.shape[2], *waves.shape[1:]
    waves_RHSX = jnp.broadcast_to(waves[:, None], shape)
    queries = jnp.concatenate([_heads_first(q), _heads_first(position)], axis=-1)
    return queries, jnp.concatenate([_heads_first(k), waves_RHSX], axis=-1)


def _scores(q_RHEx: Array, k_RHSx: Array, ids_RE: Array, key_ids_RS: Array, scale: float) -> Array:
    """[R, H, E, S] in the accumulation dtype; minus infinity between documents."""
    acc = accumulation_dtype(q_RHEx)
    scores_RHES = jnp.einsum("rhex,rhjx->rhej", q_RHEx, k_RHSx, preferred_element_type=acc)
    same_RES = ids_RE[:, :, None] == key_ids_RS[:, None]
    return jnp.where(same_RES[:, None], scale * scores_RHES, -jnp.inf)


def _forward(q, k, position, waves, v, ids_RE, key_ids_RS, scale):
    scores_RHES = _scores(*_joined(q, k, position, waves), ids_RE, key_ids_RS, scale)
    most_RHE1 = scores_RHES.max(-1, keepdims=True)
    weights_RHES = jnp.exp(scores_RHES - most_RHE1)
    sum_RHE1 = weights_RHES.sum(-1, keepdims=True)
    acc = accumulation_dtype(v)
    out_RHEV = jnp.einsum("rhej,rjhv->rhev", weights_RHES.astype(v.dtype), v, preferred_element_type=acc)
    out_REHV = _heads_first(out_RHEV / sum_RHE1).astype(v.dtype)
    log_sum_RHE1 = most_RHE1 + jnp.log(sum_RHE1)
    return out_REHV, (q, k, position, waves, v, ids_RE, key_ids_RS, out_REHV, log_sum_RHE1)


def _backward(scale, residuals, dout_REHV):
    q, k, position, waves, v, ids_RE, key_ids_RS, out_REHV, log_sum_RHE1 = residuals
    acc, dim = accumulation_dtype(q), q.shape[-1]
    dot = partial(jnp.einsum, preferred_element_type=acc)
    q_RHEx, k_RHSx = _joined(q, k, position, waves)
    weights_RHES = jnp.exp(_scores(q_RHEx, k_RHSx, ids_RE, key_ids_RS, scale) - log_sum_RHE1)
    product_REH = (dout_REHV.astype(acc) * out_REHV).sum(-1)
    dout_RHEV = _heads_first(dout_REHV)
    dweights_RHES = dot("rhev,rjhv->rhej", dout_RHEV, v)
    dscores = weights_RHES * (dweights_RHES - _heads_first(product_REH)[..., None]) * scale
    dscores_RHES = dscores.astype(q.dtype)
    dq_RHEx = dot("rhej,rhjx->rhex", dscores_RHES, k_RHSx)
    gradients = (
        dq_RHEx[..., :dim],
        dot("rhej,rhed->rhjd", dscores_RHES, q_RHEx[..., :dim]),
        dq_RHEx[..., dim:],
        dot("rhej,rhev->rhjv", weights_RHES.astype(v.dtype), dout_RHEV),
    )
    dq, dk, dposition, dv = (_heads_first(g).astype(q.dtype) for g in gradients)
    return dq, dk, dposition, None, dv, None, None


dense_attention.defvjp(_forward, _backward)
