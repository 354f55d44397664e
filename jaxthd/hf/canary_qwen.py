"""Canary-Qwen, as NeMo's class SALM writes it: FastConformer, a projection, Qwen3 with LoRA.

config.json is NeMo's settings, which name the LLM ("pretrained_llm") and do not describe it. Its sizes are
read off the tensors; the base of the rotary embedding and the norms' epsilon follow from the name.
An export also describes the LLM, under "text_config", which NeMo leaves unread: NeMo takes the settings of
the LLM of that name. The embedding is outside of the LLM, and a tied head is not stored.

Source: NeMo, collections/speechlm2 (models/salm.py, modules/perception.py, parts/lora.py, parts/hf_hub.py).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxthd.config import AdaptConfig, ModelConfig
from jaxthd.errors import UserError
from jaxthd.hf.family import ADAPTER, ENCODER, LLM, Family, Fields, encoder_of, must_be, required
from jaxthd.hf.names import Names, Shape
from jaxthd.hf.nemo import encoder_fields, nemo_name
from jaxthd.hf.nemotron_h import token_fields
from jaxthd.hf.parakeet import encoder_config, write_encoder
from jaxthd.hf.qwen3 import llm_config, llm_fields, write_layers

KIND = "nemo_salm"
"""What stands for the model_type that such a config.json does not have."""

_PARTS = "nemo.collections.speechlm2.modules.perception"
_IDENTITY = f"{_PARTS}.IdentityConnector"
_PREPROCESSOR = {
    "sample_rate": 16000,
    "normalize": "per_feature",
    "window_size": 0.025,
    "window_stride": 0.01,
    "window": "hann",
    "n_fft": 512,
    "log": True,
    "frame_splicing": 1,
}
_PLAIN_LORA = {
    "use_dora": False,
    "use_rslora": False,
    "bias": "none",
    "modules_to_save": None,
    "alpha_pattern": {},
    "rank_pattern": {},
    "layers_to_transform": [],
    "fan_in_fan_out": False,
}
_TARGETS = {
    "q_proj": "decoder.layers.attention.mixer.q",
    "k_proj": "decoder.layers.attention.mixer.k",
    "v_proj": "decoder.layers.attention.mixer.v",
    "o_proj": "decoder.layers.attention.mixer.out",
    "gate_proj": "decoder.layers.mlp.mixer.gate",
    "up_proj": "decoder.layers.mlp.mixer.up",
    "down_proj": "decoder.layers.mlp.mixer.down",
}
"""The projections' names in peft's target_modules -> our projections."""
_OF_ALL: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
}
_SIZE = ("hidden_size", "num_hidden_layers")
_DIFFERING = (
    *_SIZE,
    "num_attention_heads",
    "intermediate_size",
    "rope_theta",
    "tie_word_embeddings",
)
_PUBLISHED: dict[str, dict[str, Any]] = {
    name: _OF_ALL | dict(zip(_DIFFERING, values, strict=True))
    for name, values in {
        "Qwen/Qwen3-0.6B": (1024, 28, 16, 3072, 1e6, True),
        "Qwen/Qwen3-1.7B": (2048, 28, 16, 6144, 1e6, True),
        "Qwen/Qwen3-4B": (2560, 36, 32, 9728, 1e6, True),
        "Qwen/Qwen3-4B-Instruct-2507": (2560, 36, 32, 9728, 5e6, True),
        "Qwen/Qwen3-8B": (4096, 36, 32, 12288, 1e6, False),
        "Qwen/Qwen3-14B": (5120, 40, 40, 17408, 1e6, False),
        "Qwen/Qwen3-32B": (5120, 64, 64, 25600, 1e6, False),
    }.items()
}
"""The LLM's name, from which NeMo takes its settings and its tokenizer -> those settings."""


def is_salm(fields: Fields) -> bool:
    """Whether a config.json is NeMo's for a SALM."""
    return {"perception", "pretrained_llm", "audio_locator_tag"} <= fields.keys()


