"""Nemotron-Omni: Parakeet's encoder, a projection, NemotronH (transformers: NemotronH_Omni_Reasoning_V3).

A speech LLM has no use for its vision tower: import skips it, export copies it from the original. A text-only
model takes the LLM alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jaxthd.config import ModelConfig
from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape, Tensor, tensors
from jaxthd.hf.decoder import token_fields
from jaxthd.hf.family import ADAPTER, ENCODER, LLM, Family, TokenIds
from jaxthd.hf.fields import Fields, must_be, required
from jaxthd.hf.nemotron_h import NEMOTRON_H
from jaxthd.hf.parakeet import encoder_config, encoder_fields, encoder_tensors

_PROJECTION_EPS = 1e-5
_VLLM_S_OWN = ("attention_bias", "scale_input")

_NO_VISION = {
    "vision_config": {
        "model_type": "radio",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 16,
        "max_img_size": 16,
        "video_temporal_patch_size": 2,
    },
    "vision_hidden_size": 16,
    "projector_hidden_size": 16,
    "video_temporal_patch_size": 2,
}
"""The smallest vision tower: the library's class needs one. No weights are written for it."""


def _parts(fields: Fields) -> tuple[Fields, Fields]:
    """(the LLM's settings, the encoder's). Released checkpoints use other names than the library writes."""
    text, audio = (
        fields.get(name) or required(fields, old)
        for name, old in (("text_config", "llm_config"), ("audio_config", "sound_config"))
    )
    return text, {"attention_bias": False, "scale_input": False, **audio}


def _configure(fields: Fields, model: ModelConfig) -> ModelConfig:
    text, audio = _parts(fields)
    llm = NEMOTRON_H.read(text, model.llm, "text_config")
    if model.encoder is None:
        return replace(model, llm=llm)
    must_be(audio, {"projection_bias": False}, "audio_config")
    if llm.norm_eps != _PROJECTION_EPS:
        raise UserError(
            f"text_config has layer_norm_epsilon {llm.norm_eps}; expected {_PROJECTION_EPS}, which the "
            "projection has too: choose another checkpoint"
        )
    inner = required(audio, "projection_hidden_size", "audio_config")
    encoder = encoder_config(audio, model, "audio_config")
    return replace(
        model, llm=llm, encoder=encoder, adapter_dim=inner, adapter_bias=False, adapter_form="relu2"
    )


def _fields(model: ModelConfig) -> dict[str, Any]:
    is_other = not model.adapter_dim or model.adapter_bias or model.adapter_form != "relu2"
    if is_other or model.llm.norm_eps != _PROJECTION_EPS:
        raise UserError(
            f"model.adapter_dim is {model.adapter_dim}, model.adapter_bias {model.adapter_bias}, "
            f"model.adapter_form {model.adapter_form!r} and model.llm.norm_eps {model.llm.norm_eps}; the "
            'omni format holds an adapter of the form "relu2" with an inner dim and no bias, and norms of '
            f"epsilon {_PROJECTION_EPS}: choose --format parts"
        )
    audio, text = encoder_fields(model), NEMOTRON_H.write(model.llm)
    for part in (audio, text):
        del part["architectures"]
    audio |= {"projection_hidden_size": model.adapter_dim, "projection_bias": False}
    # vLLM has these by itself, and refuses a config that has them too; it knows no other values of them.
    served = {name: value for name, value in audio.items() if name not in _VLLM_S_OWN}
    is_served = not any(audio[name] for name in _VLLM_S_OWN)
    return {
        "architectures": ["NemotronH_Omni_Reasoning_V3"],
        "model_type": "nemotron_h_omni",
        "text_config": text,
        "audio_config": audio,
        **({"sound_config": served | {"sampling_rate": SAMPLE_RATE}} if is_served else {}),
        **_NO_VISION,
    }


def _tensors(model: ModelConfig, fields: Fields, shapes: Mapping[str, Shape]) -> Iterator[Tensor]:
    if model.encoder is not None:
        yield from encoder_tensors(model, shapes, "sound_encoder.encoder.")
        projection = {"norm": "norm", "linear1": "up", "linear2": "out"}
        yield from tensors(projection, shapes, "sound_projection.", "adapter.")
    for tensor in NEMOTRON_H.tensors(model.llm, _parts(fields)[0], shapes):
        yield tensor._replace(name=f"language_model.{tensor.name}")


def _token_fields(tokens: TokenIds) -> dict[str, Any]:
    return {"text_config": token_fields(tokens), "audio_token_id": tokens.audio_id}


FAMILY = Family(
    format="omni",
    title="NemotronH_Omni_Reasoning_V3",
    gives="encoder, adapter and LLM, without its vision tower",
    model_types=("nemotron_h_omni", "NemotronH_Omni_Reasoning_V3", "NemotronH_Nano_Omni_Reasoning_V3"),
    covers=(*ENCODER, *ADAPTER, *LLM),
    configure=_configure,
    fields=_fields,
    tensors=_tensors,
    ignored=(
        "vision_model.*",
        "vision_final_layernorm.*",
        "mlp1.*",
        "sound_encoder.encoder.feature_extractor.*",
        "sound_encoder.*",
        "sound_projection.*",
    ),
    token_fields=_token_fields,
    mtp_tensors=lambda fields: ("language_model.mtp.",),
    # The released folders' own names, which their code and vLLM read.
    meaningless=lambda model: (*NEMOTRON_H.meaningless_fields(model.llm), "model_type", "architectures"),
)
