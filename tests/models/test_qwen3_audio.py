"""The stem of Qwen3's audio encoder: in parts and at once, it is three convolutions of each chunk alone."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from jaxthd.config import ComputeConfig
from jaxthd.models.front_ends.qwen3_audio.module import Stem
from jaxthd.models.front_ends.qwen3_audio.settings import CHUNK, OUTPUTS, Qwen3Audio
from jaxthd.parallel.params import Init

CONFIG = Qwen3Audio(mel_bands=10, channels=3, dim=8, heads=2)
CHUNKS = 20
"""More than two parts, of which the last is not full."""


def convolved(stem: Stem, x_AM: Array, ends_B: Array) -> Array:
    """The stem by XLA's convolution, all chunks at once; frames behind the end of each layer are zeros."""
    x_BTFC = x_AM.reshape(CHUNKS, CHUNK, -1, 1)
    for conv in stem.convs:
        x_BTFC = jax.lax.conv_general_dilated(
            x_BTFC, conv.w[...], (2, 2), ((1, 1), (1, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        ends_B = -(-ends_B // 2)
        is_there = np.arange(x_BTFC.shape[1]) < ends_B[:, None]
        x_BTFC = jax.nn.gelu(x_BTFC + conv.bias[...], approximate=False) * is_there[:, :, None, None]
    return x_BTFC.reshape(CHUNKS * OUTPUTS, -1) @ stem.out.w[...]


@pytest.mark.parametrize("remat", ["none", "full"])
def test_the_stem_is_three_convolutions_of_each_chunk(remat: Any) -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        compute = replace(ComputeConfig(), remat=remat)
        stem = Stem(CONFIG, Init.of(nnx.Rngs(0), compute), compute)
        assert 2 * stem.chunks < CHUNKS
        graph, params = nnx.split(stem)
        params = jax.tree.map(lambda w: jnp.asarray(rng.normal(size=w.shape)), params)
        x_AM = jnp.asarray(rng.normal(size=(CHUNKS * CHUNK, CONFIG.mel_bands)))
        ends_B = jnp.asarray(rng.integers(1, CHUNK + 1, CHUNKS), jnp.int32)
        weight_ED = jnp.asarray(rng.normal(size=(CHUNKS * OUTPUTS, CONFIG.dim)))

        def both(how: Any) -> Any:
            """The outputs' sum by random weights, and its gradients."""
            loss = lambda params, x: (how(nnx.merge(graph, params), x, ends_B) * weight_ED).sum()  # noqa: E731
            return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(params, x_AM)

        got, want = both(lambda stem, x, ends: stem(x, ends)), both(convolved)
        assert len(jax.tree.leaves(got)) == len(jax.tree.leaves(want)) == 9
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-9), got, want)
