"""The training step: one shard_map over all mesh axes around loss and gradient, then the update.

Inside, every rank differentiates its local share of the objective: its sum over the count of the whole batch,
which is known before. The shares add up to the loss, so gradients of what several ranks hold are summed over
these once, after. In that convention (check_vma=False) every collective inside transposes to the right thing:
psum to psum, all_gather to psum_scatter, ppermute to its inverse.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Int32, UInt32

from jaxthd.config import Config
from jaxthd.kernels.xla_options import jit_for
from jaxthd.models.adapt import join, keeps_router_biases, keeps_statistics, split, trained
from jaxthd.models.decoding import Pick, advance, answer, begin
from jaxthd.models.mixers import Routing
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.objectives import sft
from jaxthd.ops.cross_entropy import TokenScores
from jaxthd.ops.sampling import Sampling
from jaxthd.packing.batch import Batch
from jaxthd.packing.prompts import PromptEnds
from jaxthd.parallel.mesh import (
    AXES,
    CONTEXT,
    DATA,
    PIPELINE,
    TENSOR,
    TOKEN_AXES,
    batch_specs,
    on_ranks,
    ranks_of,
)
from jaxthd.parallel.pipeline import accumulate, score
from jaxthd.parallel.pipelined import PipelinedModel, PipelinedParams
from jaxthd.parallel.schedule import make_schedule
from jaxthd.steps.state import (
    TrainState,
    Tree,
    abstract_model,
    learning_rate_schedule,
    make_optimizer,
    model_graph,
    model_specs,
    stages_of,
    state_shardings,
)


class StepMetrics(NamedTuple):
    """Mean negative log-likelihood over the supervised tokens; gradient norm before clipping; the learning
    rate of this step; the state's counts of skipped steps, this one included. With multi-token prediction:
    as the loss, of its depths' targets, the mean over depths. With experts: the most tokens that any got,
    over the mean of its layer, and the auxiliary loss (1 for an even load).
    """

    loss: Array
    grad_norm: Array
    learning_rate: Array
    skipped: Array
    skipped_in_a_row: Array
    mtp_loss: Array | None
    max_expert_load: Array | None
    aux_loss: Array | None


class Ahead(NamedTuple):
    """Multi-token prediction. loss: by depth, [K]. routing: see Gradient."""

    loss: Array
    routing: Routing | None


class Gradient(NamedTuple):
    """loss: of the next tokens. gradients: of the whole objective for the trained parameters, None for others
    (jaxthd/models/adapt.py). routing: of the decoder's MoE layers in the order of their stack, summed over
    microbatches; None without any. ahead: None without multi-token prediction.
    """

    loss: Array
    gradients: Tree
    buffers: Tree
    routing: Routing | None
    ahead: Ahead | None = None


class _Counts(NamedTuple):
    """Over all microbatches and ranks, 1 for none: supervised tokens, real tokens, and for each depth of
    multi-token prediction its supervised tokens and those that have a token so far ahead, [K].
    """

    supervised: Array
    real: Array
    supervised_future: Array
    real_future: Array

    @classmethod
    def of(cls, batch: Batch) -> "_Counts":
        ahead = batch.future_weights.swapaxes(0, 1), (batch.future_tokens >= 0).swapaxes(0, 1)
        own = cls(
            sft.count(batch.weights.reshape(-1), batch.segment_ids.reshape(-1)),
            (batch.segment_ids > 0).sum(),
            *(x_KRT.sum((1, 2)) for x_KRT in ahead),
        )
        return jax.tree.map(lambda x: jnp.maximum(x, 1), jax.lax.psum(own, TOKEN_AXES))


class _Left(NamedTuple):
    """This rank's shares of Gradient.loss and Gradient.ahead."""

    loss: Array
    ahead: Ahead | None


def _divided(params: Tree) -> PipelinedParams:
    """The parameters of the model's three parts."""
    decoder = params["decoder"]
    mtp = {name: params[name] for name in ("mtp",) if name in params}
    return PipelinedParams(
        enter={name: params[name] for name in ("embedding", "encoder", "adapter")},
        stage={"layers": decoder["layers"]},
        leave={"head": params["head"], "norm": decoder["norm"], **mtp},
    )