def _complete(fields: Fields, shapes: Mapping[str, Shape]) -> Fields:
    """The settings with "text_config", read off the tensors' shapes where it is absent."""
    if "text_config" in fields:
        return fields
    named = _PUBLISHED.get(fields["pretrained_llm"])
    if named is None:
        raise UserError(
            f"config.json has pretrained_llm {fields['pretrained_llm']!r} and no text_config; expected one "
            f"of {', '.join(_PUBLISHED)}, because no tensor shows its rope_theta: if it is another dense "
            "Qwen3, put its own config.json under text_config, else choose another checkpoint"
        )
    prefix = "llm.base_model.model." if fields.get("lora") else "llm."
    first = f"{prefix}model.layers.0."

    def shape(*names: str) -> Shape:
        for name in names:
            if name in shapes:
                return shapes[name]
        raise UserError(
            f"config.json has pretrained_llm {fields['pretrained_llm']!r}, and there is no tensor "
            f"{names[0]}; expected those of a dense Qwen3, the only LLM that jaxthd reads in NeMo's "
            "folders: choose another checkpoint"
        )

    def rows(name: str) -> int:
        return shape(f"{first}{name}.weight", f"{first}{name}.base_layer.weight")[0]

    (head_dim,) = shape(f"{first}self_attn.q_norm.weight")
    numbers = {
        m[1] for name in shapes if (m := re.match(re.escape(prefix) + r"model\.layers\.(\d+)\.", name))
    }
    vocabulary, dim = shape("embed_tokens.weight")
    text = {
        "vocab_size": vocabulary,
        "hidden_size": dim,
        "num_hidden_layers": len(numbers),
        "num_attention_heads": rows("self_attn.q_proj") // head_dim,
        "num_key_value_heads": rows("self_attn.k_proj") // head_dim,
        "head_dim": head_dim,
        "intermediate_size": rows("mlp.gate_proj"),
        "rms_norm_eps": named["rms_norm_eps"],
        "rope_theta": named["rope_theta"],
        "tie_word_embeddings": f"{prefix}lm_head.weight" not in shapes,
    }
    return {**fields, "text_config": text}


def _configure(fields: Fields, model: ModelConfig) -> ModelConfig:
    llm = llm_config(required(fields, "text_config"), model.llm)
    if model.encoder is None:
        return replace(model, llm=llm)
    perception = required(fields, "perception")
    connector = (perception.get("modality_adapter") or {}).get("_target_")
    if connector != _IDENTITY:
        raise UserError(
            f"config.json has perception.modality_adapter {connector!r}; expected {_IDENTITY!r}, as "
            "Canary-Qwen has it: choose another checkpoint"
        )
    must_be(perception.get("preprocessor") or {}, _PREPROCESSOR, "perception.preprocessor")
    encoder = encoder_config(encoder_fields(perception, "perception"), model.audio_encoder, "perception")
    return replace(model, llm=llm, encoder=encoder, adapter_dim=0, adapter_bias=True)


def _lora(fields: Fields) -> AdaptConfig | None:
    """The LoRA of the checkpoint as settings of a run; None without one."""
    lora = fields.get("lora")
    if not lora:
        return None
    must_be(lora, _PLAIN_LORA, "lora")
    targets = lora.get("target_modules") or ["q_proj", "v_proj"]  # peft's default for Qwen3
    if isinstance(targets, str) and targets != "all-linear":
        raise UserError(
            f"lora.target_modules is {targets!r}, which peft takes as a regular expression; expected a list "
            f'of names, or "all-linear": list those of {", ".join(_TARGETS)} that it matches'
        )
    chosen = list(_TARGETS) if targets == "all-linear" else list(targets)
    unknown = sorted(set(chosen) - set(_TARGETS))
    if unknown:
        raise UserError(
            f"lora.target_modules has {', '.join(unknown)}; expected some of {', '.join(_TARGETS)}: choose "
            "another checkpoint"
        )
    return AdaptConfig(
        lora_rank=int(lora.get("r", 8)),
        lora_alpha=float(lora.get("lora_alpha", 8)),
        lora_targets=tuple(_TARGETS[name] for name in _TARGETS if name in chosen),
        lora_dropout=float(lora.get("lora_dropout", 0.0)),
    )


def _lora_fields(adapt: AdaptConfig, adapted: frozenset[str]) -> dict[str, Any]:
    if adapt.dora or not adapted <= {*_TARGETS.values()}:
        others = ", ".join(sorted(adapted - {*_TARGETS.values()})) or "DoRA"
        raise UserError(
            f"the run has LoRA on {others}; the salm format holds plain LoRA on projections of the LLM "
            "alone: choose --format parts, for which LoRA is merged"
        )
    return {
        "task_type": "CAUSAL_LM",
        "r": adapt.lora_rank,
        "lora_alpha": adapt.lora_alpha,
        "lora_dropout": adapt.lora_dropout,
        "target_modules": [theirs for theirs, ours in _TARGETS.items() if ours in adapted],
    }


