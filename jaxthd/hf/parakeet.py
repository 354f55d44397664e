"""Parakeet's encoder (transformers: ParakeetEncoder, alone or below the head of a speech recogniser)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jaxthd.config import ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape, Tensor, tensors
from jaxthd.hf.family import ENCODER, Family, Field, Settings, read_settings, updated, write_settings
from jaxthd.hf.fields import Fields, must_be, required
from jaxthd.models.front_ends import FastConformer

_EXPECTED = {
    "hidden_act": "silu",
    "subsampling_factor": 8,
    "subsampling_conv_kernel_size": 3,
    "subsampling_conv_stride": 2,
}
_SIZES: Settings = {
    "num_mels": Field("num_mel_bins", 80),
    "layers": Field("num_hidden_layers", 24),
    "dim": Field("hidden_size", 1024),
    "heads": Field("num_attention_heads", 8),
    "ffn_dim": Field("intermediate_size", 4096),
    "conv_kernel": Field("conv_kernel_size", 9),
    "subsampling_channels": Field("subsampling_conv_channels", 256),
    "linear_bias": Field("attention_bias", True),
    "conv_bias": Field("convolution_bias", True),
    "scale_input": Field("scale_input", True),
}


LACKS = ("encoder.qformer.",)
"""Parts of a front end beside its FastConformer."""


def encoder_config(fields: Fields, model: ModelConfig, where: str = "config.json") -> FastConformer:
    """The model's encoder with the checkpoint's settings; absent ones are the library's defaults."""
    must_be(fields, _EXPECTED, where)
    return updated(base_encoder(model), read_settings(fields, _SIZES))


def base_encoder(model: ModelConfig) -> FastConformer:
    """The model's encoder where it is a FastConformer, else one with its default settings."""
    return model.encoder if isinstance(model.encoder, FastConformer) else FastConformer()


def own_encoder(model: ModelConfig) -> FastConformer:
    """The encoder of a model to export. Raises UserError for another front end, and for none."""
    encoder = model.audio_encoder
    if not isinstance(encoder, FastConformer):
        raise UserError(
            f"model.encoder is {encoder.title}; expected a FastConformer for this format: choose another"
        )
    return encoder


def encoder_fields(model: ModelConfig) -> dict[str, Any]:
    """config.json of an export. Raises UserError for an encoder that is more than its blocks."""
    encoder = own_encoder(model)
    if type(encoder) is not FastConformer or encoder.output_layers or encoder.bfloat16_filters:
        raise UserError(
            f"model.encoder is {encoder.title} with output_layers {encoder.output_layers} and "
            f"bfloat16_filters {encoder.bfloat16_filters}; this format holds a FastConformer with the "
            "outputs of its last block and unrounded filters: choose --format salm"
        )
    return {
        "architectures": ["ParakeetEncoder"],
        "model_type": "parakeet_encoder",
        **write_settings(encoder, _SIZES),
        **_EXPECTED,
    }


def encoder_tensors(model: ModelConfig, shapes: Mapping[str, Shape], theirs: str = "") -> Iterator[Tensor]:
    """The tensors of our arrays below "encoder.". theirs: what their names have in front."""
    return tensors(own_encoder(model).tensors(), shapes, theirs, "encoder.")


def _configure(fields: Fields, model: ModelConfig) -> ModelConfig:
    """A recogniser's config.json has the encoder's settings under encoder_config."""
    own = fields if _is_alone(fields) else required(fields, "encoder_config")
    return replace(model, encoder=encoder_config(own, model))


def _is_alone(fields: Fields) -> bool:
    return fields.get("model_type") == "parakeet_encoder"


FAMILY = Family(
    format="encoder",
    title="ParakeetEncoder",
    gives="the encoder",
    model_types=("parakeet_encoder", "parakeet_ctc", "parakeet_tdt", "parakeet_rnnt"),
    covers=ENCODER,
    configure=_configure,
    fields=encoder_fields,
    tensors=lambda model, fields, shapes: encoder_tensors(
        model, shapes, "" if _is_alone(fields) else "encoder."
    ),
    lacks=LACKS,
    ignored=("ctc_head.*", "decoder.*", "joint.*", "encoder_projector.*"),
)