def _joined(params: PipelinedParams) -> Tree:
    """The inverse of _divided."""
    last = dict(params.leave)
    return {**params.enter, "decoder": {**params.stage, "norm": last.pop("norm")}, **last}


def _parts(
    config: Config, params: Tree, buffers: Tree, counts: _Counts, *, batch_statistics: bool
) -> PipelinedModel:
    """The model's three functions for the pipeline, inside shard_map. Pipeline state is the encoder's
    buffers; embeddings of future tokens bypass the stages; leave's second result is _Left.

    They are functions of all parameters or of some, with None for the rest; that they take from `params`.
    batch_statistics: see SpeechLM.enter's train.
    """
    graph, mesh, whole = model_graph(config), config.mesh, _divided(params)
    stages = stages_of(config)
    # Only where there is a ring, or but one stage, which all ranks run alike: else idle ranks need not work.
    has_ring = mesh.context > 1 and config.compute.context_exchange == "ring"
    uniform_program = len(stages.patterns) == 1 or (stages.are_equal and has_ring)
    copies, depths = ranks_of(mesh, (PIPELINE, TENSOR)), config.depths_trained

    def model(buffers: Tree, **given: Tree) -> SpeechLM:
        filled = {name: join(some, getattr(whole, name)) for name, some in given.items()}
        return nnx.merge(graph, _joined(whole._replace(**filled)), buffers)

    def enter(enter: Tree, state: Tree, batch: Batch) -> tuple[Array, list[Array], Tree]:
        of_rank = model({**buffers, "encoder": state}, enter=enter)
        (x_nD, *ahead), state = of_rank.enter_with_ahead(batch, axes=AXES, train=batch_statistics)
        return x_nD, ahead, state

    def stage(pattern: str, stage: Tree, chunk: Array | int, x_nD: Array, batch: Batch) -> Any:
        of_rank = model(buffers, stage=stage)
        segments = of_rank.segments(batch, AXES, uniform_program=uniform_program)
        return of_rank.decoder.stage(pattern, chunk, x_nD, segments)

    def loss(logp_N: Array, weights_RT: Array, batch: Batch, count: Array) -> Array:
        total = sft.loss_sum(logp_N, weights_RT.reshape(-1), batch.segment_ids.reshape(-1))
        return total / count / copies

    def leave(leave: Tree, x_nD: Array, bypass: list[Array], batch: Batch) -> tuple[Array, _Left]:
        of_rank = model(buffers, leave=leave)
        if not bypass:
            own = loss(of_rank.leave(x_nD, batch), batch.weights, batch, counts.supervised)
            return own, _Left(own, None)
        logp_N, (logp_KN, routing) = of_rank.leave_with_ahead(x_nD, bypass, batch, AXES)
        own = loss(logp_N, batch.weights, batch, counts.supervised)
        losses = [
            loss(logp_KN[k], batch.future_weights[:, k], batch, counts.supervised_future[k])
            for k in range(depths)
        ]
        share = own + config.train.mtp_loss * sum(losses) / depths
        found = [each for each in routing if each is not None]
        for each, real in zip(found, counts.real_future, strict=False):
            share += _aux_share(config, each, real) / mesh.pipeline
        joined = of_rank.mtp.joined(found) if of_rank.mtp and found else None
        return share, _Left(own, Ahead(jnp.stack(losses), joined))

    return PipelinedModel(enter, stage, leave, stages, uniform_program)


def _aux_share(config: Config, routing: Routing, real: Array) -> Array:
    """What MoE layers add to this rank's share of the objective: of the mean over all that a step runs.

    real: tokens that they route in a step.
    """
    llm = config.model.llm
    layers = llm.letters.count("E") + config.depths_trained * llm.mtp_pattern.count("E")
    return config.train.aux_loss * routing.aux.sum() / (real * layers)


