"""The distance between two trees of tensors, as every check and test of gradients measures it."""

import math
from typing import Any

import jax
import numpy as np


def relative_errors(got: Any, want: Any) -> dict[str, float]:
    """Each tensor's |g - g'| / max(|g'|, 1e-3 * t), by name; g' is the expected value.

    t is the typical norm, root_mean_square_norm(want). Some tensors are zero in truth, such as gradients of
    biases before BatchNorm; the floor keeps their errors from being divided by mere rounding. Raises
    AssertionError for a value that is not finite.
    """
    got_leaves, want_leaves = ([np.asarray(x, np.float64) for x in jax.tree.leaves(t)] for t in (got, want))
    floor = 1e-3 * root_mean_square_norm(want)
    errors = {}
    names = (jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(got))
    for name, g, w in zip(names, got_leaves, want_leaves, strict=True):
        assert np.isfinite(g).all(), f"{name} is not finite"
        errors[name] = float(np.linalg.norm(g - w)) / max(float(np.linalg.norm(w)), floor, 1e-300)
    return errors


def worst_error(got: Any, want: Any) -> tuple[float, str]:
    """(the largest relative error of a tensor, its name); (0, "") for trees without tensors.

    want: in float64. A tensor that is zero in truth is, in float32, the rounding of terms that cancel: its
    error is divided by the typical norm, not by 1e-3 of it.
    """
    zero = 1e-9 * root_mean_square_norm(want)
    errors = [(0.0, "")]
    for (name, error), truth in zip(relative_errors(got, want).items(), jax.tree.leaves(want), strict=True):
        errors.append((error * (1e-3 if np.linalg.norm(truth) <= zero else 1.0), name))
    return max(errors)


def root_mean_square_norm(tree: Any) -> float:
    """The root mean square of the tensors' norms; 0 for an empty tree."""
    norms = [np.linalg.norm(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)]
    return math.sqrt(np.mean(np.square(norms))) if norms else 0.0
