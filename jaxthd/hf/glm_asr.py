"""GLM-ASR (transformers: GlmAsrForConditionalGeneration): Whisper's encoder with rotary positions, four of
whose outputs are an audio token, a projector, Llama.

A recording is encoded in windows of 30 s, or of as many as the folder's processor says (chunk_length): the
encoder has no table of positions. The silence that fills the last one is heard, but makes no tokens.
At most 655 s are heard, in whole windows, as by the published processor.
"""

from dataclasses import replace
from typing import Any

from jaxthd.config import FrontEnd
from jaxthd.files.tensor_names import Below, Table
from jaxthd.hf.family import Family, Field, Settings
from jaxthd.hf.fields import Fields, extractor_fields, must_be
from jaxthd.hf.llama import LLAMA
from jaxthd.hf.qwen2_audio import heard
from jaxthd.hf.reader import Reader
from jaxthd.hf.speech_llm import AUDIO, Q2A_NAMES, Names, Part, SpeechLLM
from jaxthd.models.front_ends import Whisper

JOINED, POSITIONS = 4, 50
"""Outputs of an audio token, and of a second."""


def _of_rope(name: str, default: float) -> Any:
    """Reads a setting of the rotary embedding, which is not scaled."""

    def read(rope: Any, fields: Fields) -> float:
        must_be(rope or {}, {"rope_type": "default"}, "audio_config.rope_parameters")
        return float((rope or {}).get(name) or fields.get(name) or default)

    return read


def _rope(encoder: Any) -> dict[str, Any]:
    return {
        "rope_type": "default",
        "rope_theta": encoder.rope_theta,
        "partial_rotary_factor": encoder.rope_fraction,
    }


_SIZES: Settings = {
    "mel_bands": Field("num_mel_bins", 128),
    "layers": Field("num_hidden_layers", 32),
    "model_dim": Field("hidden_size", 1280),
    "heads": Field("num_attention_heads", 20),
    "ffn_dim": Field("intermediate_size", 5120),
    "positions": Field("max_position_embeddings", 1500),
    "windows": heard(655, "max_position_embeddings"),
    "rope_theta": Field("rope_parameters", None, _of_rope("rope_theta", 10000.0), _rope),
    "rope_fraction": Field("rope_parameters", None, _of_rope("partial_rotary_factor", 0.5), _rope),
}


def _adapter(encoder: FrontEnd, dim: int) -> dict[str, Any]:
    return {"adapter_dim": 2 * dim, "adapter_bias": True, "adapter_form": "gelu"}


def _expected(encoder: Any, dim: int) -> dict[str, Any]:
    """The library joins as many outputs as fill the feed-forward module, and all heads have keys."""
    return {
        "hidden_act": "gelu",
        "intermediate_size": JOINED * encoder.model_dim,
        "num_key_value_heads": encoder.heads,
    }


def _encoder(encoder: FrontEnd) -> Table:
    """Whisper's convolutions, and blocks with the names of a decoder's."""
    block: Table = {
        "self_attn.": Below("attention.", {"q_proj": "q", "k_proj": "k", "v_proj": "v", "o_proj": "out"}),
        "input_layernorm": "norm1",
        "post_attention_layernorm": "norm2",
        "mlp.fc1": "up",
        "mlp.fc2": "down",
    }
    usual = encoder.tensors()
    convolutions = {name: entry for name, entry in usual.items() if name.startswith("conv")}
    blocks = Below("transformer.blocks.", block, over="norm1.weight")
    return {**convolutions, "layers.{}.": blocks, "norm": "transformer.norm"}


GLM_ASR = SpeechLLM(
    format="glmasr",
    title="GlmAsrForConditionalGeneration",
    model_types=("glmasr",),
    decoders=(LLAMA,),
    text={
        "vocab_size": 59264,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
    encoder=Whisper(joined=JOINED, rope_theta=1e4),
    parts={
        AUDIO: Part(settings=_SIZES, type="glmasr_encoder", expected=_expected),
        "": Part(settings={}, expected=lambda encoder, dim: {"projector_hidden_act": "gelu"}),
    },
    adapter=_adapter,
    names=Names(**{**vars(Q2A_NAMES), "encoder": _encoder}),
    data={"template": "chat_template", "prompt": "{audio}Please transcribe this audio into text"},
)


def _opened(family: Family, fields: Fields, reader: Reader) -> tuple[Family, Fields, Reader]:
    """The fields with the positions of the folder's windows."""
    seconds = extractor_fields(reader.path).get("chunk_length")
    if seconds is not None:
        audio = fields.get(AUDIO) or {}
        fields = {**fields, AUDIO: {**audio, "max_position_embeddings": POSITIONS * seconds}}
    return family, fields, reader


FAMILY = replace(GLM_ASR.family(), opened=_opened)
