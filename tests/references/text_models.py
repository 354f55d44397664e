"""Writes NAME.npz for each of VARIANTS: tiny random language models of the transformers library.

    python -m tests.references.text_models [--checkpoints FOLDER]

Needs torch and transformers; about a minute. Float32, eval mode; a model is given one document of LENGTHS
tokens at a time, unpadded. save_pretrained's checkpoints stay in FOLDER, by name. Names are those on disk: an
entry for each expert, and NemotronH's prefix "backbone.".

    nemotron_h          scan chunks of 16: documents are shorter than, equal to and longer than one. The
                        library's CPU scan clamps dt to [time_step_min, inf): here it clamps nothing
    nemotron_h_latent   experts around a latent projection; a third of its dt is clamped to 0.05, the
                        lower bound of time_step_limit, too
    qwen3               the head tied to the embedding; one key and value head
    qwen3_moe           a dense layer between two layers of experts
    qwen3_next          zero-centred norms, gated delta rules, attention, a dense layer among
                        layers of experts
    qwen3_5             the gated delta rule's projections each by itself, convolutions of 3, a tied head,
                        three axes of positions, which are equal
    qwen3_5_moe         the same with experts in all layers, convolutions of 2
    kimi_linear         decays of features, latent attention without rotation, a dense layer before
                        two of experts in two groups
    deepseek_v3         a latent for queries, a dense layer before two of experts, groups of experts, YaRN
    moonlight           no latent for queries, one group, two shared experts
    llama               all projections with biases, heads wider than their share, Llama 3's positions
    mistral             windows in all layers
    qwen2               biases of queries, keys and values, a window in the last layers
    granite             four multipliers; the head tied to the embedding
    gpt_oss             windows shorter than two documents and as long as one; gates and ups reach the limit

Keys (c a document's number, i a layer's):
    config              config.json, as save_pretrained writes it
    weight.NAME         every tensor on disk
    tokens.c            int64 [tokens]
    logits.c            [tokens, vocabulary]
    loss                sum of -log p(tokens.c[t + 1] | tokens.c[: t + 1]) over all t and c
    grad.NAME           gradient of loss, by tensor; zeros for experts that no token chose
    margin              smallest difference, over all documents and layers, between the score of the last
                        expert (or group) chosen and that of the first not chosen; infinite without experts
NemotronH alone:
    mixer.document      number of the document that the mixer.i entries belong to
    mixer.i.input       [tokens, dim], input of layer i's mixer (after its norm)
    mixer.i.output      [tokens, dim], its output (before the residual)
    mixer.i.experts     int64 [tokens, experts per token], in rising order; MoE layers only
    mixer.i.weights     [tokens, experts per token], their weights, times the scale; MoE layers only
GPT-OSS alone:
    fp4.blocks, fp4.scales, fp4.values      MXFP4 numbers, uint8 [2, 6, 3, 16] and [2, 6, 3], and what the
                        library makes of them, float32 [2, 96, 6]
"""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.references.common import (
    Arrays,
    arguments,
    behind,
    biased_sigmoid,
    gradients,
    softmax,
    summed_loss,
    watched,
    write,
)

LENGTHS = (1, 5, 16, 37)
MIXER_DOCUMENT = 3
NEMOTRON_H: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 24,
}
QWEN3: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "head_dim": 10,
    "intermediate_size": 36,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
}
LLAMA: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "intermediate_size": 38,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
}
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 20,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "kv_lora_rank": 9,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 7,
    "intermediate_size": 36,
    "moe_intermediate_size": 12,
    "first_k_dense_replace": 1,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 16}
