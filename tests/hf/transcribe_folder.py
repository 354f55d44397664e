"""A tiny folder of Nemotron 3.5 Transcribe with random weights, and its two tokenizers."""

import json
from pathlib import Path

import jax
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxthd.checkpoints.weights import Weights, named_weights
from jaxthd.config import Config, LLMConfig, ModelConfig
from jaxthd.hf.export import export
from jaxthd.hf.transcribe import FAMILY
from jaxthd.models.blocks import Attention, Mamba2, MoE
from jaxthd.models.front_ends import Transcribe
from jaxthd.models.front_ends.transcribe.settings import Diarizer, SpeakerCache, WordTimes
from jaxthd.steps.blueprint import Blueprint
from tests.hf.folders import TEMPLATE

MARKS = ("<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>")
SPECIAL = (*MARKS, *(f"<spk:{n}>" for n in range(3)), "<|audio|>")
CONTENT = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'audio' %}<|audio|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
)


def tokenizer_of(special: tuple[str, ...]) -> tokenizers.Tokenizer:
    """One of bytes, with these special tokens behind them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({x: n for n, x in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(special))
    return made


def write_folder(folder: Path) -> None:
    """A tiny random checkpoint with its tokenizers. The placeholder lies past the vocabulary."""
    words, pieces = tokenizer_of(SPECIAL), tokenizer_of(())
    vocabulary = words.get_vocab_size() - 1
    cache = SpeakerCache(queue=7, moved=5, size=11)
    llm = LLMConfig(
        pattern="ME*E",
        vocab_size=vocabulary,
        dim=40,
        blocks={
            "*": Attention(heads=4, kv_heads=2, head_dim=8),
            "M": Mamba2(heads=4, head_dim=8, state=8, groups=2),
            "E": MoE(experts=4, inner=24, shared_inner=24),
        },
    )
    encoder = Transcribe(
        mel_bands=80,
        layers=2,
        dim=36,
        heads=3,
        head_dim=12,
        ffn_dim=40,
        chunk_outputs=20,
        context_outputs=(4, 3),
        diarizer=Diarizer(
            layers=2, dim=24, heads=3, head_dim=8, ffn_dim=28, head_inner=6, speakers=3, cache=cache
        ),
        word_times=WordTimes(classes=257, blank=256, layers=1, heads=3, head_dim=12, ffn_dim=20),
    )
    model = ModelConfig(encoder=encoder, llm=llm, adapter_bias=True)
    made = jax.jit(lambda: Blueprint(Config(model=model)).initial_weights())()
    arrays = {name: np.asarray(x) for name, x in named_weights(Weights(*made)).items()}
    shapes = {name: x.shape for name, x in arrays.items()}
    take = lambda part: arrays[part.name][part.at]  # noqa: E731
    export(model, shapes, take, FAMILY, folder, settings={"audio_token_id": vocabulary})
    words.save(str(folder / "tokenizer.json"))
    (folder / "alignment_tokenizer").mkdir()
    pieces.save(str(folder / "alignment_tokenizer" / "tokenizer.json"))
    template = TEMPLATE.replace("{{ message.content }}", CONTENT)
    marks = {"bos_token": "<s>", "eos_token": "<|im_end|>", "unk_token": "<unk>", "audio_token": SPECIAL[-1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(marks | {"chat_template": template}))