def _microbatches(batch: Batch, count: int) -> Batch:
    """[R, ...] -> [count, R / count, ...]."""
    return jax.tree.map(lambda x: x.reshape(count, len(x) // count, *x.shape[1:]), batch)


def loss_and_gradient(config: Config, mesh: Mesh) -> Callable[[Tree, Tree, Batch], Gradient]:
    """(params, buffers, batch) -> Gradient, each on its sharding. Frozen parameters are constants.

    Every rank cuts its rows into config.train.microbatches equal parts and adds up their gradients, on a
    pipeline by its schedule. Loss and gradients do not depend on their number, up to rounding, but for the
    encoder's batch statistics, and the experts' auxiliary loss, which are of a microbatch.
    """
    model = abstract_model(config)
    specs, buffer_specs = model_specs(model)
    is_trained = trained(model, config.adapt)
    trained_specs, _ = split(specs, is_trained)
    llm, has_ahead = config.model.llm, config.depths_trained > 0
    schedule = make_schedule(config.train.microbatches, config.mesh.pipeline, config.mesh.stages_per_rank)

    def rank(params: Tree, buffers: Tree, batch: Batch) -> Gradient:
        counts, batch_statistics = _Counts.of(batch), not keeps_statistics(is_trained)
        parts = _parts(config, params, buffers, counts, batch_statistics=batch_statistics)
        own, _ = split(params, is_trained)

        def extra_share(routing: Routing | None) -> Array:
            if routing is None or not config.train.aux_loss:
                return jnp.zeros((), jnp.result_type(*jax.tree.leaves(params)))
            return _aux_share(config, routing, counts.real)

        batches = _microbatches(batch, schedule.microbatches)
        step = accumulate(parts, schedule, _divided(own), buffers["encoder"], batches, extra_share)
        routing = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), step.extra)
        gradients = _sum_copies(_joined(step.gradients), trained_specs)
        left: _Left = step.out
        loss, ahead = jax.lax.psum(left.loss, AXES), left.ahead
        if ahead is not None:
            ahead = Ahead(jax.lax.psum(ahead.loss, AXES), _with_whole_aux(ahead.routing))
        buffers = {**buffers, "encoder": step.state}
        return Gradient(loss, gradients, buffers, _with_whole_aux(routing), ahead)

    everywhere: Any = PartitionSpec()

    def routing_specs(pattern: str, spec: Any) -> Routing | None:
        return Routing(spec, spec, spec) if "E" in pattern else None

    ahead_specs = Ahead(everywhere, routing_specs(llm.mtp_pattern, everywhere)) if has_ahead else None
    by_stage = routing_specs(llm.letters, PartitionSpec(PIPELINE))
    out_specs = Gradient(everywhere, trained_specs, buffer_specs, by_stage, ahead_specs)
    return on_ranks(rank, mesh, (specs, buffer_specs, batch_specs()), out_specs)


def _with_whole_aux(routing: Routing | None) -> Routing | None:
    """The sum of the ranks' shares of aux."""
    return routing and routing._replace(aux=jax.lax.psum(routing.aux, (*TOKEN_AXES, TENSOR)))


def _sum_copies(gradients: Tree, specs: Tree) -> Tree:
    """Sums gradients over the ranks that hold the same part of a parameter."""
    leaves, tree = jax.tree.flatten(gradients)
    by_axes: dict[tuple[str, ...], list[int]] = {}
    for i, spec in enumerate(jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))):
        cut = {axis for axes in spec if axes for axis in ((axes,) if isinstance(axes, str) else axes)}
        by_axes.setdefault(tuple(a for a in AXES if a not in cut), []).append(i)
    for axes, members in by_axes.items():
        if axes:
            for i, total in zip(members, jax.lax.psum([leaves[i] for i in members], axes), strict=True):
                leaves[i] = total
    return jax.tree.unflatten(tree, leaves)


