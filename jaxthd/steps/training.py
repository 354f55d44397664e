"""The training step: one shard_map over all mesh axes around loss and gradient, then the update.

Every rank differentiates its share of the loss (steps/forward.py). With check_vma=False every collective
inside transposes to the right one: psum to psum, all_gather to psum_scatter, ppermute to its inverse.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthd.config import Config, MeshConfig
from jaxthd.kernels.xla_options import jit_for
from jaxthd.models.adapt import join, keeps_router_biases, split
from jaxthd.models.blocks import Routing
from jaxthd.objectives import LOSS
from jaxthd.ops.dropout import token_keys
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import AXES, PIPELINE, TENSOR, TOKEN_AXES, batch_specs, on_ranks
from jaxthd.parallel.params import metadata
from jaxthd.parallel.pipeline import accumulate
from jaxthd.parallel.pipeline_tick import Largest
from jaxthd.parallel.tensor import psum_live
from jaxthd.steps.blueprint import Blueprint, Tree
from jaxthd.steps.forward import (
    CTC,
    Counts,
    Forward,
    FuturePrediction,
    HeadOutputs,
    at_least_one,
    auxiliary_share,
    count,
    merged_gradients,
    microbatches,
    objective_of,
    split_params,
    with_encoder,
)
from jaxthd.steps.optimizer import clipped, learning_rate_schedule, make_optimizer
from jaxthd.steps.state import TrainState, state_shardings


class StepMetrics(NamedTuple):
    """Measurements of a step, on the devices; scalars.

    loss: the objective's; for SFT the mean negative log-likelihood over the supervised tokens, natural log.
    grad_norm: before clipping. learning_rate: of this step. skipped, skipped_in_a_row: the state's counts,
    this step included. objective: the objective's other quotients and extremes, by name. mtp_loss: as loss,
    of the targets of multi-token prediction, the mean over its depths; None without. ctc_loss: as loss, of
    the labels that the CTC loss covers; ctc_uncovered: the share of documents with audio that it does not
    cover; None without it. max_expert_load: the most tokens that an expert got, over the mean of its layer;
    aux_loss: the auxiliary loss, 1 for an even load; None without experts.
    """

    loss: Array
    grad_norm: Array
    learning_rate: Array
    skipped: Array
    skipped_in_a_row: Array
    objective: dict[str, Array]
    mtp_loss: Array | None
    ctc_loss: Array | None
    ctc_uncovered: Array | None
    max_expert_load: Array | None
    aux_loss: Array | None


class Gradient(NamedTuple):
    """loss: of the next tokens. gradients: of the whole objective for the trained parameters, None for others
    (models/adapt.py). buffers: after the step. routing: of the decoder's MoE layers in the order of their
    stack, summed over microbatches; None without any. future: None without multi-token prediction.
    objective: the quotients other than the loss, by name. ctc: None without the CTC loss. extremes: those of
    the objective.
    """

    loss: Array
    gradients: Tree
    buffers: Tree
    routing: Routing | None
    future: FuturePrediction | None
    objective: dict[str, Array] = {}  # noqa: RUF012 (nobody changes it)
    ctc: CTC | None = None
    extremes: Largest = Largest({})


def loss_and_gradient(
    blueprint: Blueprint, mesh: Mesh, *, counted: bool = False, in_compute_dtype: bool = False
) -> Callable[..., Gradient]:
    """(params, buffers, batch) -> Gradient, each on its sharding. Frozen parameters are constants.

    counted: the function takes the counts of all batches of an update as a fourth argument, and returns this
    batch's share of its Gradient (steps/accumulation.py).
    in_compute_dtype: gradients of matrices that are used in the compute dtype alone come in it, in which they
    were computed, if they are a sum of nothing more: on one device, of one microbatch.

    Every rank divides its rows into train.microbatches equal parts and adds up their gradients, on a pipeline
    by its schedule. Loss and gradients do not depend on the number of microbatches, up to rounding, but for
    the encoder's batch statistics and the experts' auxiliary loss, which are those of a microbatch.
    Raises UserError for an unknown objective.
    """
    config = blueprint.config
    specs, buffer_specs = blueprint.specs
    trained_specs, _ = split(specs, blueprint.trained)
    is_policy = objective_of(config).is_policy

    def rank(params: Tree, buffers: Tree, batch: Batch, counts: Counts | None = None) -> Gradient:
        """Loss, gradient and metrics of this rank."""
        counts = at_least_one(count(batch, config) if counts is None else counts)
        front_end = config.model.encoder
        frozen = front_end is None or front_end.keeps_statistics(blueprint.trained["encoder"])
        batch_statistics = not frozen and not is_policy
        forward = Forward(blueprint, params, buffers, counts, batch_statistics=batch_statistics)
        own, _ = split(params, blueprint.trained)
        own = _matrices_cast(own, blueprint) if in_compute_dtype else own

        def extra_share(routing: Routing | None) -> Array:
            """The rank's share of the load-balancing loss; 0 without experts."""
            if routing is None or not config.train.aux_loss:
                return jnp.zeros((), jnp.result_type(*jax.tree.leaves(params)))
            return auxiliary_share(config, routing, counts.real)

        batches = microbatches(batch, blueprint.schedule.microbatches)
        encoder = buffers.get("encoder", {})
        step = accumulate(
            forward.pipelined, blueprint.schedule, split_params(own), encoder, batches, extra_share
        )
        routing = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), step.extra)
        gradients = _sum_copies(merged_gradients(step.gradients), trained_specs, blueprint.config.mesh)
        outputs: HeadOutputs = step.out
        objective, ctc = jax.lax.psum((outputs.objective, outputs.ctc), AXES)
        future = outputs.future
        if future is not None:
            future = FuturePrediction(jax.lax.psum(future.loss, AXES), _with_whole_aux(future.routing))
        loss, buffers = objective.pop(LOSS), with_encoder(buffers, step.state)
        extremes = Largest(jax.lax.pmax(outputs.extremes.numbers, AXES))
        return Gradient(loss, gradients, buffers, _with_whole_aux(routing), future, objective, ctc, extremes)

    in_specs = (specs, buffer_specs, batch_specs(), *[PartitionSpec()] * counted)
    return on_ranks(rank, mesh, in_specs, gradient_specs(blueprint))


