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
from jaxthd.mesh import AXES, CONTEXT, DATA, batch_specs
from jaxthd.models.decoding import answer
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.objectives import sft
from jaxthd.packing.batch import Batch
from jaxthd.packing.prompts import PromptEnds
from jaxthd.parallel.params import Buffer, Init, weight_decay_mask

Tree = Any
"""A nested dict of arrays, by the names of the module tree."""


class TrainState(NamedTuple):
    """All that a step reads and writes; a checkpoint holds it whole.

    step: steps done, skipped ones included. skipped, skipped_in_a_row: steps whose update was left out since
    loss or gradient was not finite: of all, and of the last ones without a break.
    params: trained. buffers: state that no gradient trains.
    """

    step: Array
    skipped: Array
    skipped_in_a_row: Array
    params: Tree
    buffers: Tree
    opt_state: Any


class StepMetrics(NamedTuple):
    """Mean negative log-likelihood over the supervised tokens; gradient norm before clipping; the learning
    rate of this step; the state's counts of skipped steps, this one included.
    """

    loss: Array
    grad_norm: Array
    learning_rate: Array
    skipped: Array
    skipped_in_a_row: Array


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
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, zero, zero, params, buffers, make_optimizer(config).init(params))


def abstract_state(config: Config) -> TrainState:
    """A run's state with shapes and dtypes for arrays: no memory, nothing compiled."""
    return jax.eval_shape(lambda: _new_state(config))


def init_state(config: Config, mesh: Mesh) -> TrainState:
    """A new run's state, on its final sharding (a step that moved it would compile twice)."""
    # It runs once: on a CPU compiling is most of its time, and halves without the compiler's optimizations.
    once = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(lambda: _new_state(config), out_shardings=everywhere, compiler_options=once)()


def _on_mesh(rank: Callable[..., Any], mesh: Mesh, in_specs: tuple[Any, ...], out_specs: Any) -> Any:
    """`rank` on every device, all axes manual."""
    return jax.shard_map(rank, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def _supervised(batch: Batch) -> Array:
    """This rank's part of the objective's count."""
    return sft.count(batch.weights.reshape(-1), batch.segment_ids.reshape(-1))


def loss_and_gradient(
    graphdef: nnx.GraphDef, mesh: Mesh, microbatches: int = 1
) -> Callable[[Tree, Tree, Batch], tuple[Array, Tree, Tree]]:
    """(params, buffers, batch) -> (loss, gradients, new buffers), all equal on every device.

    microbatches: equal parts that every rank cuts its rows into and works through one after the other,
        adding up gradients. Loss and gradients do not depend on it, up to rounding, but for the encoder's
        batch statistics, which are of a microbatch.
    """

    def rank(params: Tree, buffers: Tree, batch: Batch) -> tuple[Array, Tree, Tree]:
        count = jnp.maximum(jax.lax.psum(_supervised(batch), AXES), 1)

        def local_share(params: Tree, buffers: Tree, batch: Batch) -> tuple[Array, Tree]:
            model = nnx.merge(graphdef, params, buffers)
            logp_RT, new_buffers = model.log_probs(batch, axes=AXES, train=True)
            logp_N, weights_N, ids_N = (x.reshape(-1) for x in (logp_RT, batch.weights, batch.segment_ids))
            return sft.loss_sum(logp_N, weights_N, ids_N) / count, {**buffers, "encoder": new_buffers}

        share_and_gradient = jax.value_and_grad(local_share, has_aux=True)

        def add(carry: tuple[Tree, Tree], batch: Batch) -> tuple[tuple[Tree, Tree], Array]:
            total, buffers = carry
            (share, buffers), gradients = share_and_gradient(params, buffers, batch)
            return (jax.tree.map(jnp.add, total, gradients), buffers), share

        if microbatches == 1:
            (share, buffers), gradients = share_and_gradient(params, buffers, batch)
        else:
            parts = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
            start = (jax.tree.map(jnp.zeros_like, params), buffers)
            (gradients, buffers), shares = jax.lax.scan(add, start, parts)
            share = shares.sum()
        loss, gradients = jax.lax.psum((share, gradients), AXES)
        return loss, gradients, buffers

    everywhere = PartitionSpec()
    return _on_mesh(rank, mesh, (everywhere, everywhere, batch_specs()), everywhere)


def make_train_step(
    config: Config, graphdef: nnx.GraphDef, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """One optimizer step, jitted; the old state's memory is reused.

    Where loss or gradient is not finite, parameters, optimizer and statistics stay as they were.
    """
    gradient = loss_and_gradient(graphdef, mesh, config.train.microbatches)
    optimizer = make_optimizer(config)
    schedule = learning_rate_schedule(config.train)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        loss, gradients, buffers = gradient(state.params, state.buffers, batch)
        grad_norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        new = (optax.apply_updates(state.params, updates), buffers, opt_state)
        old = (state.params, state.buffers, state.opt_state)
        new = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
        skipped = state.skipped + ~finite
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        # The schedule counts updates, as the optimizer does.
        rate = jnp.asarray(schedule(state.step - state.skipped))
        metrics = StepMetrics(loss, grad_norm, rate, skipped, in_a_row)
        return TrainState(state.step + 1, skipped, in_a_row, *new), metrics

    return jax.jit(train_step, donate_argnums=0, out_shardings=NamedSharding(mesh, PartitionSpec()))


class Scores(NamedTuple):
    """Sums over the supervised tokens of a batch: negative log-likelihood, correct ones, their number."""

    loss: Array
    correct: Array
    tokens: Array


def make_validation_step(
    graphdef: nnx.GraphDef, mesh: Mesh, *, end_id: int, new_tokens: int
) -> Callable[[Tree, Tree, Batch, PromptEnds], tuple[Scores, Array]]:
    """(params, buffers, batch, prompts) -> (scores, answers decoded); stored statistics.

    The answers, int32 [R * D, new_tokens], are in the order of the prompts and filled up with end_id.
    """

    def rank(params: Tree, buffers: Tree, batch: Batch, ends: PromptEnds) -> tuple[Scores, Array]:
        model = nnx.merge(graphdef, params, buffers)
        answered = answer(model, batch, ends, end_id=end_id, new_tokens=new_tokens, axes=AXES)
        logp_N, weights_N, ids_N = (
            x.reshape(-1) for x in (answered.log_probs, batch.weights, batch.segment_ids)
        )
        scores = Scores(
            sft.loss_sum(logp_N, weights_N, ids_N), answered.correct.sum(), sft.count(weights_N, ids_N)
        )
        return jax.lax.psum(scores, AXES), answered.tokens

    everywhere, rows = PartitionSpec(), PartitionSpec(DATA)
    in_specs = (everywhere, everywhere, batch_specs(), PromptEnds(rows, rows))
    scored = _on_mesh(rank, mesh, in_specs, (everywhere, PartitionSpec((DATA, CONTEXT))))
    # The answers go everywhere too: a process that has a row decodes all of its documents.
    return jax.jit(scored, out_shardings=NamedSharding(mesh, everywhere))
