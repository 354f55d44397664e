"""Modules used alone: made with nnx.Rngs, on one device, without a mesh, differentiated by nnx.grad."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxthd.config import BlockSizes, ComputeConfig, EncoderConfig, LLMConfig
from jaxthd.config.block import usual_blocks
from jaxthd.models.blocks import (
    MLP,
    Attention,
    AttentionMixer,
    DeltaMixer,
    GatedDelta,
    KimiDelta,
    KimiDeltaMixer,
    LatentAttentionMixer,
    Mamba2,
    Mamba2Mixer,
    Mixer,
    MLPMixer,
    MoE,
    MoEMixer,
    RoutedMixer,
)
from jaxthd.models.front_ends.fastconformer.module import FastConformerEncoder
from jaxthd.models.front_ends.fastconformer.settings import SUBSAMPLING
from jaxthd.models.hybrid import Block, HybridDecoder
from jaxthd.models.mtp import MultiTokenPrediction
from jaxthd.packing.segments import Segments, segments_of
from jaxthd.parallel.params import Init
from tests.helpers import assert_same
from tests.meshes.models import LATENT, deepseek, gpt_oss, qwen3, qwen3_next

LENGTHS = (7, 1, 12, 3, 5)
CAPACITY = 32
DIM = 16
BLOCK = 8
ATTENTION, MAMBA = Attention(heads=4, kv_heads=2, head_dim=6), Mamba2(heads=4, head_dim=8, state=8, groups=2)
PERCEPTRON, EXPERTS = MLP(inner=24), MoE(experts=5, inner=7, shared_inner=9)
LLM = LLMConfig(
    pattern="ME*-M",
    dim=DIM,
    blocks={"*": ATTENTION, "-": PERCEPTRON, "M": MAMBA, "E": EXPERTS},
    mtp_pattern="*E",
)
QWEN3_LLM, QWEN3_NEXT_LLM, GPT_OSS_LLM, DEEPSEEK_LLM = (
    family(LLM) for family in (qwen3, qwen3_next, gpt_oss, deepseek)
)
WINDOW = GPT_OSS_LLM.window
COMPUTE = ComputeConfig(dtype="float64", block_sizes=BlockSizes(scan=6, attention=BLOCK, experts=4))
PADDING = 30.0
"""Size of values in padding, against 1 in documents, so that a leak shows."""


def decoder_output(decoder: HybridDecoder, x_ND: Any, segments: Segments) -> Any:
    return decoder.norm(decoder(x_ND, segments)[0])


def depth_output(mtp: MultiTokenPrediction, x_ND: Any, segments: Segments) -> Any:
    return mtp(0, x_ND, jnp.flip(x_ND, axis=1), segments)[0]


MODULES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "attention": (partial(AttentionMixer, ATTENTION), AttentionMixer.__call__),
    "latent attention": (
        lambda _, *given: LatentAttentionMixer(LATENT, DEEPSEEK_LLM, *given),
        LatentAttentionMixer.__call__,
    ),
    "Mamba2": (partial(Mamba2Mixer, MAMBA), Mamba2Mixer.__call__),
    "gated delta rule": (partial(DeltaMixer, GatedDelta()), DeltaMixer.__call__),
    "Kimi delta attention": (partial(KimiDeltaMixer, KimiDelta(head_dim=7)), KimiDeltaMixer.__call__),
    "MLP": (partial(MLPMixer, PERCEPTRON), MLPMixer.__call__),
    "MoE": (partial(MoEMixer, EXPERTS), MoEMixer.__call__),
    "block": (lambda *given: Block("M", *given), lambda block, x, segments: block(x, segments)[0]),
    "decoder": (HybridDecoder, decoder_output),
    "decoder of Qwen3": (lambda _, *given: HybridDecoder(QWEN3_LLM, *given), decoder_output),
    "decoder of Qwen3-Next": (lambda _, *given: HybridDecoder(QWEN3_NEXT_LLM, *given), decoder_output),
    "decoder of GPT-OSS": (lambda _, *given: HybridDecoder(GPT_OSS_LLM, *given), decoder_output),
    "multi-token prediction": (MultiTokenPrediction, depth_output),
}


@pytest.mark.parametrize("name", MODULES)
def test_packed_equals_each_document_alone(name: str):
    """Compares outputs, and gradients of all parameters and of inputs, in float64."""
    make, apply = MODULES[name]
    rng = np.random.default_rng(0)
    x_ND, dy_ND = rng.normal(size=(2, CAPACITY, DIM))
    real = sum(LENGTHS)
    x_ND[real:] *= PADDING
    dy_ND[real:] = 0
    with jax.enable_x64(True):
        module = make(LLM, nnx.Rngs(0), COMPUTE)

        @nnx.jit
        def run(module: Any, x_ND: Any, dy_ND: Any, segments: Segments) -> Any:
            def total(module: Any, x_ND: Any) -> Any:
                y_ND = apply(module, x_ND, segments)
                return (y_ND * dy_ND).sum(), y_ND

            gradients, y_ND = nnx.grad(total, argnums=(0, 1), has_aux=True)(module, x_ND)
            return y_ND, nnx.to_pure_dict(gradients[0]), gradients[1]

        y_ND, dparams, dx_ND = run(
            module, x_ND, dy_ND, segments_of(LENGTHS, CAPACITY, block=BLOCK, window=WINDOW)
        )
        assert y_ND.dtype == jnp.float64
        assert not np.any(dx_ND[real:])
        total = jax.tree.map(np.zeros_like, dparams)
        start = 0
        for length in LENGTHS:
            mine = slice(start, start + length)
            start += length
            segments = segments_of([length], CAPACITY, block=BLOCK, window=WINDOW)
            segments = replace(segments, documents=len(LENGTHS))
            alone = [np.full_like(x_ND, PADDING), np.zeros_like(dy_ND)]
            alone[0][:length], alone[1][:length] = x_ND[mine], dy_ND[mine]
            y, dparams_alone, dx = run(module, *alone, segments)
            assert_same((y_ND[mine], dx_ND[mine]), (y[:length], dx[:length]), 1e-10)
            total = jax.tree.map(np.add, total, dparams_alone)
        assert_same(dparams, total, 1e-10)
        assert all(np.any(g) for g in jax.tree.leaves(total))


def test_clips_packed_equal_each_clip_alone():
    config = EncoderConfig(num_mels=16, layers=1, dim=DIM, heads=2, ffn_dim=24, subsampling_channels=4)
    rng = np.random.default_rng(0)
    mels_AM = rng.normal(size=(CAPACITY * SUBSAMPLING, config.num_mels))
    lengths = [SUBSAMPLING * n - 3 for n in LENGTHS]
    mask_A = np.zeros(len(mels_AM), bool)
    start, spans = 0, []
    for length, frames in zip(lengths, LENGTHS, strict=True):
        spans.append(slice(start, start + frames))
        mask_A[SUBSAMPLING * start : SUBSAMPLING * start + length] = True
        start += frames
    with jax.enable_x64(True):
        encoder = FastConformerEncoder(config, nnx.Rngs(0), COMPUTE)

        @nnx.jit
        def run(encoder: FastConformerEncoder, mels_AM: Any, mask_A: Any, segments: Segments) -> Any:
            return encoder(mels_AM, mask_A, segments)[0]

        y_ED = run(encoder, mels_AM, mask_A, segments_of(LENGTHS, CAPACITY, block=BLOCK))
        for span, frames in zip(spans, LENGTHS, strict=True):
            segments = replace(segments_of([frames], CAPACITY, block=BLOCK), documents=len(LENGTHS))
            alone = [np.zeros_like(mels_AM), np.zeros_like(mask_A)]
            mine = slice(SUBSAMPLING * span.start, SUBSAMPLING * span.stop)
            for whole, part in zip(alone, (mels_AM, mask_A), strict=True):
                whole[: SUBSAMPLING * frames] = part[mine]
            assert_same(y_ED[span], run(encoder, *alone, segments)[:frames], 1e-10)


def test_the_defaults_are_enough():
    """Makes the modules as docs/api.md shows."""
    mixer = Mamba2Mixer(Mamba2(), LLMConfig(dim=64), nnx.Rngs(0))
    segments = segments_of([5, 3])
    gradients = nnx.jit(nnx.grad(lambda m: m(jnp.ones((8, 64)), segments).sum()))(mixer)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(gradients))


def test_rngs_give_the_draws_of_their_key():
    """Init holds a key stream; nnx.Rngs gives it its first key."""
    with_rngs = nnx.state(MLPMixer(PERCEPTRON, LLM, nnx.Rngs(3)))
    with_init = nnx.state(MLPMixer(PERCEPTRON, LLM, Init(nnx.Rngs(3).params())))
    jax.tree.map(np.testing.assert_array_equal, with_rngs, with_init)


@pytest.mark.parametrize("letter", usual_blocks())
def test_every_kind_of_block_offers_a_mixer(letter: str):
    block = usual_blocks()[letter]
    mixer = nnx.eval_shape(lambda: block.build(LLM, Init(jax.random.key(0)), ComputeConfig()))
    assert letter in block.usual()
    assert isinstance(mixer, Mixer)
    assert isinstance(mixer, RoutedMixer) == block.routes == (letter == "E")
    assert block.cost(2 * DIM) > block.cost(DIM) > 0
