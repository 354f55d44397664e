"""Parakeet's encoder (transformers: ParakeetEncoder, alone or below the head of a speech recogniser)."""

from dataclasses import replace
from typing import Any

from jaxthd.config import EncoderConfig, ModelConfig
from jaxthd.hf.family import ENCODER, Family, Fields, encoder_of, must_be, required
from jaxthd.hf.names import Names, Shape

_EXPECTED = {
    "hidden_act": "silu",
    "subsampling_factor": 8,
    "subsampling_conv_kernel_size": 3,
    "subsampling_conv_stride": 2,
}
_SIZES: dict[str, tuple[str, Any]] = {
    "num_mels": ("num_mel_bins", 80),
    "layers": ("num_hidden_layers", 24),
    "dim": ("hidden_size", 1024),
    "heads": ("num_attention_heads", 8),
    "ffn_dim": ("intermediate_size", 4096),
    "conv_kernel": ("conv_kernel_size", 9),
    "subsampling_channels": ("subsampling_conv_channels", 256),
    "linear_bias": ("attention_bias", True),
    "conv_bias": ("convolution_bias", True),
    "scale_input": ("scale_input", True),
}
"""Our names -> (theirs, the library's default: config.json may leave out what has its default)."""


def encoder_config(fields: Fields, encoder: EncoderConfig, where: str = "config.json") -> EncoderConfig:
    """`encoder` with the checkpoint's settings; absent ones are the library's defaults."""
    must_be(fields, _EXPECTED, where)
    return replace(
        encoder, **{ours: fields.get(theirs, default) for ours, (theirs, default) in _SIZES.items()}
    )


def encoder_fields(encoder: EncoderConfig) -> dict[str, Any]:
    """config.json of an export."""
    return {
        "architectures": ["ParakeetEncoder"],
        "model_type": "parakeet_encoder",
        **{theirs: getattr(encoder, ours) for ours, (theirs, _) in _SIZES.items()},
        **_EXPECTED,
    }


def _pointwise_2d(channels: int) -> Shape:
    return (channels, 1, 1)


def _pointwise_1d(channels: int) -> Shape:
    return (channels, 1)


def write_encoder(encoder: EncoderConfig, names: Names) -> None:
    """Writes the name table of our arrays below "encoder."."""
    names = names.within("", "encoder.")
    _subsampling(encoder, names.within("subsampling.", "subsampling."))
    for number in range(encoder.layers):
        _block(names.within(f"layers.{number}.", "blocks.", number))


def _subsampling(encoder: EncoderConfig, names: Names) -> None:
    def square(taps: int) -> Shape:
        return (1, 3, 3)

    names.linear("layers.0", "first", tail=square)
    for ours, depthwise, pointwise in (("later.0", 2, 3), ("later.1", 5, 6)):
        names.transposed(f"layers.{depthwise}.weight", f"{ours}.w", tail=square)
        names.same(f"layers.{depthwise}.bias", f"{ours}.bias")
        names.linear(f"layers.{pointwise}", f"{ours}.pointwise", tail=_pointwise_2d)
    # The library flattens (channels, bands), jaxthd (bands, channels).
    bands = encoder.num_mels // 8
    names.reshaped("linear.weight", "out.w", (encoder.dim, encoder.subsampling_channels, bands), (2, 1, 0))
    names.same("linear.bias", "out.bias")


def _block(names: Names) -> None:
    for theirs, ours in (("feed_forward1.", "ffn1."), ("feed_forward2.", "ffn2.")):
        ffn = names.within(theirs, ours)
        ffn.linear("linear1", "up")
        ffn.linear("linear2", "down")

    attention = names.within("self_attn.", "attention.")
    for theirs, ours in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "out")):
        attention.linear(theirs, ours)
    attention.transposed("relative_k_proj.weight", "position")
    attention.same("bias_u", "content_bias")
    attention.same("bias_v", "position_bias")

    conv = names.within("conv.", "conv.")
    conv.linear("pointwise_conv1", "up", tail=_pointwise_1d)
    conv.transposed("depthwise_conv.weight", "depthwise", tail=lambda taps: (1, taps))
    if conv.has("depthwise_bias"):
        conv.same("depthwise_conv.bias", "depthwise_bias")
    conv.linear("pointwise_conv2", "down", tail=_pointwise_1d)
    for theirs, ours in (
        ("weight",) * 2,
        ("bias",) * 2,
        ("running_mean", "mean"),
        ("running_var", "variance"),
    ):
        conv.same(f"norm.{theirs}", f"norm.{ours}")
    conv.counter("norm.num_batches_tracked")

    norms = {"feed_forward1": "ffn1", "self_att": "attention", "conv": "conv", "feed_forward2": "ffn2"}
    for theirs, ours in (norms | {"out": "out"}).items():
        for part in ("weight", "bias"):
            names.same(f"norm_{theirs}.{part}", f"norm_{ours}.{part}")


def _encoder_fields(fields: Fields) -> Fields:
    """A recogniser's config.json has them under encoder_config."""
    return fields if fields["model_type"] == "parakeet_encoder" else required(fields, "encoder_config")


def _configure(fields: Fields, model: ModelConfig) -> ModelConfig:
    encoder = model.encoder or EncoderConfig()
    return replace(model, encoder=encoder_config(_encoder_fields(fields), encoder))


def _write(model: ModelConfig, fields: Fields, names: Names) -> None:
    is_alone = fields["model_type"] == "parakeet_encoder"
    write_encoder(encoder_of(model, "encoder"), names if is_alone else names.within("encoder.", ""))


FAMILY = Family(
    format="encoder",
    title="ParakeetEncoder",
    gives="the encoder",
    model_types=("parakeet_encoder", "parakeet_ctc", "parakeet_tdt", "parakeet_rnnt"),
    covers=ENCODER,
    configure=_configure,
    fields=lambda model: encoder_fields(encoder_of(model, "encoder")),
    write=_write,
    ignored=("ctc_head.*", "decoder.*", "joint.*", "encoder_projector.*"),
)