def make_train_step(
    config: Config, mesh: Mesh
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """One optimizer step, jitted; the old state's memory is reused.

    Where loss or gradient is not finite, parameters, optimizer and statistics stay as they were. Frozen
    parameters always do.
    """
    gradient = loss_and_gradient(config, mesh)
    is_trained = trained(abstract_model(config), config.adapt)
    moving = {
        module: 0.0 if keeps_router_biases(is_trained, module) else config.train.router_bias_rate
        for module in ("decoder", "mtp")
        if module in is_trained
    }
    optimizer = make_optimizer(config)
    schedule = learning_rate_schedule(config.train)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        loss, gradients, buffers, routing, ahead = gradient(state.params, state.buffers, batch)
        by_module = {"decoder": routing, "mtp": ahead and ahead.routing}
        grad_norm = optax.tree.norm(gradients)
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        own, frozen = split(state.params, is_trained)
        updates, opt_state = optimizer.update(gradients, state.opt_state, own)
        buffers = _even_out(buffers, by_module, moving)
        new = (optax.apply_updates(own, updates), buffers, opt_state)
        old = (own, state.buffers, state.opt_state)
        own, buffers, opt_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), new, old)
        skipped = state.skipped + ~finite
        in_a_row = jnp.where(finite, 0, state.skipped_in_a_row + 1)
        # The schedule counts updates, as the optimizer does.
        rate = jnp.asarray(schedule(state.step - state.skipped))
        mtp_loss = ahead and ahead.loss.mean()
        load = _load([each for each in by_module.values() if each is not None])
        metrics = StepMetrics(loss, grad_norm, rate, skipped, in_a_row, mtp_loss, *load)
        params = join(own, frozen)
        return TrainState(state.step + 1, skipped, in_a_row, params, buffers, opt_state), metrics

    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = state_shardings(config, mesh), everywhere
    return jit_for(config, mesh, train_step, donate_argnums=0, out_shardings=shardings)


def _even_out(buffers: Tree, routing: dict[str, Routing | None], rates: dict[str, float]) -> Tree:
    """Moves the correction bias of each expert by its module's rate, up if fewer tokens came than on average,
    else down (Wang et al., Auxiliary-Loss-Free Load Balancing, 2024).
    """

    def change(path: tuple[Any, ...], x: Array) -> Array:
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


class Scores(NamedTuple):
    """Sums over the supervised tokens of a batch: negative log-likelihood, correct ones, their number."""

    loss: Array
    correct: Array
    tokens: Array


def make_validation_step(
    config: Config, mesh: Mesh, *, end_id: int, new_tokens: int
) -> Callable[[Tree, Tree, Batch, PromptEnds], tuple[Scores, Array]]:
    """(params, buffers, batch, prompts) -> (scores, answers decoded); stored statistics.

    The answers, int32 [R * D, new_tokens], are in the order of the prompts and filled up with end_id.
    """
    graph = model_graph(config)
    specs = model_specs(abstract_model(config))

    def rank(params: Tree, buffers: Tree, batch: Batch, ends: PromptEnds) -> tuple[Scores, Array]:
        model = nnx.merge(graph, params, buffers)
        answered = answer(model, batch, ends, end_id=end_id, new_tokens=new_tokens, axes=AXES)
        logp_N, weights_N, ids_N = (
            x.reshape(-1) for x in (answered.log_probs, batch.weights, batch.segment_ids)
        )
        scores = Scores(
            sft.loss_sum(logp_N, weights_N, ids_N), answered.correct.sum(), sft.count(weights_N, ids_N)
        )
        return jax.lax.psum(scores, TOKEN_AXES), answered.tokens

    everywhere, rows = PartitionSpec(), PartitionSpec(DATA)
    in_specs = (*specs, batch_specs(), PromptEnds(rows, rows))
    scored = on_ranks(rank, mesh, in_specs, (everywhere, PartitionSpec(TOKEN_AXES)))
    # The answers go everywhere too: a process that has a row decodes all of its documents.
    return jit_for(config, mesh, scored, out_shardings=NamedSharding(mesh, everywhere))


class Draws(NamedTuple):
    """keys: 64 random bits of each document, in the order of the prompts."""

    keys: UInt32[Any, "RD 2"]
    sampling: Sampling


class Answers(NamedTuple):
    """tokens: decoded so far, what ends an answer included, in the order of the prompts; those from `number`
    on are not decoded yet. active: documents that have not ended.
    """

    number: Int32[Any, ""]
    tokens: Int32[Any, "RD m"]
    active: Bool[Any, " RD"]


