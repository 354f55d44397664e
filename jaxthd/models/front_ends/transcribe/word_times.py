"""The head that finds words in time.

Legend: E outputs of the encoder, u frames of the head for each, N = u E, D model dim, C classes.
"""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig
from jaxthd.models.front_ends.stacked.module import Pieces, Transformer
from jaxthd.models.front_ends.stacked.settings import Stacked
from jaxthd.models.front_ends.transcribe.settings import Transcribe
from jaxthd.models.layers import Linear
from jaxthd.packing.segments import Segments, make_segments
from jaxthd.parallel.params import Init, applied


class _Frames(nnx.Module):
    """A linear layer that makes u frames of an output; they share a bias."""

    def __init__(self, dim: int, frames: int, init: Init) -> None:
        self.w, self.bias = init.normal((dim, frames * dim), projects=True), init.zeros((dim,))

    def __call__(self, x_ED: Float[Array, "E D"]) -> Float[Array, "N D"]:
        y_EF = x_ED @ self.w[...].astype(x_ED.dtype)
        return y_EF.reshape(-1, x_ED.shape[1]) + self.bias[...].astype(x_ED.dtype)


class WordTimesHead(Transformer):
    """x + scale * Transformer(x), x being several frames of each output; then the logits of the classes."""

    def __init__(self, config: Transcribe, blocks: Stacked, init: Init, compute: ComputeConfig) -> None:
        super().__init__(blocks, init, compute)
        self.upsample = _Frames(config.dim, config.word_times.upsampling, init)
        self.classes = Linear(config.dim, config.word_times.classes, init, bias=True)
        self.config = config

    def hidden(
        self,
        x_ED: Float[Array, "E D"],
        segments: Segments,
        hidden_E: Array,
        axes: tuple[str, ...],
        row_axes: tuple[str, ...],
    ) -> Float[Array, "N D"]:
        """The input of the classes. x: the encoder's outputs before their norm. segments: their pieces.
        hidden: as in Pieces. axes, row_axes: as in the contract (Encoder)."""
        frames, config = self.config.word_times.upsampling, self.config
        x_ND = applied(self.upsample, x_ED, keeps_gathered=self.keeps_gathered)
        inside_F = jnp.arange(frames, dtype=jnp.int32)
        by_row = [x.reshape(segments.rows, -1) for x in (segments.ids, segments.positions)]
        ids_RN, first_RN = (jnp.repeat(x, frames, axis=1) for x in by_row)
        positions_RN = (first_RN * frames + jnp.tile(inside_F, by_row[0].shape[1])) * (ids_RN > 0)
        finer = make_segments(ids_RN, positions_RN, block=segments.block, axis=None)
        longest = config.units(config.longest) * frames
        pieces = Pieces.of(finer, frames * jnp.repeat(hidden_E, frames), longest, axes, row_axes)
        scale = jnp.asarray(config.word_times.residual_scale, x_ND.dtype)
        return x_ND + scale * self.run(x_ND, pieces)

    def logits(self, h_ND: Float[Array, "N D"]) -> Float[Array, "N C"]:
        """The logits of all classes."""
        found: Array = applied(self.classes, h_ND, keeps_gathered=self.keeps_gathered)
        return found
