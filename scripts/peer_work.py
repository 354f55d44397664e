"""The models, the documents, and the calls that the two sides of bench_peer.py offer."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ENTRIES, PADDING, AUDIO = 512, 510, 511
"""The vocabulary; in it the peer's padding and its placeholder of a recording. The rest are bytes."""
QWEN3: dict[str, Any] = {
    "vocab_size": ENTRIES,
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
}
NEMOTRON_H: dict[str, Any] = {
    "vocab_size": ENTRIES,
    "hybrid_override_pattern": "M-M*-M-M*-",
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
    "conv_kernel": 4,
    "time_step_min": 0.001,
    "time_step_limit": (0.001, math.inf),
}
"""The scan of this class clamps time steps to time_step_min on a CPU, not to the limit."""
WIDE = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
MODELS: dict[str, tuple[str, dict[str, Any], int, float]] = {
    "qwen3": ("Qwen3", QWEN3, 0, 1.3),
    "hybrid": ("NemotronH", NEMOTRON_H, 32, 1.6),
    "qwen3-wide": ("Qwen3", QWEN3 | WIDE | {"intermediate_size": 1536}, 0, 1.3),
    "hybrid-wide": (
        "NemotronH",
        NEMOTRON_H | WIDE | {"intermediate_size": 2048, "mamba_num_heads": 16},
        32,
        1.6,
    ),
}
"""Name -> (class of transformers, its settings, its scan's chunk, jaxthd's least speed as a multiple)."""
_TEXT = {name: x for name, x in QWEN3.items() if name != "rope_theta"}
_TEXT["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
_BY_WHISPER = {"encoder_layers": 4, "d_model": 256, "encoder_attention_heads": 4, "encoder_ffn_dim": 1024}
_ENCODER = {"num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024}
_MELS = {"num_mel_bins": 80}


def _family(kind: str, text: str, audio: dict[str, Any], token: str = "audio_token_id") -> Any:
    """A speech LLM: its class, and fields of its config. text: the model_type of the decoder."""
    fields = {"text_config": {"model_type": text, **_TEXT}, "audio_config": audio | _MELS, token: AUDIO}
    return kind, fields | {"tie_word_embeddings": True}


FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_asr": _family(
        "Qwen3ASR", "qwen3", _BY_WHISPER | {"downsample_hidden_size": 64, "output_dim": 256}
    ),
    "qwen2_audio": _family("Qwen2Audio", "qwen2", _BY_WHISPER, "audio_token_index"),
    "audioflamingo3": _family("AudioFlamingo3", "qwen2", _ENCODER),
    "voxtral": _family("Voxtral", "llama", _ENCODER),
    "glmasr": _family("GlmAsr", "llama", _ENCODER | {"num_key_value_heads": 4}),
    "moss": _family("MossTranscribeDiarize", "qwen3", _ENCODER),
    "granite_speech": (
        "GraniteSpeech",
        {
            "text_config": {"model_type": "granite", **_TEXT},
            "encoder_config": {
                "num_layers": 4,
                "hidden_dim": 256,
                "num_heads": 4,
                "dim_head": 64,
                "dropout": 0.0,
            },
            "projector_config": {
                "model_type": "blip_2_qformer",
                "hidden_size": 256,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "intermediate_size": 1024,
                "encoder_hidden_size": 256,
                "cross_attention_frequency": 1,
                "attention_probs_dropout_prob": 0.0,
                "hidden_dropout_prob": 0.0,
            },
            "audio_token_index": AUDIO,
            "has_lora_adapter": False,
            "tie_word_embeddings": True,
        },
    ),
}
"""Speech LLMs of transformers: its class without the ending, the fields of its config. Tied embeddings are
tied where the class can."""
STRETCHES = 6
"""Parts of a pass over the recordings. Each has batches of all lengths."""
CHECKED = 4
"""Documents that are compared, each alone: the first in whose training NeMo's BatchNorm counts no padding.
Its features are a frame longer than they should be, which after a multiple of 8 makes one more output."""
ANSWERED, AT_ONCE, NEW_TOKENS = 64, 16, 64
"""Documents whose prompts are answered, how many of them together, and tokens of each answer."""
NAMES = {name: "embedding, head, rest" for name in ("embedding", "head", "segments", "other")}
"""Parts that the profiles of the two sides divide differently -> the part that both have."""


