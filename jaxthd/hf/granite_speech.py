"""Granite Speech (transformers: GraniteSpeechForConditionalGeneration): a Conformer with attention in blocks,
a Q-Former, a linear layer, Granite.

Granite's multiplier of embeddings is on audio too. Its logits are not divided by logits_scaling: the library
leaves that out (5.24). A recording is encoded alone: padding in a batch enters the published encoder's
convolutions and its attention.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from jaxthd.config import AdaptConfig, FrontEnd, ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape, Tensor
from jaxthd.hf.family import Family, Field, Settings
from jaxthd.hf.fields import Fields, must_be
from jaxthd.hf.llama import GRANITE
from jaxthd.hf.lora import lora_fields, read_lora, target_modules, with_lora
from jaxthd.hf.speech_llm import Names, Part, SpeechLLM, below_language_model
from jaxthd.models.front_ends import GraniteConformer


def _times_dim(default: int) -> Any:
    """Reads a factor on the model dim."""
    return lambda factor, fields: (default if factor is None else factor) * fields.get("hidden_dim", 1024)


def _mels(inputs: int, fields: Fields) -> int:
    """Mel bands of a frame, which holds two mel frames."""
    must_be({"input_dim": inputs}, {"input_dim": inputs // 2 * 2}, "encoder_config")
    return inputs // 2


_CONFORMER: Settings = {
    "mel_bands": Field("input_dim", 160, _mels, lambda encoder: encoder.width),
    "layers": Field("num_layers", 10),
    "model_dim": Field("hidden_dim", 1024),
    "heads": Field("num_heads", 8),
    "head_dim": Field(
        "dim_head",
        read=lambda x, fields: x or fields.get("hidden_dim", 1024) // fields.get("num_heads", 8),
    ),
    "ffn_dim": Field("feedforward_mult", 4, _times_dim(4), lambda x: x.ffn_dim // x.model_dim),
    "block": Field("context_size", 200),
    "distances": Field("max_pos_emb", 512),
    "conv_kernel": Field("conv_kernel_size", 15),
    "conv_dim": Field("conv_expansion_factor", 2, _times_dim(2), lambda x: x.conv_dim // x.model_dim),
    "labels": Field("output_dim", 42),
}
_QFORMER: Settings = {
    "query_dim": Field("hidden_size", 768),
    "query_layers": Field("num_hidden_layers", 12),
    "query_heads": Field("num_attention_heads", 12),
    "query_ffn_dim": Field("intermediate_size", 3072),
    "cross_every": Field("cross_attention_frequency", 2),
}


def _queries(rate: int | None, fields: Fields) -> int:
    """Queries of a window. Raises UserError where the windows' outputs are not as many as the library joins
    (it then fails with a recording of two windows)."""
    rate, window = 5 if rate is None else rate, fields.get("window_size", 15)
    if window % rate:
        raise UserError(
            f"config.json has downsample_rate {rate}; expected a divisor of window_size, {window}: choose "
            "another checkpoint"
        )
    return int(window // rate)


_WINDOWS: Settings = {
    "window": Field("window_size", 15),
    "queries": Field("downsample_rate", 5, _queries, lambda encoder: encoder.window // encoder.queries),
}


def _expected_qformer(encoder: Any, dim: int) -> dict[str, Any]:
    fixed = {"layer_norm_eps": 1e-12, "hidden_act": "gelu", "use_qformer_text_input": False}
    return {"encoder_hidden_size": encoder.read_dim, **fixed}


def _adapter(encoder: FrontEnd, dim: int) -> dict[str, Any]:
    return {"adapter_dim": 0, "adapter_bias": True}


_SIZES = {name: entry for name, entry in GRANITE.sizes.items() if name != "logits_scaling"}


def _read_lora(fields: Fields) -> AdaptConfig | None:
    """The checkpoint's LoRA, which is on only with audio."""
    if not (lora := fields.get("lora")):
        return None
    return replace(read_lora(lora, target_modules(lora)), lora_documents="audio")


def _lora_fields(adapt: AdaptConfig, adapted: frozenset[str]) -> dict[str, Any]:
    """The settings of LoRA on the LLM, in documents with audio; other LoRA is merged."""
    if adapt.lora_documents != "audio":
        return {}
    try:
        return lora_fields(adapt, adapted)
    except UserError:
        return {}


def _family(of: SpeechLLM) -> Family:
    """The family, with LoRA in files of its own."""

    def tensors(model: ModelConfig, fields: Fields, shapes: Mapping[str, Shape]) -> Iterator[Tensor]:
        found = of.tensors(model, fields, shapes)
        return with_lora(found, shapes) if fields.get("lora") else found

    return replace(
        of.family(),
        gives="encoder, adapter and LLM, with its LoRA",
        tensors=tensors,
        lora=_read_lora,
        lora_fields=lambda model, adapt, adapted: _lora_fields(adapt, adapted),
        adapter="has_lora_adapter",
    )


GRANITE_SPEECH = SpeechLLM(
    format="granite_speech",
    title="GraniteSpeechForConditionalGeneration",
    model_types=("granite_speech",),
    decoders=(replace(GRANITE, sizes=_SIZES),),
    text={
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    encoder=GraniteConformer(),
    parts={
        "encoder_config": Part(settings=_CONFORMER, type="granite_speech_encoder"),
        "projector_config": Part(settings=_QFORMER, type="blip_2_qformer", expected=_expected_qformer),
        "": Part(settings=_WINDOWS, expected=lambda encoder, dim: {}),
    },
    adapter=_adapter,
    audio_token="audio_token_index",
    names=Names(
        text=below_language_model,
        audio="",
        projector="projector.",
        projection={"linear": "out"},
        memory={
            "language_model.model.": "model.language_model.",
            **{f"{part}.": f"model.{part}." for part in ("encoder", "projector")},
        },
    ),
    data={
        "template": "chat_template",
        "prompt": "{audio}can you transcribe the speech into a written format?",
    },
)
_JOINED: Settings = {
    "joined_layers": Field(
        "cat_hidden_layers",
        (),
        lambda layers, fields: tuple(sorted(set(layers or ()))),
        lambda encoder: list(encoder.joined_layers) or None,
    )
}
PLUS = replace(
    GRANITE_SPEECH,
    format="granite_speech_plus",
    title="GraniteSpeechPlusForConditionalGeneration",
    model_types=("granite_speech_plus",),
    parts={
        **GRANITE_SPEECH.parts,
        "encoder_config": Part(settings={**_CONFORMER, **_JOINED}, type="granite_speech_plus_encoder"),
    },
)
FAMILIES = (_family(GRANITE_SPEECH), _family(PLUS))
