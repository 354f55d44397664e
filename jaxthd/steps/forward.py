"""The model in the three functions that a pipeline runs, with the objective at their end.

`embed` embeds text and audio, `stage` applies a pipeline stage's layers, `head` gives this rank's part of
the objective. All run inside the step's shard_map. Every rank differentiates its own share: its sums over the
counts of the whole batch, which are known before. The shares of all ranks add up to the loss, so gradients of
what several ranks hold are summed over these ranks once, afterwards (steps/training.py).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from jaxthd.config import Config
from jaxthd.models.adapt import join
from jaxthd.models.blocks import Routing
from jaxthd.models.ctc import Transcripts, transcripts
from jaxthd.models.front_ends.contract import LABEL_LOSS
from jaxthd.models.hybrid import StackedLayers
from jaxthd.models.lora_tokens import Draws, drawing
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.objectives import LOSS, Objective, Tokens, make_objective
from jaxthd.objectives.sft import negative_log_likelihood
from jaxthd.packing.batch import Batch
from jaxthd.packing.segments import Segments
from jaxthd.parallel.mesh import AXES, CONTEXT, PIPELINE, TENSOR, TOKEN_AXES, ranks_of
from jaxthd.parallel.pipeline_model import PipelinedModel, PipelinedParams, PreparedStage
from jaxthd.parallel.pipeline_tick import Largest
from jaxthd.steps.blueprint import Blueprint, Tree


class FuturePrediction(NamedTuple):
    """Multi-token prediction. loss: of each depth, [K]. routing: of its MoE layers; None without any."""

    loss: Array
    routing: Routing | None


class FixedOfStage(NamedTuple):
    """PreparedStage.fixed. layers: the stage's, all weights, by unit. draws: None without dropout."""

    layers: list[StackedLayers]
    segments: Segments
    draws: Draws | None


class CTC(NamedTuple):
    """The CTC loss. uncovered: the share of the documents with audio that it does not cover."""

    loss: Array
    uncovered: Array


class CTCCounts(NamedTuple):
    """labels: those that the CTC loss covers. documents: those with audio, which it covers or not."""

    labels: Array
    documents: Array


class Counts(NamedTuple):
    """Denominators over all microbatches and ranks.

    objective: by name. totals: Objective.totals, as they are. real: tokens that are not padding.
    supervised_future, real_future: for each depth of multi-token prediction its supervised tokens, and those
    whose document has a token that far on, [K].
    ctc: None without the CTC loss. labels: of recordings, for the encoder's loss; None without it.
    """

    objective: dict[str, Array]
    totals: dict[str, Array]
    real: Array
    supervised_future: Array
    real_future: Array
    ctc: CTCCounts | None
    labels: Array | None = None


class SkipState(NamedTuple):
    """Values that go from `embed` to `head`, past the stages: embeddings of this rank's residual stream, [n,
    D].

    future: of each depth's future tokens. own: of the tokens themselves, for the CTC loss; else None.
    label_loss: this rank's share of the encoder's loss on labels (contract.LABEL_LOSS), a number; else None.
    """

    future: list[Array]
    own: Array | None
    label_loss: Array | None = None


class HeadOutputs(NamedTuple):
    """Results of `head` beside the local loss, which is differentiated.

    objective: this rank's shares of the objective's quotients, by name. extremes: this rank's
    Objective.extremes. future: shares of those of FuturePrediction. ctc: of the CTC loss; None without it.
    """

    objective: dict[str, Array]
    extremes: Largest
    future: FuturePrediction | None = None
    ctc: CTC | None = None


def objective_of(config: Config) -> Objective:
    """Raises UserError as make_objective."""
    return make_objective(config.train.objective, config.train.objective_options)


def policy_temperature(config: Config) -> float:
    """Softmax temperature of training log-probabilities: rollout.temperature for policy objectives, else
    1."""
    return config.rollout.temperature if objective_of(config).is_policy else 1.0


def count(batch: Batch, config: Config) -> Counts:
    """The counts of a whole step's batch, over all ranks. Not to be differentiated."""
    weights_KRT = batch.future_weights.swapaxes(0, 1)
    has_token_KRT = (batch.future_tokens >= 0).swapaxes(0, 1)
    objective, tokens = objective_of(config), _tokens(batch, config)
    own = Counts(
        objective=objective.counts(tokens),
        totals=objective.totals(tokens),
        real=(batch.segment_ids > 0).sum(),
        supervised_future=weights_KRT.sum((1, 2)),
        real_future=has_token_KRT.sum((1, 2)),
        ctc=_count_ctc(batch, config) if trains_ctc(batch, config) else None,
    )
    counts = jax.lax.psum(own, TOKEN_AXES)
    if batch.recording_labels is None:
        return counts
    return counts._replace(labels=jax.lax.psum((batch.recording_labels >= 0).sum(), AXES))


def at_least_one(counts: Counts) -> Counts:
    """The counts as denominators: 1 where there is nothing to count."""
    return jax.tree.map(lambda x: jnp.maximum(x, 1), counts)._replace(totals=counts.totals)


