"""What check_gpu and compile_for_gpu compute: models, documents of recordings, operations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxthd.config import (
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    ModelConfig,
    RopeConfig,
    TrainConfig,
)
from jaxthd.config.compute import SMALL_BLOCKS
from jaxthd.data.loader import BatchReport, RowReport
from jaxthd.kernels.choose import using
from jaxthd.models.blocks import MLP, Attention, Mamba2, MoE, Router
from jaxthd.models.front_ends import FastConformer
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import AudioPiece, Document
from jaxthd.packing.pack import pack_row

ONE_BILLION = ModelConfig(
    encoder=EncoderConfig(layers=17, dim=512, heads=8, ffn_dim=2048, subsampling_channels=256),
    llm=LLMConfig(
        pattern="M-M-M*-" * 5,
        vocab_size=32768,
        dim=2048,
        blocks={
            "*": Attention(heads=16, kv_heads=4, head_dim=128),
            "-": MLP(inner=8192),
            "M": Mamba2(heads=64, head_dim=64, state=128, groups=8),
        },
    ),
    adapter_dim=2048,
)
TINY = ModelConfig(
    encoder=EncoderConfig(layers=1, dim=32, heads=2, ffn_dim=64, subsampling_channels=8),
    llm=LLMConfig(
        pattern="M-M*-",
        dim=64,
        blocks={
            "*": Attention(heads=2, kv_heads=1, head_dim=32),
            "-": MLP(inner=128),
            "M": Mamba2(heads=4, head_dim=16, state=16),
        },
    ),
    adapter_dim=32,
)
_SIZES: dict[str, int] = {"layers": 24, "dim": 1024, "heads": 8, "ffn_dim": 4096, "subsampling_channels": 256}
ENCODER = EncoderConfig(num_mels=128, linear_bias=False, conv_bias=False, scale_input=False, **_SIZES)
"""0.6B parameters: the sizes of Parakeet-TDT-0.6B."""
DENSE = LLMConfig(
    pattern="*-" * 16,
    vocab_size=32768,
    dim=2048,
    blocks={
        "*": Attention(heads=16, kv_heads=8, head_dim=128, rope=RopeConfig(theta=1e6), qk_norm=True),
        "-": MLP(inner=8192, form="swiglu"),
    },
)
HYBRID = LLMConfig(
    pattern="M-M-M*-" * 7,
    vocab_size=131072,
    dim=3072,
    blocks={
        "*": Attention(heads=32, kv_heads=8, head_dim=128),
        "-": MLP(inner=12288),
        "M": Mamba2(heads=112, head_dim=64, state=128, groups=8),
    },
)
MIXTURE = replace(
    HYBRID,
    pattern="ME*E",
    dim=2688,
    blocks={
        "*": Attention(heads=32, kv_heads=2, head_dim=128),
        "M": Mamba2(heads=64, head_dim=64, state=128, groups=8),
        "E": MoE(experts=128, experts_per_token=6, inner=1856, shared_inner=3712, router=Router(scale=2.5)),
    },
)
"""Nemotron-3 Nano's layers and experts, at a depth whose state one GPU holds."""
MODELS = {
    "tiny": TINY,
    "1b": ONE_BILLION,
    "dense-1b": ModelConfig(encoder=ENCODER, llm=DENSE, adapter_dim=2048),
    "hybrid-4b": ModelConfig(encoder=ENCODER, llm=HYBRID, adapter_dim=2048),
    "moe": ModelConfig(encoder=ENCODER, llm=MIXTURE, adapter_dim=2048),
}


def base_config(tiny: bool, *, kernels: bool) -> Config:
    model = TINY if tiny else ONE_BILLION
    compute = ComputeConfig(dtype="bfloat16", block_sizes=SMALL_BLOCKS if tiny else None)
    config = Config(model=model, compute=compute, train=TrainConfig(warmup_steps=2, learning_rate=1e-4))
    return using(config, attention_backend="auto", scan_backend="auto") if kernels else config


