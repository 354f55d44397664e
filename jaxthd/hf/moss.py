"""MOSS-Transcribe-Diarize (transformers: MossTranscribeDiarizeForConditionalGeneration): Whisper's encoder,
four of whose outputs are an audio token, a projector, Qwen3.

A recording of any length is encoded in windows of 30 s; the silence that fills the last one is heard. After
every two seconds of audio tokens the seconds so far stand as text.
"""

from dataclasses import replace
from typing import Any

from jaxthd.config import FrontEnd
from jaxthd.hf.family import Field, Settings
from jaxthd.hf.qwen2_audio import QWEN2_AUDIO, SIZES
from jaxthd.hf.qwen3_asr import QWEN3_ASR
from jaxthd.hf.speech_llm import AUDIO, Part
from jaxthd.models.front_ends import Whisper

JOINED = 4


def _adapter(encoder: FrontEnd, dim: int) -> dict[str, Any]:
    return {"adapter_dim": dim, "adapter_bias": True, "adapter_form": "silu"}


_PROJECTOR = {"projector_hidden_act": "silu", "projector_bias": True, "audio_merge_size": JOINED}
_SMALLER: Settings = {
    "mel_bands": Field("num_mel_bins", 80),
    "layers": Field("encoder_layers", 24),
    "model_dim": Field("d_model", 1024),
    "heads": Field("encoder_attention_heads", 16),
    "ffn_dim": Field("encoder_ffn_dim", 4096),
}
"""Settings with other defaults of the library's than Qwen2-Audio's."""
MOSS = replace(
    QWEN3_ASR,
    format="moss_transcribe_diarize",
    title="MossTranscribeDiarizeForConditionalGeneration",
    model_types=("moss_transcribe_diarize",),
    text={
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    encoder=Whisper(joined=JOINED, tail="ceil", time_marks=2),
    parts={
        AUDIO: replace(
            QWEN2_AUDIO.parts[AUDIO],
            type="moss_transcribe_diarize_audio",
            settings={**SIZES, **_SMALLER},
            expected=lambda encoder, dim: {"activation_function": "gelu"},
        ),
        "": Part(settings={}, expected=lambda encoder, dim: _PROJECTOR),
    },
    adapter=_adapter,
    names=replace(QWEN3_ASR.names, projection={"linear_1": "up", "linear_2": "out", "norm": "norm_after"}),
    data={"template": "chat_template", "answer": "moss"},
)
FAMILY = MOSS.family()