def _matrices_cast(params: Tree, blueprint: Blueprint) -> Tree:
    """The trained parameters, those that are cast in the compute dtype: as loss_and_gradient has it."""
    config = blueprint.config
    if config.mesh.devices > 1 or blueprint.schedule.microbatches > 1 or config.depths_trained:
        return params
    is_cast, _ = split(metadata(nnx.state(blueprint.model, nnx.Param), "cast"), blueprint.trained)
    dtype = config.compute.dtype
    return jax.tree.map(lambda x, cast: x.astype(dtype) if cast else x, params, is_cast)


def gradient_specs(blueprint: Blueprint) -> Gradient:
    """PartitionSpecs of a Gradient; one may stand for a whole part of the tree."""
    config = blueprint.config
    specs, buffer_specs = blueprint.specs
    trained_specs, _ = split(specs, blueprint.trained)
    llm = config.model.llm
    everywhere: Any = PartitionSpec()

    def routing_specs(pattern: str, spec: Any) -> Routing | None:
        """Specs of the routing of a chunk with experts; None without."""
        return Routing(spec, spec, spec) if llm.routed_layers(pattern) else None

    future = None
    if config.depths_trained:
        future = FuturePrediction(everywhere, routing_specs(llm.mtp_pattern, everywhere))
    by_stage = routing_specs(llm.letters, PartitionSpec(PIPELINE))
    own = everywhere, trained_specs, buffer_specs, by_stage, future
    return Gradient(*own, objective=everywhere, ctc=everywhere, extremes=everywhere)


