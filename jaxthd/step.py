"""The training step: one shard_map over all mesh axes around loss and gradient, then the update.

Inside, every rank differentiates its local share of the objective: its sum over the count of the whole batch,
which is known before. The shares add up to the loss, so gradients are summed over the mesh once, after. In
that convention (check_vma=False) every collective inside transposes to the right thing: psum to psum,
all_gather to psum_scatter, ppermute to its inverse.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthd.config import Config, TrainConfig
from jaxthd.mesh import AXES, batch_specs
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.objectives import sft
from jaxthd.packing.batch import Batch
from jaxthd.parallel.params import Buffer, Init, weight_decay_mask

Tree = Any
"""A nested dict of arrays, by the names of the module tree."""


class TrainState(NamedTuple):
    """All that a step reads and writes; a checkpoint holds it whole.

    step: optimizer steps done. params: trained. buffers: state that no gradient trains.
    """

    step: Array
    params: Tree
    buffers: Tree
    opt_state: Any


class StepMetrics(NamedTuple):
    """Mean negative log-likelihood over the supervised tokens; gradient norm before clipping."""

    loss: Array
    grad_norm: Array


def abstract_model(config: Config) -> SpeechLM:
    """The model with shapes and dtypes for arrays: no memory."""
    return nnx.eval_shape(lambda: _make_model(config, jax.random.key(0)))


def model_graph(config: Config) -> nnx.GraphDef:
    """The model's structure: nnx.merge(graph, params, buffers) is the model."""
    return nnx.split(abstract_model(config), nnx.Param, Buffer)[0]


def _make_model(config: Config, key: Array) -> SpeechLM:
    dtype = jnp.float64 if config.model.dtype == "float64" else jnp.float32
    return SpeechLM(config.model, Init(key, dtype))


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Steps done before -> learning rate: linear warm-up, the peak, a cosine to the minimum at the last step.

    The first step has one warm-up step's worth, not 0: none is wasted.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.steps, config.warmup_steps + 1),
        end_value=config.min_learning_rate,
    )
    return lambda steps_done: schedule(steps_done + 1)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW; weight decay on the weight matrices."""
    train = config.train
    return optax.chain(
        optax.clip_by_global_norm(train.clip_norm),
        optax.adamw(
            learning_rate_schedule(train),
            b1=train.beta1,
            b2=train.beta2,
            weight_decay=train.weight_decay,
            mask=weight_decay_mask(nnx.state(abstract_model(config), nnx.Param)),
        ),
    )


def _new_state(config: Config) -> TrainState:
    model = _make_model(config, jax.random.key(config.train.seed))
    params, buffers = (nnx.to_pure_dict(nnx.state(model, kind)) for kind in (nnx.Param, Buffer))
    return TrainState(jnp.zeros((), jnp.int32), params, buffers, make_optimizer(config).init(params))


def abstract_state(config: Config) -> TrainState:
    """A run's state with shapes and dtypes for arrays: no memory, nothing compiled."""
    return jax.eval_shape(lambda: _new_state(config))


def init_state(config: Config, mesh: Mesh) -> TrainState:
    """A new run's state, on its final sharding (a step that moved it would compile twice)."""
    # It runs once: on a CPU compiling is most of its time, and halves without the compiler's optimizations.
    once = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda: _new_state(config), out_shardings=everywhere, compiler_options=once)()


def _on_mesh(rank: Callable[[Tree, Tree, Batch], Any], mesh: Mesh) -> Callable[[Tree, Tree, Batch], Any]:
    """`rank` on every device, all axes manual: its share of the batch in, results equal everywhere out."""
    everywhere = PartitionSpec()
    return jax.shard_map(
        rank,
        mesh=mesh,
        in_specs=(everywhere, everywhere, batch_specs()),
        out_specs=everywhere,
        check_vma=False,
    )


def loss_and_gradient(
    graphdef: nnx.GraphDef, mesh: Mesh
) -> Callable[[Tree, Tree, Batch], tuple[Array, Tree, Tree]]:
    """(params, buffers, batch) -> (loss, gradients, new buffers), all equal on every device."""

    def rank(params: Tree, buffers: Tree, batch: Batch) -> tuple[Array, Tree, Tree]:
        count = jax.lax.psum(sft.count(batch.weights.reshape(-1), batch.segment_ids.reshape(-1)), AXES)

        def local_share(params: Tree) -> tuple[Array, Tree]:
            model = nnx.merge(graphdef, params, buffers)
            logp_RT, new_buffers = model.log_probs(batch, axes=AXES, train=True)
            logp_N, weights_N, ids_N = (x.reshape(-1) for x in (logp_RT, batch.weights, batch.segment_ids))
            return sft.loss_sum(logp_N, weights_N, ids_N) / jnp.maximum(count, 1), new_buffers

        (loss, new_buffers), gradients = jax.value_and_grad(local_share, has_aux=True)(params)
        loss, gradients = jax.lax.psum((loss, gradients), AXES)
        return loss, gradients, {**buffers, "encoder": new_buffers}

    return _on_mesh(rank, mesh)


def make_train_step(
    config: Config, graphdef: nnx.GraphDef, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """One optimizer step, jitted; the old state's memory is reused."""
    gradient = loss_and_gradient(graphdef, mesh)
    optimizer = make_optimizer(config)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        loss, gradients, buffers = gradient(state.params, state.buffers, batch)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = StepMetrics(loss, optax.tree.norm(gradients))
        return TrainState(state.step + 1, params, buffers, opt_state), metrics

    return jax.jit(train_step, donate_argnums=0, out_shardings=NamedSharding(mesh, PartitionSpec()))


def make_validation_step(
    graphdef: nnx.GraphDef, mesh: Mesh
) -> Callable[[Tree, Tree, Batch], tuple[Array, Array]]:
    """(params, buffers, batch) -> (summed negative log-likelihood, supervised tokens); stored statistics."""

    def rank(params: Tree, buffers: Tree, batch: Batch) -> tuple[Array, Array]:
        logp_RT, _ = nnx.merge(graphdef, params, buffers).log_probs(batch, axes=AXES, train=False)
        weights_N, ids_N = batch.weights.reshape(-1), batch.segment_ids.reshape(-1)
        sums = sft.loss_sum(logp_RT.reshape(-1), weights_N, ids_N), sft.count(weights_N, ids_N)
        return jax.lax.psum(sums, AXES)

    return jax.jit(_on_mesh(rank, mesh))
