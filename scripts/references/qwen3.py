"""Writes tests/references/qwen3.npz, qwen3_moe.npz, qwen3_next.npz: tiny random Qwen3ForCausalLM,
Qwen3MoeForCausalLM, Qwen3NextForCausalLM.

    python scripts/references/qwen3.py [--checkpoints FOLDER]

Needs torch and transformers; takes about 15 s. Float32, eval mode; the model is given one document of LENGTHS
tokens at a time, unpadded. The dense model ties its head to its embedding, and all its query heads share one
key and value head. The second one has a dense layer between two layers of experts. The third one, with
zero-centred norms, has gated delta rules, attention, and a dense layer among layers of experts. The
checkpoints of save_pretrained stay in FOLDER, by name.

Keys (c a document's number):
    config              config.json, as save_pretrained writes it
    weight.NAME         every tensor on disk
    tokens.c            int64 [tokens]
    logits.c            [tokens, vocabulary]
    loss                sum of -log p(tokens.c[t + 1] | tokens.c[: t + 1]) over all t and c
    grad.NAME           gradient of loss, by tensor; zeros for experts that no token chose
    margin              smallest difference, over all documents and layers of experts, between the score of
                        the last expert chosen and that of the first not chosen; at least MARGIN (seeds are
                        tried until it is); infinite without experts
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from places import arguments
from safetensors.numpy import load_file

LENGTHS = (1, 5, 16, 37)
MARGIN = 1e-3
SHARED: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 24,
    "num_attention_heads": 6,
    "head_dim": 10,
    "intermediate_size": 36,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
}
VARIANTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen3": (
        transformers.Qwen3Config,
        transformers.Qwen3ForCausalLM,
        {"num_hidden_layers": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {
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
        transformers.Qwen3NextConfig,
        transformers.Qwen3NextForCausalLM,
        {
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
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e3,
                "partial_rotary_factor": 0.4,
            },
        },
    ),
}


def randomize(model: torch.nn.Module) -> None:
    """Gives every weight a value at which an error in its use would show."""
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "A_log" in name or "dt_bias" in name:  # decays from almost none to almost all
                x.uniform_(-3.0, 1.5)
            elif x.ndim == 1:
                is_zero_centred = isinstance(model, transformers.Qwen3NextForCausalLM)
                x.normal_(0.0 if is_zero_centred and "linear_attn" not in name else 1.0, 0.3)
            else:
                x.normal_(0.0, 0.5 if "embed" in name else x.shape[-1] ** -0.5)


def on_disk(named: dict[str, torch.Tensor], stored: set[str]) -> dict[str, np.ndarray]:
    """Renames the library's names in memory to those on disk: each expert's matrices have their own."""
    out: dict[str, np.ndarray] = {}
    for name, x in named.items():
        array = x.detach().numpy().copy()
        if ".experts." not in name:
            out[name] = array
            continue
        head, kind = name.split(".experts.")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
        for expert, matrices in enumerate(array):
            split = np.split(matrices, len(parts))
            out |= {f"{head}.experts.{expert}.{p}.weight": m for p, m in zip(parts, split, strict=True)}
    return {name: x for name, x in out.items() if name in stored}


def reference(name: str, seed: int, folder: Path) -> dict[str, np.ndarray]:
    """All arrays of one archive. folder: where the checkpoint is saved."""
    configure, make, fields = VARIANTS[name]
    torch.manual_seed(seed)
    model = make(configure(**{**SHARED, **fields}, attn_implementation="eager")).eval()
    randomize(model)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    margins = [np.inf]

    def gate_hook(gate: Any, _args: Any, result: Any) -> None:
        ranked = result[0].detach().softmax(-1).sort(-1, descending=True).values
        margins.append(float((ranked[:, gate.top_k - 1] - ranked[:, gate.top_k]).min()))

    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(gate_hook)

    out = {"config": np.asarray((folder / "config.json").read_text())}
    out |= {f"weight.{k}": v for k, v in weights.items()}
    loss = torch.zeros(())
    for c, length in enumerate(LENGTHS):
        tokens = torch.randint(SHARED["vocab_size"], (length,))
        logits = model(tokens[None], use_cache=False).logits[0]
        loss = loss + torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")
        out |= {f"tokens.{c}": tokens.numpy(), f"logits.{c}": logits.detach().numpy()}
    loss.backward()
    grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()}
    named = on_disk(grads, set(weights))
    assert named.keys() == weights.keys()
    out |= {f"grad.{k}": v for k, v in named.items()}
    out |= {"loss": loss.detach().numpy(), "margin": np.asarray(min(margins))}
    return out


def main() -> None:
    options = arguments(__doc__)
    for name in VARIANTS:
        with tempfile.TemporaryDirectory() as scratch:
            folder, seed = (options.checkpoints or Path(scratch)) / name, options.seed
            while (out := reference(name, seed, folder))["margin"] < MARGIN:
                seed += 1
        path = options.out / f"{name}.npz"
        np.savez_compressed(path, **out)  # type: ignore[arg-type]
        print(f"{path.name}: seed {seed}, margin {out['margin']:.1e}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
