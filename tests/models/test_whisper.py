"""Whisper's windows, attended in blocks of any size, are each window alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from jaxthd.config import ComputeConfig
from jaxthd.models.front_ends.whisper import module
from jaxthd.models.front_ends.whisper.settings import Whisper
from jaxthd.packing.segments import make_segments
from jaxthd.parallel.params import Init

CONFIG = Whisper(mel_bands=8, layers=2, model_dim=16, heads=2, ffn_dim=24, positions=20, tail="window")
WINDOWS = 3
PADDING = 2
"""Outputs behind the windows."""


@pytest.mark.parametrize("block", [7, 20, 512])
def test_windows_in_blocks_of_any_size_are_each_alone(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last size is longer than a window, so that compute.blocks' is taken."""
    monkeypatch.setattr(module, "WINDOW_BLOCK", block)
    rng, outputs, read = np.random.default_rng(0), CONFIG.positions // CONFIG.joined, 2 * CONFIG.joined
    with jax.enable_x64(True):
        encoder = module.WhisperEncoder(CONFIG, Init.of(nnx.Rngs(0), ComputeConfig()))
        graph, params, buffers = nnx.split(encoder, nnx.Param, ...)
        params = jax.tree.map(lambda w: jnp.asarray(0.3 * rng.normal(size=w.shape)), params)
        features = jnp.asarray(rng.normal(size=(read * (WINDOWS * outputs + PADDING), CONFIG.mel_bands)))
        weights = jnp.asarray(rng.normal(size=(WINDOWS * outputs + PADDING, CONFIG.dim)))

        def encoded(params: Any, features: Array, ids: np.ndarray, positions: np.ndarray) -> Array:
            pieces = make_segments(jnp.asarray(ids)[None], jnp.asarray(positions)[None], block=4, axis=None)
            mask = jnp.repeat(jnp.asarray(ids > 0), read)
            out: Array = nnx.merge(graph, params, buffers)(features, mask, pieces)[0]
            return out

        def packed(params: Any) -> Array:
            ids = np.repeat([*range(1, WINDOWS + 1), 0], [outputs] * WINDOWS + [PADDING]).astype(np.int32)
            positions = np.append(np.tile(np.arange(outputs), WINDOWS), [0] * PADDING).astype(np.int32)
            return (encoded(params, features, ids, positions) * weights).sum()

        def alone(params: Any) -> Array:
            own, at = np.ones(outputs, np.int32), np.arange(outputs, dtype=np.int32)
            total = jnp.zeros(())
            for window in range(WINDOWS):
                mine = slice(window * outputs, (window + 1) * outputs)
                frames = features[read * mine.start : read * mine.stop]
                total += (encoded(params, frames, own, at) * weights[mine]).sum()
            return total

        got, want = (jax.jit(jax.value_and_grad(how))(params) for how in (packed, alone))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), got, want)
