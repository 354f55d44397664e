"""Voxtral (transformers: VoxtralForConditionalGeneration): Whisper's encoder, four of whose outputs are an
audio token, a projector, Llama.

A recording is filled up with silence to whole windows of 30 s, which is heard, and makes tokens.
"""

from typing import Any

from jaxthd.config import FrontEnd
from jaxthd.hf.llama import LLAMA
from jaxthd.hf.qwen2_audio import PLAIN, SIZES
from jaxthd.hf.speech_llm import AUDIO, WHISPER_NAMES, Part, SpeechLLM
from jaxthd.models.front_ends import Whisper

JOINED = 4


def _adapter(encoder: FrontEnd, dim: int) -> dict[str, Any]:
    return {"adapter_dim": dim, "adapter_bias": False, "adapter_form": "gelu"}


VOXTRAL = SpeechLLM(
    format="voxtral",
    title="VoxtralForConditionalGeneration",
    model_types=("voxtral",),
    decoders=(LLAMA,),
    text={
        "vocab_size": 131072,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 30,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e8,
        "head_dim": 128,
    },
    ties=False,
    encoder=Whisper(joined=JOINED, tail="window", whole_features=True),
    parts={
        AUDIO: Part(
            settings=SIZES,
            type="voxtral_encoder",
            aliases=WHISPER_NAMES,
            # The library joins as many outputs as fill the feed-forward module.
            expected=lambda encoder, dim: {**PLAIN, "encoder_ffn_dim": JOINED * encoder.model_dim},
        ),
        "": Part(settings={}, expected=lambda encoder, dim: {"projector_hidden_act": "gelu"}),
    },
    adapter=_adapter,
    float32=("*.embed_positions.weight",),
    data={"template": "mistral"},
)
FAMILY = VOXTRAL.family()
