"""GPT-OSS (transformers: GptOssForCausalLM).

A layer of theirs is two blocks of ours: attention, in a window or not, then experts ("WE" or "*E"). Their
experts' gates and ups are the even and the odd columns of one matrix.
"""

from dataclasses import replace
from typing import Any

from jaxthd.config import LLMConfig, ModelConfig
from jaxthd.errors import UserError
from jaxthd.hf.family import LLM, Family, Fields, must_be, must_hold, required
from jaxthd.hf.names import Names
from jaxthd.hf.nemotron_h import token_fields
from jaxthd.hf.rotary import must_rotate_whole_heads, rope_config, rope_fields

_EXPECTED = {"hidden_act": "silu"}
_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "norm_eps": "rms_norm_eps",
    "q_heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "window": "sliding_window",
    "experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_dim": "intermediate_size",
}
"""Our names -> theirs."""
_DEFAULTS: dict[str, tuple[str, Any]] = {
    "attention_bias": ("attention_bias", True),
    "swiglu_alpha": ("swiglu_alpha", 1.702),
    "swiglu_limit": ("swiglu_limit", 7.0),
    "tied_embedding": ("tie_word_embeddings", False),
}
"""Our names -> (theirs, the library's default)."""
_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
"""The library's default."""
_FORM: dict[str, Any] = {
    "qk_norm": False,
    "attention_gate": False,
    "norm_zero_centred": False,
    "attention_sinks": True,
    "ffn_form": "clamped_swiglu",
    "ffn_bias": True,
    "router": "softmax",
    "router_bias": True,
    "router_normalised": True,
    "router_scale": 1.0,
    "router_groups": 1,
    "shared_expert_dim": 0,
    "latent_dim": 0,
    "mtp_pattern": "",
}
"""Our settings that the family has no field for. Its softmax is over the experts chosen, which is that over
all experts, normalised."""
_KINDS = {"sliding_attention": "W", "full_attention": "*"}


def _configure(fields: Fields, model: ModelConfig) -> ModelConfig:
    return replace(model, llm=llm_config(fields, model.llm))


def llm_config(fields: Fields, llm: LLMConfig) -> LLMConfig:
    """`llm` with the checkpoint's settings. The stage marks of its pattern stay."""
    must_be(fields, _EXPECTED)
    letters, settings = _letters(fields), dict(_FORM)
    settings |= {ours: required(fields, theirs) for ours, theirs in _SIZES.items()}
    settings |= {ours: fields.get(theirs, default) for ours, (theirs, default) in _DEFAULTS.items()}
    settings["pattern"] = llm.pattern if llm.letters == letters else letters
    has_rope = fields.get("rope_parameters") or fields.get("rope_scaling")
    settings["rope"] = rope_config(fields if has_rope else {"rope_parameters": _ROPE}, _ROPE["rope_theta"])
    return replace(llm, **settings)


def _letters(fields: Fields) -> str:
    layers = int(required(fields, "num_hidden_layers"))
    types = fields.get("layer_types") or [list(_KINDS)[i % 2] for i in range(layers)]
    unknown = sorted(set(types) - _KINDS.keys())
    if unknown or len(types) != layers:
        raise UserError(
            f"config.json names {len(types)} layers of types {', '.join(dict.fromkeys(types))}; expected "
            f"{layers} of {' and '.join(_KINDS)}: correct layer_types or num_hidden_layers"
        )
    return "".join(f"{_KINDS[kind]}E" for kind in types)


def llm_fields(llm: LLMConfig) -> dict[str, Any]:
    """config.json of an export. Raises UserError where the family cannot hold the model."""
    layers = [llm.letters[i : i + 2] for i in range(0, len(llm.letters), 2)]
    if set(layers) - {"WE", "*E"}:
        raise UserError(
            f"model.llm.pattern is {llm.pattern!r}; expected WE and *E alone for GptOssForCausalLM: choose "
            "another format"
        )
    must_hold(llm, _FORM, "GptOssForCausalLM")
    must_rotate_whole_heads(llm.rope, "GptOssForCausalLM")
    names = _SIZES | {ours: theirs for ours, (theirs, _) in _DEFAULTS.items()}
    types = {letter: kind for kind, letter in _KINDS.items()}
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **{theirs: getattr(llm, ours) for ours, theirs in names.items()},
        **_EXPECTED,
        "num_hidden_layers": len(layers),
        "layer_types": [types[layer[0]] for layer in layers],
        **rope_fields(llm.rope),
    }


def _write(model: ModelConfig, fields: Fields, names: Names) -> None:
    llm = model.llm
    names.same("model.embed_tokens.weight", "embedding")
    counts = dict.fromkeys(_KINDS.values(), 0)
    for number, letter in enumerate(llm.letters[::2]):
        layer = names.within(f"model.layers.{number}.", "decoder.layers.")
        stack = {"W": "window_attention.", "*": "attention."}[letter]
        attention = layer.within("", stack, counts[letter])
        counts[letter] += 1
        attention.same("input_layernorm.weight", "norm.weight")
        _write_attention(attention.within("self_attn.", "mixer."))
        experts = layer.within("", "moe.", number)
        experts.same("post_attention_layernorm.weight", "norm.weight")
        _write_experts(experts.within("mlp.", "mixer."))
    names.same("model.norm.weight", "decoder.norm.weight")
    if not llm.tied_embedding:
        names.same("lm_head.weight", "head")


def _write_attention(names: Names) -> None:
    for theirs, ours in (("q_proj", "q"), ("k_proj", "k"), ("v_proj", "v"), ("o_proj", "out")):
        names.linear(theirs, ours)
    names.same("sinks", "sinks")


def _write_experts(names: Names) -> None:
    names.linear("router", "router")
    names.interleaved("experts.gate_up_proj", "gate", "up")
    names.interleaved("experts.gate_up_proj_bias", "gate_bias", "up_bias")
    names.same("experts.down_proj", "down")
    names.same("experts.down_proj_bias", "down_bias")


FAMILY = Family(
    format="llm",
    title="GptOssForCausalLM",
    gives="the LLM",
    model_types=("gpt_oss",),
    covers=LLM,
    configure=_configure,
    fields=lambda model: llm_fields(model.llm),
    write=_write,
    ignored=("lm_head.weight",),
    token_fields=token_fields,
)
