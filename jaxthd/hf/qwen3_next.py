"""Qwen3-Next (transformers: Qwen3NextForCausalLM).

A layer of theirs is two blocks of ours: the gated delta rule or attention, then experts or an MLP ("DE",
"*E", "D-", "*-"). Their norms' weights are stored as the difference from 1, as ours with norm_zero_centred.
A published checkpoint has one module of multi-token prediction, "*E". The library does not read it, and
config.json does not tell of it.
"""

from dataclasses import replace
from typing import Any

from jaxthd.config import DeltaConfig, LLMConfig
from jaxthd.errors import UserError
from jaxthd.hf.family import LLM, PLAIN, Family, Fields, mtp_settings, must_be, must_hold, required
from jaxthd.hf.names import Names, Shape
from jaxthd.hf.nemotron_h import token_fields
from jaxthd.hf.rotary import rope_config, rope_fields

_EXPECTED = {"attention_bias": False, "hidden_act": "silu"}
_SIZES: dict[str, tuple[str, Any]] = {
    "vocab_size": ("vocab_size", 151936),
    "dim": ("hidden_size", 2048),
    "norm_eps": ("rms_norm_eps", 1e-6),
    "q_heads": ("num_attention_heads", 16),
    "kv_heads": ("num_key_value_heads", 2),
    "head_dim": ("head_dim", 256),
    "ffn_dim": ("intermediate_size", 5632),
    "tied_embedding": ("tie_word_embeddings", False),
}
_MOE_SIZES: dict[str, tuple[str, Any]] = {
    "experts": ("num_experts", 512),
    "experts_per_token": ("num_experts_per_tok", 10),
    "expert_dim": ("moe_intermediate_size", 512),
    "shared_expert_dim": ("shared_expert_intermediate_size", 512),
    "router_normalised": ("norm_topk_prob", True),
}
_DELTA_SIZES: dict[str, tuple[str, Any]] = {
    "key_heads": ("linear_num_key_heads", 16),
    "value_heads": ("linear_num_value_heads", 32),
    "key_dim": ("linear_key_head_dim", 128),
    "value_dim": ("linear_value_head_dim", 128),
    "conv": ("linear_conv_kernel_dim", 4),
}
"""Our names -> (theirs, the library's default: config.json may leave out what has its default)."""
_FORM: dict[str, Any] = PLAIN | {
    "qk_norm": True,
    "attention_bias": False,
    "attention_gate": True,
    "norm_zero_centred": True,
    "shared_expert_gate": True,
    "ffn_form": "swiglu",
}
_MOE_FORM: dict[str, Any] = {
    "router": "softmax",
    "router_scale": 1.0,
    "latent_dim": 0,
}
"""Our settings that the family has no field for."""
_MTP_NORMS = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "final_layernorm"}
_MIXERS = {"linear_attention": "D", "full_attention": "*"}
FRACTION, INTERVAL = 0.25, 4
"""The library's defaults: the share of a head that is rotated; every so many layers one has attention."""


def _taken(fields: Fields, sizes: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    return {ours: fields.get(theirs, default) for ours, (theirs, default) in sizes.items()}


def llm_config(fields: Fields, llm: LLMConfig) -> LLMConfig:
    """`llm` with the checkpoint's settings. The stage marks of its pattern stay."""
    must_be(fields, _EXPECTED)
    fields = {"partial_rotary_factor": FRACTION, **fields}
    letters = _letters(fields)
    settings = _taken(fields, _SIZES) | _FORM
    if "E" in letters:
        settings |= _taken(fields, _MOE_SIZES) | _MOE_FORM
        if not settings["shared_expert_dim"]:
            raise UserError(
                "config.json has shared_expert_intermediate_size 0; expected more, since each layer of "
                "experts has a shared one beside them: choose another checkpoint"
            )
    settings["pattern"] = llm.pattern if llm.letters == letters else letters
    settings["delta"] = DeltaConfig(**_taken(fields, _DELTA_SIZES))
    settings["rope"] = rope_config(fields, partial=True)
    settings |= mtp_settings(_mtp_letters(letters), 1, llm)
    return replace(llm, **settings)


def _letters(fields: Fields) -> str:
    layers = int(required(fields, "num_hidden_layers"))
    interval = fields.get("full_attention_interval") or INTERVAL
    alternating = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
    kinds = fields.get("layer_types") or alternating
    unknown = sorted({*kinds} - {*_MIXERS})
    if unknown or len(kinds) != layers:
        raise UserError(
            f"config.json has {layers} layers and layer_types {', '.join(kinds)}; expected one of "
            f"{' and '.join(_MIXERS)} for each layer: choose another checkpoint"
        )
    dense, every = set(fields.get("mlp_only_layers") or []), fields.get("decoder_sparse_step") or 1
    if not fields.get("num_experts", 1):
        dense = set(range(layers))
    ffns = ("-" if i in dense or (i + 1) % every else "E" for i in range(layers))
    return "".join(_MIXERS[kind] + ffn for kind, ffn in zip(kinds, ffns, strict=True))


def _mtp_letters(letters: str) -> str:
    """The blocks of the module of multi-token prediction, of a model with these blocks."""
    return "*E" if "E" in letters else "*-"


def llm_fields(llm: LLMConfig) -> dict[str, Any]:
    """config.json of an export. Raises UserError where the family cannot hold the model."""
    layers = [llm.letters[i : i + 2] for i in range(0, len(llm.letters), 2)]
    expected = ("DE", "*E", "D-", "*-")
    if set(layers) - {*expected} or not llm.rope.theta:
        raise UserError(
            f"model.llm.pattern is {llm.pattern!r} and model.llm.rope.theta {llm.rope.theta}; expected "
            f"{', '.join(expected)} alone and more than 0 for Qwen3NextForCausalLM: choose another format"
        )
    experts = "E" in llm.letters
    mtp = {"mtp_pattern": _mtp_letters(llm.letters), "mtp_modules": 1} if llm.mtp_pattern else {}
    must_hold(llm, _FORM | (_MOE_FORM if experts else {}) | mtp, "Qwen3NextForCausalLM")
    if experts and not llm.shared_expert_dim:
        raise UserError(
            "model.llm.shared_expert_dim is 0; expected more for Qwen3NextForCausalLM, whose experts have a "
            "shared one beside them: choose another format"
        )
    names = _SIZES | (_MOE_SIZES if experts else {})
    theirs = {letter: kind for kind, letter in _MIXERS.items()}
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        **{theirs: getattr(llm, ours) for ours, (theirs, _) in names.items()},
        **{theirs: getattr(llm.delta, ours) for ours, (theirs, _) in _DELTA_SIZES.items()},
        **({} if experts else {"num_experts": 0}),
        **_EXPECTED,
        "num_hidden_layers": len(layers),
        "layer_types": [theirs[layer[0]] for layer in layers],
        "decoder_sparse_step": 1,
        "mlp_only_layers": [number for number, layer in enumerate(layers) if layer[1] == "-"],
        **rope_fields(llm.rope),
        "partial_rotary_factor": llm.rope.fraction,
    }


