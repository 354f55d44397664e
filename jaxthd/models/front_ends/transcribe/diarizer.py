"""The diarizer's layers: stacked frames and blocks, then a head with a frame's own rate.

Legend: E outputs, D model dim, I dim of the head, k frames of an output, S speakers.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig
from jaxthd.models.front_ends.stacked.module import Pieces, StackedEncoder
from jaxthd.models.front_ends.transcribe.settings import Transcribe
from jaxthd.models.layers import Linear
from jaxthd.ops.neighbours import extended
from jaxthd.parallel.params import Init, applied


class Head(nnx.Module):
    """A convolution over three outputs that gives each its k frames, then two layers with ReLU before them.

    upsample: [3 I, k I]; its rows are those of the output before, the output, and the one after.
    """

    def __init__(self, config: Transcribe, init: Init) -> None:
        inner, frames = config.diarizer.head_inner, config.stack
        self.upsample = Linear(3 * inner, frames * inner, init, bias=True)
        self.hidden = Linear(inner, inner, init, bias=True)
        self.out = Linear(inner, config.diarizer.speakers, init, bias=True)
        self.frames = frames

    def __call__(self, x_EI: Float[Array, "E I3"]) -> Float[Array, "E S"]:
        """The mean of each output's frames. x: the output before, the output, and the one after."""
        y_AI = self.upsample(x_EI).reshape(len(x_EI) * self.frames, -1)
        logits_AS = self.out(jax.nn.relu(self.hidden(jax.nn.relu(y_AI))))
        return jax.nn.sigmoid(logits_AS).reshape(len(x_EI), self.frames, -1).mean(1)


def _beside(x_EI: Array, pieces: Pieces) -> tuple[Array, Array]:
    """The outputs before and after each one in its piece; 0 where there is none."""
    segments, neighbours = pieces.segments, pieces.neighbours
    x_REI = x_EI.reshape(segments.rows, -1, x_EI.shape[1])
    if neighbours is None:
        window_RWI, remaining_E = jnp.pad(x_REI, ((0, 0), (1, 1), (0, 0))), segments.remaining
    else:
        window_RWI = extended(x_REI, 1, 1, neighbours.is_split, neighbours.axes)
        remaining_E = neighbours.remaining
    before_EI, after_EI = (x.reshape(x_EI.shape) for x in (window_RWI[:, :-2], window_RWI[:, 2:]))
    is_inside = segments.valid & (segments.positions > 0), segments.valid & (remaining_E > 0)
    return jnp.where(is_inside[0][:, None], before_EI, 0), jnp.where(is_inside[1][:, None], after_EI, 0)


class Diarizer(nnx.Module):
    """An encoder and a head. silence: the embedding that stands for silence in a full cache."""

    def __init__(self, config: Transcribe, init: Init, compute: ComputeConfig) -> None:
        self.encoder = StackedEncoder(config.diarizing, init, compute)
        self.inward = Linear(config.diarizer.dim, config.diarizer.head_inner, init, bias=True)
        self.head = Head(config, init)
        self.silence = init.zeros((config.diarizer.dim,))

    def probabilities(self, x_ED: Float[Array, "E D"], pieces: Pieces) -> Float[Array, "E S"]:
        """Probability of each speaker in each output, from the encoder's embeddings. Beyond both ends of a
        piece the convolution reads zeros."""
        keeps = self.encoder.keeps_gathered
        y_EI = applied(self.inward, self.encoder.run(x_ED, pieces), keeps_gathered=keeps)
        before_EI, after_EI = _beside(y_EI, pieces)
        window_EI = jnp.concatenate([before_EI, y_EI, after_EI], axis=1)
        found_ES: Array = applied(self.head, window_EI, keeps_gathered=keeps)
        return found_ES
