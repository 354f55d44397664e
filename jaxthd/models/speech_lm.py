"""The speech LLM: encoder -> adapter -> embeddings in the sequence -> hybrid decoder -> log-probabilities.

It runs inside the step's shard_map, where every array is this rank's shard, or on one device without a mesh.

Legend: R rows on this rank, T tokens of a row on this rank, N = R * T, n = N or this tensor rank's part of N
(compute.sequence_sharded), V vocabulary entries of this rank, A audio frames of a row on this rank,
M mel bands, e = A / 8 encoder frames, E encoder frames of a row over all audio ranks, D model dim,
K depths of multi-token prediction that the batch has data for.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int32

from jaxthd.config import ComputeConfig, ModelConfig
from jaxthd.models.blocks import Routing
from jaxthd.models.ctc import Transcripts, covered_frames, document_log_probs, label_scores
from jaxthd.models.front_ends.contract import LABEL_LOSS, Recordings
from jaxthd.models.hybrid import HybridDecoder
from jaxthd.models.layers import LayerNorm, Linear, RMSNorm
from jaxthd.models.mtp import MultiTokenPrediction
from jaxthd.ops.activations import relu_squared, silu
from jaxthd.ops.cross_entropy import (
    HeadBlocks,
    HeadInputs,
    TokenScores,
    supervised_log_probs,
    supervised_scores,
    supervised_top_k,
)
from jaxthd.ops.numerics import accumulation_dtype
from jaxthd.packing.batch import Batch
from jaxthd.packing.segments import Segments, make_segments
from jaxthd.parallel.mesh import AUDIO_AXES, CONTEXT, DATA, PIPELINE, TENSOR, ranks_of
from jaxthd.parallel.params import (
    DECODER_FSDP,
    ENCODER_FSDP,
    Buffer,
    Init,
    applied,
    gathered,
    over_vocabulary,
)
from jaxthd.parallel.stages import Stages
from jaxthd.parallel.tensor import Residual, vocabulary_rows

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu2": relu_squared,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "silu": silu,
}
"""By model.adapter_form."""
_NOWHERE = np.iinfo(np.int32).max
"""A token that no vocabulary has."""
Scored = tuple[Array, Array, Array, Array, int, int, tuple[str, ...]]
"""The first arguments of supervised_log_probs, up to axes."""


class Adapter(nnx.Module):
    """Encoder outputs -> token embeddings: one linear layer, or one of the forms of model.adapter_form."""

    def __init__(self, dim: int, config: ModelConfig, init: Init) -> None:
        """dim: of the encoder's outputs."""
        inner, bias, self.form = config.adapter_dim, config.adapter_bias, config.adapter_form
        has_norm = inner > 0 and self.form == "relu2"
        self.norm = RMSNorm(dim, config.llm.norm_eps, init) if has_norm else None
        self.up = Linear(dim, inner, init, bias=bias and not has_norm) if inner else None
        self.out = Linear(inner or dim, config.llm.dim, init, bias=bias)
        is_normed = inner > 0 and self.form == "silu"
        self.norm_after = LayerNorm(config.llm.dim, init, config.llm.norm_eps) if is_normed else None

    def __call__(self, x_ED: Float[Array, "e D"]) -> Float[Array, "e O"]:
        if self.norm is not None:
            x_ED = self.norm(x_ED)
        if self.up is not None:
            x_ED = _ACTIVATIONS[self.form](self.up(x_ED))
        x_ED = self.out(x_ED)
        return x_ED if self.norm_after is None else self.norm_after(x_ED)


class FutureScores(NamedTuple):
    """Results of multi-token prediction, by depth.

    log_probs: log-probability of every position's target at that depth, 0 where its weight is 0.
    routing: rows for the depth's MoE layers; None without any.
    """

    log_probs: Float[Array, "K N"]
    routing: list[Routing | None]


