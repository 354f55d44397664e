"""Qwen3-ASR in both of its forms: transformers' (Qwen/Qwen3-ASR-1.7B-hf) and that of its authors
(Qwen/Qwen3-ASR-1.7B), whose config.json has the model under thinker_config.

Recordings of any length: windows of 8 s attend to themselves. The authors' rotary embedding has three axes,
which are equal for audio and text.
"""

from dataclasses import replace
from typing import Any

from jaxthd.config import FrontEnd, RopeConfig
from jaxthd.errors import UserError
from jaxthd.hf.family import Field, Settings
from jaxthd.hf.fields import Fields
from jaxthd.hf.qwen3 import QWEN3, Qwen3
from jaxthd.hf.speech_llm import AUDIO, Q2A_NAMES, WHISPER_NAMES, Names, Part, SpeechLLM
from jaxthd.models.front_ends import Qwen3Audio
from jaxthd.models.front_ends.qwen3_audio.settings import CHUNK

_ENCODER = Qwen3Audio()


def _chunks(frames: int | None, fields: Fields) -> int:
    """Whole chunks of a window. Raises UserError for one that ends inside a chunk."""
    frames = 8 * CHUNK if frames is None else frames
    if frames % CHUNK or not frames:
        raise UserError(
            f"audio_config has n_window_infer {frames}; expected a multiple of {CHUNK}: choose another "
            "checkpoint"
        )
    return frames // CHUNK


_AUDIO: Settings = {
    "mel_bands": Field("num_mel_bins", 128),
    "channels": Field("downsample_hidden_size", 480),
    "layers": Field("encoder_layers", 24),
    "dim": Field("d_model", 1024),
    "heads": Field("encoder_attention_heads", 16),
    "ffn_dim": Field("encoder_ffn_dim", 4096),
    "chunks": Field("n_window_infer", 8 * CHUNK, _chunks, lambda encoder: encoder.longest),
}


def _adapter(encoder: FrontEnd, dim: int) -> dict[str, Any]:
    return {"adapter_dim": encoder.dim, "adapter_bias": True, "adapter_form": "gelu"}


def _expected(encoder: FrontEnd, dim: int) -> dict[str, Any]:
    plain = {"activation_function": "gelu", "scale_embedding": False}
    return {"n_window": CHUNK // 2, "output_dim": dim, **plain}


def _text(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name


_AXES = {"mrope_section": [24, 20, 20], "interleaved": True, "mrope_interleaved": True}
"""Entries of the published rope_scaling. The authors' code reads sections from it, and fails without them."""


class _WithAxes(Qwen3):
    """The decoder as the authors' code names and reads it."""

    def rope_fields(self, rope: RopeConfig, block: str) -> dict[str, Any]:
        """The fields, with sections of axes."""
        fields = super().rope_fields(rope, block)
        scaling = fields["rope_scaling"] or {"rope_type": "default"}
        return fields | {"rope_scaling": {**scaling, "type": scaling["rope_type"], **_AXES}}


_PART = Part(settings=_AUDIO, type="qwen3_asr_encoder", aliases=WHISPER_NAMES, expected=_expected)
QWEN3_ASR = SpeechLLM(
    format="qwen3_asr",
    title="Qwen3ASRForConditionalGeneration",
    model_types=("qwen3_asr",),
    decoders=(QWEN3,),
    text={
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    encoder=_ENCODER,
    parts={AUDIO: _PART},
    adapter=_adapter,
    names=replace(
        Q2A_NAMES,
        text=_text,
        audio="model.audio_tower.",
        projector="model.multi_modal_projector.",
        memory={},
    ),
    data={"template": "chat_template", "answer": "qwen3_asr"},
)
AUTHORS = replace(
    QWEN3_ASR,
    format="qwen3_asr_authors",
    decoders=(_WithAxes(**{**vars(QWEN3), "model_types": (*QWEN3.model_types, "qwen3_asr_text")}),),
    parts={AUDIO: replace(_PART, type="qwen3_asr_audio_encoder")},
    names=Names(
        text=lambda name: f"thinker.{name}",
        audio="thinker.audio_tower.",
        projector="thinker.audio_tower.",
        projection={"proj1": "up", "proj2": "out"},
        memory={"thinker.": ""},
    ),
    text_ties=True,
    above="thinker_config",
)
FAMILIES = (QWEN3_ASR.family(), AUTHORS.family())
