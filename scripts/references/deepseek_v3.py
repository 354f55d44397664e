"""Writes tests/references/deepseek_v3.npz and moonlight.npz: tiny random DeepseekV3ForCausalLM.

    python scripts/references/deepseek_v3.py [--checkpoints FOLDER]

Needs torch and transformers; takes about 15 s. Float32, eval mode; the model is given one document of LENGTHS
tokens at a time, unpadded. One has a latent for the queries, a dense layer before two layers of experts,
groups of experts, and positions scaled by YaRN. The other one has Moonlight's settings: no latent for the
queries, one group, two shared experts. Heads, experts, ranks and dims are no powers of two. save_pretrained's
checkpoints stay in FOLDER, by name.

Keys: those of qwen3.py. The margin is also that between the last group chosen and the first not chosen.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from places import arguments
from qwen3 import LENGTHS, MARGIN, on_disk, randomize
from safetensors.numpy import load_file

SHARED: dict[str, Any] = {
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
VARIANTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "q_lora_rank": 13,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e3,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    },
    "moonlight": {
        "num_hidden_layers": 2,
        "q_lora_rank": None,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e3},
    },
}


def margin(gate: Any, logits: torch.Tensor) -> float:
    """The smallest difference between what a token chose last and the first that it did not choose, among
    groups and among experts."""
    ranked = logits.detach().sigmoid() + gate.e_score_correction_bias
    grouped = ranked.view(len(ranked), gate.num_group, -1)
    found = []
    if gate.num_group > 1:
        best = grouped.topk(2, dim=-1).values.sum(-1)
        ordered = best.sort(-1, descending=True)
        found.append(ordered.values[:, gate.topk_group - 1] - ordered.values[:, gate.topk_group])
        outside = ordered.indices[:, gate.topk_group :]
        grouped = grouped.scatter(1, outside[..., None].expand(-1, -1, grouped.shape[-1]), -torch.inf)
    ordered = grouped.flatten(1).sort(-1, descending=True).values
    found.append(ordered[:, gate.top_k - 1] - ordered[:, gate.top_k])
    return float(torch.stack(found).min())


def reference(name: str, seed: int, folder: Path) -> dict[str, np.ndarray]:
    """All arrays of one archive. folder: where the checkpoint is saved."""
    torch.manual_seed(seed)
    config = transformers.DeepseekV3Config(**SHARED, **VARIANTS[name], attn_implementation="eager")
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    randomize(model)
    margins: list[float] = []
    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.e_score_correction_bias.uniform_(-0.3, 0.3)
            layer.mlp.gate.register_forward_hook(
                lambda gate, _, result: margins.append(margin(gate, result[0]))
            )
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
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
    assert {k for k in weights if not k.endswith("e_score_correction_bias")} == named.keys()
    out |= {f"grad.{k}": v for k, v in named.items()}
    return out | {"loss": loss.detach().numpy(), "margin": np.asarray(min(margins))}


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