def _with_whole_aux(routing: Routing | None) -> Routing | None:
    """The sum of the ranks' shares of aux."""
    return routing and routing._replace(aux=jax.lax.psum(routing.aux, (*TOKEN_AXES, TENSOR)))


def _sum_copies(gradients: Tree, specs: Tree, mesh: MeshConfig) -> Tree:
    """Sums gradients over the ranks that hold the same shard of a parameter."""
    leaves, tree = jax.tree.flatten(gradients)
    by_axes: dict[tuple[str, ...], list[int]] = {}
    for i, spec in enumerate(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))):
        sharded = {axis for axes in spec if axes for axis in ((axes,) if isinstance(axes, str) else axes)}
        by_axes.setdefault(tuple(a for a in AXES if a not in sharded), []).append(i)
    for axes, members in by_axes.items():
        for i, total in zip(members, psum_live([leaves[i] for i in members], axes, mesh), strict=True):
            leaves[i] = total
    return jax.tree.unflatten(tree, leaves)


def make_train_step(
    blueprint: Blueprint, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """One optimizer step, jitted; the old state's memory is reused.

    The batch must be on the mesh (parallel.mesh.put_batch). Where loss or gradient is not finite, parameters,
    optimizer and statistics stay as they were. Frozen parameters always do.
    """
    config = blueprint.config
    gradient = loss_and_gradient(blueprint, mesh, in_compute_dtype=True)
    update = make_update(blueprint, mesh)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        """One update of the state by a batch: (state, metrics)."""
        batch = with_draws(batch, config, state.step)
        return update(state, gradient(state.params, state.buffers, batch))

    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = state_shardings(blueprint, mesh), everywhere
    return jit_for(config, mesh, train_step, donate_argnums=0, out_shardings=shardings)


def with_draws(batch: Batch, config: Config, step: Array) -> Batch:
    """The batch with what dropout draws in this step; as it is without dropout. Its arrays are global."""
    if not (config.adapt.lora_rank and config.adapt.lora_dropout):
        return batch
    documents = batch.documents, config.data.max_documents
    keys_RT = token_keys(batch.tokens, batch.positions, *documents, config.train.seed, step)
    return batch._replace(draws=keys_RT)


def make_update(
    blueprint: Blueprint, mesh: Mesh
) -> Callable[[TrainState, Gradient], tuple[TrainState, StepMetrics]]:
    """An optimizer step from its gradient, not jitted. See make_train_step."""
    config, is_trained = blueprint.config, blueprint.trained
    is_policy = objective_of(config).is_policy
    bias_rates = {
        module: 0.0 if is_policy or keeps_router_biases(is_trained, module) else config.train.router_bias_rate
        for module in ("decoder", "mtp")
        if module in is_trained
    }
    optimizer = make_optimizer(blueprint, mesh)
    schedule = learning_rate_schedule(config)
    on_gpus = mesh.devices.flat[0].platform in ("gpu", "cuda")

    def update(state: TrainState, found: Gradient) -> tuple[TrainState, StepMetrics]:
        """Applies a gradient: (state, metrics). The state stays where the gradient is not finite."""
        loss, gradients, buffers, routing, future, objective, ctc, extremes = found
        by_module = {"decoder": routing, "mtp": future and future.routing}
        own, frozen = split(state.params, is_trained)
        wide = _wide(gradients, own)
        grad_norm = optax.tree.norm(wide)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        most = config.train.clip_norm
        norm = grad_norm if on_gpus else None
        gradients = gradients if on_gpus else clipped(wide, most)
        own, opt_state = _updated_if(finite, optimizer, gradients, own, state.opt_state, norm, most)
        new_buffers = _balanced(buffers, by_module, bias_rates)
        buffers = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new_buffers, state.buffers)
        skipped = state.skipped + ~finite
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        # The schedule counts updates, as the optimizer does.
        rate = jnp.asarray(schedule(state.step - state.skipped))
        mtp_loss = future and future.loss.mean()
        load = _load([each for each in by_module.values() if each is not None])
        auxiliary = mtp_loss, ctc and ctc.loss, ctc and ctc.uncovered
        of_objective = objective | extremes.numbers
        metrics = StepMetrics(loss, grad_norm, rate, skipped, in_a_row, of_objective, *auxiliary, *load)
        new = TrainState(state.step + 1, skipped, in_a_row, join(own, frozen), buffers, opt_state)
        ema = _averaged(state.ema, own, finite, state.step + 1 - skipped, config.train.ema_decay)
        return new._replace(reference=state.reference, ema=ema), metrics

    return update


