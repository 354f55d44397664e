"""The reference policy of a run: which weights it has of its own.

A post-training objective compares the policy with a reference. What the policy does not train, both share. Of
what it trains the state holds a copy (TrainState.reference), sharded as the policy is; see reference_of.
LoRA's matrices need none: the reference is the model without them, as long as it is never refreshed. And none
is needed where the reference has scored all documents before (jaxthd/training/cached_reference.py).
"""

from typing import Any

import jax
from jax import Array

from jaxthd.config import Config
from jaxthd.models.adapt import is_lora
from jaxthd.objectives.objective import REFERENCE
from jaxthd.steps.blueprint import Blueprint, Tree
from jaxthd.steps.forward import objective_of


def has_reference(config: Config) -> bool:
    """Whether the run's objective compares with a reference policy."""
    return REFERENCE in objective_of(config).scored


def is_cached(config: Config) -> bool:
    """Whether the reference's log-probabilities are kept in place of the reference."""
    return has_reference(config) and config.posttraining.reference == "cached"


def is_base(config: Config) -> bool:
    """Whether the reference is the model without LoRA."""
    post = config.posttraining
    return bool(config.adapt.lora_rank) and post.reference == "auto" and not post.reference_every


def copied(blueprint: Blueprint) -> Tree:
    """A bool for every parameter, in the place of its array: whether the reference has a copy of it."""
    config = blueprint.config
    wanted, without_lora = has_reference(config) and not is_cached(config), is_base(config)

    def is_copied(path: tuple[Any, ...], is_trained: bool) -> bool:
        """Whether the reference has a copy of the parameter of its own."""
        return wanted and is_trained and not (without_lora and is_lora(tuple(key.key for key in path)))

    return jax.tree_util.tree_map_with_path(is_copied, blueprint.trained)


def reference_of(blueprint: Blueprint, params: Tree) -> Tree:
    """TrainState.reference for a reference that is the policy with these parameters: copies of what trains,
    None for what it shares; None where nothing is copied.

    Each is copied in the dtype in which the model uses it (Blueprint.used_dtypes).
    """
    is_copied = copied(blueprint)
    if not any(jax.tree.leaves(is_copied)):
        return None

    def copy(mine: bool, dtype: Any, x: Array) -> Array | None:
        """The parameter in the reference's dtype; None where it has no copy."""
        return x.astype(dtype) if mine else None

    return jax.tree.map(copy, is_copied, blueprint.used_dtypes, params)
