"""NeMo's FastConformer encoder, as in .nemo archives of Parakeet and Canary and in Canary-Qwen's folders: its
settings and its names."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jaxthd.config import ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape, Tensor
from jaxthd.hf import parakeet
from jaxthd.hf.family import Family, Field, Settings, read_settings, updated, write_settings
from jaxthd.hf.fields import must_be, required
from jaxthd.models.front_ends import FastConformer

_EXPECTED = {
    "subsampling": "dw_striding",
    "subsampling_factor": 8,
    "self_attention_model": "rel_pos",
    "conv_norm_type": "batch_norm",
    "untie_biases": True,
    "att_context_size": [-1, -1],
}
_ALSO = {
    "att_context_style": "regular",
    "causal_downsampling": False,
    "conv_context_size": None,
    "reduction": None,
}
"""Further settings, which are not written."""
_SIZES: Settings = {
    "num_mels": "feat_in",
    "layers": "n_layers",
    "dim": "d_model",
    "heads": "n_heads",
    "ffn_dim": Field(
        "ff_expansion_factor",
        4,
        lambda factor, encoder: factor * encoder["d_model"],
        lambda encoder: encoder.ffn_dim // encoder.dim,
    ),
    "conv_kernel": "conv_kernel_size",
    "subsampling_channels": Field(
        "subsampling_conv_channels",
        -1,
        lambda channels, encoder: encoder["d_model"] if channels == -1 else channels,
    ),
    "linear_bias": Field("use_bias", True),
    "conv_bias": Field("use_bias", True),
    "scale_input": Field("xscaling", True),
}
_NAMES = (
    ("subsampling.layers.", "pre_encode.conv."),
    ("subsampling.linear.", "pre_encode.out."),
    *((f".self_attn.{x}_proj.", f".self_attn.linear_{x}.") for x in "qkv"),
    (".self_attn.o_proj.", ".self_attn.linear_out."),
    (".self_attn.relative_k_proj.", ".self_attn.linear_pos."),
    (".self_attn.bias_", ".self_attn.pos_bias_"),
    (".conv.norm.", ".conv.batch_norm."),
)
"""Parts of the names of ParakeetEncoder in the transformers library -> NeMo's."""


def encoder_config(config: Any, model: ModelConfig, where: str) -> FastConformer:
    """The model's encoder with NeMo's settings.

    config: of a model, with "encoder" and "preprocessor". where: its name in messages. Raises UserError for
    another kind of encoder than jaxthd's.
    """
    try:
        fields = dict(required(config, "encoder", where))
        if isinstance(fields.get("feat_in"), str):  # ${model.preprocessor.features}, or the like
            fields["feat_in"] = required(required(config, "preprocessor", where), "features", where)
        required(fields, "subsampling_factor", where)  # NeMo's default is another one
        found = updated(parakeet.base_encoder(model), read_settings(fields, _SIZES, where))
    except UserError as error:
        raise UserError(
            f"{where} describes no FastConformer encoder ({error}); expected a model such as "
            "Parakeet or Canary: choose another checkpoint"
        ) from error
    if [-1, -1] in (fields.get("att_context_size") or [[-1, -1]]):  # several are alternatives
        fields["att_context_size"] = [-1, -1]
    must_be(
        {name: x if x is not None else "null" for name, x in fields.items()},
        _EXPECTED | _ALSO,
        f"the encoder in {where}",
    )
    if (fields.get("feat_out") or -1) not in (-1, found.dim):
        raise UserError(
            f"the encoder in {where} has feat_out {fields['feat_out']}; expected -1, because jaxthd has no "
            "projection behind the encoder: choose another checkpoint"
        )
    return found


def encoder_fields(model: ModelConfig) -> dict[str, Any]:
    """NeMo's settings of an encoder. Raises UserError for one that they cannot describe."""
    encoder = parakeet.own_encoder(model)
    if encoder.linear_bias != encoder.conv_bias:
        raise UserError(
            f"model.encoder.linear_bias is {encoder.linear_bias} and conv_bias {encoder.conv_bias}; NeMo has "
            "one setting for both: choose --format parts"
        )
    if encoder.ffn_dim % encoder.dim:
        raise UserError(
            f"model.encoder.ffn_dim is {encoder.ffn_dim} with dim {encoder.dim}; NeMo has a whole number for "
            "their ratio: choose --format parts"
        )
    return {**write_settings(encoder, _SIZES), **_EXPECTED}


def encoder_tensors(model: ModelConfig, shapes: Mapping[str, Shape], theirs: str) -> Iterator[Tensor]:
    """The tensors of our arrays below "encoder.", by NeMo's names. theirs: what these have in front."""
    for tensor in parakeet.encoder_tensors(model, shapes):
        name = tensor.name
        for librarys, nemos in _NAMES:
            name = name.replace(librarys, nemos)
        yield tensor._replace(name=theirs + name)


def archive_family(where: str) -> Family:
    """A .nemo archive as a family of checkpoints. where: the name of its settings in messages."""
    return replace(
        parakeet.FAMILY,
        configure=lambda config, model: replace(model, encoder=encoder_config(config, model, where)),
        tensors=lambda model, config, shapes: encoder_tensors(model, shapes, "encoder."),
        ignored=(),
    )
