"""Nemotron-Omni: Parakeet's encoder, a projection, NemotronH (transformers: NemotronH_Omni_Reasoning_V3).

Its vision tower is no part of a speech LLM: left out on import, taken from the original on export.
"""

from dataclasses import replace
from typing import Any

from jaxthd.config import ModelConfig
from jaxthd.errors import UserError
from jaxthd.hf import nemotron_h
from jaxthd.hf.family import Family, Fields, must_be, required
from jaxthd.hf.names import Names
from jaxthd.hf.nemotron_h import llm_config, llm_fields, write_llm
from jaxthd.hf.parakeet import encoder_config, encoder_fields, write_encoder

_PROJECTION_EPS = 1e-5

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
"""The smallest vision tower: the class cannot be without one. No weights are written for it."""


def _parts(fields: Fields) -> tuple[Fields, Fields]:
    """(the LLM's settings, the encoder's). Released checkpoints have other names than the library writes."""
    text, audio = (
        fields.get(name) or required(fields, old)
        for name, old in (("text_config", "llm_config"), ("audio_config", "sound_config"))
    )
    return text, {"attention_bias": False, "scale_input": False, **audio}


def _configure(fields: Fields, model: ModelConfig) -> ModelConfig:
    text, audio = _parts(fields)
    must_be(audio, {"projection_bias": False}, "audio_config")
    llm = llm_config(text, model.llm, "text_config")
    if llm.norm_eps != _PROJECTION_EPS:
        raise UserError(
            f"text_config has layer_norm_epsilon {llm.norm_eps}; expected {_PROJECTION_EPS}, which the "
            "projection has too: choose another checkpoint"
        )
    inner = required(audio, "projection_hidden_size", "audio_config")
    return replace(
        model, llm=llm, encoder=encoder_config(audio, model.audio_encoder, "audio_config"), adapter_dim=inner
    )


def _fields(model: ModelConfig) -> dict[str, Any]:
    if not model.adapter_dim or model.llm.norm_eps != _PROJECTION_EPS:
        raise UserError(
            f"model.adapter_dim is {model.adapter_dim} and model.llm.norm_eps {model.llm.norm_eps}; the Omni "
            f"format holds an adapter with an inner dim and norms of {_PROJECTION_EPS}: export the parts"
        )
    audio = encoder_fields(model.audio_encoder)
    audio |= {"projection_hidden_size": model.adapter_dim, "projection_bias": False}
    text = llm_fields(model.llm)
    for part in (audio, text):
        del part["architectures"]
    return {
        "architectures": ["NemotronH_Omni_Reasoning_V3"],
        "model_type": "nemotron_h_omni",
        "text_config": text,
        "audio_config": audio,
        **_NO_VISION,
    }


def _write(model: ModelConfig, fields: Fields, names: Names) -> None:
    write_encoder(model.audio_encoder, names.within("sound_encoder.encoder.", ""))
    projection = names.within("sound_projection.", "adapter.")
    projection.same("norm.weight", "norm.weight")
    projection.linear("linear1", "up")
    projection.linear("linear2", "out")
    write_llm(model.llm, _parts(fields)[0], names.within("language_model.", ""))


NEMOTRON_OMNI = Family(
    model_types=("nemotron_h_omni", "NemotronH_Omni_Reasoning_V3", "NemotronH_Nano_Omni_Reasoning_V3"),
    covers=("encoder.", "adapter.", "embedding", "decoder.", "head"),
    configure=_configure,
    fields=_fields,
    write=_write,
    ignored=(
        "vision_model.*",
        "vision_final_layernorm.*",
        "mlp1.*",
        "sound_encoder.encoder.feature_extractor.*",
        *(f"language_model.{pattern}" for pattern in nemotron_h.MTP),
    ),
)
