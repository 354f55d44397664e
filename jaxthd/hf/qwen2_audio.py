"""Qwen2-Audio (transformers: Qwen2AudioForConditionalGeneration): Whisper's encoder, whose outputs are
averaged in pairs, a linear layer, Qwen2.

A recording is one window of 30 s, and what comes behind it is cut off, as by the published processor.
"""

from dataclasses import replace
from typing import Any

from jaxthd.config import FrontEnd
from jaxthd.hf.family import Field, Settings
from jaxthd.hf.llama import QWEN2
from jaxthd.hf.speech_llm import AUDIO, Q2A_NAMES, WHISPER_NAMES, Part, SpeechLLM
from jaxthd.models.front_ends import Whisper

SIZES: Settings = {
    "mel_bands": Field("num_mel_bins", 128),
    "layers": Field("encoder_layers", 32),
    "model_dim": Field("d_model", 1280),
    "heads": Field("encoder_attention_heads", 20),
    "ffn_dim": Field("encoder_ffn_dim", 5120),
    "positions": Field("max_source_positions", 1500),
}
"""Settings of Whisper's encoder in audio_config, by Whisper's names."""
PLAIN = {"activation_function": "gelu", "scale_embedding": False}
"""Settings of Whisper's encoder that have no other value."""


def heard(seconds: int, name: str = "max_source_positions", default: int = 1500) -> Field:
    """The windows of a recording of which the published processor takes so many seconds, in whole windows.

    name, default: of the field with the positions of a window, 50 a second.
    """
    return Field(
        name,
        default,
        lambda positions, fields: max(50 * seconds // (positions or default), 1),
        lambda encoder: encoder.positions,
    )


TEMPLATE = (
    "{% set heard = namespace(count=0) %}"
    "{% if messages[0].role != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'audio' %}"
    "{% set heard.count = heard.count + 1 %}"
    "{{ 'Audio ' ~ heard.count ~ ': <|audio_bos|><|AUDIO|><|audio_eos|>\n' }}"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template by which the library's processor writes turns where a folder has none."""


def _adapter(encoder: FrontEnd, dim: int) -> dict[str, Any]:
    return {"adapter_dim": 0, "adapter_bias": True}


QWEN2_AUDIO = SpeechLLM(
    format="qwen2_audio",
    title="Qwen2AudioForConditionalGeneration",
    model_types=("qwen2_audio",),
    decoders=(QWEN2,),
    text={
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
    },
    ties=False,
    encoder=Whisper(join="mean", joined=2, silence="hidden", windows=1),
    parts={
        AUDIO: Part(
            settings=SIZES,
            type="qwen2_audio_encoder",
            aliases=WHISPER_NAMES,
            expected=lambda encoder, dim: PLAIN,
        )
    },
    adapter=_adapter,
    audio_token="audio_token_index",
    names=replace(Q2A_NAMES, projection={"linear": "out"}),
    data={"template": "chat_template", "template_source": TEMPLATE},
)
FAMILY = QWEN2_AUDIO.family()
