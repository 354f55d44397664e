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
    number, and see each other. A query needs a key. Differentiable in all but waves and ids. The weights are
    computed again in the backward pass, as in FlashAttention (Dao et al., 2022): keeping them would cost more
    than a matrix product.
    """
    return _forward(q_REHd, k_RSHd, position_REHX, waves_RSX, v_RSHV, ids_RE, key_ids_RS, scale)[0]


def _weights(
    q: Array, k: Array, position: Array, waves: Array, ids_RE: Array, key_ids_RS: Array, scale: float
) -> Array:
    """Softmax over the keys, [R, H, E, S], in the accumulation dtype."""
    dot = partial(jnp.einsum, preferred_element_type=accumulation_dtype(q))
    scores_RHES = dot("rehd,rjhd->rhej", q, k) + dot("rehx,rjx->rhej", position, waves)
    same_RES = ids_RE[:, :, None] == key_ids_RS[:, None]
    return jax.nn.softmax(jnp.where(same_RES[:, None], scale * scores_RHES, -jnp.inf))


def _forward(q, k, position, waves, v, ids_RE, key_ids_RS, scale):
    weights_RHES = _weights(q, k, position, waves, ids_RE, key_ids_RS, scale).astype(v.dtype)
    acc = accumulation_dtype(v)
    out_REHV = jnp.einsum("rhej,rjhv->rehv", weights_RHES, v, preferred_element_type=acc).astype(v.dtype)
    return out_REHV, (q, k, position, waves, v, ids_RE, key_ids_RS, out_REHV)


def _backward(scale, residuals, dout_REHV):
    q, k, position, waves, v, ids_RE, key_ids_RS, out_REHV = residuals
    acc = accumulation_dtype(q)
    dot = partial(jnp.einsum, preferred_element_type=acc)
    weights_RHES = _weights(q, k, position, waves, ids_RE, key_ids_RS, scale)
    product_REH = (dout_REHV.astype(acc) * out_REHV).sum(-1)
    dweights_RHES = dot("rehv,rjhv->rhej", dout_REHV, v)
    dscores = weights_RHES * (dweights_RHES - product_REH.swapaxes(1, 2)[..., None]) * scale
    dscores_RHES = dscores.astype(q.dtype)
    gradients = (
        dot("rhej,rjhd->rehd", dscores_RHES, k),
        dot("rhej,rehd->rjhd", dscores_RHES, q),
        dot("rhej,rjx->rehx", dscores_RHES, waves),
    )
    dv_REHV = dot("rhej,rehv->rjhv", weights_RHES.astype(v.dtype), dout_REHV)
    dq, dk, dposition, dv = (g.astype(q.dtype) for g in (*gradients, dv_REHV))
    return dq, dk, dposition, None, dv, None, None


dense_attention.defvjp(_forward, _backward)