QWEN35: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e3,
        "partial_rotary_factor": 0.6,
        "mrope_section": [1, 1, 1],
        "mrope_interleaved": True,
    },
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": (
        "NemotronH",
        {
            **NEMOTRON_H,
            "hybrid_override_pattern": "MEM*E-",
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 2.5,
            "time_step_min": 1e-30,
        },
    ),
    "nemotron_h_latent": (
        "NemotronH",
        {
            **NEMOTRON_H,
            "hybrid_override_pattern": "M*E",
            "n_routed_experts": 16,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 5.0,
            "moe_latent_size": 12,
            "time_step_min": 0.05,
            "time_step_limit": (0.05, float("inf")),
        },
    ),
    "qwen3": (
        "Qwen3",
        {**QWEN3, "num_hidden_layers": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **QWEN3,
            "num_hidden_layers": 3,
            "num_key_value_heads": 3,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **QWEN3,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "mlp_only_layers": [2],
            "linear_num_key_heads": 3,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 7,
            "linear_value_head_dim": 5,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 9,
            "rope_parameters": QWEN3["rope_parameters"] | {"partial_rotary_factor": 0.4},
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            **QWEN35,
            "num_hidden_layers": 3,
            "intermediate_size": 36,
            "linear_conv_kernel_dim": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            **QWEN35,
            "num_hidden_layers": 2,
            "linear_conv_kernel_dim": 2,
            "layer_types": ["linear_attention", "full_attention"],
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 9,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            "vocab_size": 48,
            "hidden_size": 20,
            "intermediate_size": 36,
            "moe_intermediate_size": 12,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "kv_lora_rank": 9,
            "qk_nope_head_dim": 10,
            "qk_rope_head_dim": 5,
            "v_head_dim": 7,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "n_shared_experts": 2,
            "linear_num_heads": 4,
            "linear_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "rms_norm_eps": 1e-4,
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "pad_token_id": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "num_hidden_layers": 3,
            "q_lora_rank": 13,
            "n_routed_experts": 12,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 1,
            "max_position_embeddings": 64,
            "rope_parameters": YARN
            | {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "moonlight": (
        "DeepseekV3",
        {
            **DEEPSEEK,
            "num_hidden_layers": 2,
            "q_lora_rank": None,
            "n_routed_experts": 7,
            "num_experts_per_tok": 3,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
        },
    ),
    "llama": (
        "Llama",
        {
            **LLAMA,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e3,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
    ),
    "mistral": (
        "Mistral",
        {**LLAMA, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 14, "sliding_window": 5},
    ),
    "qwen2": (
        "Qwen2",
        {
            **LLAMA,
            "num_hidden_layers": 3,
            "num_key_value_heads": 3,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
        },
    ),
    "granite": (
        "Granite",
        {
            **LLAMA,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.4,
            "logits_scaling": 1.7,
            "tie_word_embeddings": True,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "vocab_size": 47,
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "head_dim": 10,
            "intermediate_size": 14,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "sliding_window": 5,
            "swiglu_limit": 0.9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": YARN | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False},
            "max_position_embeddings": 64,
            "experts_implementation": "eager",
        },
    ),
}
"""The library's class, without its ending, and the fields of its config."""


ZERO_CENTRED = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
"""The classes whose norms' weights are stored as their difference from 1, but for the delta rule's."""


def randomize(model: torch.nn.Module) -> None:
    """Gives every weight of a NemotronH a value at which an error in its use would show."""
    with torch.no_grad():
        for name, x in model.state_dict().items():
            if not x.is_floating_point():
                continue
            if name.endswith("A_log"):
                x.uniform_(0.0, 2.5)
            elif name.endswith("dt_bias"):
                x.normal_(-2.5, 1.0)
            elif name.endswith("e_score_correction_bias"):
                x.normal_(0.0, 0.2)
            elif x.ndim == 1:
                x.normal_(1.0 if "norm" in name else 0.0, 0.3)
            elif name.endswith("conv1d.weight"):
                x.normal_(0.0, 0.5)
            else:
                x.normal_(0.0, 1.0 if "embeddings" in name else x.shape[-1] ** -0.5)


def randomize_others(model: torch.nn.Module, kind: str) -> None:
    """Gives every weight of another family's model such a value."""
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "A_log" in name or "dt_bias" in name:  # decays from almost none to almost all
                x.uniform_(-3.0, 1.5)
            elif x.ndim == 1 or name.endswith("_bias"):
                zero_centred = kind in ZERO_CENTRED and "linear_attn" not in name
                is_bias = name.endswith(".bias") or (kind == "GptOss" and "norm" not in name)
                x.normal_(0.0 if zero_centred or is_bias else 1.0, 0.3)
            else:
                # GPT-OSS's experts are stored [in, out], the others' [out, in].
                fan_in = x.shape[-2 if kind == "GptOss" and ".experts." in name else -1]
                x.normal_(0.0, 0.5 if "embed" in name else fan_in**-0.5)
        for name, x in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                x.uniform_(-0.3, 0.3)


def groups_and_experts(gate: Any, logits: torch.Tensor) -> torch.Tensor:
    """The margins of DeepSeek-V3's choices, among groups and among experts."""
    grouped = (logits.sigmoid() + gate.e_score_correction_bias).view(len(logits), gate.num_group, -1)
    found = []
    if gate.topk_group < gate.num_group:
        best = grouped.topk(2, dim=-1).values.sum(-1)
        found.append(behind(best, gate.topk_group))
        outside = best.sort(-1, descending=True).indices[:, gate.topk_group :]
        grouped = grouped.scatter(1, outside[..., None].expand(-1, -1, grouped.shape[-1]), -torch.inf)
    found.append(behind(grouped.flatten(1), gate.top_k))
    return torch.stack(found)


SCORES = {"NemotronH": biased_sigmoid, "DeepseekV3": groups_and_experts, "KimiLinear": groups_and_experts}


RENAMED = {
    "KimiLinear": {"forget_gate.": "", ".mlp.": ".block_sparse_moe."},
    "OlmoHybrid": {
        "input_layernorm": "attention_layer_norm",
        "post_attention_layernorm": "feedforward_layer_norm",
    },
    "GraniteMoeHybrid": {
        "experts.gate_up_proj": "input_linear.weight",
        "experts.down_proj": "output_linear.weight",
        "router.weight": "router.layer.weight",
    },
}
"""Parts of the library's names in memory -> those on disk, where these are others."""


def on_disk(named: dict[str, torch.Tensor], kind: str = "NemotronH") -> Arrays:
    """Renames the library's names in memory to those of checkpoints on disk."""
    out: Arrays = {}
    names = {x: x for x in ("gate_proj", "up_proj", "down_proj")}
    if kind == "KimiLinear":
        names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    for name, x in named.items():
        array = x.detach().numpy().copy()
        if kind == "NemotronH":
            name = name.replace("model.", "backbone.", 1)
        for ours, theirs in RENAMED.get(kind, {}).items():
            name = name.replace(ours, theirs)
        if kind in ("KimiLinear", "OlmoHybrid") and name.endswith("conv1d.weight"):
            rows = [len(named[name.replace("conv1d", f"{part}_proj")]) for part in "qkv"]
            parts = zip("qkv", np.split(array, np.cumsum(rows)[:-1]), strict=True)
            out |= {name.replace("conv1d", f"{part}_conv1d"): each for part, each in parts}
            continue
        if ".experts." not in name or kind == "GptOss":
            out[name] = array
            continue
        head, matrix = name.split(".experts.")
        parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else (matrix,)
        for expert, matrices in enumerate(array):
            split = zip(parts, np.split(matrices, len(parts)), strict=True)
            out |= {f"{head}.experts.{expert}.{names[part]}.weight": each for part, each in split}
    return out


def as_published(saved: Arrays) -> Arrays:
    """Tensors of OLMo Hybrid as its authors publish them, where the library saves them otherwise: with the
    norm after attention under the name of another, and all taps of a convolution in three equal parts."""
    out: Arrays = {}
    for name, x in saved.items():
        layer, part, _ = name.partition("feedforward_layer_norm")
        is_after = part and f"{layer}post_feedforward_layernorm.weight" in saved
        out[f"{layer}post_attention_layernorm.weight" if is_after else name] = x
    for head in [name.removesuffix("q_conv1d.weight") for name in saved if "q_conv1d" in name]:
        names = [f"{head}{part}_conv1d.weight" for part in "qkv"]
        rows = np.cumsum([len(saved[f"{head}{part}_proj.weight"]) for part in "qkv"])
        pieces = np.split(np.concatenate([saved[name] for name in names]), rows[:-1])
        out |= {name: np.ascontiguousarray(x) for name, x in zip(names, pieces, strict=True)}
    return out


def watch_mixers(model: Any) -> dict[str, torch.Tensor]:
    """A dict that holds, of the last document run, what each of NemotronH's mixers takes and returns."""
    seen: dict[str, torch.Tensor] = {}

    def watch(layer: int, mixer: Any) -> None:
        def mixer_hook(_module: Any, args: Any, kwargs: Any, result: Any) -> None:
            result = result[0] if isinstance(result, tuple) else result
            given = args[0] if args else kwargs["hidden_states"]
            seen[f"mixer.{layer}.input"], seen[f"mixer.{layer}.output"] = given[0], result[0]

        def gate_hook(_gate: Any, _args: Any, result: Any) -> None:
            _, weights, chosen = result
            order = chosen.argsort(-1)
            seen[f"mixer.{layer}.experts"] = chosen.gather(1, order)
            seen[f"mixer.{layer}.weights"] = weights.gather(1, order)

        mixer.register_forward_hook(mixer_hook, with_kwargs=True)
        if hasattr(mixer, "gate"):
            mixer.gate.register_forward_hook(gate_hook)

    for number, layer in enumerate(model.model.layers):
        watch(number, layer.mixer)
    return seen


def mxfp4(seed: int) -> Arrays:
    """Random MXFP4 numbers and their values."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = rng.integers(110, 135, (2, 6, 3), dtype=np.uint8)
    values = convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    return {"fp4.blocks": blocks, "fp4.scales": scales, "fp4.values": values.numpy()}


def reference(kind: str, fields: dict[str, Any], seed: int, folder: Path) -> Arrays:
    """All arrays of one archive. kind, fields: as in VARIANTS. folder: where the checkpoint is saved."""
    torch.manual_seed(seed)
    text = "Text" if kind in ZERO_CENTRED[1:] else ""  # what has a vision tower besides has the plain name
    config = getattr(transformers, f"{kind}{text}Config")(**deepcopy(fields), attn_implementation="eager")
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    randomize(model) if kind == "NemotronH" else randomize_others(model, kind)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    if kind == "OlmoHybrid":
        weights = as_published(weights)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    margins = watched(model, SCORES.get(kind, softmax))
    seen = watch_mixers(model) if kind == "NemotronH" else {}
    out = {"config": np.asarray((folder / "config.json").read_text())}
    out |= {f"weight.{k}": v for k, v in weights.items()}
    loss = torch.zeros(())
    for number, length in enumerate(LENGTHS):
        tokens = torch.randint(fields["vocab_size"], (length,))
        logits = model(tokens[None], use_cache=False).logits[0]
        loss = loss + summed_loss(logits, tokens)
        out |= {f"tokens.{number}": tokens.numpy(), f"logits.{number}": logits.detach().numpy()}
        if number == MIXER_DOCUMENT:
            out |= {k: v.detach().numpy().copy() for k, v in seen.items()}
    loss.backward()
    named = on_disk(gradients(model), kind)
    named = as_published(named) if kind == "OlmoHybrid" else named
    named = {k: v for k, v in named.items() if k in weights}  # a tied head is none
    assert {k for k in weights if not k.endswith("e_score_correction_bias")} == named.keys()
    out |= {f"grad.{k}": v for k, v in named.items()}
    out |= {"loss": loss.detach().numpy(), "margin": np.asarray(min(margins, default=np.inf))}
    out |= {"mixer.document": np.asarray(MIXER_DOCUMENT)} if seen else {}
    return out | (mxfp4(seed) if kind == "GptOss" else {})


def main() -> None:
    options = arguments(__doc__)
    for name in options.only or VARIANTS:
        write(name, options, lambda seed, folder, name=name: reference(*VARIANTS[name], seed, folder))  # type: ignore[misc]


if __name__ == "__main__":
    main()
