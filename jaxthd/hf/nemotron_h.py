"""NemotronH, dense and MoE, with and without latent experts (transformers: NemotronHForCausalLM)."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxthd.config import LLMConfig, RopeConfig
from jaxthd.errors import UserError
from jaxthd.hf.family import (
    LLM,
    PLAIN,
    Family,
    Fields,
    SpecialTokens,
    mtp_settings,
    must_be,
    must_hold,
    one_or_all,
    required,
)
from jaxthd.hf.names import Names, Shape
from jaxthd.models.mixers import LAYER_KINDS
from jaxthd.models.mixers.mamba2 import COST_CHUNK

_BLOCKS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_LETTERS = {name: letter for letter, name in _BLOCKS.items()} | {"mamba": "M", "attention": "*"}

_EXPECTED = {
    "attention_bias": False,
    "use_bias": False,
    "mlp_bias": False,
    "mamba_proj_bias": False,
    "use_conv_bias": True,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
}

_SIZES: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 131072),
    "dim": ("hidden_size", 4096),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "q_heads": ("num_attention_heads", 32),
    "kv_heads": ("num_key_value_heads", 8),
    "head_dim": ("head_dim", 128),
    "ffn_dim": ("intermediate_size", 21504),
    "mamba_heads": ("mamba_num_heads", 128),
    "mamba_head_dim": ("mamba_head_dim", 64),
    "mamba_state": ("ssm_state_size", 128),
    "mamba_groups": ("n_groups", 8),
    "mamba_conv": ("conv_kernel", 4),
}
_MOE_SIZES: dict[str, tuple[str, Any]] = {
    "experts": ("n_routed_experts", 8),
    "experts_per_token": ("num_experts_per_tok", 2),
    "expert_dim": ("moe_intermediate_size", 7688),
    "shared_expert_dim": ("moe_shared_expert_intermediate_size", 7688),
    "router_scale": ("routed_scaling_factor", 1.0),
}
"""Our names -> (theirs, the library's default: config.json may leave out what has its default)."""
_FORM: dict[str, Any] = PLAIN | {
    "rope": RopeConfig(),
    "attention_bias": False,
    "qk_norm": False,
    "ffn_form": "relu2",
    "tied_embedding": False,
    "router": "sigmoid",
    "router_normalised": True,
}
"""Our settings that the family has no field for."""
_OLD_NAMES = {
    "head_dim": "attention_head_dim",
    "n_groups": "mamba_n_groups",
    "conv_kernel": "mamba_d_conv",
    "time_step_limit": "mamba_dt_limit",
}
"""The library's names -> their names in older checkpoints."""


def llm_config(fields: Fields, llm: LLMConfig, where: str = "config.json") -> LLMConfig:
    """`llm` with the checkpoint's settings. The stage marks of its pattern stay."""
    fields = {**fields, **{new: fields[old] for new, old in _OLD_NAMES.items() if old in fields}}
    must_be(fields, _EXPECTED, where)
    letters = _letters(fields, where)
    has_experts = "E" in letters + _mtp_letters(fields, where)
    names = _SIZES | (_MOE_SIZES if has_experts else {})
    settings = {ours: fields.get(theirs, default) for ours, (theirs, default) in names.items()}
    if has_experts:
        settings["latent_dim"] = fields.get("moe_latent_size") or 0
        settings["router_scale"] = float(settings["router_scale"])
    low, high = (_number(x) for x in fields.get("time_step_limit") or (0.0, math.inf))
    pattern = llm.pattern if llm.letters == letters else letters
    modules = int(fields.get("num_nextn_predict_layers") or 0)
    settings |= mtp_settings(_mtp_letters(fields, where), modules, llm) | _FORM
    return replace(llm, pattern=pattern, mamba_dt_limit=(low, high), **settings)


def _number(x: Any) -> float:
    """JSON has no infinity: some checkpoints write {"__float__": "Infinity"}."""
    return float(x["__float__"] if isinstance(x, dict) else x)


def _letters(fields: Fields, where: str) -> str:
    if fields.get("hybrid_override_pattern"):
        return str(fields["hybrid_override_pattern"])
    return _letters_of(fields.get("layers_block_type") or required(fields, "layer_types", where), where)


def _mtp_letters(fields: Fields, where: str) -> str:
    """The blocks of one depth of multi-token prediction; "" where the checkpoint has none."""
    if not fields.get("num_nextn_predict_layers"):
        return ""
    if fields.get("mtp_hybrid_override_pattern"):
        return str(fields["mtp_hybrid_override_pattern"])
    return _letters_of(fields.get("mtp_layers_block_type") or ["full_attention", "moe"], where)


def _letters_of(blocks: Sequence[str], where: str) -> str:
    unknown = sorted({str(block) for block in blocks if block not in _LETTERS})
    if unknown:
        raise UserError(f"{where} names layers of type {', '.join(unknown)}; expected {', '.join(_LETTERS)}")
    return "".join(_LETTERS[block] for block in blocks)


def llm_fields(llm: LLMConfig) -> dict[str, Any]:
    """config.json of an export, with the fields of the library's present version and of older ones.

    Raises UserError where the family cannot hold the model.
    """
    must_hold(llm, _FORM, "NemotronHForCausalLM")
    for where, letters in (("pattern", llm.letters), ("mtp_pattern", llm.mtp_pattern)):
        unknown = sorted({*letters} - {*_BLOCKS})
        if unknown:
            raise UserError(
                f"model.llm.{where} is {getattr(llm, where)!r}, with {', '.join(unknown)}; expected "
                f"{', '.join(_BLOCKS)} alone for NemotronHForCausalLM: choose another format"
            )
    moe = _MOE_SIZES if "E" in llm.letters + llm.mtp_pattern else {}
    low, high = llm.mamba_dt_limit
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        **{theirs: getattr(llm, ours) for ours, (theirs, _) in (_SIZES | moe).items()},
        **_EXPECTED,
        "moe_latent_size": (llm.latent_dim or None) if moe else None,
        "layers_block_type": [_BLOCKS[letter] for letter in llm.letters],
        "hybrid_override_pattern": llm.letters,
        "num_hidden_layers": len(llm.letters),
        "chunk_size": COST_CHUNK,
        "expand": max(1, llm.mamba_heads * llm.mamba_head_dim // llm.dim),
        "time_step_limit": [low, high if math.isfinite(high) else {"__float__": "Infinity"}],
        # The library's scan on CPUs clamps time steps to this and ignores time_step_limit.
        "time_step_min": max(low, 1e-30),
        **(_mtp_fields(llm) if llm.mtp_pattern else {}),
    }


def _mtp_fields(llm: LLMConfig) -> dict[str, Any]:
    return {
        "num_nextn_predict_layers": llm.mtp_modules,
        "mtp_layers_block_type": [_BLOCKS[letter] for letter in llm.mtp_pattern],
        "mtp_hybrid_override_pattern": llm.mtp_pattern,
    }


def write_llm(llm: LLMConfig, fields: Fields, names: Names) -> None:
    """Writes the LLM's name table. fields: the text model's.

    Multi-token prediction is written where both the model and the checkpoint have it.
    """
    names.same("backbone.embeddings.weight", "embedding")
    _write_layers(llm, llm.letters, names.within("backbone.", "decoder."))
    names.same("backbone.norm_f.weight", "decoder.norm.weight")
    names.same("lm_head.weight", "head")
    if llm.mtp_pattern and fields.get("num_nextn_predict_layers"):
        _write_mtp(llm, names.within("mtp.", "mtp."))


def _write_layers(llm: LLMConfig, letters: str, names: Names) -> None:
    done = dict.fromkeys(LAYER_KINDS, 0)
    for number, letter in enumerate(letters):
        layer = names.within(f"layers.{number}.", f"layers.{LAYER_KINDS[letter].name}.", done[letter])
        layer.same("norm.weight", "norm.weight")
        _MIXERS[letter](layer.within("mixer.", "mixer."), llm)
        done[letter] += 1


def _write_mtp(llm: LLMConfig, names: Names) -> None:
    """One depth after the other. Each one's norms and projection are stored with its first and last block."""
    size = len(llm.mtp_pattern)
    _write_layers(llm, llm.mtp_pattern * llm.mtp_modules, names)
    for module in range(llm.mtp_modules):
        first = names.within(f"layers.{module * size}.", "depths.", module)
        for norm in ("enorm.weight", "hnorm.weight"):
            first.same(norm, norm)
        first.linear("eh_proj", "eh_proj")
        last = names.within(f"layers.{module * size + size - 1}.", "depths.", module)
        last.same("final_layernorm.weight", "final_layernorm.weight")


def _mamba(names: Names, llm: LLMConfig) -> None:
    def taps(width: int) -> Shape:
        return (1, width)

    names.transposed("in_proj.weight", *(f"{part}.w" for part in ("z", "x", "b", "c", "dt")))
    names.transposed("conv1d.weight", "conv_x", "conv_b", "conv_c", tail=taps)
    names.same("conv1d.bias", "conv_bias_x", "conv_bias_b", "conv_bias_c")
    for theirs, ours in (("dt_bias", "dt_bias"), ("A_log", "a_log"), ("D", "d"), ("norm.weight",) * 2):
        names.same(theirs, ours)
    names.linear("out_proj", "out")


def _attention(names: Names, llm: LLMConfig) -> None:
    for theirs, ours in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "out")):
        names.linear(theirs, ours)


