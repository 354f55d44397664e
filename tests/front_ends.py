"""A front end for tests that has what the others lack: pieces that read frames of their neighbours on both
sides, a state that goes from piece to piece of a recording in order, tokens that are not linear in the
frames, and vectors that are added to the embeddings.

Legend: A frames on a device, W numbers of a frame, E outputs (as many as frames), D dim.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from jaxthd.config.front_end import FrontEnd, Piece
from jaxthd.config.values import DERIVED
from jaxthd.models.front_ends.contract import Recordings
from jaxthd.models.layers import Linear
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, applied

LEFT, RIGHT = 3, 2
"""Frames of its neighbours that a piece reads."""
KEPT = 0.8
"""Share of the state that a frame leaves."""


@dataclass(frozen=True, kw_only=True)
class Carried(FrontEnd):
    """Frames of 160 samples, each the mean of every tenth of them; pieces of 12 frames."""

    title = "carried"
    divisible = "recordings"
    reads_recordings = True
    adds = True
    frame_samples: ClassVar[int] = 160
    kind: Annotated[Literal["carried"], DERIVED] = "carried"
    dim: int = 12
    """Dim of an output."""
    owned: int = 12
    """Frames of a piece, without its neighbours'."""

    @property
    def width(self) -> int:
        return 16

    @property
    def longest(self) -> int:
        return LEFT + self.owned + RIGHT

    def pieces(self, samples: int) -> list[Piece]:
        frames, found = samples // self.frame_samples, []
        for begin in range(0, frames, self.owned):
            end = min(begin + self.owned, frames)
            first, stop = max(begin - LEFT, 0), min(end + RIGHT, frames)
            own = end - begin
            found.append(Piece(0, first, stop - first, begin - first, math.isqrt(own - 1) + 1, own))
        return found

    def features(self, samples: np.ndarray, dither: np.random.Generator | None) -> list[np.ndarray]:
        whole = samples[: len(samples) // self.frame_samples * self.frame_samples]
        return [whole.reshape(-1, self.width, 10).mean(-1, dtype=np.float32)]

    def build(self, init: Init, compute: Any) -> "CarriedEncoder":
        return CarriedEncoder(self, init)


class CarriedEncoder(nnx.Module):
    """A convolution over the frames of a piece; a state that each frame adds to; a projection of both."""

    def __init__(self, front_end: Carried, init: Init) -> None:
        taps = LEFT + 1 + RIGHT
        self.conv = Linear(taps * front_end.width, front_end.dim, init, bias=True)
        self.state, self.out = (Linear(front_end.dim, front_end.dim, init) for _ in range(2))
        self.keeps_gathered = True

    def __call__(
        self,
        features_AW: Array,
        mask_A: Array,
        pieces: Segments,
        *,
        recordings: Recordings | None,
        **where: Any,
    ) -> tuple[Array, dict[str, Any]]:
        assert recordings is not None
        x_EW = jnp.where(mask_A[:, None], features_AW, 0)
        window_EF = jnp.concatenate([_moved(x_EW, by, pieces.ids) for by in range(-LEFT, RIGHT + 1)], axis=1)
        x_ED = jnp.tanh(applied(self.conv, window_EF, keeps_gathered=True))
        added_ED = applied(self.state, x_ED, keeps_gathered=True)

        def step(carry: tuple[Array, Array], given: tuple[Array, Array]) -> tuple[Any, Array]:
            """The state after a frame; a recording begins from zero, padding is passed over."""
            (state_D, before), (more_D, number) = carry, given
            begun_D = jnp.where(number == before, state_D, 0)
            state_D = jnp.where(number > 0, KEPT * begun_D + more_D, state_D)
            return (state_D, jnp.where(number > 0, number, before)), state_D

        by_row = added_ED.reshape(pieces.rows, -1, added_ED.shape[1]), recordings.ids
        zero = jnp.zeros(added_ED.shape[1], added_ED.dtype), jnp.int32(0)
        states_RED = jax.vmap(lambda *row: jax.lax.scan(step, zero, row)[1])(*by_row)
        y_ED = applied(self.out, x_ED + jnp.tanh(states_RED.reshape(x_ED.shape)), keeps_gathered=True)
        return jnp.where(pieces.valid[:, None], y_ED, 0), {}


def _moved(x_EW: Array, by: int, ids_E: Array) -> Array:
    """The frame so many places later in the same piece; 0 where there is none."""
    from_ids_E = jnp.roll(ids_E, -by)
    at_E = jnp.arange(len(ids_E)) + by
    same_E = (from_ids_E == ids_E) & (ids_E > 0) & (at_E >= 0) & (at_E < len(ids_E))
    return jnp.where(same_E[:, None], jnp.roll(x_EW, -by, axis=0), 0)
