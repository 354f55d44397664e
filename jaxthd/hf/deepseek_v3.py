"""DeepSeek-V3, and Moonlight, which has its layout without a latent for queries (transformers:
DeepseekV3ForCausalLM).

A layer of theirs is two blocks of ours: latent attention, then an MLP ("L-") in the first layers and experts
("LE") in the others. Their rotated features are in pairs of neighbours, ours in halves: rows of the
projections are moved. A module of multi-token prediction is stored as one more layer, with copies of the
embedding and the head.
"""

from dataclasses import replace
from typing import Any

from jaxthd.config import LatentAttentionConfig, LLMConfig, ModelConfig
from jaxthd.errors import UserError
from jaxthd.hf.family import LLM, Family, Fields, mtp_settings, must_be, must_hold, required
from jaxthd.hf.names import Names, Shape
from jaxthd.hf.nemotron_h import token_fields
from jaxthd.hf.rotary import must_rotate_whole_heads, rope_config, rope_fields

_TITLE = "DeepseekV3ForCausalLM"
_EXPECTED = {
    "attention_bias": False,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
_SIZES = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "norm_eps": "rms_norm_eps",
    "q_heads": "num_attention_heads",
    "ffn_dim": "intermediate_size",
    "experts": "n_routed_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "router_scale": "routed_scaling_factor",
}
"""Our names -> theirs."""
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Of LatentAttentionConfig: their names are ours."""
_DEFAULTS: dict[str, Any] = {
    "first_k_dense_replace": 3,
    "n_group": 8,
    "n_shared_experts": 1,
    "q_lora_rank": 1536,
    "topk_group": 4,
}
"""The library's, where config.json lacks them. null is none of them."""
_FORM: dict[str, Any] = {
    "norm_zero_centred": False,
    "shared_expert_gate": False,
    "ffn_form": "swiglu",
    "ffn_bias": False,
    "router": "sigmoid",
    "router_bias": False,
    "latent_dim": 0,
}
"""Our settings that the family has no field for."""
_MTP = "LE"
"""The blocks of a module of multi-token prediction."""
_NORM_EPS = 1e-6
"""That of the latents' norms, whatever rms_norm_eps."""


def llm_config(fields: Fields, llm: LLMConfig) -> LLMConfig:
    """`llm` with the checkpoint's settings. The stage marks of its pattern stay."""
    must_be(fields, _EXPECTED | {"num_key_value_heads": required(fields, "num_attention_heads")})
    fields = {**_DEFAULTS, **fields}
    layers = int(required(fields, "num_hidden_layers"))
    dense = min(int(fields.get("first_k_dense_replace") or 0), layers)
    letters = "L-" * dense + "LE" * (layers - dense)
    settings = _FORM | {ours: required(fields, theirs) for ours, theirs in _SIZES.items()}
    settings["pattern"] = llm.pattern if llm.letters == letters else letters
    settings["router_scale"] = float(settings["router_scale"])
    settings["router_normalised"] = bool(fields.get("norm_topk_prob", True))
    settings["router_groups"] = int(fields.get("n_group") or 1)
    settings["router_groups_per_token"] = int(fields.get("topk_group") or 1)
    settings["shared_expert_dim"] = (fields.get("n_shared_experts") or 0) * settings["expert_dim"]
    settings["tied_embedding"] = bool(fields.get("tie_word_embeddings", False))
    settings["rope"] = rope_config(fields)
    settings |= mtp_settings(_MTP, _mtp_modules(fields), llm)
    settings["latent_attention"] = LatentAttentionConfig(
        q_lora_rank=fields.get("q_lora_rank") or 0,
        **{name: required(fields, name) for name in _LATENT_SIZES},
        norm_eps=_NORM_EPS,
    )
    return replace(llm, **settings)


def _mtp_modules(fields: Fields) -> int:
    return int(fields.get("num_nextn_predict_layers") or 0)


def llm_fields(llm: LLMConfig) -> dict[str, Any]:
    """config.json of an export. Raises UserError where the family cannot hold the model."""
    latent, layers = llm.latent_attention, len(llm.letters) // 2
    dense = llm.letters.count("-")
    if llm.letters != "L-" * dense + "LE" * (layers - dense) or not layers:
        raise UserError(
            f"model.llm.pattern is {llm.pattern!r}; expected L- in the first layers and LE in the others for "
            f"{_TITLE}: choose another format"
        )
    must_hold(llm, _FORM | ({"mtp_pattern": _MTP} if llm.mtp_pattern else {}), _TITLE)
    must_rotate_whole_heads(llm.rope, _TITLE)
    if latent.norm_eps != _NORM_EPS:
        raise UserError(
            f"model.llm.latent_attention.norm_eps is {latent.norm_eps}; expected {_NORM_EPS} for {_TITLE}: "
            "choose another format"
        )
    if llm.shared_expert_dim % llm.expert_dim:
        raise UserError(
            f"model.llm.shared_expert_dim is {llm.shared_expert_dim}; expected a multiple of expert_dim "
            f"({llm.expert_dim}) for {_TITLE}, whose shared experts are of the routed ones' size: choose "
            "another format"
        )
    return {
        "architectures": [_TITLE],
        "model_type": "deepseek_v3",
        **{theirs: getattr(llm, ours) for ours, theirs in _SIZES.items()},
        **_EXPECTED,
        **{name: getattr(latent, name) for name in _LATENT_SIZES},
        "q_lora_rank": latent.q_lora_rank or None,
        "num_key_value_heads": llm.q_heads,
        "num_hidden_layers": layers,
        "first_k_dense_replace": dense,
        # Without it, an export like a checkpoint that has it keeps what that says: its tensors are copied.
        **({"num_nextn_predict_layers": llm.mtp_modules} if llm.mtp_pattern else {}),
        "n_shared_experts": llm.shared_expert_dim // llm.expert_dim,
        "n_group": llm.router_groups,
        "topk_group": min(llm.router_groups_per_token, llm.router_groups),
        "norm_topk_prob": llm.router_normalised,
        "rope_interleave": True,
        **rope_fields(llm.rope),
        "tie_word_embeddings": llm.tied_embedding,
    }