def _wide(gradients: Tree, params: Tree) -> Tree:
    """Gradients in the parameters' dtypes."""
    return jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, params)


def _updated_if(
    finite: Array,
    optimizer: optax.GradientTransformation,
    gradients: Tree,
    params: Tree,
    opt_state: Tree,
    norm: Array | None,
    most: float,
) -> tuple[Tree, Tree]:
    """The parameters and the optimizer's state after an update; where `finite` is False, as they were.

    norm: of the gradients, if they must be clipped to the norm `most` here. Inside the conditional XLA fuses
    that with the update: before it, clipped gradients are written to memory and read again.

    A conditional, because choosing between old and new arrays afterwards keeps both: it copies every moment.
    All devices take the same branch, because they agree on `finite`: the optimizer may hold collectives.
    """

    def update(gradients: Tree, params: Tree, opt_state: Tree, *norm: Array) -> tuple[Tree, Tree]:
        """(parameters, optimizer state) after the clipped gradient."""
        gradients = _wide(gradients, params)
        gradients = clipped(gradients, most, *norm) if norm else gradients
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def keep(_: Tree, params: Tree, opt_state: Tree, *__: Array) -> tuple[Tree, Tree]:
        """Parameters and optimizer state as they are."""
        return params, opt_state

    more = () if norm is None else (norm,)
    return jax.lax.cond(finite, update, keep, gradients, params, opt_state, *more)


def _averaged(ema: Tree, params: Tree, finite: Array, updates: Array, decay: float) -> Tree:
    """The averages of the trained parameters after an update, the `updates`-th; None without them.

    The first updates weigh more, so that the initial parameters are soon forgotten.
    """
    if ema is None:
        return None
    step = 1 - jnp.minimum(decay, (1 + updates) / (10 + updates))
    return optax.incremental_update(params, ema, jnp.where(finite, step, 0))


def _balanced(buffers: Tree, routing: dict[str, Routing | None], rates: dict[str, float]) -> Tree:
    """Moves the correction bias of each expert by its module's rate: up if it got fewer tokens than the mean,
    else down (Wang et al., Auxiliary-Loss-Free Load Balancing, 2024).
    """

    def change(path: tuple[Any, ...], x: Array) -> Array:
        """The correction bias moved against its expert's surplus of tokens; other buffers as they are."""
        of_module = routing.get(path[0].key)
        if path[-1].key != "correction_bias" or of_module is None or not rates[path[0].key]:
            return x
        surplus = of_module.load - of_module.load.mean(-1, keepdims=True)
        return x - rates[path[0].key] * jnp.sign(surplus).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(change, buffers)


def _load(routing: list[Routing]) -> tuple[Array | None, Array | None]:
    """StepMetrics.max_expert_load and aux_loss."""
    if not routing:
        return None, None
    load_LE, tokens_L, aux_L = (jnp.concatenate(of_modules) for of_modules in zip(*routing, strict=True))
    mean_L = load_LE.mean(-1)
    highest = (load_LE.max(-1) / jnp.where(mean_L > 0, mean_L, 1)).max()
    return highest, aux_L.sum() / jnp.maximum(tokens_L.sum(), 1)
