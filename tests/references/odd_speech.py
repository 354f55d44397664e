"""Writes a folder of a speech LLM with settings drawn at random, odd where they may be.

    python -m tests.references.odd_speech FAMILY FOLDER --seed N [--ranks 2] [--arrays FILE]

Needs torch and transformers. FAMILY: one of speech_llms.VARIANTS. FOLDER is as save_pretrained writes it,
with speech_llms.py's vocabulary and placeholder, and without a tokenizer. --ranks: the decoder has sizes that
so many tensor ranks can divide, and at least so many layers. --arrays: an archive of what the library makes
of DOCUMENTS, by the keys of speech_llms.py.
"""

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.references.speech_llms import TEXT, VARIANTS, Drawn, computed, save, window_seconds

DOCUMENTS: tuple[Drawn, ...] = (
    (3, (0.3,), 5),
    (2, (2.33, 5.03, 0.77), 4),
    (4, (), 6),
    (1, (31.2, 0.9), 4),
    (2, (100.0,), 5),
)
MELS = (8, 13, 16, 40, 80, 128)


class Draw(random.Random):
    """Draws a family's sizes. ranks: 1 or 2, which divide its decoder."""

    def __init__(self, name: str, seed: int, ranks: int) -> None:
        super().__init__(f"{name} {seed}")
        self.ranks = ranks

    def width(self, least: int, most: int) -> int:
        """A width that the ranks can divide."""
        return self.ranks * self.randint(-(-least // self.ranks), most // self.ranks)


def _heads(draw: Draw) -> dict[str, int]:
    """Heads; each rank has as many, and keys and values of its own or those that both have."""
    few = draw.choice((1, 2, 4 if draw.ranks == 2 else 3))
    groups = draw.choice((1, 2, 3)) * (draw.ranks if few == 1 else 1)
    return {"num_key_value_heads": few, "num_attention_heads": few * groups}


def _rope(draw: Draw) -> dict[str, Any]:
    kind = draw.choice(("default", "default", "linear", "yarn", "llama3"))
    fields: dict[str, Any] = {"rope_type": kind, "rope_theta": draw.choice((1e3, 1e4, 1e6))}
    if kind != "default":
        fields["factor"] = draw.choice((2.5, 4.0))
    if kind in ("yarn", "llama3"):
        fields["original_max_position_embeddings"] = draw.choice((64, 128))
    if kind == "llama3":
        fields |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return fields


def _text(draw: Draw, own_head_dim: bool = True) -> dict[str, Any]:
    """A decoder's fields. own_head_dim: its heads may have another dim than their share of the model's."""
    heads, dim = _heads(draw), 2 * draw.randint(2, 9)
    fields = {
        **TEXT,
        **heads,
        "hidden_size": dim * heads["num_attention_heads"],
        "intermediate_size": draw.width(5, 50),
        "num_hidden_layers": draw.randint(draw.ranks, 4),
        "max_position_embeddings": 4096,
        "rms_norm_eps": draw.choice((1e-6, 1e-5, 1e-3)),
        "rope_parameters": _rope(draw),
        "tie_word_embeddings": draw.random() < 0.5,
    }
    if own_head_dim and draw.random() < 0.7:
        fields |= {"head_dim": dim, "hidden_size": draw.randint(9, 52)}
    return fields


def _llama(draw: Draw) -> dict[str, Any]:
    """The library wants that heads divide the model's dim, even where they have a dim of their own."""
    fields = _text(draw, own_head_dim=False)
    own = 2 * draw.randint(2, 9) if draw.random() < 0.5 else None
    biases = {"attention_bias": draw.random() < 0.4, "mlp_bias": draw.random() < 0.4}
    return fields | biases | {"head_dim": own}


def _qwen2(draw: Draw) -> dict[str, Any]:
    fields = _text(draw, own_head_dim=False)
    if draw.random() < 0.5:
        window = {"sliding_window": draw.choice((7, 30)), "max_window_layers": draw.randint(0, 3)}
        fields |= {"use_sliding_window": True, **window}
    return fields


def _qwen3(draw: Draw) -> dict[str, Any]:
    fields = _text(draw)
    fields["attention_bias"] = draw.random() < 0.3
    return {"head_dim": fields["hidden_size"] // fields["num_attention_heads"], **fields}


def _granite(draw: Draw) -> dict[str, Any]:
    return _text(draw, own_head_dim=False) | {
        "attention_bias": draw.random() < 0.5,
        "mlp_bias": draw.random() < 0.5,
        "embedding_multiplier": draw.choice((1.0, 12, 0.3)),
        "residual_multiplier": draw.choice((1.0, 0.22)),
        "attention_multiplier": draw.choice((1.0, 0.0078125, 0.3)),
        "logits_scaling": draw.choice((1.0, 8, 0.7)),
    }


def _axes(fields: dict[str, Any]) -> dict[str, Any]:
    """A decoder's fields with a rotary embedding of three axes."""
    half = (fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]) // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    return fields | {"rope_parameters": rope, "tie_word_embeddings": False}


def _encoder(draw: Draw, odd: bool = False) -> dict[str, Any]:
    """Of a Transformer, by the library's names. odd: its heads may have an odd dim, as beside a stored table
    of positions."""
    heads = draw.choice((1, 2, 3, 4))
    dim = draw.randint(4, 10) if odd else 2 * draw.randint(2, 5)
    return {
        "num_mel_bins": draw.choice(MELS),
        "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": heads,
        "hidden_size": heads * dim,
        "intermediate_size": draw.randint(5, 40),
    }


def _whispers(draw: Draw, odd: bool = False) -> dict[str, Any]:
    """The same by Whisper's names."""
    names = ("num_mel_bins", "encoder_layers", "encoder_attention_heads", "d_model", "encoder_ffn_dim")
    return dict(zip(names, _encoder(draw, odd).values(), strict=True))


def _windows(draw: Draw, joined: int = 2) -> int:
    """Positions of a window whose outputs are joined by so many."""
    return 50 * draw.choice((1, 3, 30) if joined == 2 else (2, 4, 30))


def qwen3_asr(draw: Draw, fields: dict[str, Any]) -> dict[str, Any]:
    text, audio = _qwen3(draw), _whispers(draw)
    windows = {
        "downsample_hidden_size": draw.randint(2, 9),
        "n_window_infer": 100 * draw.choice((1, 2, 3, 8)),
    }
    return {"text_config": text, "audio_config": audio | windows | {"output_dim": text["hidden_size"]}}


def qwen2_audio(draw: Draw, fields: dict[str, Any]) -> dict[str, Any]:
    audio = _whispers(draw, odd=True) | {"max_source_positions": _windows(draw)}
    return {"text_config": _qwen2(draw), "audio_config": audio}


def audioflamingo3(draw: Draw, fields: dict[str, Any]) -> dict[str, Any]:
    audio = _encoder(draw, odd=True) | {"max_source_positions": _windows(draw)}
    return {"text_config": _qwen2(draw), "audio_config": audio}


def qwen2_5_omni(draw: Draw, fields: dict[str, Any]) -> dict[str, Any]:
    text = _axes(_qwen2(draw))
    audio = _whispers(draw) | {"n_window": draw.choice((50, 100)), "output_dim": text["hidden_size"]}
    return {
        "text_config": text,
        "audio_config": audio,
        "vision_config": {"out_hidden_size": text["hidden_size"]},
    }


def qwen3_omni(draw: Draw, fields: dict[str, Any]) -> dict[str, Any]:
    found, experts = qwen3_asr(draw, fields), draw.randint(2, 7)
    text = _axes(found["text_config"]) | {
        "num_experts": experts,
        "num_experts_per_tok": draw.randint(1, experts - 1),
        "moe_intermediate_size": draw.width(3, 20),
        "norm_topk_prob": draw.random() < 0.7,
    }
    return found | {"text_config": text, "vision_config": {"out_hidden_size": text["hidden_size"]}}


def voxtral(draw: Draw, fields: dict[str, Any]) -> dict[str, Any]:
    audio = _encoder(draw, odd=True) | {"max_source_positions": _windows(draw, 4)}
    return {
        "text_config": _llama(draw),
        "audio_config": audio | {"intermediate_size": 4 * audio["hidden_size"]},
    }


def glmasr(draw: Draw, fields: dict[str, Any]) -> dict[str, Any]:
    audio = _encoder(draw) | {"max_position_embeddings": _windows(draw, 4)}
    heads = audio["num_attention_heads"]
    dim = 4 * draw.randint(1, 4)
    audio |= {"hidden_size": heads * dim, "intermediate_size": 4 * heads * dim, "num_key_value_heads": heads}
    share = draw.choice((0.5, 0.5, 1.0))
    rope = {"rope_type": "default", "rope_theta": draw.choice((1e3, 1e4)), "partial_rotary_factor": share}
    return {"text_config": _llama(draw), "audio_config": audio | {"rope_parameters": rope}}


def moss(draw: Draw, fields: dict[str, Any]) -> dict[str, Any]:
    audio = _encoder(draw, odd=True) | {"max_source_positions": _windows(draw, 4)}
    return {"text_config": _qwen3(draw), "audio_config": audio}


def granite_speech(draw: Draw, fields: dict[str, Any]) -> dict[str, Any]:
    dim, block, layers = draw.choice((12, 20, 26)), draw.choice((20, 50, 77, 200)), draw.randint(1, 4)
    encoder = {
        "input_dim": 2 * draw.choice(MELS),
        "num_layers": layers,
        "hidden_dim": dim,
        "num_heads": draw.choice((1, 2, 3)),
        "dim_head": draw.choice((4, 6, 8, 10)),
        "feedforward_mult": draw.choice((1, 2, 4)),
        "output_dim": draw.choice((5, 7, 42)),
        "context_size": block,
        "max_pos_emb": block + draw.choice((0, 12, 312)),
        "conv_kernel_size": draw.choice((3, 7, 15, 31)),
        "conv_expansion_factor": draw.choice((1, 2)),
    }
    joined = fields["encoder_config"].get("cat_hidden_layers") and draw.sample(
        range(layers), draw.randint(1, layers)
    )
    heads, (window, rate) = draw.choice((2, 4)), draw.choice(((15, 5), (15, 3), (12, 4), (10, 5), (14, 7)))
    projector = {
        "hidden_size": heads * draw.choice((4, 7)),
        "num_hidden_layers": draw.randint(1, 3),
        "num_attention_heads": heads,
        "intermediate_size": draw.choice((20, 36)),
        "encoder_hidden_size": dim * (1 + len(joined or ())),
        "cross_attention_frequency": draw.choice((1, 2)),
    }
    return {
        "text_config": _granite(draw),
        "encoder_config": encoder | ({"cat_hidden_layers": joined} if joined else {}),
        "projector_config": projector,
        "window_size": window,
        "downsample_rate": rate,
    }


DRAWN: dict[str, Callable[[Draw, dict[str, Any]], dict[str, Any]]] = {
    "qwen3_asr": qwen3_asr,
    "qwen2_audio": qwen2_audio,
    "audioflamingo3": audioflamingo3,
    "qwen2_5_omni": qwen2_5_omni,
    "qwen3_omni": qwen3_omni,
    "voxtral": voxtral,
    "glmasr": glmasr,
    "moss": moss,
    "granite_speech": granite_speech,
    "granite_speech_plus": granite_speech,
}
"""(what draws, the reference's fields) -> fields that are drawn, those of its parts over the reference's."""


def drawn(name: str, seed: int, ranks: int) -> dict[str, Any]:
    """The fields of a config."""
    fields = VARIANTS[name].fields(2)
    for key, value in DRAWN[name](Draw(name, seed, ranks), fields).items():
        fields[key] = {**fields[key], **value} if isinstance(value, dict) else value
    # The library's class asks what stands on top.
    return fields | {"tie_word_embeddings": fields["text_config"].get("tie_word_embeddings", False)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", choices=DRAWN)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1, choices=(1, 2))
    parser.add_argument("--arrays", type=Path)
    options = parser.parse_args()
    name, seed, folder = options.family, options.seed, options.folder
    fields = drawn(name, seed, options.ranks)
    model, _ = save(name, fields, seed, folder)
    if options.arrays:
        found = computed(name, model, folder, window_seconds(fields), DOCUMENTS, is_long=True)
        np.savez(options.arrays, **found)  # type: ignore[arg-type]
    # It names the default tokens, which are beyond this vocabulary.
    (options.folder / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