def _count_ctc(batch: Batch, config: Config) -> CTCCounts:
    """All context ranks find the same; the first one counts."""
    found, is_first = _transcripts(batch, config), jax.lax.axis_index(CONTEXT) == 0
    return CTCCounts(*(jnp.where(is_first, x.sum(), 0) for x in (found.documents.labels, found.has_audio)))


def trains_ctc(batch: Batch, config: Config) -> bool:
    """Whether a step computes the CTC loss: a batch without audio arrays has none."""
    return config.train.ctc_loss > 0 and batch.has_audio


def _transcripts(batch: Batch, config: Config) -> Transcripts:
    return transcripts(batch, config.data.max_documents, config.train.ctc_max_labels, CONTEXT)


def _tokens(batch: Batch, config: Config, totals: dict[str, Array] | None = None) -> Tokens:
    return Tokens.of(batch, config.data.max_documents, CONTEXT, totals)


def split_params(params: Tree) -> PipelinedParams:
    """The parameters by the function that uses them. A tied embedding is used by two, and stands twice."""
    of_embed = ("embedding", "encoder", "adapter")
    of_head = ("head" if "head" in params else "embedding", "mtp")
    decoder = params["decoder"]
    return PipelinedParams(
        embed={name: params[name] for name in of_embed if name in params},
        stage={"layers": decoder["layers"]},
        head={name: params[name] for name in of_head if name in params} | {"norm": decoder["norm"]},
    )


def merged_params(params: PipelinedParams, *, embedding_of: str = "embed") -> Tree:
    """The inverse of split_params. embedding_of: "embed" or "head", whose tied embedding it has."""
    last = dict(params.head)
    norm, tied = last.pop("norm"), last.pop("embedding", None)
    whole = {**params.embed, "decoder": {**params.stage, "norm": norm}, **last}
    return {**whole, "embedding": tied} if tied is not None and embedding_of == "head" else whole


def merged_gradients(gradients: PipelinedParams) -> Tree:
    """The inverse of split_params for gradients: those of a tied embedding are summed."""
    whole = merged_params(gradients)
    if "embedding" in gradients.head:
        whole["embedding"] = jax.tree.map(jnp.add, whole["embedding"], gradients.head["embedding"])
    return whole


