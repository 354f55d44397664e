"""Parakeet's encoder (transformers: ParakeetEncoder, alone or below the head of a speech recogniser)."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jaxthd.config import ModelConfig
from jaxthd.errors import UserError
from jaxthd.hf.decoder import ATTENTION
from jaxthd.hf.family import ENCODER, Family, Field, Settings, read_settings, updated, write_settings
from jaxthd.hf.fields import Fields, must_be, required
from jaxthd.hf.names import Arrays, Below, Shape, Table, Tensor, matrix, tensors
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
_SQUARE, _POINT_2D, _POINT_1D, _TAPS = (1, 3, 3), (0, 1, 1), (0, 1), (1, 0)
"""Kernels of convolutions, behind the output channels; 0 is the number of input channels or of taps."""
_FFN: Table = {"linear1": "up", "linear2": "down"}
_CONV: Table = {
    "pointwise_conv1.weight": matrix("up.w", tail=_POINT_1D),
    "pointwise_conv1.bias": "up.bias",
    "depthwise_conv.weight": matrix("depthwise", tail=_TAPS),
    "depthwise_conv.bias": "depthwise_bias",
    "pointwise_conv2.weight": matrix("down.w", tail=_POINT_1D),
    "pointwise_conv2.bias": "down.bias",
    "norm": "norm",
    "norm.running_mean": "norm.mean",
    "norm.running_var": "norm.variance",
    "norm.num_batches_tracked": None,
}
_BLOCK: Table = {
    "feed_forward1.": Below("ffn1.", _FFN),
    "feed_forward2.": Below("ffn2.", _FFN),
    "self_attn.": Below(
        "attention.",
        {
            **ATTENTION,
            "relative_k_proj.weight": matrix("position"),
            "bias_u": "content_bias",
            "bias_v": "position_bias",
        },
    ),
    "conv.": Below("conv.", _CONV),
    "norm_feed_forward1": "norm_ffn1",
    "norm_self_att": "norm_attention",
    "norm_conv": "norm_conv",
    "norm_feed_forward2": "norm_ffn2",
    "norm_out": "norm_out",
}


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
    """config.json of an export."""
    encoder = own_encoder(model)
    return {
        "architectures": ["ParakeetEncoder"],
        "model_type": "parakeet_encoder",
        **write_settings(encoder, _SIZES),
        **_EXPECTED,
    }


def encoder_tensors(model: ModelConfig, shapes: Mapping[str, Shape], theirs: str = "") -> Iterator[Tensor]:
    """The tensors of our arrays below "encoder.". theirs: what their names have in front."""
    encoder = own_encoder(model)
    # The library flattens (channels, bands), jaxthd (bands, channels).
    view = (encoder.dim, encoder.subsampling_channels, encoder.num_mels // 8)
    flattened = Arrays(("out.w",), view, order=(2, 1, 0), tail=(view[1] * view[2],))
    subsampling: dict[str, Any] = {
        "layers.0.weight": matrix("first.w", tail=_SQUARE),
        "layers.0.bias": "first.bias",
    }
    for ours, depthwise, pointwise in (("later.0", 2, 3), ("later.1", 5, 6)):
        subsampling |= {
            f"layers.{depthwise}.weight": matrix(f"{ours}.w", tail=_SQUARE),
            f"layers.{depthwise}.bias": f"{ours}.bias",
            f"layers.{pointwise}.weight": matrix(f"{ours}.pointwise.w", tail=_POINT_2D),
            f"layers.{pointwise}.bias": f"{ours}.pointwise.bias",
        }
    subsampling |= {"linear.weight": flattened, "linear.bias": "out.bias"}
    table = {
        "subsampling.": Below("subsampling.", subsampling),
        "layers.{}.": Below("blocks.", _BLOCK, over="norm_out.weight"),
    }
    return tensors(table, shapes, theirs, "encoder.")


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
    ignored=("ctc_head.*", "decoder.*", "joint.*", "encoder_projector.*"),
)
