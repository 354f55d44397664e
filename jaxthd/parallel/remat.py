"""Recomputation in the backward pass: everything of a step, what is cheap, or gathered weights alone."""

from collections.abc import Callable
from typing import Any, Literal

import jax
from flax import nnx

from jaxthd.ops.numerics import KEPT

Remat = Literal["auto", "none", "selective", "layers", "full"]
"""compute.remat: "none" is recomputed; all but results of matrix products ("selective"); or everything of a
unit of layers, or of each layer ("layers"). "auto" is as "full" where nothing has decided on it."""

_products = jax.checkpoint_policies.save_from_both_policies(
    jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    jax.checkpoint_policies.save_only_these_names(KEPT),
)


def rematerialized(
    step: Callable[..., Any], remat: Remat, state: Any, *, keeps_views: bool = True
) -> Callable[..., Any]:
    """`step`, rematerialized as scan_stack says. state: what the scan goes over, variables and others.

    keeps_views: with "none": whether results that only move or cast values are kept too. They take memory:
    of a weight as of an activation.
    """
    if remat == "selective":
        return jax.checkpoint(step, policy=_products)
    if remat != "none":
        return jax.checkpoint(step)
    if not keeps_views:
        return jax.checkpoint(step, policy=_all_but_views)
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    gathered = [x for x in leaves if isinstance(x, nnx.Variable) and x.get_metadata("fsdp")[1]]
    if not gathered:
        return step
    return jax.checkpoint(step, policy=all_but_gathered)


_GATHERS = ("all_gather", "convert_element_type")


def all_but_gathered(primitive: Any, *of: Any, **params: Any) -> bool:
    """Whether a result is kept for the backward pass. A cast to a narrower dtype is: what is cast would take
    more memory. That of a whole weight is not: it is a call of `narrowed` (ops/product.py).
    """
    if primitive.name == "convert_element_type" and params["new_dtype"].itemsize < of[0].dtype.itemsize:
        return True
    return primitive.name not in _GATHERS and not _only_casts(params)


def _only_casts(params: dict[str, Any]) -> bool:
    """Whether the operation with these parameters is a call of `narrowed` (ops/product.py)."""
    called = params.get("call_jaxpr")
    return called is not None and all(x.primitive.name == "convert_element_type" for x in called.eqns)


_VIEWS = frozenset(
    (
        "all_gather",
        "broadcast_in_dim",
        "concatenate",
        "convert_element_type",
        "copy",
        "dynamic_slice",
        "expand_dims",
        "iota",
        "pad",
        "reshape",
        "slice",
        "split",
        "squeeze",
        "transpose",
    )
)


def _all_but_views(primitive: Any, *_: Any, **params: Any) -> bool:
    return primitive.name not in _VIEWS and not _only_casts(params)
