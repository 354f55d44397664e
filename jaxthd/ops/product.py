"""Products of activations with a weight, whose gradient comes in the weight's own dtype.

The compute dtype is narrower than that of the parameters, as a rule. Autodiff rounds a weight's gradient to
the compute dtype, in which the product reads the weight, and then writes it once more in the weight's own.

Legend: N tokens, D features in, F features out.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
from jaxtyping import Float


def product(x: Float[Array, "... D"], w_DF: Float[Array, "D F"]) -> Float[Array, "... F"]:
    """x @ w in x's dtype."""
    precision: Any = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    return _product(_Product(w_DF.dtype, precision), x, w_DF)


def narrowed(w: Array, dtype: Any) -> Array:
    """w.astype(dtype) of a weight. Policies of recomputation (parallel/remat.py) do not keep it."""
    return w if w.dtype == dtype else _narrowed(dtype, w.dtype, w)


class _Product(NamedTuple):
    """weight_dtype: the weight's dtype. precision: of the products, where the call stands
    (jax.lax.Precision)."""

    weight_dtype: Any
    precision: Any


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _Product, x: Array, w_DF: Array) -> Array:
    found: Array = jax.numpy.matmul(x, narrowed(w_DF, x.dtype), precision=how.precision)
    return found


def _forward(how: _Product, x: Array, w_DF: Array) -> tuple[Array, tuple[Array, Array]]:
    w_DF = narrowed(w_DF, x.dtype)
    return jax.numpy.matmul(x, w_DF, precision=how.precision), (x, w_DF)


def _backward(how: _Product, given: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    x, w_DF = given
    tokens = tuple(range(x.ndim - 1))
    of_w = {"precision": how.precision, "preferred_element_type": how.weight_dtype}
    dx = jax.lax.dot_general(dy, w_DF, (((dy.ndim - 1,), (1,)), ((), ())), precision=how.precision)
    return dx, jax.lax.dot_general(x, dy, ((tokens, tokens), ((), ())), **of_w)


_product.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _narrowed(dtype: Any, weight_dtype: Any, w: Array) -> Array:
    return w.astype(dtype)


_narrowed.defvjp(
    lambda dtype, weight_dtype, w: (_narrowed(dtype, weight_dtype, w), None),
    lambda dtype, weight_dtype, _, dw: (dw.astype(weight_dtype),),
)