class SpeechLM(nnx.Module):
    """The speech LLM as one module tree. With nnx.Rngs for init it is made for one device, without a mesh.

    The forward pass of training comes in three parts, which a pipeline runs on the ranks and at the times of
    its schedule: `embed`, the decoder's stages, `target_log_probs`.

    config.encoder None: a text-only model; encoder and adapter are None, and batches have no audio.
    stages: of the pipeline; None for one stage. decoder_fsdp: axes over which the decoder's matrices are
    FSDP-sharded. max_documents: the most of a row; see Segments.documents. lora_documents: as in AdaptConfig.
    Raises ValueError if the pipeline and tensor ranks cannot share the vocabulary, or the times that the head
    tells (config.marks), and if these have no head of their own.
    """

    def __init__(
        self,
        config: ModelConfig,
        init: Init | nnx.Rngs,
        compute: ComputeConfig = ComputeConfig(),
        stages: Stages | None = None,
        decoder_fsdp: tuple[str, ...] = DECODER_FSDP,
        max_documents: int | None = None,
        lora_documents: Literal["all", "audio"] = "all",
    ) -> None:
        init = Init.of(init, compute)
        vocabulary = (over_vocabulary(config.llm.vocab_size), None)
        shape, dim = (config.llm.vocab_size, config.llm.dim), config.llm.dim
        everywhere, decoder = init.with_fsdp(ENCODER_FSDP), init.with_fsdp(decoder_fsdp)
        self.encoder = config.encoder.build(everywhere, compute) if config.encoder else None
        self.adapter = Adapter(config.encoder.output_dim, config, everywhere) if config.encoder else None
        is_tied, head_std = config.llm.tied_embedding, dim**-0.5
        self.embedding = decoder.normal(shape, vocabulary, std=head_std if is_tied else 1.0)
        self.decoder = HybridDecoder(config.llm, decoder, compute, stages)
        times = config.marks.classes
        entries = times or config.llm.vocab_size
        rows = (over_vocabulary(entries), None)
        self.head = None if is_tied else decoder.normal((entries, dim), rows, std=head_std)
        # For patterns of names (models/adapt.py): one matrix is both.
        self.also_named = (("embedding", "head"),) if is_tied else ()
        # All ranks of a pipeline use it.
        everyone = decoder.with_fsdp(tuple(dict.fromkeys((*decoder_fsdp, PIPELINE))))
        self.mtp = MultiTokenPrediction(config.llm, everyone, compute) if config.llm.mtp_modules else None
        self.config, self.compute = config, compute
        self.is_wide = config.encoder is not None and config.encoder.is_wide
        self.residual = Residual.of(init.mesh, compute.sequence_sharded)
        ranks = ranks_of(init.mesh, (PIPELINE, TENSOR))
        if config.llm.vocab_size % ranks:
            raise ValueError(
                f"model.llm.vocab_size is {config.llm.vocab_size}, expected a multiple of {ranks}, the ranks "
                "of mesh.pipeline x mesh.tensor, which share the vocabulary."
            )
        if times and (is_tied or times % ranks):
            raise ValueError(
                f"model.marks.classes is {times} with model.llm.tied_embedding {is_tied}; expected a "
                f"multiple of {ranks}, the ranks of mesh.pipeline x mesh.tensor, and False: the head is not "
                "the embedding."
            )
        self.vocabulary_axes = (PIPELINE, TENSOR) if ranks > 1 else ()
        self.has_pipeline = init.mesh.pipeline > 1
        self.max_documents, self.lora_documents = max_documents, lora_documents
        self.window = config.llm.window
        self.mesh = init.mesh

    def log_probs(
        self, batch: Batch, *, axes: tuple[str, ...], train: bool
    ) -> tuple[Float[Array, "R T"], dict[str, Any]]:
        """Log-probability of every position's target, 0 where weights is 0. And the encoder's new buffers.

        For a rank that has all layers, so not in a pipeline.
        axes: the mesh axes' names, inside shard_map over all of them; () on one device without a mesh.
        train: BatchNorm uses statistics of the batch (over all valid frames of all ranks), else stored ones.
        """
        x_nD, buffers = self.embed(batch, axes=axes, train=train)
        x_nD, _ = self.decoder(x_nD, self.segments(batch, axes))
        return self.target_log_probs(x_nD, batch).reshape(batch.tokens.shape), buffers

    def segments(self, batch: Batch, axes: tuple[str, ...], *, in_stages: bool = True) -> Segments:
        """The batch's documents for the decoder's blocks. in_stages: False for what all ranks of a pipeline
        run at the same time (Segments.uniform_program).
        """
        uniform_program = not in_stages or len(self.decoder.stages.patterns) == 1
        segments = make_segments(
            batch.segment_ids,
            batch.positions,
            batch.prefixes,
            block=self.compute.blocks.attention,
            axis=CONTEXT if axes else None,
            layout=self.compute.layout,
            documents=self.max_documents,
            uniform_program=uniform_program,
            splits_RK=batch.splits,
            uniform_over=(DATA,)
            if axes and uniform_program and self.compute.context_exchange == "ring"
            else (),
            window=self.window,
        )
        if self.lora_documents == "all":
            return segments
        return replace(segments, adapted=self._with_audio(batch, axes))

    def segments_ahead(self, batch: Batch, depth: int, axes: tuple[str, ...]) -> Segments:
        """The documents for a depth of multi-token prediction: a position is padding if its document has no
        token that far in the future."""
        has_token_RT = batch.future_tokens[:, depth] >= 0
        ahead = batch._replace(
            segment_ids=jnp.where(has_token_RT, batch.segment_ids, 0),
            positions=jnp.where(has_token_RT, batch.positions, 0),
            prefixes=None,
        )
        return self.segments(ahead, axes, in_stages=False)

    def _with_audio(self, batch: Batch, axes: tuple[str, ...]) -> Bool[Array, " N"]:
        """Whether each token's document has audio, on whichever context rank."""
        rows, tokens = batch.tokens.shape
        most = self.max_documents or tokens * ranks_of(self.mesh, (CONTEXT,))
        row_R1 = jnp.arange(rows, dtype=jnp.int32)[:, None]
        audio_RD = jnp.zeros((rows, most + 1), jnp.int32)
        audio_RD = audio_RD.at[row_R1, batch.documents].max(batch.is_audio.astype(jnp.int32))
        if axes:
            audio_RD = jax.lax.pmax(audio_RD, CONTEXT)
        return jnp.take_along_axis(audio_RD, batch.documents, axis=1).reshape(-1) > 0

    def embed(
        self, batch: Batch, *, axes: tuple[str, ...], train: bool, labels: str = ""
    ) -> tuple[Float[Array, "n D"], dict[str, Any]]:
        """The decoder's input: embeddings of text tokens, and encoded audio in the audio slots. And the
        encoder's new buffers, {} without an encoder.

        All pipeline ranks get this tensor rank's tokens of the residual stream. axes, train: see log_probs.
        labels: see embed_with_future.
        """
        (x_nD,), buffers = self._embedded(batch, 0, axes=axes, train=train, labels=labels)
        return x_nD, buffers

    def embed_with_future(
        self,
        batch: Batch,
        *,
        axes: tuple[str, ...],
        train: bool,
        labels: str = "",
        depths: int | None = None,
    ) -> tuple[list[Float[Array, "n D"]], dict[str, Any]]:
        """As embed, with a list of embeddings: those of the tokens, then those of each depth's future tokens.

        Where a document has no token that far on, the embedding is that of token 0, and is not used.
        labels: what the buffers have of the recordings' labels too, contract.LABEL_LOSS or LABEL_SCORES.
        depths: only the first ones; None: all of the batch.
        """
        depths = batch.future_tokens.shape[1] if depths is None else depths
        return self._embedded(batch, depths, axes=axes, train=train, labels=labels)

    def _embedded(
        self,
        batch: Batch,
        depths: int,
        *,
        axes: tuple[str, ...],
        train: bool,
        labels: str,
    ) -> tuple[list[Array], dict[str, Any]]:
        rows, tokens = batch.tokens.shape
        if batch.embeddings is not None:
            alone = not (batch.has_audio or depths)
            return [self._given(batch.embeddings, alone=alone)], self._encoder_buffers()

        def with_future(own_RT: Array, future_RKT: Array) -> Array:
            """The own targets and those of `depths` later tokens, a row after the other."""
            return jnp.concatenate([own_RT[:, None], future_RKT[:, :depths]], axis=1).reshape(rows, -1)

        tokens_RL = jnp.maximum(with_future(batch.tokens, batch.future_tokens), 0)
        buffers = self._encoder_buffers()
        if batch.has_audio:
            audio_RED, buffers = self._encode(batch, axes=axes, train=train, labels=labels)
            slots_RL = with_future(batch.audio_slots, batch.future_audio_slots)
            # A slot has a token or a frame: the other is looked up nowhere and is 0. A choice between them
            # would keep a mask of every dim for the backward pass.
            if self.config.encoder is not None and not self.config.encoder.adds:
                tokens_RL = jnp.where(slots_RL >= 0, _NOWHERE, tokens_RL)
            frames_RL1 = jnp.where(slots_RL >= 0, slots_RL, audio_RED.shape[1])[..., None]
            placed_RLD = jnp.take_along_axis(audio_RED, frames_RL1, axis=1, mode="fill", fill_value=0)
        x_RLD = self._rows_of(gathered(self.embedding), tokens_RL.reshape(-1)).reshape(*tokens_RL.shape, -1)
        if batch.has_audio:
            x_RLD += placed_RLD
        x_RLD = self._multiplied(x_RLD)
        x_RJTD = x_RLD.reshape(rows, 1 + depths, tokens, -1)
        each = [self.residual.own(x_RJTD[:, j].reshape(rows * tokens, -1)) for j in range(1 + depths)]
        return each, buffers

    def _given(self, embeddings_RTD: Array, *, alone: bool) -> Float[Array, "n D"]:
        """Embeddings that the batch brings along. alone: without audio, and without future tokens."""
        dim = self.config.llm.dim
        if embeddings_RTD.shape[-1] != dim or not alone:
            raise ValueError(
                f"the batch brings embeddings of {embeddings_RTD.shape[-1]} dims, {'no' * alone or 'and'} "
                f"audio or future tokens; expected {dim} dims (model.llm.dim), and neither of these"
            )
        return self.residual.own(self._multiplied(embeddings_RTD.reshape(-1, dim).astype(self.compute.dtype)))

    def _multiplied(self, x: Array) -> Array:
        """The decoder's input of embeddings."""
        factor = self.config.llm.embedding_multiplier
        return x if factor == 1 else factor * x

    def _encoder_buffers(self) -> dict[str, Any]:
        return nnx.to_pure_dict(nnx.state(self.encoder, Buffer)) if self.encoder else {}

    def embed_tokens(self, tokens_N: Int32[Array, " N"]) -> Float[Array, "N D"]:
        """The decoder's input of text tokens, on all ranks that share the vocabulary."""
        return self._multiplied(self._rows_of(gathered(self.embedding), tokens_N))

    def _rows_of(self, matrix_VD: Array, tokens_N: Array) -> Array:
        """matrix: the gathered embedding or head."""
        return vocabulary_rows(matrix_VD, tokens_N, self.vocabulary_axes, self.compute.dtype)

    def target_log_probs(
        self,
        x_nD: Float[Array, "n D"],
        batch: Batch,
        head_VD: Float[Array, "V D"] | None = None,
        *,
        temperature: float = 1.0,
    ) -> Float[Array, " N"]:
        """Log-probability of every position's target, 0 where weights is 0.

        x: the last stage's output; in a pipeline 0 on the ranks without that stage. All ranks get the result.
        head: as gathered_head returns it, for a caller with several uses of it. temperature: of the softmax.
        """
        return supervised_log_probs(*self._scored(self._left(x_nD), batch, head_VD, temperature))

    def gathered_head(self) -> Float[Array, "V D"]:
        """This rank's shard of the head's vocabulary, in the parameters' dtype."""
        return gathered(self.embedding if self.head is None else self.head)

    def log_probs_with_future(
        self,
        x_nD: Float[Array, "n D"],
        future: list[Float[Array, "n D"]],
        batch: Batch,
        axes: tuple[str, ...],
        head_VD: Float[Array, "V D"] | None = None,
    ) -> tuple[Float[Array, " N"], FutureScores]:
        """As target_log_probs, with multi-token prediction. future: embeddings from embed_with_future.

        All ranks of a pipeline run it alike. axes: see log_probs.
        """
        assert self.mtp is not None
        h_nD, head_VD = self._normed(x_nD), self._head_for(x_nD, head_VD)
        log_probs, routing = [], []

        def scored(h_nD: Array, targets_RT: Array, weights_RT: Array) -> Array:
            """Log-probabilities of the supervised targets of one head."""
            h_ND = self.residual.whole(h_nD)
            return supervised_log_probs(*self._scored_at(h_ND, head_VD, targets_RT, weights_RT))

        own_N = scored(h_nD, batch.targets, batch.weights)
        for depth, e_nD in enumerate(future):
            h_nD, of_depth = self.mtp(depth, h_nD, e_nD, self.segments_ahead(batch, depth, axes))
            log_probs.append(scored(h_nD, batch.future_targets[:, depth], batch.future_weights[:, depth]))
            routing.append(of_depth)
        return own_N, FutureScores(jnp.stack(log_probs), routing)

    def ctc_log_probs(
        self,
        embedded_nD: Float[Array, "n D"],
        batch: Batch,
        found: Transcripts,
        axis: str | None,
        head_VD: Float[Array, "V D"],
    ) -> Float[Array, " documents"]:
        """log p(labels) of the documents of this batch: see models.ctc.document_log_probs.

        All ranks of a pipeline run it alike. embedded: from embed. found, axis: see models.ctc.transcripts.
        head: see target_log_probs.
        """
        return document_log_probs(*self.ctc_frames(embedded_nD, batch, found, head_VD), batch, found, axis)

    def ctc_frames(
        self,
        embedded_nD: Float[Array, "n D"],
        batch: Batch,
        found: Transcripts,
        head_VD: Float[Array, "V D"],
    ) -> tuple[Float[Array, " N"], Float[Array, "N labels"]]:
        """Log-probabilities, at this rank's audio slots, of the blank and of the labels of their documents; 0
        elsewhere, and for documents that cannot be aligned. Arguments: see ctc_log_probs.
        """
        h_ND = self.residual.whole(self.decoder.norm(embedded_nD))
        blanks_RT, is_frame_RT = jnp.full_like(batch.targets, found.blank), covered_frames(batch, found)
        scored = self._scored_at(h_ND, self._head_for(h_ND, head_VD), blanks_RT, is_frame_RT)
        rows_LD = self._rows_of(head_VD, jnp.append(found.label_ids.reshape(-1), found.blank))
        blank_N = supervised_log_probs(*scored)
        return blank_N, label_scores(h_ND, blank_N, rows_LD, batch, found)

    def top_k_scores(
        self, x_nD: Float[Array, "n D"], batch: Batch, top_k: int, *, temperature: float = 1.0
    ) -> TokenScores:
        """As target_log_probs, with each position's top_k likeliest tokens. Not differentiable."""
        scored = self._scored(self._left(x_nD), batch, temperature=temperature)
        return supervised_top_k(*scored, top_k)

    def scores(self, h_ND: Float[Array, "N D"], batch: Batch) -> tuple[Float[Array, " N"], Bool[Array, " N"]]:
        """As target_log_probs, from the head's input (`hidden`), and whether no token is likelier than it."""
        return supervised_scores(*self._scored(h_ND, batch))

    def hidden(self, x_nD: Float[Array, "n D"]) -> Float[Array, "N D"]:
        """The head's input, from the last stage's output."""
        return self.residual.whole(self.decoder.norm(x_nD))

    def _left(self, x_nD: Array) -> Array:
        """The head's input, on all ranks of a pipeline."""
        return self.residual.whole(self._normed(x_nD))

    def _normed(self, x_nD: Array) -> Array:
        return self.decoder.norm(jax.lax.psum(x_nD, PIPELINE) if self.has_pipeline else x_nD)

    def _head_for(self, h_ND: Array, head_VD: Array | None = None) -> Array:
        return (self.gathered_head() if head_VD is None else head_VD).astype(h_ND.dtype)

    def _scored(
        self, h_ND: Array, batch: Batch, head_VD: Array | None = None, temperature: float = 1.0
    ) -> tuple[HeadInputs, HeadBlocks]:
        head_VD = self._head_for(h_ND, head_VD)
        return self._scored_at(h_ND, head_VD, batch.targets, batch.weights, temperature)

    def _scored_at(
        self, h_ND: Array, head_VD: Array, targets_RT: Array, weights_RT: Array, temperature: float = 1.0
    ) -> tuple[HeadInputs, HeadBlocks]:
        inputs = HeadInputs(h_ND, head_VD, targets_RT.reshape(-1), weights_RT.reshape(-1) > 0)
        sizes = self.compute.blocks
        return inputs, HeadBlocks(sizes.loss, sizes.vocabulary, self.vocabulary_axes, temperature)

    def logits(self, h_nD: Float[Array, "n D"]) -> Float[Array, "n V"]:
        """Logits of this rank's shard of the vocabulary, from the head's input; promote(float32, its dtype).

        ops/sampling.py draws from them; vocabulary_axes are the axes over which they are sharded.
        """
        head_VD, acc = self._head_for(h_nD), accumulation_dtype(h_nD)
        return jnp.einsum("nd,vd->nv", h_nD, head_VD, preferred_element_type=acc)

    def _encode(
        self, batch: Batch, *, axes: tuple[str, ...], train: bool, labels: str
    ) -> tuple[Float[Array, "R E D"], dict[str, Any]]:
        """Encodes this rank's frames, and gathers every rank's embeddings: those of the whole row."""
        if self.encoder is None or self.adapter is None:
            raise ValueError(
                "the batch holds audio, and the model has no encoder (model.encoder is None); expected a "
                "batch without audio arrays: pack with audio_capacity 0, or give the model an encoder"
            )
        rows, frames, width = batch.features.shape
        chunks: Segments = make_segments(
            batch.piece_ids, batch.piece_positions, block=self.compute.blocks.attention, axis=None
        )
        recordings, dtype = None, self.compute.dtype
        wide = jnp.promote_types(jnp.float32, dtype) if self.is_wide else dtype
        if batch.recording_ids is not None and batch.recording_positions is not None:
            given = batch.recording_labels if labels else None
            most = self.max_documents or batch.recording_ids.shape[1]
            recordings = Recordings(
                batch.recording_ids, batch.recording_positions, given, most, labels or LABEL_LOSS
            )
        with jax.default_matmul_precision("highest") if self.is_wide else nullcontext():
            y_ED, buffers = self.encoder(
                batch.features.reshape(rows * frames, width).astype(wide),
                batch.frame_mask.reshape(-1),
                chunks,
                recordings=recordings,
                train=train,
                axes=axes,
                row_axes=AUDIO_AXES if axes else (),
            )
            y_ED = applied(self.adapter, y_ED, keeps_gathered=self.encoder.keeps_gathered)
        y_RED = y_ED.astype(dtype).reshape(rows, batch.piece_ids.shape[1], -1)
        if axes:
            y_RED = jax.lax.all_gather(y_RED, AUDIO_AXES, axis=1, tiled=True)
        return y_RED, buffers