def make_generation_steps(
    config: Config, mesh: Mesh, *, stop_ids: tuple[int, ...], new_tokens: int
) -> tuple[
    Callable[[Tree, Tree, Batch, PromptEnds, Draws], Tree],
    Callable[[Tree, Tree, Tree, Draws, Any], tuple[Tree, Answers]],
]:
    """Two programs, jitted; stored statistics.

    (params, buffers, batch, prompts, draws) -> decoding, where it begins;
    (params, buffers, decoding, draws, until) -> (decoding, answers), up to `until` tokens of each document,
    at most new_tokens; the old decoding's memory is reused. stop_ids: tokens that end an answer.
    """
    graph, specs = model_graph(config), model_specs(abstract_model(config))

    def pick_from(model: SpeechLM, draws: Draws) -> Pick:
        return lambda h_nD, number: model.draw(h_nD, draws.keys, number, draws.sampling)

    def prefill(params: Tree, buffers: Tree, batch: Batch, ends: PromptEnds, draws: Draws) -> Tree:
        model = nnx.merge(graph, params, buffers)
        pick, fill = pick_from(model, draws), stop_ids[0]
        _, decoding = begin(model, batch, ends, pick, new_tokens=new_tokens, fill=fill, axes=AXES)
        return jax.tree.map(lambda x: x[None], decoding)

    def decode(
        params: Tree, buffers: Tree, decoding: Tree, draws: Draws, until: Array
    ) -> tuple[Tree, Answers]:
        model = nnx.merge(graph, params, buffers)
        own = jax.tree.map(lambda x: x[0], decoding)
        own = advance(model, own, pick_from(model, draws), stop_ids=stop_ids, until=until)
        answers = Answers(own.number, own.tokens, own.active)
        return jax.tree.map(lambda x: x[None], own), answers

    # What a rank holds is its own affair: a row for each.
    everywhere, rows, documents = PartitionSpec(), PartitionSpec(DATA), PartitionSpec(TOKEN_AXES)
    held = PartitionSpec(AXES)
    draw_specs = Draws(documents, Sampling(*[everywhere] * 3))
    prefill = on_ranks(prefill, mesh, (*specs, batch_specs(), PromptEnds(rows, rows), draw_specs), held)
    decode = on_ranks(
        decode,
        mesh,
        (*specs, held, draw_specs, everywhere),
        (held, Answers(everywhere, documents, documents)),
    )
    shardings = NamedSharding(mesh, held), NamedSharding(mesh, everywhere)
    return (
        jit_for(config, mesh, prefill, out_shardings=shardings[0]),
        jit_for(config, mesh, decode, donate_argnums=2, out_shardings=shardings),
    )


def make_scores(config: Config, mesh: Mesh, top_k: int = 0) -> Callable[[Tree, Tree, Batch], TokenScores]:
    """(params, buffers, batch) -> of every position that weights supervises the log-probability of its target
    and the top_k likeliest tokens, [R, T, ...], 0 elsewhere; in the batch's layout and sharding, with stored
    statistics. By the pipeline's schedule, jitted.

    Raises ValueError unless top_k lies in 0..model.llm.vocab_size.
    """
    if not 0 <= top_k <= config.model.llm.vocab_size:
        raise ValueError(
            f"top_k is {top_k}; expected 0 to {config.model.llm.vocab_size}, the entries of the vocabulary"
        )
    graph, specs = model_graph(config), model_specs(abstract_model(config))
    schedule = make_schedule(
        config.train.microbatches, config.mesh.pipeline, config.mesh.stages_per_rank, backward=False
    )

    def rank(params: Tree, buffers: Tree, batch: Batch) -> TokenScores:
        divided = _divided(params)

        def leave(leave: Tree, x_nD: Array, bypass: None, batch: Batch) -> tuple[Array, TokenScores]:
            model = nnx.merge(graph, _joined(divided._replace(leave=leave)), buffers)
            scores = model.leave_top_k(x_nD, batch, top_k)
            return jnp.zeros(()), jax.tree.map(lambda x: x.reshape(*batch.tokens.shape, *x.shape[1:]), scores)

        counts = _Counts.of(batch)
        parts = _parts(config, params, buffers, counts, batch_statistics=False)._replace(leave=leave)
        batches = _microbatches(batch, schedule.microbatches)
        scores = score(parts, schedule, divided, buffers["encoder"], batches)
        return jax.tree.map(lambda x: x.reshape(*batch.tokens.shape, *x.shape[3:]), scores)

    by_token: Any = PartitionSpec(DATA, CONTEXT)
    out_specs = TokenScores(by_token, by_token, by_token)
    return jax.jit(on_ranks(rank, mesh, (*specs, batch_specs()), out_specs))