def _write(model: ModelConfig, fields: Fields, names: Names) -> None:
    llm, layers = model.llm, len(model.llm.letters) // 2
    pairs = bool(fields.get("rope_interleave", True))
    names.same("model.embed_tokens.weight", "embedding")
    _write_layers(llm, llm.letters, names.within("model.", "decoder."), pairs)
    names.same("model.norm.weight", "decoder.norm.weight")
    if not llm.tied_embedding:
        names.same("lm_head.weight", "head")
    if not llm.mtp_pattern or not _mtp_modules(fields):
        return
    _write_layers(llm, _MTP * llm.mtp_modules, names.within("model.", "mtp."), pairs, first=layers)
    for module in range(llm.mtp_modules):
        around = names.within(f"model.layers.{layers + module}.", "mtp.depths.", module)
        for norm in ("enorm.weight", "hnorm.weight"):
            around.same(norm, norm)
        around.linear("eh_proj", "eh_proj")
        around.same("shared_head.norm.weight", "final_layernorm.weight")
        around.copy_of("embed_tokens.weight", "embedding")
        around.copy_of("shared_head.head.weight", "embedding" if llm.tied_embedding else "head")


def _write_layers(llm: LLMConfig, letters: str, names: Names, pairs: bool, first: int = 0) -> None:
    """first: the number of the first layer on disk. pairs: see _write_attention."""
    experts = dense = 0
    for number, ffn_letter in enumerate(letters[1::2]):
        layer = names.within(f"layers.{first + number}.", "layers.")
        attention = layer.within("", "latent_attention.", number)
        attention.same("input_layernorm.weight", "norm.weight")
        _write_attention(attention.within("self_attn.", "mixer."), llm.latent_attention, pairs)
        if ffn_letter == "E":
            ffn, experts = layer.within("", "moe.", experts), experts + 1
            _write_experts(ffn.within("mlp.", "mixer."), llm)
        else:
            ffn, dense = layer.within("", "mlp.", dense), dense + 1
            _write_mlp(ffn.within("mlp.", "mixer."))
        ffn.same("post_attention_layernorm.weight", "norm.weight")


def _write_attention(names: Names, latent: LatentAttentionConfig, pairs: bool) -> None:
    """pairs: whether rotated features that are turned together are neighbours on disk."""

    def halves(others: int) -> Shape:
        """The order of rows that puts the first of each pair before the second ones, behind `others`."""
        rows = [*range(others, others + latent.qk_rope_head_dim)]
        return (*range(others), *rows[::2], *rows[1::2]) if pairs else ()

    of_head = halves(latent.qk_nope_head_dim)
    if latent.q_lora_rank:
        names.linear("q_a_proj", "q_down")
        names.same("q_a_layernorm.weight", "q_norm.weight")
        names.transposed("q_b_proj.weight", "q.w", block=of_head)
    else:
        names.transposed("q_proj.weight", "q.w", block=of_head)
    names.transposed("kv_a_proj_with_mqa.weight", "kv_down.w", block=halves(latent.kv_lora_rank))
    names.same("kv_a_layernorm.weight", "kv_norm.weight")
    names.linear("kv_b_proj", "kv")
    names.linear("o_proj", "out")


def _write_mlp(names: Names) -> None:
    for part in ("gate", "up", "down"):
        names.linear(f"{part}_proj", part)


def _write_experts(names: Names, llm: LLMConfig) -> None:
    names.linear("gate", "router")
    names.same("gate.e_score_correction_bias", "correction_bias")
    for expert in range(llm.experts):
        one = names.within(f"experts.{expert}.", "", expert)
        for part in ("gate", "up", "down"):
            one.transposed(f"{part}_proj.weight", part)
    if llm.shared_expert_dim:
        _write_mlp(names.within("shared_experts.", "shared."))


def _mtp_tensors(fields: Fields) -> tuple[str, ...]:
    layers = int(required(fields, "num_hidden_layers"))
    return tuple(f"model.layers.{layers + module}." for module in range(max(_mtp_modules(fields), 1)))


FAMILY = Family(
    format="llm",
    title=_TITLE,
    gives="the LLM",
    model_types=("deepseek_v3", _TITLE),
    covers=LLM,
    configure=lambda fields, model: replace(model, llm=llm_config(fields, model.llm)),
    fields=lambda model: llm_fields(model.llm),
    write=_write,
    ignored=("lm_head.weight",),  # a tied embedding may be copied as the head
    token_fields=token_fields,
    mtp_tensors=_mtp_tensors,
)
