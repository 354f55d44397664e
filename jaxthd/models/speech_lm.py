"""The speech LLM: encoder -> adapter -> embeddings in the sequence -> hybrid decoder -> log-probabilities.

Runs inside the step's shard_map: arrays are this rank's share.

Legend: R rows on this rank, T tokens of a row on this rank, N = R * T, A mel frames of a row on this rank,
M mel bands, e = A / 8 encoder frames, E encoder frames of a row over all audio ranks, D model dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ModelConfig
from jaxthd.mesh import AUDIO_AXES, CONTEXT
from jaxthd.models.fastconformer import FastConformer
from jaxthd.models.hybrid import HybridDecoder
from jaxthd.models.layers import Linear, RMSNorm, relu_squared
from jaxthd.ops.cross_entropy import supervised_log_probs
from jaxthd.packing.batch import Batch
from jaxthd.packing.segments import Segments, make_segments
from jaxthd.parallel.params import Buffer, Init


class Adapter(nnx.Module):
    """Encoder frames -> token embeddings: one linear layer, or RMSNorm, linear, relu^2, linear."""

    def __init__(self, config: ModelConfig, init: Init) -> None:
        dim, inner, out = config.encoder.dim, config.adapter_dim, config.llm.dim
        self.norm = RMSNorm(dim, config.llm.norm_eps, init) if inner else None
        self.up = Linear(dim, inner, init) if inner else None
        self.out = Linear(inner or dim, out, init)

    def __call__(self, x_ED: Float[Array, "e D"]) -> Float[Array, "e O"]:
        if self.norm is not None and self.up is not None:
            x_ED = relu_squared(self.up(self.norm(x_ED)))
        return self.out(x_ED)


class SpeechLM(nnx.Module):
    """One module tree for all parameters; `log_probs` is the forward pass of training and validation."""

    def __init__(self, config: ModelConfig, init: Init) -> None:
        self.encoder = FastConformer(config.encoder, init)
        self.adapter = Adapter(config, init)
        self.embedding = init.normal((config.llm.vocab_size, config.llm.dim), std=1.0)
        self.decoder = HybridDecoder(config, init)
        self.head = init.normal((config.llm.vocab_size, config.llm.dim), std=config.llm.dim**-0.5)
        self.config = config

    def log_probs(
        self, batch: Batch, *, axes: tuple[str, ...], train: bool
    ) -> tuple[Float[Array, "R T"], dict[str, Any]]:
        """Log-probability of every position's target (0 where weights is 0), and the encoder's new buffers.

        axes: the mesh axes' names, inside shard_map over all of them; () on one device without a mesh.
        train: batch statistics in BatchNorm (over all valid frames of all ranks), else the stored ones.
        """
        config = self.config
        x_ND, segments, buffers = self.embed(batch, axes=axes, train=train)
        h_ND = self.decoder(x_ND, segments)
        logp_N = supervised_log_probs(
            h_ND,
            self.head[...].astype(h_ND.dtype),
            batch.targets.reshape(-1),
            batch.weights.reshape(-1) > 0,
            config.loss_block,
            config.vocab_block,
        )
        return logp_N.reshape(batch.tokens.shape), buffers

    def embed(
        self, batch: Batch, *, axes: tuple[str, ...], train: bool
    ) -> tuple[Float[Array, "N D"], Segments, dict[str, Any]]:
        """What the decoder takes: embeddings of text and audio in their places, and the segments; and the
        encoder's new buffers.
        """
        config = self.config
        segments = make_segments(
            batch.segment_ids,
            batch.positions,
            block=config.attention_block,
            axis=CONTEXT if axes else None,
            layout=config.context_layout,
        )
        x_ND = jnp.take(self.embedding[...], batch.tokens.reshape(-1), axis=0).astype(config.dtype)
        buffers: dict[str, Any] = nnx.to_pure_dict(nnx.state(self.encoder, Buffer))
        if batch.mels.shape[1]:
            audio_RED, buffers = self._encode(batch, axes=axes, train=train)
            slots_RT = batch.audio_slots
            placed_RTD = jnp.take_along_axis(audio_RED, jnp.maximum(slots_RT, 0)[..., None], axis=1)
            x_ND = jnp.where((slots_RT >= 0).reshape(-1, 1), placed_RTD.reshape(x_ND.shape), x_ND)
        return x_ND, segments, buffers

    def _encode(
        self, batch: Batch, *, axes: tuple[str, ...], train: bool
    ) -> tuple[Float[Array, "R E D"], dict[str, Any]]:
        """This rank's clips through encoder and adapter; then every rank's embeddings, for the whole row."""
        rows, frames, mels = batch.mels.shape
        chunks: Segments = make_segments(
            batch.chunk_ids, batch.chunk_positions, block=self.config.attention_block, axis=None
        )
        y_ED, buffers = self.encoder(
            batch.mels.reshape(rows * frames, mels).astype(self.config.dtype),
            batch.mel_mask.reshape(-1),
            chunks,
            train=train,
            axes=axes,
            remat=self.config.remat_encoder,
        )
        y_RED = self.adapter(y_ED).reshape(rows, batch.chunk_ids.shape[1], -1)
        if axes:
            y_RED = jax.lax.all_gather(y_RED, AUDIO_AXES, axis=1, tiled=True)
        return y_RED, buffers
