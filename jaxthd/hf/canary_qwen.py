"""Canary-Qwen, as NeMo's class SALM writes it: FastConformer, a projection, Qwen3 with LoRA.

config.json is NeMo's settings, which name the LLM ("pretrained_llm") and do not describe it. Its sizes are
read off the tensors; the base of the rotary embedding and the norms' epsilon follow from the name.
An export also describes the LLM, under "text_config", which NeMo leaves unread: NeMo takes the settings of
the LLM of that name. The embedding is outside of the LLM, and a tied head is not stored.

Source: NeMo, collections/speechlm2 (models/salm.py, modules/perception.py, parts/lora.py, parts/hf_hub.py).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from jaxthd.config import AdaptConfig, ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape, Tensor, matrix, tensors
from jaxthd.hf.decoder import token_fields
from jaxthd.hf.family import (
    ADAPTER,
    ENCODER,
    LLM,
    Family,
    Field,
    Settings,
    read_settings,
    updated,
    write_settings,
)
from jaxthd.hf.fields import Fields, must_be, required
from jaxthd.hf.nemo_encoder import encoder_config, encoder_fields, encoder_tensors
from jaxthd.hf.parakeet import own_encoder
from jaxthd.hf.qwen3 import QWEN3

KIND = "nemo_salm"
"""Stands for the model_type, which such a config.json does not have."""

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
_LORA: Settings = {
    "lora_rank": Field("r", 8),
    "lora_alpha": Field("lora_alpha", 8.0),
    "lora_dropout": Field("lora_dropout", 0.0),
}
_OF_ALL: dict[str, Any] = {
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
}
_SIZE = ("hidden_size", "num_hidden_layers")
_DIFFERING = (*_SIZE, "num_attention_heads", "intermediate_size", "rope_theta", "tie_word_embeddings")
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
    plain = {name.replace(".base_layer.", "."): shape for name, shape in shapes.items()}
    first = f"{prefix}model.layers.0."
    try:
        (head_dim,) = plain[f"{first}self_attn.q_norm.weight"]
        vocabulary, dim = plain["embed_tokens.weight"]
        queries, keys, gates = (
            plain[f"{first}{name}_proj.weight"][0] for name in ("self_attn.q", "self_attn.k", "mlp.gate")
        )
    except KeyError as error:
        raise UserError(
            f"config.json has pretrained_llm {fields['pretrained_llm']!r}, and there is no tensor "
            f"{error.args[0]}; expected those of a dense Qwen3, the only LLM that jaxthd reads in NeMo's "
            "folders: choose another checkpoint"
        ) from error
    layer = re.compile(rf"{re.escape(prefix)}model\.layers\.(\d+)\.")
    text = {
        "vocab_size": vocabulary,
        "hidden_size": dim,
        "num_hidden_layers": len({m[1] for name in shapes if (m := layer.match(name))}),
        "num_attention_heads": queries // head_dim,
        "num_key_value_heads": keys // head_dim,
        "head_dim": head_dim,
        "intermediate_size": gates,
        "rms_norm_eps": named["rms_norm_eps"],
        "rope_theta": named["rope_theta"],
        "tie_word_embeddings": f"{prefix}lm_head.weight" not in shapes,
    }
    return {**fields, "text_config": text}


def _configure(fields: Fields, model: ModelConfig) -> ModelConfig:
    llm = QWEN3.read(required(fields, "text_config"), model.llm)
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
    encoder = encoder_config(perception, model, "perception")
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
    adapt = AdaptConfig(lora_targets=tuple(ours for name, ours in _TARGETS.items() if name in chosen))
    return updated(adapt, read_settings(lora, _LORA))


def _lora_fields(adapt: AdaptConfig, adapted: frozenset[str]) -> dict[str, Any]:
    if adapt.dora or not adapted <= {*_TARGETS.values()}:
        others = ", ".join(sorted(adapted - {*_TARGETS.values()})) or "DoRA"
        raise UserError(
            f"the run has LoRA on {others}; the salm format holds plain LoRA on projections of the LLM "
            "alone: choose --format parts, for which LoRA is merged"
        )
    return {
        "task_type": "CAUSAL_LM",
        **write_settings(adapt, _LORA),
        "target_modules": [theirs for theirs, ours in _TARGETS.items() if ours in adapted],
    }


def _fields(model: ModelConfig) -> dict[str, Any]:
    encoder, llm = own_encoder(model), model.llm
    if model.adapter_dim or not model.adapter_bias:
        raise UserError(
            f"model.adapter_dim is {model.adapter_dim} and model.adapter_bias {model.adapter_bias}; the salm "
            "format holds an adapter of one linear layer with a bias (0, True): choose --format parts"
        )
    text = QWEN3.write(llm)
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
                "feat_out": -1,
                **encoder_fields(model),
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


def _tensors(model: ModelConfig, fields: Fields, shapes: Mapping[str, Shape]) -> Iterator[Tensor]:
    if model.encoder is not None:
        yield from encoder_tensors(model, shapes, "perception.encoder.")
        yield from tensors({"proj": "out"}, shapes, "perception.", "adapter.")
    llm = QWEN3.tensors(model.llm, fields, shapes)
    yield next(llm)._replace(name="embed_tokens.weight")  # the first is the embedding
    if fields.get("lora"):
        yield from _with_lora(llm, shapes, "llm.base_model.model.")
    else:
        yield from (tensor._replace(name=f"llm.{tensor.name}") for tensor in llm)


def _with_lora(found: Iterable[Tensor], shapes: Mapping[str, Shape], theirs: str) -> Iterator[Tensor]:
    """The tensors with the low-rank matrices of their projections, as peft names them.

    theirs: what all names have in front.
    """
    for tensor in found:
        module = tensor.slices[0].name.removesuffix(".w")
        name, at = tensor.name.removesuffix(".weight"), tensor.slices[0].at
        if f"{module}.lora.a" in shapes:
            low_rank = {
                f"{name}.lora_A.default.weight": matrix("a"),
                f"{name}.lora_B.default.weight": matrix("b"),
            }
            yield from tensors(low_rank, shapes, theirs, f"{module}.lora.", at)
            name += ".base_layer"
        yield tensor._replace(name=f"{theirs}{name}.weight")


FAMILY = Family(
    format="salm",
    title="NeMo's SALM (Canary-Qwen)",
    gives="encoder, adapter and LLM, with its LoRA",
    model_types=(KIND,),
    covers=(*LLM, *ENCODER, *ADAPTER),
    configure=_configure,
    fields=_fields,
    tensors=_tensors,
    # The mel filters, which follow from the settings, and a tied head.
    ignored=("perception.preprocessor.*", "perception.encoder.pos_enc.*", "llm.*lm_head.weight"),
    complete=_complete,
    lora=_lora,
    lora_fields=_lora_fields,
    token_fields=lambda tokens: {"text_config": token_fields(tokens)},
    by_default=False,
    turns={"template": "chatml", "prompt": "Transcribe the following: {audio}"},
)
