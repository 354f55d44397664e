"""A tiny speech LLM with every mixer, ragged documents for it, and its loss and gradients on meshes."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from jaxthd.config import (
    BlockSizes,
    ComputeConfig,
    Config,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from jaxthd.models.blocks import MLP, Attention, Mamba2, MoE, Router
from jaxthd.models.front_ends import FastConformer
from jaxthd.packing.assignment import Placement, Shares
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import Gradient, loss_and_gradient
from tests.clips import clip_of
from tests.meshes.batches import even_placement
from tests.meshes.models import deepseek, gpt_oss, kimi_linear, qwen3, qwen3_next
from tests.weights import random_state

CAPACITY, AUDIO, MELS, VOCAB = 64, 256, 8, 50
PLACEHOLDER = VOCAB - 1
Layout = Literal["buffer", "whole"]
CHUNK = 48
"""Longer clips are encoded in chunks of this many mel frames."""
MODEL = ModelConfig(
    encoder=EncoderConfig(
        num_mels=MELS, layers=2, dim=16, heads=2, ffn_dim=24, subsampling_channels=4, conv_kernel=5
    ),
    # Two repeats of one unit: stacked and scanned.
    llm=LLMConfig(
        pattern="ME*-ME*-",
        vocab_size=VOCAB,
        dim=32,
        blocks={
            "*": Attention(heads=4, kv_heads=2, head_dim=8),
            "-": MLP(inner=32),
            "M": Mamba2(heads=4, head_dim=16, state=8, groups=2),
            "E": MoE(experts=4, experts_per_token=2, inner=12, shared_inner=16, router=Router(scale=2.5)),
        },
    ),
    adapter_dim=24,
)
COMPUTE = ComputeConfig(block_sizes=BlockSizes(scan=6, attention=8, loss=16, vocabulary=20, experts=8))


QWEN = replace(MODEL, llm=qwen3(MODEL.llm))
"""The same with the blocks of Qwen3."""
NEXT = replace(MODEL, llm=qwen3_next(MODEL.llm))
"""The same with the blocks of Qwen3-Next."""
GPT = replace(MODEL, llm=gpt_oss(MODEL.llm))
"""The same with the blocks of GPT-OSS."""
DEEPSEEK_V3 = replace(MODEL, llm=deepseek(MODEL.llm))
"""The same with the blocks of DeepSeek-V3."""


KIMI = replace(MODEL, llm=kimi_linear(MODEL.llm))
"""The same with the blocks of Kimi-Linear."""


class Spec(NamedTuple):
    """A document: text tokens, mel frames of each clip, the fraction of its text that is supervised."""

    text: int
    clips: tuple[int, ...] = ()
    supervised: float = 0.7


CASES: dict[str, list[list[Spec]]] = {
    "ragged": [
        [Spec(5, (40,)), Spec(1), Spec(9, (17,)), Spec(20)],
        [Spec(7, (64, 9)), Spec(12), Spec(2, (33,))],
        [Spec(3), Spec(30, (8,)), Spec(4, (21, 40))],
        [Spec(2, (1,)), Spec(2)],
    ],
    "documents of one token": [
        [Spec(1)] * 5 + [Spec(9, (40,)), Spec(1), Spec(1), Spec(3)],
        [Spec(1)] * 9,
        [Spec(1)],
        [Spec(0, (8,)), Spec(0, (5,)), Spec(12)],
    ],
    "one document fills the buffer": [
        [Spec(53, (64, 24))],
        [Spec(64)],
        [Spec(1), Spec(55, (58,))],
        [Spec(3, (9,))],
    ],
    "mostly padding": [[Spec(2, (5,))], [], [Spec(3)], []],
    "all rows are padding": [[], [], [], []],
    "text only": [[Spec(20), Spec(3), Spec(17)], [Spec(50)], [Spec(1), Spec(6)], []],
    "nothing supervised": [[Spec(20, (30,), 0.0)], [Spec(1), Spec(1)], [Spec(8, (), 0.0)], []],
    # For data 2, with two rows a rank: 113 supervised tokens against 1.
    "unlike numbers of supervised tokens": [
        [Spec(56, (60,), 1.0)],
        [Spec(60, (), 1.0)],
        [Spec(40, (64,), 0.0)],
        [Spec(2, (64, 64), 1.0), Spec(30, (), 0.0)],
    ],
    "padded": [[Spec(14, (50,))], [Spec(40)], [Spec(3, (12,))], [Spec(9, (30, 20))]],
}


def document(key: str, spec: Spec, rng: np.random.Generator) -> Document:
    text = rng.integers(1, PLACEHOLDER, spec.text).tolist()
    supervised = (rng.random(spec.text) < spec.supervised).tolist()
    for _ in spec.clips:
        at = int(rng.integers(len(text) + 1))
        text.insert(at, PLACEHOLDER)
        supervised.insert(at, False)
    mels = [rng.normal(size=(n, MELS)).astype(np.float32) for n in spec.clips]
    clips = [np.split(clip, range(CHUNK, len(clip), CHUNK)) for clip in mels]
    return Document.splice(key, text, supervised, [clip_of(clip) for clip in clips], PLACEHOLDER)


@functools.cache
def documents(case: str, seed: int = 3) -> list[list[Document]]:
    rng = np.random.default_rng([seed, list(CASES).index(case)])
    return [[document(f"{r}.{d}", s, rng) for d, s in enumerate(row)] for r, row in enumerate(CASES[case])]


def shares_of(context: int, layout: Layout) -> Shares | None:
    return Shares(context, 2 * CAPACITY, 3) if layout == "whole" and context > 1 else None


def placement(row: list[Document], context: int, layout: Layout) -> Placement | None:
    """In the layout "whole": one that cuts documents until attention is even."""
    shares = shares_of(context, layout)
    return even_placement(row, shares) if shares and row else None


def pack(rows: list[list[Document]], context: int, layout: Layout = "buffer", *, audio: int = AUDIO) -> Batch:
    """Packs the rows. In the layout "whole" they take more slots, in the order that `placement` gives."""
    capacity = CAPACITY if layout == "buffer" else 2 * CAPACITY
    shares = shares_of(context, layout)
    packed = [
        pack_row(
            row,
            capacity=capacity,
            audio_capacity=audio,
            front_end=FastConformer(num_mels=MELS),
            max_documents=16,
            context=context,
            audio_ranks=context,
            order_seed=None,
            layout=layout,
            shares=shares,
            placement=placement(row, context, layout),
        )[0]
        for row in rows
    ]
    return concatenate_rows(packed)


def run_config(
    data: int, context: int, exchange: str, dtype: str, layout: Layout = "buffer", microbatches: int = 1
) -> Config:
    """The config of a run. One device keeps activations, more recompute them: the result is the same."""
    alone = data == context == 1
    compute = vars(COMPUTE) | {"context_exchange": exchange, "dtype": dtype, "context_layout": layout}
    compute |= {"remat": "none" if alone else "full"}
    return Config(
        mesh=MeshConfig(data=data, context=context),
        model=MODEL,
        compute=ComputeConfig(**compute),
        train=TrainConfig(steps=10, warmup_steps=0, learning_rate=1e-2, microbatches=microbatches),
    )


@functools.cache
def state(dtype: str, model: ModelConfig = MODEL) -> tuple[Any, Any]:
    """(parameters, buffers)."""
    config = replace(run_config(1, 1, "ring", "float32"), model=model)
    filled = random_state(Blueprint(config).model)[1:]
    return jax.tree.map(lambda x: x.astype(dtype), filled)


@functools.cache
def program(
    data: int,
    context: int,
    exchange: str,
    dtype: str,
    layout: Layout = "buffer",
    microbatches: int = 1,
) -> Callable[..., Gradient]:
    config = run_config(data, context, exchange, dtype, layout, microbatches)
    return jax.jit(loss_and_gradient(Blueprint(config), make_mesh(config.mesh)))


def evaluate(
    batch: Batch,
    data: int = 1,
    context: int = 1,
    exchange: str = "ring",
    dtype: str = "float64",
    layout: Layout = "buffer",
    microbatches: int = 1,
) -> Gradient:
    with jax.enable_x64(dtype == "float64"):
        on_mesh = put_batch(batch, make_mesh(MeshConfig(data=data, context=context)))
        results = program(data, context, exchange, dtype, layout, microbatches)(*state(dtype), on_mesh)
        return jax.tree.map(np.asarray, results)
