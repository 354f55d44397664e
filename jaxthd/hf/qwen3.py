"""Qwen3, dense and MoE (transformers: Qwen3ForCausalLM, Qwen3MoeForCausalLM).

A layer of theirs is two blocks of ours: attention, then an MLP ("*-") or experts ("*E").
"""

from dataclasses import replace
from typing import Any

from jaxthd.config import LLMConfig, ModelConfig
from jaxthd.errors import UserError
from jaxthd.hf.family import LLM, PLAIN, Family, Fields, must_be, must_hold, required
from jaxthd.hf.names import Names
from jaxthd.hf.nemotron_h import token_fields
from jaxthd.hf.rotary import must_rotate_whole_heads, rope_config, rope_fields

_EXPECTED = {
    "attention_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
}
_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "norm_eps": "rms_norm_eps",
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_dim": "intermediate_size",
}
_MOE_SIZES = {
    "experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
}
"""Our names -> theirs."""
_FORM: dict[str, Any] = PLAIN | {
    "qk_norm": True,
    "attention_bias": False,
    "ffn_form": "swiglu",
    "mtp_pattern": "",
}
_MOE_FORM: dict[str, Any] = {
    "router": "softmax",
    "router_scale": 1.0,
    "shared_expert_dim": 0,
    "latent_dim": 0,
}
"""Our settings that the families have no field for."""


def _configure(fields: Fields, model: ModelConfig) -> ModelConfig:
    return replace(model, llm=llm_config(fields, model.llm))


def llm_config(fields: Fields, llm: LLMConfig) -> LLMConfig:
    """`llm` with the checkpoint's settings. The stage marks of its pattern stay."""
    fields = {**fields, "num_experts": fields.get("num_experts") or fields.get("num_local_experts")}
    must_be(fields, _EXPECTED)
    letters = _letters(fields)
    has_experts = "E" in letters
    names, settings = _SIZES | (_MOE_SIZES if has_experts else {}), dict(_FORM)
    settings |= {ours: required(fields, theirs) for ours, theirs in names.items()}
    if has_experts:
        settings |= _MOE_FORM | {"router_normalised": bool(fields.get("norm_topk_prob", False))}
    settings["pattern"] = llm.pattern if llm.letters == letters else letters
    settings["head_dim"] = fields.get("head_dim") or settings["dim"] // settings["q_heads"]
    settings["tied_embedding"] = bool(fields.get("tie_word_embeddings", False))
    settings["rope"] = rope_config(fields)
    return replace(llm, **settings)


def _letters(fields: Fields) -> str:
    layers = int(required(fields, "num_hidden_layers"))
    other = sorted({*(fields.get("layer_types") or [])} - {"full_attention"})
    if other:
        raise UserError(
            f"config.json names layers of type {', '.join(other)}; expected full_attention in all of them: "
            "choose a checkpoint without sliding windows"
        )
    if not fields.get("num_experts"):
        return "*-" * layers
    dense, every = set(fields.get("mlp_only_layers") or []), fields.get("decoder_sparse_step", 1)
    return "".join("*-" if i in dense or (i + 1) % every else "*E" for i in range(layers))


def llm_fields(llm: LLMConfig, *, moe: bool) -> dict[str, Any]:
    """config.json of an export. Raises UserError where the family cannot hold the model."""
    name, kinds = ("Qwen3Moe", "-E") if moe else ("Qwen3", "-")
    layers = [llm.letters[i : i + 2] for i in range(0, len(llm.letters), 2)]
    expected = {f"*{kind}" for kind in kinds}
    if set(layers) - expected or ("*E" in layers) != moe:
        raise UserError(
            f"model.llm.pattern is {llm.pattern!r}; expected {' and '.join(sorted(expected))} alone for "
            f"{name}ForCausalLM: choose another format"
        )
    must_hold(llm, _FORM | (_MOE_FORM if moe else {}), f"{name}ForCausalLM")
    must_rotate_whole_heads(llm.rope, f"{name}ForCausalLM")
    names = _SIZES | (_MOE_SIZES if moe else {})
    fields = {theirs: getattr(llm, ours) for ours, theirs in names.items()}
    return {
        "architectures": [f"{name}ForCausalLM"],
        "model_type": "qwen3_moe" if moe else "qwen3",
        **fields,
        **_EXPECTED,
        "head_dim": llm.head_dim,
        "num_hidden_layers": len(layers),
        **rope_fields(llm.rope),
        "tie_word_embeddings": llm.tied_embedding,
        **(_moe_fields(llm, layers) if moe else {}),
    }


def _moe_fields(llm: LLMConfig, layers: list[str]) -> dict[str, Any]:
    return {
        "num_local_experts": llm.experts,  # what newer versions of the library write
        "norm_topk_prob": llm.router_normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [number for number, layer in enumerate(layers) if layer == "*-"],
    }


def _write(model: ModelConfig, fields: Fields, names: Names) -> None:
    names.same("model.embed_tokens.weight", "embedding")
    write_layers(model.llm, names)


def write_layers(llm: LLMConfig, names: Names) -> None:
    """Writes the name table of all but the embedding."""
    experts = dense = 0
    for number in range(len(llm.letters) // 2):
        layer = names.within(f"model.layers.{number}.", "decoder.layers.")
        attention = layer.within("", "attention.", number)
        attention.same("input_layernorm.weight", "norm.weight")
        _write_attention(attention.within("self_attn.", "mixer."))
        if llm.letters[2 * number + 1] == "E":
            ffn, experts = layer.within("", "moe.", experts), experts + 1
            _write_experts(ffn.within("mlp.", "mixer."), llm)
        else:
            ffn, dense = layer.within("", "mlp.", dense), dense + 1
            _write_mlp(ffn.within("mlp.", "mixer."))
        ffn.same("post_attention_layernorm.weight", "norm.weight")
    names.same("model.norm.weight", "decoder.norm.weight")
    if not llm.tied_embedding:
        names.same("lm_head.weight", "head")


def _write_attention(names: Names) -> None:
    for theirs, ours in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "out")):
        names.linear(theirs, ours)
    for norm in ("q_norm.weight", "k_norm.weight"):
        names.same(norm, norm)


def _write_mlp(names: Names) -> None:
    for part in ("gate", "up", "down"):
        names.linear(f"{part}_proj", part)


def _write_experts(names: Names, llm: LLMConfig) -> None:
    names.linear("gate", "router")
    for expert in range(llm.experts):
        one = names.within(f"experts.{expert}.", "", expert)
        for part in ("gate", "up", "down"):
            one.transposed(f"{part}_proj.weight", part)


def _family(model_type: str, *, moe: bool) -> Family:
    return Family(
        format="llm",
        title="Qwen3MoeForCausalLM" if moe else "Qwen3ForCausalLM",
        gives="the LLM",
        model_types=(model_type,),
        covers=LLM,
        configure=_configure,
        fields=lambda model: llm_fields(model.llm, moe=moe),
        write=_write,
        # Some checkpoints with a tied embedding have a copy of it under this name.
        ignored=("lm_head.weight",),
        token_fields=token_fields,
    )


FAMILIES = (_family("qwen3", moe=False), _family("qwen3_moe", moe=True))
