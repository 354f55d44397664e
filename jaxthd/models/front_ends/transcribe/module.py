"""A stacked encoder beside a diarizer, over packed pieces of recordings.

Legend: A mel frames on this rank, W numbers of a frame, M mel bands, E outputs, D model dim, S speakers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Float32

from jaxthd.config import ComputeConfig
from jaxthd.models.front_ends.contract import LABEL_LOSS, Recordings
from jaxthd.models.front_ends.stacked.module import Pieces, StackedEncoder
from jaxthd.models.front_ends.transcribe.diarizer import Diarizer
from jaxthd.models.front_ends.transcribe.order import Order
from jaxthd.models.front_ends.transcribe.settings import Transcribe
from jaxthd.models.front_ends.transcribe.speakers import heard_speakers
from jaxthd.models.front_ends.transcribe.word_times import WordTimesHead
from jaxthd.models.layers import LayerNorm
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, applied


class TranscribeEncoder(StackedEncoder):
    """LayerNorm(encoder) + LayerNorm(who speaks) @ a fixed table of sines and cosines."""

    def __init__(
        self, config: Transcribe, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        init = Init.of(init, compute)
        super().__init__(config, init, compute)
        self.diarizer = Diarizer(config, init, compute)
        self.output_norm, self.speaker_norm = (
            LayerNorm(dim, init) for dim in (config.dim, config.diarizer.speakers)
        )
        self.word_times = WordTimesHead(config, config.timing, init, compute) if config.timing else None
        self.config = config
        self.without_gradient = ("diarizer",) if config.word_times.loss else ("diarizer", "word_times")
        self.dtype = None if config.float32 else compute.dtype

    def __call__(
        self,
        features_AW: Float[Array, "A W"],
        mask_A: Bool[Array, " A"],
        segments: Segments,
        *,
        recordings: Recordings | None = None,
        train: bool = False,
        axes: tuple[str, ...] = (),
        row_axes: tuple[str, ...] = (),
    ) -> tuple[Float[Array, "E D"], dict[str, Any]]:
        """See jaxthd.models.front_ends.contract.Encoder."""
        assert recordings is not None
        config, bands = self.config, self.config.mel_bands
        hidden_E = (segments.valid & ~mask_A[:: config.stack]).astype(jnp.int32)
        pieces = Pieces.of(segments, hidden_E, self.longest, axes, row_axes)
        normed_AM, raw_AM = features_AW[:, :bands], features_AW[:, bands : 2 * bands]
        normed_AM = normed_AM.astype(self.dtype or normed_AM.dtype)
        y_ED = self.run(self.embedded(normed_AM, mask_A, len(segments.ids)), pieces)
        is_whole_RE = mask_A.reshape(segments.rows, -1, config.stack)[..., -1]
        order = Order.of(recordings, is_whole_RE, row_axes)
        named_E = jnp.where(segments.valid, features_AW[:: config.stack, -1], 0)
        is_unknown_E = named_E < 0
        has_unknown = jax.lax.pmax(is_unknown_E.any().astype(jnp.int32), axes) > 0
        bit_S = 2.0 ** jnp.arange(config.diarizer.speakers)
        named_ES = (jnp.maximum(named_E, 0)[:, None] // bit_S % 2).astype(features_AW.dtype)

        def diarized() -> Array:
            """Who speaks where the data does not say it."""
            given = raw_AM, mask_A, pieces, order, axes, row_axes
            return jnp.where(is_unknown_E[:, None], heard_speakers(self.diarizer, config, *given), named_ES)

        heard_ES = jax.lax.cond(has_unknown, diarized, lambda: named_ES).astype(y_ED.dtype)
        normed_ES = applied(self.speaker_norm, heard_ES, keeps_gathered=self.keeps_gathered)
        buffers: dict[str, Any] = {}
        if self.word_times is not None and recordings.labels is not None:
            givers_E = order.givers(recordings, row_axes)
            h_ND = self.word_times.hidden(y_ED, segments, hidden_E, givers_E, axes, row_axes)
            labels, rows = self.word_times.labels(recordings, order, row_axes), segments.rows
            found = self.word_times.scores(h_ND, labels, rows, row_axes)
            if recordings.asked == LABEL_LOSS:
                found = self.word_times.loss(found, labels, rows, row_axes)
            buffers[recordings.asked] = found
        y_ED = applied(self.output_norm, y_ED, keeps_gathered=self.keeps_gathered)
        y_ED = y_ED + normed_ES @ jnp.asarray(speaker_table(config.diarizer.speakers, config.dim), y_ED.dtype)
        return jnp.where(segments.valid[:, None], y_ED, 0), buffers


def speaker_table(speakers: int, dim: int) -> Float32[np.ndarray, "S D"]:
    """The embedding of each speaker: sines in even columns, cosines in odd ones, of its number times
    exp(-2 i ln(10000) / dim)."""
    numbers_S1, even_I = (
        np.arange(speakers, dtype=np.float32)[:, None],
        np.arange(0, dim, 2, dtype=np.float32),
    )
    angles_SI = numbers_S1 * np.exp(even_I * np.float32(-np.log(10000.0) / dim))
    return np.stack([np.sin(angles_SI), np.cos(angles_SI)], axis=-1).reshape(speakers, dim)
