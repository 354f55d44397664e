"""Writes tests/references/nemotron_h.npz and nemotron_h_latent.npz: tiny random NemotronHForCausalLM models.

    python scripts/references/nemotron_h.py [--checkpoints FOLDER]

Needs torch and transformers; takes about 20 s. Float32, eval mode; the model is given one document of LENGTHS
tokens at a time, unpadded. The scan chunk is 16, so documents are shorter than, equal to and longer than it.
There are two models: one with experts on the model dim, one with a latent projection around them
(VARIANTS). Names are those of checkpoints on disk: prefix "backbone.", one entry for each expert.

The library's CPU scan clamps dt to [time_step_min, inf) and ignores time_step_limit. The first model has
time_step_min = 1e-30, so nothing is clamped. The second has 0.05, which clamps a third of its dt; its
time_step_limit has the same lower bound. save_pretrained's checkpoints stay in FOLDER, by name.

Keys (c a document's number, i a layer's):
    config              config.json, as save_pretrained writes it
    weight.NAME         every parameter, and mixer.gate.e_score_correction_bias
    tokens.c            int64 [tokens]
    logits.c            [tokens, vocabulary]
    loss                sum of -log p(tokens.c[t + 1] | tokens.c[: t + 1]) over all t and c
    grad.NAME           gradient of loss, by parameter; zeros for experts that no token chose
    mixer.document      number of the document that the mixer.i entries belong to
    mixer.i.input       [tokens, dim], input of layer i's mixer (after its norm)
    mixer.i.output      [tokens, dim], its output (before the residual)
    mixer.i.experts     int64 [tokens, experts per token], in rising order; MoE layers only
    mixer.i.weights     [tokens, experts per token], their weights, times the scale; MoE layers only
    margin              smallest difference, over all documents and MoE layers, between the biased score of
                        the last expert chosen and that of the first not chosen; at least MARGIN (seeds are
                        tried until it is)
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
MIXER_DOCUMENT = 3
MARGIN = 1e-3
SHARED: dict[str, Any] = {
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
VARIANTS: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "hybrid_override_pattern": "MEM*E-",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 2.5,
        "time_step_min": 1e-30,
    },
    "nemotron_h_latent": {
        "hybrid_override_pattern": "M*E",
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 5.0,
        "moe_latent_size": 12,
        "time_step_min": 0.05,
        "time_step_limit": (0.05, float("inf")),
    },
}


def randomize(model: torch.nn.Module) -> None:
    """Gives every weight a value at which an error in its use would show."""
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


def on_disk(named: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Renames the library's names in memory to the names of checkpoints on disk."""
    out: dict[str, np.ndarray] = {}
    for name, x in named.items():
        name, array = name.replace("model.", "backbone.", 1), x.detach().numpy().copy()
        if ".experts." in name:
            head, kind = name.split(".experts.")
            out |= {f"{head}.experts.{e}.{kind}.weight": a for e, a in enumerate(array)}
        else:
            out[name] = array
    return out


def reference(fields: dict[str, Any], seed: int, folder: Path) -> dict[str, np.ndarray]:
    """All arrays of one archive. folder: where the checkpoint is saved."""
    torch.manual_seed(seed)
    config = transformers.NemotronHConfig(**fields, attn_implementation="eager")
    model = transformers.NemotronHForCausalLM(config).eval()
    randomize(model)
    weights = on_disk(dict(model.state_dict()))
    model.save_pretrained(folder)
    assert load_file(folder / "model.safetensors").keys() == weights.keys()

    seen: dict[str, torch.Tensor] = {}
    margins: list[float] = []

    def watch(layer: int, mixer: torch.nn.Module) -> None:
        def mixer_hook(_module: Any, args: Any, kwargs: Any, result: Any) -> None:
            result = result[0] if isinstance(result, tuple) else result
            given = args[0] if args else kwargs["hidden_states"]
            seen[f"mixer.{layer}.input"], seen[f"mixer.{layer}.output"] = given[0], result[0]

        def gate_hook(gate: Any, _args: Any, result: Any) -> None:
            logits, chosen_weights, chosen = result
            order = chosen.argsort(-1)
            seen[f"mixer.{layer}.experts"] = chosen.gather(1, order)
            seen[f"mixer.{layer}.weights"] = chosen_weights.gather(1, order)
            ranked = (
                (logits.detach().sigmoid() + gate.e_score_correction_bias).sort(-1, descending=True).values
            )
            margins.append(float((ranked[:, gate.top_k - 1] - ranked[:, gate.top_k]).min()))

        mixer.register_forward_hook(mixer_hook, with_kwargs=True)
        router: Any = getattr(mixer, "gate", None)
        if router is not None:
            router.register_forward_hook(gate_hook)

    for i, layer in enumerate(model.model.layers):
        watch(i, layer.mixer)

    out = {"config": np.asarray((folder / "config.json").read_text())}
    out |= {f"weight.{k}": v for k, v in weights.items()}
    loss = torch.zeros(())
    for c, length in enumerate(LENGTHS):
        tokens = torch.randint(fields["vocab_size"], (length,))
        logits = model(tokens[None], use_cache=False).logits[0]
        loss = loss + torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")
        out |= {f"tokens.{c}": tokens.numpy(), f"logits.{c}": logits.detach().numpy()}
        if c == MIXER_DOCUMENT:
            out |= {k: v.detach().numpy().copy() for k, v in seen.items()}
    loss.backward()
    grads = {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()}
    out |= {f"grad.{k}": v for k, v in on_disk(grads).items()}
    out |= {"loss": loss.detach().numpy(), "mixer.document": np.asarray(MIXER_DOCUMENT)}
    out["margin"] = np.asarray(min(margins))
    return out


def main() -> None:
    options = arguments(__doc__)
    for name, variant in VARIANTS.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder, seed = (options.checkpoints or Path(scratch)) / name, options.seed
            while (out := reference(SHARED | variant, seed, folder))["margin"] < MARGIN:
                seed += 1
        path = options.out / f"{name}.npz"
        np.savez_compressed(path, **out)  # type: ignore[arg-type]
        print(f"{path.name}: seed {seed}, margin {out['margin']:.1e}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