class Forward:
    """The three functions for one microbatch.

    They take the parameters that are differentiated; where these are None (frozen), `params` fills them in.
    The pipeline's state is the encoder's buffers ({} without an encoder). SkipState says what goes past
    the stages.
    counts: None where `head` is not called. batch_statistics: see SpeechLM.embed's train.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        params: Tree,
        buffers: Tree,
        counts: Counts | None,
        *,
        batch_statistics: bool,
    ) -> None:
        self._blueprint, self._config = blueprint, blueprint.config
        self._params, self._buffers, self._counts = split_params(params), buffers, counts
        self._batch_statistics = batch_statistics
        self._objective = objective_of(blueprint.config)
        # Ranks of these axes compute the same share.
        self._copies = ranks_of(blueprint.config.mesh, (PIPELINE, TENSOR))

    @property
    def pipelined(self) -> PipelinedModel:
        """The functions by which a pipeline runs the model."""
        return PipelinedModel(
            embed=self.embed,
            prepare=self.prepare,
            run=self.run,
            head=self.head,
            stages=self._blueprint.stages,
            constants=(self._params.embed, self._buffers),
        )

    def model(self, buffers: Tree, **given: Tree) -> SpeechLM:
        """The module on this rank. given: parameters of some of the functions, in the place of `params`."""
        filled = {name: join(some, getattr(self._params, name)) for name, some in given.items()}
        which = "head" if "head" in given else "embed"
        params = merged_params(self._params._replace(**filled), embedding_of=which)
        return nnx.merge(self._blueprint.graph, params, buffers)

    def embed(self, embed: Tree, state: Tree, batch: Batch) -> tuple[Array, SkipState, Tree]:
        """Embeds the batch: (activations, what goes around the stages, encoder statistics)."""
        model = self.model(with_encoder(self._buffers, state), embed=embed)
        labels, train = LABEL_LOSS if self._counts is not None else "", self._batch_statistics
        (x_nD, *future), state = model.embed_with_future(batch, axes=AXES, train=train, labels=labels)
        label_loss = state.pop(LABEL_LOSS, None)
        return x_nD, SkipState(future, x_nD if trains_ctc(batch, self._config) else None, label_loss), state

    def prepare(self, pattern: str, stage: Tree, chunk: Array | int, batch: Batch) -> PreparedStage:
        """Selects the layers of a chunk, and what stays the same for all microbatches."""
        model = self.model(self._buffers)
        segments = model.segments(batch, AXES)
        draws = _draws(batch)
        with drawing(draws):
            layers = model.decoder.layers_of(pattern, chunk)
        fixed = FixedOfStage(layers, segments, draws)
        return PreparedStage(model.decoder.rows_of(pattern, chunk, stage["layers"]), fixed)

    def run(self, pattern: str, prepared: PreparedStage, x_nD: Array) -> tuple[Array, Routing | None]:
        """Runs the layers of a chunk: (activations, routing of its experts)."""
        decoder, fixed = self.model(self._buffers).decoder, prepared.fixed
        with drawing(fixed.draws):
            return decoder.run(pattern, fixed.layers, prepared.trained, x_nD, fixed.segments)

    def head(self, head: Tree, x_nD: Array, skip: SkipState, batch: Batch) -> tuple[Array, HeadOutputs]:
        """Applies the head: (the rank's share of the loss, metrics)."""
        model = self.model(self._buffers, head=head)
        # Gathered once for both losses.
        head_VD = None if skip.own is None else model.gathered_head()
        if skip.future:
            local_loss, outputs = self._head_with_future(model, x_nD, skip.future, batch, head_VD)
        else:
            logp_N = model.target_log_probs(
                x_nD, batch, head_VD, temperature=policy_temperature(self._config)
            )
            outputs = self._outputs(logp_N, batch)
            local_loss = outputs.objective[LOSS]
        if skip.label_loss is not None and self._counts is not None and self._counts.labels is not None:
            share = skip.label_loss / self._counts.labels
            local_loss += self._config.model.audio_encoder.label_loss * share
            outputs = outputs._replace(objective={**outputs.objective, LABEL_LOSS: share})
        if skip.own is None or head_VD is None:
            return local_loss, outputs
        ctc = self._ctc(model, skip.own, batch, head_VD)
        return local_loss + self._config.train.ctc_loss * ctc.loss, outputs._replace(ctc=ctc)

    def _head_with_future(
        self, model: SpeechLM, x_nD: Array, future: list[Array], batch: Batch, head_VD: Array | None
    ) -> tuple[Array, HeadOutputs]:
        with drawing(_draws(batch)):
            logp_N, (logp_KN, routing) = model.log_probs_with_future(x_nD, future, batch, AXES, head_VD)
        assert self._counts is not None
        outputs = self._outputs(logp_N, batch)
        losses = [
            self._share(
                negative_log_likelihood(logp_KN[k], batch.future_weights[:, k].reshape(-1)),
                self._counts.supervised_future[k],
            )
            for k in range(len(future))
        ]
        local_loss = outputs.objective[LOSS] + self._config.train.mtp_loss * sum(losses) / len(future)
        routed = [each for each in routing if each is not None]
        for each, real in zip(routed, self._counts.real_future, strict=False):
            local_loss += auxiliary_share(self._config, each, real) / self._config.mesh.pipeline
        of_future = model.mtp.routing_of_depths(routed) if model.mtp and routed else None
        return local_loss, outputs._replace(future=FuturePrediction(jnp.stack(losses), of_future))

    def _ctc(self, model: SpeechLM, embedded_nD: Array, batch: Batch, head_VD: Array) -> CTC:
        """This rank's shares of the CTC loss."""
        counts = self._counts and self._counts.ctc
        assert counts is not None
        found = _transcripts(batch, self._config)
        logp_G = model.ctc_log_probs(embedded_nD, batch, found, CONTEXT, head_VD)
        uncovered = (found.has_audio & ~found.is_covered).sum()
        ranks = self._config.mesh.context  # All of them compute the same.
        return CTC(
            loss=self._share(-logp_G.sum(), counts.labels) / ranks,
            uncovered=self._share(uncovered, counts.documents) / ranks,
        )

    def _outputs(self, logp_N: Array, batch: Batch) -> HeadOutputs:
        """The objective's sums from the next tokens' log-probabilities."""
        assert self._counts is not None
        logp_RT, tokens = (
            logp_N.reshape(batch.tokens.shape),
            _tokens(batch, self._config, self._counts.totals),
        )
        sums, counts = self._objective.sums(logp_RT, tokens), self._counts.objective
        shares = {name: self._share(x, counts.get(name, counts[LOSS])) for name, x in sums.items()}
        return HeadOutputs(shares, Largest(self._objective.extremes(logp_RT, tokens)))

    def _share(self, total: Array, count: Array) -> Array:
        return total / count / self._copies


def _draws(batch: Batch) -> Draws | None:
    return None if batch.draws is None else Draws(batch.draws.reshape(-1))


def with_encoder(buffers: Tree, encoder: Tree) -> Tree:
    """The model's buffers with these of the encoder, if it has any."""
    return {**buffers, "encoder": encoder} if "encoder" in buffers else buffers


def auxiliary_share(config: Config, routing: Routing, real: Array) -> Array:
    """Addition of MoE layers to this rank's share of the objective: the mean over all that a step runs.

    real: tokens that these layers route in a step.
    """
    llm = config.model.llm
    layers = llm.routed_layers(llm.letters) + config.depths_trained * llm.routed_layers(llm.mtp_pattern)
    return config.train.aux_loss * routing.aux.sum() / (real * layers)


def microbatches(batch: Batch, number: int) -> Batch:
    """[R, ...] -> [number, R / number, ...]."""
    return jax.tree.map(lambda x: x.reshape(number, len(x) // number, *x.shape[1:]), batch)
