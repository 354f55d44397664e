"""The optimizer: AdamW, a learning rate for each part of the model; and clipping by global norm before it."""

from typing import Any

import jax
import optax
from flax import nnx

from jaxthd.config import AdaptConfig, Config
from jaxthd.models.adapt import split
from jaxthd.parallel.params import weight_decay_mask
from jaxthd.steps.blueprint import Blueprint, Tree


def learning_rate_schedule(config: Config) -> optax.Schedule:
    """Updates done before -> learning rate: linear warm-up, the peak, a cosine to the minimum at the end.

    The first step has one warm-up step's learning rate, not 0, so that no step is wasted. The updates of one
    step have one rate.
    """
    train, updates = config.train, config.updates_of_a_step
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if train.warmup_steps else train.learning_rate,
        peak_value=train.learning_rate,
        warmup_steps=train.warmup_steps,
        decay_steps=max(train.steps, train.warmup_steps + 1),
        end_value=train.min_learning_rate,
    )
    return lambda done: schedule((done if updates == 1 else done // updates) + 1)


def make_optimizer(blueprint: Blueprint) -> optax.GradientTransformation:
    """AdamW for the trained parameters: each part of the model at its learning rate, weight decay on the
    weight matrices. It takes gradients that are clipped already (see `clipped`).
    """
    train = blueprint.config.train
    decayed = weight_decay_mask(nnx.state(blueprint.model, nnx.Param))
    transformations = [
        optax.identity(),  # where clipping was, so that the state has the same tree in older checkpoints
        optax.adamw(
            learning_rate_schedule(blueprint.config),
            b1=train.beta1,
            b2=train.beta2,
            weight_decay=train.weight_decay,
            mask=split(decayed, blueprint.trained)[0],
        ),
    ]
    return optax.chain(*transformations, *_scaled_by_part(blueprint.config.adapt))


def clipped(gradients: Tree, most: float) -> Tree:
    """The gradients, scaled down to the global norm `most` if theirs is larger."""
    return optax.clip_by_global_norm(most).update(gradients, optax.EmptyState())[0]


def _scaled_by_part(adapt: AdaptConfig) -> list[optax.GradientTransformation]:
    """Comes after AdamW, whose update is proportional to the learning rate."""
    factors = {"encoder": adapt.encoder_lr_factor, "adapter": adapt.adapter_lr_factor}

    def scaled(updates: Tree, _: Tree) -> Tree:
        def times(factor: float, of_module: Tree) -> Tree:
            return jax.tree.map(lambda update: factor * update, of_module)

        return {name: times(factors.get(name, adapt.llm_lr_factor), u) for name, u in updates.items()}

    is_one = {*factors.values(), adapt.llm_lr_factor} == {1.0}
    transformation: Any = optax.stateless(scaled)
    return [] if is_one else [transformation]