def write_llm(llm: LLMConfig, names: Names) -> None:
    """Writes the LLM's name table."""
    names.same("model.embed_tokens.weight", "embedding")
    _write_layers(llm, llm.letters, names.within("model.", "decoder."))
    names.same("model.norm.weight", "decoder.norm.weight")
    if not llm.tied_embedding:
        names.same("lm_head.weight", "head")
    if llm.mtp_pattern:
        mtp = names.within("mtp.", "mtp.")
        _write_layers(llm, llm.mtp_pattern, mtp)
        around = mtp.within("", "depths.", 0)
        for theirs, ours in _MTP_NORMS.items():
            around.same(f"{theirs}.weight", f"{ours}.weight")
        around.linear("fc", "eh_proj")


def _write_layers(llm: LLMConfig, letters: str, names: Names) -> None:
    done = dict.fromkeys("D*E-", 0)
    for number in range(len(letters) // 2):
        layer = names.within(f"layers.{number}.", "layers.")
        mixer, ffn = letters[2 * number], letters[2 * number + 1]
        for letter, norm in ((mixer, "input_layernorm"), (ffn, "post_attention_layernorm")):
            kind, theirs, write = _BLOCKS[letter]
            block = layer.within("", f"{kind}.", done[letter])
            block.same(f"{norm}.weight", "norm.weight")
            write(block.within(f"{theirs}.", "mixer."), llm)
            done[letter] += 1


def _write_delta(names: Names, llm: LLMConfig) -> None:
    def taps(width: int) -> Shape:
        return (1, width)

    key_heads = llm.delta.key_heads
    names.transposed("in_proj_qkvz.weight", "q.w", "k.w", "v.w", "z.w", groups=key_heads)
    names.transposed("in_proj_ba.weight", "rate.w", "dt.w", groups=key_heads)
    names.transposed("conv1d.weight", "conv_q", "conv_k", "conv_v", tail=taps)
    for theirs, ours in (("dt_bias", "dt_bias"), ("A_log", "a_log"), ("norm.weight",) * 2):
        names.same(theirs, ours)
    names.linear("out_proj", "out")


def _write_attention(names: Names, llm: LLMConfig) -> None:
    names.transposed("q_proj.weight", "q.w", "gate.w", groups=llm.q_heads)
    for theirs, ours in (("k_proj", "k"), ("v_proj", "v"), ("o_proj", "out")):
        names.linear(theirs, ours)
    for norm in ("q_norm.weight", "k_norm.weight"):
        names.same(norm, norm)


def _write_mlp(names: Names, _: LLMConfig) -> None:
    for part in ("gate", "up", "down"):
        names.linear(f"{part}_proj", part)


def _write_experts(names: Names, llm: LLMConfig) -> None:
    names.linear("gate", "router")
    for expert in range(llm.experts):
        one = names.within(f"experts.{expert}.", "", expert)
        for part in ("gate", "up", "down"):
            one.transposed(f"{part}_proj.weight", part)
    _write_mlp(names.within("shared_expert.", "shared."), llm)
    names.linear("shared_expert_gate", "shared_gate")


_BLOCKS = {
    "D": ("delta", "linear_attn", _write_delta),
    "*": ("attention", "self_attn", _write_attention),
    "E": ("moe", "mlp", _write_experts),
    "-": ("mlp", "mlp", _write_mlp),
}
"""Of each letter: our stack, their module, the writer of its names."""

FAMILY = Family(
    format="llm",
    title="Qwen3NextForCausalLM",
    gives="the LLM",
    model_types=("qwen3_next",),
    covers=LLM,
    configure=lambda fields, model: replace(model, llm=llm_config(fields, model.llm)),
    fields=lambda model: llm_fields(model.llm),
    write=lambda model, fields, names: write_llm(model.llm, names),
    ignored=("lm_head.weight",),
    token_fields=token_fields,
)
