"""Latent attention by a fused kernel, its absorbed matrices with LoRA, routers that are limited to groups.

That packed documents, meshes and decoding are exact is tested with all other layers: test_alone.py,
test_decoding.py, test_meshes.py, test_shared_prompts.py.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxthd.config import ComputeConfig, Config, LLMConfig
from jaxthd.kernels.choose import attention_shapes, using, with_admitted
from jaxthd.models.blocks import LatentAttentionMixer
from jaxthd.models.blocks.moe import of_best_groups
from jaxthd.models.layers import Linear
from jaxthd.packing.segments import segments_of
from jaxthd.parallel.params import Init
from tests.helpers import assert_same
from tests.meshes.models import LATENT
from tests.ops import fake_kernels
from tests.weights import random_state

LENGTHS, CAPACITY, DIM = (7, 1, 12, 3, 5), 32, 16


@pytest.mark.parametrize("v_head_dim", [7, pytest.param(14, marks=pytest.mark.exhaustive)])
def test_a_fused_kernel_takes_heads_of_unlike_dims(v_head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values narrower and wider than keys. Outputs and all gradients, by a stand-in for Transformer Engine
    that asks for one dim; float32."""
    fake_kernels.install_te(monkeypatch)
    latent = replace(LATENT, heads=3, v_head_dim=v_head_dim)
    llm = LLMConfig(dim=DIM, pattern="L-LEL-LE", blocks={"L": latent})
    rng = np.random.default_rng(0)
    x, dy = (jnp.asarray(rng.normal(size=(CAPACITY, DIM)), jnp.float32) for _ in range(2))
    dy = dy.at[sum(LENGTHS) :].set(0)
    segments = segments_of(LENGTHS, CAPACITY, block=8)

    def run(backend: str) -> Any:
        compute = ComputeConfig(attention_backend=backend)
        abstract = nnx.eval_shape(lambda: LatentAttentionMixer(latent, llm, nnx.Rngs(0), compute))
        graph, params, _ = random_state(abstract)
        params = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), params)
        y, pull = jax.vjp(lambda p, x: nnx.merge(graph, p)(x, segments), params, x)
        return y[: sum(LENGTHS)], *pull(dy)

    for got, want in zip(jax.jit(run, static_argnums=0)("te"), run("xla"), strict=True):
        assert_same(got, want, 1e-5)


def test_the_shape_of_a_kernel_is_that_of_the_expanded_heads() -> None:
    llm = LLMConfig(pattern="L-LEL-LE", blocks={"L": replace(LATENT, heads=6)})
    config = replace(Config(), model=replace(Config().model, llm=llm))
    (shape,) = attention_shapes(config)
    assert (shape.q_heads, shape.kv_heads, shape.head_dim) == (6, 6, 11)
    both = replace(config, model=replace(config.model, llm=replace(llm, pattern="*L")))
    assert [(x.q_heads, x.kv_heads, x.head_dim) for x in attention_shapes(both)] == [(4, 2, 32), (6, 6, 11)]
    told: list[str] = []
    assert (
        with_admitted(using(both, attention_backend="auto"), told.append).compute.attention_backend == "xla"
    )
    assert not [line for line in told if line.startswith("attention")]


@pytest.mark.parametrize("dora", [False, True])
def test_an_absorbed_matrix_has_its_lora(dora: bool) -> None:
    """`matrix` is what a call multiplies by."""
    linear = Linear(6, 9, Init(jax.random.key(0)))
    linear.add_lora(2, 1.5, jax.random.key(1), dora=dora)
    assert linear.lora is not None
    linear.lora.b[...] = jax.random.normal(jax.random.key(2), linear.lora.b.shape)
    if linear.lora.m is not None:
        linear.lora.m[...] = jnp.linspace(0.5, 2, 9)
    plain = linear.w[...]
    found = linear.matrix(jnp.float32)
    assert_same(found, linear(jnp.eye(6)), 1e-5)
    assert np.abs(found - plain).max() > 0.1


def test_a_choice_is_limited_to_the_best_groups() -> None:
    """Against the definition, token by token; scores below 0 too."""
    rng = np.random.default_rng(0)
    for groups, size, most in ((4, 3, 2), (2, 2, 1), (3, 5, 3)):
        scores = rng.normal(size=(50, groups * size))
        want = np.full_like(scores, -np.inf)
        for token, row in enumerate(scores):
            by_group = row.reshape(groups, size)
            sums = [sum(sorted(group)[-2:]) for group in by_group]
            for group in sorted(range(groups), key=lambda g: -sums[g])[:most]:
                at = slice(group * size, group * size + size)
                want[token, at] = row[at]
        with jax.enable_x64(True):
            np.testing.assert_array_equal(of_best_groups(jnp.asarray(scores), groups, most), want)
