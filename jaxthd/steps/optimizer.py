"""The optimizer, a learning rate for each part of the model; and clipping by global norm before it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxthd.config import AdaptConfig, Config, TrainConfig
from jaxthd.errors import UserError
from jaxthd.models.adapt import split
from jaxthd.parallel.params import metadata
from jaxthd.steps.blueprint import Blueprint, Tree
from jaxthd.steps.optimizer_kinds import Trained, optimizer_kind


def learning_rate_schedule(config: Config) -> optax.Schedule:
    """Updates done before -> learning rate: linear warm-up, then train.schedule.

    The first step has one warm-up step's learning rate, not 0, so that no step is wasted. The updates of one
    step have one rate. Raises UserError for an unknown schedule.
    """
    if config.train.schedule not in _SCHEDULES:
        raise UserError(
            f"train.schedule is {config.train.schedule!r}; expected one of {', '.join(_SCHEDULES)}: "
            "correct train.schedule"
        )
    updates, schedule = config.updates_of_a_step, _SCHEDULES[config.train.schedule](config.train)
    return lambda done: schedule((done if updates == 1 else done // updates) + 1)


def _cosine(train: TrainConfig) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if train.warmup_steps else train.learning_rate,
        peak_value=train.learning_rate,
        warmup_steps=train.warmup_steps,
        decay_steps=max(train.steps, train.warmup_steps + 1),
        end_value=train.min_learning_rate,
    )


def _warm_up_stable_decay(train: TrainConfig, decay_steps: int) -> optax.Schedule:
    """Ends with a line of decay_steps from the peak to the minimum, or of those that the warm-up leaves."""
    peak, warmup = train.learning_rate, train.warmup_steps
    decay = min(decay_steps, max(train.steps - warmup, 1))
    rising = optax.linear_schedule(0.0, peak, warmup) if warmup else optax.constant_schedule(peak)
    falling = optax.linear_schedule(peak, train.min_learning_rate, decay)
    flat = optax.constant_schedule(peak)
    return optax.join_schedules(
        [rising, flat, falling if decay else flat], [warmup, max(train.steps - decay, warmup)]
    )


_SCHEDULES: dict[str, Callable[[TrainConfig], optax.Schedule]] = {
    "cosine": _cosine,
    "linear": lambda train: _warm_up_stable_decay(train, train.steps),
    "constant": lambda train: _warm_up_stable_decay(train, 0),
    "warmup_stable_decay": lambda train: _warm_up_stable_decay(train, train.decay_steps),
}


def make_optimizer(blueprint: Blueprint, mesh: Mesh | None = None) -> optax.GradientTransformation:
    """The optimizer of the trained parameters: each part of the model at its learning rate, weight decay on
    the weight matrices. It takes gradients that are clipped already (see `clipped`).

    mesh: the one that the parameters lie on; None where only its state's form is asked for (`init`).
    Raises UserError for settings that the optimizer does not have.
    """
    config = blueprint.config
    params = nnx.state(blueprint.model, nnx.Param)

    def of_trained(tree: Tree) -> Tree:
        """The leaves of parameters that train."""
        return split(tree, blueprint.trained)[0]

    trained = Trained(
        config.train,
        learning_rate_schedule(config),
        of_trained(metadata(params, "decayed")),
        of_trained(metadata(params, "projects")),
        of_trained(metadata(params, "stacked")),
        blueprint.specs[0],
        mesh,
    )
    kind = optimizer_kind(config.train.optimizer, config.train.optimizer_options)
    return optax.chain(
        optax.identity(),  # where clipping was, so that the state has the same tree in older checkpoints
        kind.transformation(trained),
        *_scaled_by_part(config.adapt),
    )


def clipped(gradients: Tree, most: float, norm: Array | None = None) -> Tree:
    """The gradients, scaled down to the global norm `most` if theirs is larger. norm: theirs, if it is
    known."""
    if norm is None:
        return optax.clip_by_global_norm(most).update(gradients, optax.EmptyState())[0]
    return jax.tree.map(lambda g: jnp.where(norm < most, g, g / norm.astype(g.dtype) * most), gradients)


def _scaled_by_part(adapt: AdaptConfig) -> list[optax.GradientTransformation]:
    """Comes after the optimizer, whose update is proportional to the learning rate."""
    factors = adapt.factors

    def scaled(updates: Tree, _: Tree) -> Tree:
        """Updates times the factor of their part."""

        def times(factor: float, of_module: Tree) -> Tree:
            """The updates of a module times a factor."""
            return jax.tree.map(lambda update: factor * update, of_module)

        return {name: times(factors.get(name, factors["llm"]), u) for name, u in updates.items()}

    is_one = set(factors.values()) == {1.0}
    transformation: Any = optax.stateless(scaled)
    return [] if is_one else [transformation]
