"""Folders of tiny random models with a tokenizer of their own, as one downloads them."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tokenizers

from jaxthd.checkpoints.weights import Weights, named_weights
from jaxthd.config import Config, LLMConfig, ModelConfig, RopeConfig
from jaxthd.hf import qwen3
from jaxthd.hf.export import export
from jaxthd.hf.family import Family
from jaxthd.models.blocks import MLP, Attention
from jaxthd.steps.blueprint import Blueprint

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<so_embedding>")
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> tokenizers.Tokenizer:
    """A BPE of bytes."""
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(SPECIAL), show_progress=False
    )
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def vocabulary_of(tokenizer: tokenizers.Tokenizer) -> int:
    """Rows of an embedding for the tokenizer, with room for a placeholder."""
    return 8 * math.ceil((tokenizer.get_vocab_size() + 1) / 8)


def write_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path, **marks: str) -> None:
    """Writes the tokenizer beside a checkpoint. marks: further special tokens by their role."""
    tokenizer.save(str(folder / "tokenizer.json"))
    known = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", **marks}
    (folder / "tokenizer_config.json").write_text(json.dumps(known | {"chat_template": TEMPLATE}))


def write_weights(
    model: ModelConfig, family: Family, folder: Path, settings: Mapping[str, Any] | None = None
) -> None:
    """Writes a model with random weights as a folder of the family."""
    weights = named_weights(Weights(*jax.jit(lambda: Blueprint(Config(model=model)).initial_weights())()))
    arrays = {name: np.asarray(x) for name, x in weights.items()}
    shapes = {name: x.shape for name, x in arrays.items()}
    export(
        model,
        shapes,
        lambda part: arrays[part.name][part.at],
        family,
        folder,
        settings=dict(settings or {}),
    )


def write_llm(folder: Path, texts: Iterable[str]) -> Path:
    """Writes a Qwen3 of two layers with a tied embedding, its tokenizer and its chat template."""
    tokenizer = train_tokenizer(texts)
    llm = LLMConfig(
        pattern="*-*-",
        vocab_size=vocabulary_of(tokenizer),
        dim=32,
        norm_eps=1e-6,
        tied_embedding=True,
        blocks={
            "*": Attention(heads=2, kv_heads=1, head_dim=16, qk_norm=True, rope=RopeConfig(theta=1e6)),
            "-": MLP(inner=48, form="swiglu"),
        },
    )
    write_weights(ModelConfig(encoder=None, llm=llm), qwen3.FAMILIES[0], folder)
    write_tokenizer(tokenizer, folder)
    return folder