def _mlp(names: Names, llm: LLMConfig) -> None:
    for part in ("up", "down"):
        names.linear(f"{part}_proj", part)


def _moe(names: Names, llm: LLMConfig) -> None:
    names.linear("gate", "router")
    names.same("gate.e_score_correction_bias", "correction_bias")
    for expert in range(llm.experts):
        one = names.within(f"experts.{expert}.", "", expert)
        for part in ("up", "down"):
            one.transposed(f"{part}_proj.weight", part)
    _mlp(names.within("shared_experts.", "shared."), llm)
    if llm.latent_dim:
        names.linear("fc1_latent_proj", "latent_in")
        names.linear("fc2_latent_proj", "latent_out")


_MIXERS = {"M": _mamba, "*": _attention, "-": _mlp, "E": _moe}


def token_fields(tokens: SpecialTokens) -> dict[str, Any]:
    """Fields of config.json for a text model's special tokens."""
    return {
        "bos_token_id": tokens.bos_id,
        "eos_token_id": one_or_all(tokens.eos_ids),
        "pad_token_id": tokens.pad_id,
    }


FAMILY = Family(
    format="llm",
    title="NemotronHForCausalLM",
    gives="the LLM",
    model_types=("nemotron_h",),
    covers=LLM,
    configure=lambda fields, model: replace(model, llm=llm_config(fields, model.llm)),
    fields=lambda model: llm_fields(model.llm),
    write=lambda model, fields, names: write_llm(model.llm, fields, names),
    token_fields=token_fields,
)
