"""Audio Flamingo 3 (transformers: AudioFlamingo3ForConditionalGeneration): Qwen2-Audio's encoder over windows
of 30 s, a projector, Qwen2.

At most 600 s are heard, in whole windows, as by the published processor.
"""

from dataclasses import replace
from typing import Any

from jaxthd.config import FrontEnd
from jaxthd.hf.qwen2_audio import QWEN2_AUDIO, SIZES, heard
from jaxthd.hf.speech_llm import AUDIO, Q2A_NAMES, Part
from jaxthd.models.front_ends import Whisper


def _adapter(encoder: FrontEnd, dim: int) -> dict[str, Any]:
    return {"adapter_dim": dim, "adapter_bias": True, "adapter_form": "gelu"}


AUDIO_FLAMINGO3 = replace(
    QWEN2_AUDIO,
    format="audioflamingo3",
    title="AudioFlamingo3ForConditionalGeneration",
    model_types=("audioflamingo3",),
    encoder=Whisper(join="mean", joined=2, silence="hidden"),
    parts={
        AUDIO: replace(
            QWEN2_AUDIO.parts[AUDIO],
            type="audioflamingo3_encoder",
            settings={**SIZES, "windows": heard(600)},
        ),
        "": Part(
            settings={},
            expected=lambda encoder, dim: {"projector_hidden_act": "gelu", "projector_bias": True},
        ),
    },
    adapter=_adapter,
    audio_token="audio_token_id",
    names=Q2A_NAMES,
    data={
        "template": "chat_template",
        "prompt": "Transcribe the input speech.{audio}",
        "answer": "audio_flamingo3",
    },
)
FAMILY = AUDIO_FLAMINGO3.family()
