"""The optimizer: AdamW, a learning rate for each part of the model; and clipping by global norm before it."""

from typing import Any

import jax
import optax
from flax import nnx

from jaxthd.config import AdaptConfig, TrainConfig
from jaxthd.models.adapt import split
from jaxthd.parallel.params import weight_decay_mask
from jaxthd.steps.blueprint import Blueprint, Tree


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Steps done before -> learning rate: linear warm-up, the peak, a cosine to the minimum at the last step.

    The first step has one warm-up step's learning rate, not 0, so that no step is wasted.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.steps, config.warmup_steps + 1),
        end_value=config.min_learning_rate,
    )
    return lambda steps_done: schedule(steps_done + 1)


def make_optimizer(blueprint: Blueprint) -> optax.GradientTransformation:
    """AdamW for the trained parameters: each part of the model at its learning rate, weight decay on the
    weight matrices. It takes gradients that are clipped already (see `clipped`).
    """
    train = blueprint.config.train
    decayed = weight_decay_mask(nnx.state(blueprint.model, nnx.Param))
    transformations = [
        optax.identity(),  # where clipping was, so that the state has the same tree in older checkpoints
        optax.adamw(
            learning_rate_schedule(train),
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
