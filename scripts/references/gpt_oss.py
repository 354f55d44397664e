"""Writes tests/references/gpt_oss.npz: a tiny random GptOssForCausalLM.

    python scripts/references/gpt_oss.py [--checkpoints FOLDER]

Needs torch and transformers; takes about 15 s. Float32, eval mode; the model is given one document of LENGTHS
tokens at a time, unpadded. Its windows are shorter than two of these documents, and as long as one. All query
heads share one key and value head. Gates and ups reach the limit. save_pretrained's checkpoint stays in
FOLDER.

Keys (c a document's number):
    config              config.json, as save_pretrained writes it
    weight.NAME         every tensor on disk
    tokens.c            int64 [tokens]
    logits.c            [tokens, vocabulary]
    loss                sum of -log p(tokens.c[t + 1] | tokens.c[: t + 1]) over all t and c
    grad.NAME           gradient of loss, by tensor
    margin              smallest difference, over all documents and layers, between the score of the last
                        expert chosen and that of the first not chosen; at least MARGIN (seeds are tried)
    fp4.blocks, fp4.scales, fp4.values      MXFP4 numbers, uint8 [2, 6, 3, 16] and [2, 6, 3], and what the
                        library makes of them, float32 [2, 96, 6]
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from places import arguments
from safetensors.numpy import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

LENGTHS = (1, 5, 16, 37)
MARGIN = 1e-3
FIELDS: dict[str, Any] = {
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
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 1e3,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 4.0,
        "beta_slow": 0.5,
        "truncate": False,
    },
    "max_position_embeddings": 64,
}


def randomize(model: torch.nn.Module) -> None:
    """Gives every weight a value at which an error in its use would show."""
    with torch.no_grad():
        for name, x in model.named_parameters():
            if "norm" in name:
                x.normal_(1.0, 0.3)
            elif x.ndim == 1 or name.endswith("_bias"):
                x.normal_(0.0, 0.3)
            else:
                fan_in = x.shape[-2] if ".experts." in name else x.shape[-1]
                x.normal_(0.0, 0.5 if "embed" in name else fan_in**-0.5)


def mxfp4(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
    scales = rng.integers(110, 135, (2, 6, 3), dtype=np.uint8)
    given = torch.from_numpy(blocks), torch.from_numpy(scales)
    values = convert_moe_packed_tensors(*given, dtype=torch.float32)
    return {"fp4.blocks": blocks, "fp4.scales": scales, "fp4.values": values.numpy()}


def reference(seed: int, folder: Path) -> dict[str, np.ndarray]:
    """All arrays of the archive. folder: where the checkpoint is saved."""
    torch.manual_seed(seed)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    config = transformers.GptOssConfig(**FIELDS, **eager)
    model = transformers.GptOssForCausalLM(config).eval()
    randomize(model)
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    margins = [np.inf]

    def router_hook(router: Any, _args: Any, result: Any) -> None:
        ranked = result[0].detach().softmax(-1).sort(-1, descending=True).values
        margins.append(float((ranked[:, router.top_k - 1] - ranked[:, router.top_k]).min()))

    for layer in model.model.layers:
        layer.mlp.router.register_forward_hook(router_hook)

    out = {"config": np.asarray((folder / "config.json").read_text())}
    out |= {f"weight.{k}": v for k, v in weights.items()}
    loss = torch.zeros(())
    for c, length in enumerate(LENGTHS):
        tokens = torch.randint(FIELDS["vocab_size"], (length,))
        logits = model(tokens[None], use_cache=False).logits[0]
        loss = loss + torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")
        out |= {f"tokens.{c}": tokens.numpy(), f"logits.{c}": logits.detach().numpy()}
    loss.backward()
    grads = {k: p.grad for k, p in model.named_parameters()}
    assert grads.keys() == weights.keys(), grads.keys() ^ weights.keys()
    out |= {f"grad.{k}": v.numpy() for k, v in grads.items()}
    return out | {"loss": loss.detach().numpy(), "margin": np.asarray(min(margins))} | mxfp4(seed)


def main() -> None:
    options = arguments(__doc__)
    with tempfile.TemporaryDirectory() as scratch:
        folder, seed = (options.checkpoints or Path(scratch)) / "gpt_oss", options.seed
        while (out := reference(seed, folder))["margin"] < MARGIN:
            seed += 1
    path = options.out / "gpt_oss.npz"
    np.savez_compressed(path, **out)  # type: ignore[arg-type]
    print(f"{path.name}: seed {seed}, margin {out['margin']:.1e}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