def _fields(model: ModelConfig) -> dict[str, Any]:
    encoder, llm = encoder_of(model, "audio model"), model.llm
    if model.adapter_dim or not model.adapter_bias:
        raise UserError(
            f"model.adapter_dim is {model.adapter_dim} and model.adapter_bias {model.adapter_bias}; the salm "
            "format holds an adapter of one linear layer with a bias (0, True): choose --format parts"
        )
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
    text = llm_fields(llm, moe=False)
    return {
        "pretrained_llm": _published_name(text),
        "pretrained_asr": "",
        "pretrained_weights": False,
        "freeze_params": [],
        "prevent_freeze_params": [],
        "prompt_format": "qwen",
        "audio_locator_tag": "<|audioplaceholder|>",
        "perception": {
            "target": f"{_PARTS}.AudioPerceptionModule",
            "output_dim": llm.dim,
            "modality_adapter": {"_target_": _IDENTITY, "d_model": encoder.dim},
            "preprocessor": {
                "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
                **_PREPROCESSOR,
                "features": encoder.num_mels,
                "dither": 1e-5,
                "pad_to": 0,
            },
            "encoder": {
                "_target_": "nemo.collections.asr.modules.ConformerEncoder",
                "feat_in": encoder.num_mels,
                "feat_out": -1,
                "n_layers": encoder.layers,
                "d_model": encoder.dim,
                "n_heads": encoder.heads,
                "ff_expansion_factor": encoder.ffn_dim // encoder.dim,
                "conv_kernel_size": encoder.conv_kernel,
                "conv_norm_type": "batch_norm",
                "subsampling": "dw_striding",
                "subsampling_factor": 8,
                "subsampling_conv_channels": encoder.subsampling_channels,
                "self_attention_model": "rel_pos",
                "att_context_size": [-1, -1],
                "untie_biases": True,
                "xscaling": encoder.scale_input,
                "use_bias": encoder.linear_bias,
            },
        },
        "text_config": text,
    }


def _published_name(text: Fields) -> str:
    """The name of the published LLM that has all the settings `text`; "" for one of an unpublished size.

    Raises UserError for an LLM of a published size with other settings.
    """
    alike = {
        name: [key for key, value in settings.items() if text[key] != value]
        for name, settings in _PUBLISHED.items()
        if all(text[key] == settings[key] for key in _SIZE)
    }
    if not alike:
        return ""
    name, differing = min(alike.items(), key=lambda item: len(item[1]))
    if differing:
        listed = "".join(f"\n  {key}: {text[key]!r}, not {_PUBLISHED[name][key]!r}" for key in differing)
        raise UserError(
            f"the LLM is of the size of {name} and has other settings:{listed}\nExpected its settings, which "
            "NeMo takes from that name: choose --format parts"
        )
    return name


def _write(model: ModelConfig, fields: Fields, names: Names) -> None:
    if model.encoder is not None:
        encoder = names.renamed(lambda name: f"perception.encoder.{nemo_name(name)}")
        write_encoder(model.encoder, encoder)
        names.within("perception.", "adapter.").linear("proj", "out")
    names.same("embed_tokens.weight", "embedding")
    has_lora = bool(fields.get("lora"))
    llm = names.with_lora().within("llm.base_model.model.", "") if has_lora else names.within("llm.", "")
    write_layers(model.llm, llm)


FAMILY = Family(
    format="salm",
    title="NeMo's SALM (Canary-Qwen)",
    gives="encoder, adapter and LLM, with its LoRA",
    model_types=(KIND,),
    covers=(*LLM, *ENCODER, *ADAPTER),
    configure=_configure,
    fields=_fields,
    write=_write,
    # The mel filters, which follow from the settings, and a tied head.
    ignored=("perception.preprocessor.*", "perception.encoder.pos_enc.*", "llm.*lm_head.weight"),
    complete=_complete,
    lora=_lora,
    lora_fields=_lora_fields,
    token_fields=lambda tokens: {"text_config": token_fields(tokens)},
    by_default=False,
)