def clip_of(chunks: Sequence[np.ndarray]) -> list[AudioPiece]:
    """A recording whose encoder chunks have these features: a token for each eight frames."""
    return [AudioPiece(x, 0, -(-len(x) // 8), begins=not number) for number, x in enumerate(chunks)]


def recordings(slots: int, model: ModelConfig, most_seconds: float = 60.0, seed: int = 0) -> list[Document]:
    """Documents of one recording and its transcript, with the lengths of real recordings: 1 s to a minute,
    half of them under 8 s. Together they take at most `slots` token slots.
    """
    rng = np.random.default_rng(seed)
    documents: list[Document] = []
    while True:
        length = float(np.clip(rng.lognormal(np.log(min(8.0, most_seconds / 4)), 0.8), 1, most_seconds))
        frames, text = round(100 * length), 6 + round(3.5 * length)
        chunks, encoder = [], model.audio_encoder
        per_chunk = (encoder.longest or frames + 1) - 1
        for start in range(0, frames, per_chunk):
            size = (min(per_chunk, frames - start), encoder.width)
            chunks.append(rng.standard_normal(size, np.float32))
        tokens = [3, *rng.integers(4, min(model.llm.vocab_size, 260), text).tolist()]
        document = Document.splice(str(len(documents)), tokens, [False] + [True] * text, [clip_of(chunks)], 3)
        slots -= len(document)
        if slots < 0:
            return documents
        documents.append(document)


def rows_of(groups: Sequence[Sequence[Document]], model: ModelConfig) -> tuple[Batch, DataConfig]:
    """One row for each group; all rows are as long as the longest needs."""

    def multiple(n: int, of: int) -> int:
        return -(-n // of) * of

    capacity = multiple(max(sum(map(len, group)) for group in groups), 128)
    frames = multiple(max(sum(model.audio_encoder.taken(d.pieces) for d in group) for group in groups), 128)
    sizes: dict[str, Any] = {
        "capacity": capacity,
        "audio_capacity": frames,
        "max_documents": max(map(len, groups)),
    }
    rows = [pack_row(group, **sizes, front_end=model.audio_encoder)[0] for group in groups]
    batch = jax.tree.map(lambda *x: np.concatenate(x), *rows)
    return batch, DataConfig(rows=len(groups), workers=0, **sizes)


def attention_and_scan_flops(config: Config, documents: Sequence[Document]) -> float:
    """Of attention's scores and values over allowed pairs only, in decoder and encoder, and of Mamba2's
    states, as a recurrence would compute them; forward and backward."""
    llm, encoder = config.model.llm, config.model.audio_encoder
    pairs = sum(len(d) * (len(d) + 1) / 2 for d in documents)
    seen = [llm.blocks[x].attention(1) for x in llm.letters]
    width = sum(x.heads * x.key_dim for x in seen if x)
    assert isinstance(encoder, FastConformer)
    chunks = [-(-len(piece.features) // 8) for d in documents for piece in d.pieces]
    attended = sum(n * n for n in chunks) * encoder.layers
    scans = [llm.blocks[x].scan(1) for x in llm.letters]
    scanned = sum(map(len, documents)) * sum(2 * x.heads * x.head_dim * x.state for x in scans if x)
    return 6 * (2 * pairs * width + 2 * attended * encoder.dim + scanned)


def report_of(documents: list[Document], config: Config) -> BatchReport:
    """The report of a step with these documents."""
    tokens, frames = (
        sum(map(len, documents)),
        sum(config.model.audio_encoder.taken(d.pieces) for d in documents),
    )
    supervised = sum(int(d.supervised.sum()) for d in documents)
    row = RowReport(
        row=0,
        documents=len(documents),
        real_tokens=tokens,
        supervised_tokens=supervised,
        capacity_tokens=config.data.capacity,
        audio_seconds=frames / 100,
        imbalance=1.0,
        segments=len(documents),
    )
    return BatchReport((row,), ())
