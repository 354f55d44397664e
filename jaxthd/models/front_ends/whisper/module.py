"""Whisper's encoder over packed windows: no window sees another one.

Legend: A mel frames on this rank, M mel bands, J outputs of the convolutions that an audio token joins,
E = A / (2 J) audio tokens, N = J E outputs, D model dim.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from jaxthd.config import ComputeConfig, RopeConfig
from jaxthd.models.front_ends.contract import Recordings
from jaxthd.models.front_ends.transformer import BlockSizes, Transformer, sinusoids
from jaxthd.models.front_ends.whisper.settings import Whisper
from jaxthd.models.layers import Linear
from jaxthd.packing.segments import Segments, make_segments
from jaxthd.parallel.params import Buffer, Init, applied

WINDOW_BLOCK = 512
"""Keys of a block of attention in windows that are all at least as long. There nothing is skipped, and large
products are the faster ones: 142 ms in place of 389 with blocks of 64, for two windows of 1,500 with 4 heads
of 64, forward and backward, on two cores of an AMD EPYC."""


class Stem(nnx.Module):
    """Two convolutions of three taps over time, each with GELU; the second one has stride 2."""

    def __init__(self, bands: int, dim: int, init: Init) -> None:
        self.first = Linear(3 * bands, dim, init, bias=True)
        self.second = Linear(3 * dim, dim, init, bias=True)

    def __call__(
        self, x_AM: Float[Array, "A M"], start_A: Bool[Array, " A"], is_there_A: Bool[Array, " A"]
    ) -> Float[Array, "N D"]:
        """start: True on the first frame of a window, which comes at an even number. is_there: False on
        frames that are as if beyond the end of all."""
        starts = start_A[:, None]
        before_AM = jnp.where(starts, 0, jnp.roll(x_AM, 1, axis=0))
        after_AM = jnp.where(jnp.roll(starts, -1, axis=0), 0, jnp.roll(x_AM, -1, axis=0))
        x_AD = _gelu(self.first(jnp.concatenate([before_AM, x_AM, after_AM], axis=1)))
        x_AD = jnp.where(is_there_A[:, None], x_AD, 0)
        even_ND, odd_ND = jnp.unstack(x_AD.reshape(-1, 2, x_AD.shape[1]), axis=1)
        before_ND = jnp.where(starts[::2], 0, jnp.roll(odd_ND, 1, axis=0))
        return _gelu(self.second(jnp.concatenate([before_ND, even_ND, odd_ND], axis=1)))


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


def sines_of(config: Whisper) -> Float[Array, "P D"]:
    """The table of positions, as it is before training; one that is stored may have an odd dim."""
    dim = config.model_dim
    even = max(dim + dim % 2, 4) if config.stored_positions else dim
    return jnp.asarray(sinusoids(config.positions, even)[:, :dim])


class WhisperEncoder(nnx.Module):
    """The stem, positions, Transformer blocks; outputs joined to audio tokens."""

    def __init__(
        self, config: Whisper, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        init = Init.of(init, compute)
        rope = RopeConfig(theta=config.rope_theta, fraction=config.rope_fraction)
        sizes = BlockSizes(config.model_dim, config.heads, config.ffn_dim, key_bias=False, rope=rope)
        self.stem = Stem(config.mel_bands, config.model_dim, init)
        # Published models keep the table as it is: it has no gradient.
        is_stored = config.stored_positions and not config.rope_theta
        self.positions = init.buffer(sines_of(config)) if is_stored else None
        self.transformer = Transformer(sizes, config.layers, init, compute)
        self.config = config
        self.keeps_gathered = init.mesh.pipeline == 1

    def __call__(
        self,
        features_AM: Float[Array, "A M"],
        mask_A: Bool[Array, " A"],
        pieces: Segments,
        *,
        recordings: Recordings | None = None,
        train: bool = False,
        axes: tuple[str, ...] = (),
        row_axes: tuple[str, ...] = (),
    ) -> tuple[Float[Array, "E D"], dict[str, Any]]:
        """See jaxthd.models.front_ends.contract.Encoder."""
        config, joined = self.config, self.config.joined
        begins_E = pieces.positions == 0
        start_A = jnp.zeros(len(mask_A), bool).at[:: 2 * joined].set(begins_E)
        x_AM = jnp.where(mask_A[:, None], features_AM, 0)
        is_there_A = mask_A if config.silence == "absent" else jnp.ones_like(mask_A)
        x_ND = applied(self.stem, x_AM, start_A, is_there_A, keeps_gathered=self.keeps_gathered)
        outputs = self._outputs(pieces, mask_A, start_A)
        if not config.rope_theta:
            table_PD = self._table().astype(x_ND.dtype)
            x_ND = x_ND + table_PD.at[outputs.positions].get(mode="clip")
        x_ND = self.transformer.run(x_ND, outputs)
        if config.join == "mean":
            x_ND = x_ND.reshape(-1, joined, x_ND.shape[1]).mean(axis=1)
        x_ND = self.transformer.normed(x_ND, keeps_gathered=self.keeps_gathered)
        y_ED = jnp.where(pieces.valid[:, None], x_ND.reshape(len(pieces.ids), -1), 0)
        return y_ED, nnx.to_pure_dict(nnx.state(self, Buffer))

    def _table(self) -> Float[Array, "P D"]:
        return sines_of(self.config) if self.positions is None else self.positions[...]

    def _outputs(self, pieces: Segments, mask_A: Array, start_A: Array) -> Segments:
        """The convolutions' outputs; those that others do not see count as padding.

        Where silence is hidden, a piece of n frames has n - 2 of speech, and (n - 1) / 2 outputs, rounded
        down: those behind which there is one more pair's first frame.
        """
        joined, rows = self.config.joined, pieces.rows
        ids_N, positions_E = (x.repeat(joined) for x in (pieces.ids, pieces.positions))
        positions_N = joined * positions_E + jnp.tile(jnp.arange(joined, dtype=jnp.int32), len(pieces.ids))
        is_seen_N = ids_N > 0
        if self.config.silence == "absent":
            is_seen_N &= mask_A[::2]
        elif self.config.silence == "hidden":
            is_seen_N &= jnp.roll(mask_A & ~start_A, -2)[::2].at[-1].set(False)
        ids_RN, positions_RN = (jnp.where(is_seen_N, x, 0).reshape(rows, -1) for x in (ids_N, positions_N))
        are_long = self.config.silence == "heard" and self.config.positions >= WINDOW_BLOCK
        return make_segments(
            ids_RN, positions_RN, block=WINDOW_BLOCK if are_long else pieces.block, axis=None
        )
