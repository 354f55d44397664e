"""Norms of a layer, and the scale of what it adds, as its block says."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxthd.config import LLMConfig
from jaxthd.models.blocks import MLP, Attention, Parallel
from jaxthd.models.hybrid import Block
from jaxthd.packing.segments import make_segments


@dataclass(frozen=True, kw_only=True)
class After(MLP):
    """An MLP whose output is normalised."""

    norms = "after"


@dataclass(frozen=True, kw_only=True)
class Both(MLP):
    """An MLP between two norms, half of whose output is added."""

    norms = "both"
    residual_scale = 0.5


@pytest.mark.parametrize("kind", [MLP, After, Both])
def test_norms_and_the_residual_scale_are_the_block_s(kind: type[MLP]):
    llm = LLMConfig(pattern="-", dim=16, blocks={"-": kind(inner=24)})
    block, rng = Block("-", llm, nnx.Rngs(0)), np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(8, 16)), jnp.float32)
    for norm in filter(None, (block.norm, block.norm_after)):
        norm.weight[...] = jnp.asarray(rng.uniform(0.5, 2, 16), jnp.float32)
    ids = jnp.ones((1, 8), jnp.int32)
    segments = make_segments(ids, jnp.arange(8, dtype=jnp.int32)[None], block=8, axis=None)

    def rms(y: np.ndarray, norm: nnx.Module | None) -> np.ndarray:
        if norm is None:
            return y
        mean = np.mean(np.square(y, dtype=np.float64), axis=-1, keepdims=True)
        return y / np.sqrt(mean + llm.norm_eps) * np.asarray(norm.weight[...])

    inner = np.maximum(rms(x, block.norm) @ np.asarray(block.mixer.up.w[...], np.float64), 0) ** 2
    want = np.asarray(x) + kind.residual_scale * rms(
        inner @ np.asarray(block.mixer.down.w[...], np.float64), block.norm_after
    )
    np.testing.assert_allclose(block(x, segments)[0], want, rtol=2e-5, atol=2e-5)
    assert (block.norm is None, block.norm_after is None) == (kind is After, kind is MLP)


def test_a_setting_says_that_a_layer_s_norm_is_after_it() -> None:
    attention = Attention(norm_after=True)
    blocks = (
        MLP(norm_after=True),
        attention,
        Parallel(self_attention=attention),
        MLP(),
        Attention(),
        Parallel(),
    )
    assert [block.norms for block in blocks] == ["after"] * 3 + ["before"] * 3