class Shape(NamedTuple):
    """Consecutive recordings are joined up to so many seconds, each text is said so many times, and what
    fills no whole frame of so many samples is cut off."""

    seconds: float = 0.0
    texts: int = 1
    frame: int = 1


SHAPES = {"short": Shape(), "long": Shape(seconds=24.0), "talkative": Shape(texts=6)}
"""Shapes of data by name; `short` is the manifest as it is."""


class Side(NamedTuple):
    """The calls that a process offers; the last three where the peer is NeMo.

    stretch: (its number) -> (tokens, seconds of audio); trains on one. checked: (loss, gradient norm) of
    documents, each alone. matrix: one product. gflop: of the products of a token, as the library counts them;
    0 for jaxthd. profile: milliseconds of each part of the model for 1,000 tokens of a stretch. answers: the
    tokens of ANSWERED documents' greedy answers. load: makes all batches of a pass with their features, in
    this process alone; the number of documents.
    """

    stretch: Callable[[int], tuple[int, float]]
    checked: Callable[[], list[tuple[float, float]]]
    matrix: Callable[[], Any]
    gflop: Callable[[], float]
    profile: Callable[[], dict[str, float]] | None = None
    answers: Callable[[], list[list[int]]] | None = None
    load: Callable[[], int] | None = None


class Recordings(NamedTuple):
    """The documents as the peer takes them: samples, token ids with AUDIO once, or of FAMILIES for each audio
    token, which of these are trained, and slots of the document in jaxthd."""

    samples: list[np.ndarray]
    ids: list[np.ndarray]
    trained: list[np.ndarray]
    slots: list[int]

    @classmethod
    def read(cls, folder: Path) -> "Recordings":
        arrays = np.load(folder / "documents.npz")
        ends = np.cumsum(arrays["samples"])[:-1], np.cumsum(arrays["lengths"])[:-1]
        return cls(
            np.split(np.load(folder / "audio.npy", mmap_mode="r"), ends[0]),
            np.split(arrays["ids"], ends[1]),
            np.split(arrays["trained"], ends[1]),
            arrays["slots"].tolist(),
        )

    def checked(self) -> list[int]:
        """Numbers of the documents that are compared."""
        return [i for i, x in enumerate(self.samples) if len(x) // 160 % 8][:CHECKED]

    def answered(self) -> list[int]:
        """Numbers of the documents whose prompts are answered, sorted by length."""
        return sorted(range(len(self.ids))[:ANSWERED], key=lambda i: len(self.samples[i]))

    def batches(self, padded: float, order: str) -> list[list[int]]:
        """Numbers of the documents of each batch of so many seconds of padded audio."""
        numbers = sorted(range(len(self.ids)), key=lambda i: len(self.samples[i]))
        if order == "random":
            numbers = np.random.default_rng(0).permutation(len(numbers)).tolist()
        found: list[list[int]] = []
        longest = 0
        for i in numbers:
            more = max(longest, len(self.samples[i]))
            if found and more * (len(found[-1]) + 1) <= 16_000 * padded:
                found[-1].append(i)
                longest = more
            else:
                found.append([i])
                longest = len(self.samples[i])
        return found


def thousand_tokens(milliseconds: Mapping[str, float], tokens: int) -> dict[str, float]:
    """Milliseconds for 1,000 tokens, by the parts that both sides have."""
    found: dict[str, float] = defaultdict(float)
    for part, spent in milliseconds.items():
        found[NAMES.get(part, part)] += 1000 * spent / tokens
    return found
