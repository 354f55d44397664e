"""Writes tests/references/canary_qwen.npz: a tiny random Canary-Qwen, built as NeMo's SALM builds it.

    python -m tests.references.canary_qwen [--checkpoints FOLDER]
    python -m tests.references.canary_qwen --read-back EXPORTED REFERENCE.npz     # as read_back.py

Needs torch, transformers and peft; about 10 s.

NeMo itself is not needed: transformers' Qwen3ForCausalLM and ParakeetEncoder and peft's LoRA are put together
as in NeMo's collections/speechlm2/models/salm.py, where the embedding is taken out of the LLM, and saved by
safetensors.torch.save_model, as huggingface_hub's mixin does; the encoder's tensors get NeMo's names.
Float32, eval mode, one document at a time, unpadded: a prompt, a recording's frames, a text.
Keys are those of nemotron_omni.npz. config.json has NeMo's form, and "text_config" besides: the tiny LLM has
no published settings.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file, save_model

from tests.references.common import Arrays, arguments, speech_documents, summed_loss, write

AUDIO_TOKEN, VOCABULARY = 47, 48
DOCUMENTS = ((3, 61, 5), (1, 203, 9), (2, 20, 1))
"""(prompt tokens, mel frames, text tokens) of each document."""
TEXT: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "intermediate_size": 36,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
ENCODER: dict[str, Any] = {
    "feat_in": 16,
    "n_layers": 1,
    "d_model": 20,
    "n_heads": 2,
    "ff_expansion_factor": 2,
    "conv_kernel_size": 9,
    "subsampling": "dw_striding",
    "subsampling_factor": 8,
    "subsampling_conv_channels": 8,
    "xscaling": True,
    "use_bias": True,
    "att_context_size": [-1, -1],
}
LORA = {"task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 5, "lora_dropout": 0.01}
CONFIG: dict[str, Any] = {
    "pretrained_llm": "Qwen/Qwen3-1.7B",
    "pretrained_asr": "nvidia/canary-1b-flash",
    "pretrained_weights": True,
    "audio_locator_tag": "<|audioplaceholder|>",
    "prompt_format": "qwen",
    "lora": {**LORA, "target_modules": ["q_proj", "v_proj"]},
    "perception": {
        "target": "nemo.collections.speechlm2.modules.perception.AudioPerceptionModule",
        "output_dim": TEXT["hidden_size"],
        "modality_adapter": {
            "_target_": "nemo.collections.speechlm2.modules.perception.IdentityConnector",
            "d_model": ENCODER["d_model"],
        },
        "preprocessor": {"sample_rate": 16000, "normalize": "per_feature", "features": 16, "n_fft": 512},
        "encoder": ENCODER,
    },
}
NAMES = (
    (r"^perception\.encoder\.subsampling\.layers\.", "perception.encoder.pre_encode.conv."),
    (r"^perception\.encoder\.subsampling\.linear\.", "perception.encoder.pre_encode.out."),
    (r"\.self_attn\.relative_k_proj\.", ".self_attn.linear_pos."),
    (r"^(perception.*)\.self_attn\.([qkv])_proj\.", r"\1.self_attn.linear_\2."),
    (r"^(perception.*)\.self_attn\.o_proj\.", r"\1.self_attn.linear_out."),
    (r"\.self_attn\.bias_([uv])$", r".self_attn.pos_bias_\1"),
    (r"\.conv\.norm\.", ".conv.batch_norm."),
)
"""ParakeetEncoder's names -> NeMo's."""


def nemo(name: str) -> str:
    for pattern, new in NAMES:
        name = re.sub(pattern, new, name)
    return name


class Perception(torch.nn.Module):
    def __init__(self, fields: dict[str, Any], dim: int) -> None:
        super().__init__()
        off = dict.fromkeys(("dropout", "layerdrop", "activation_dropout", "attention_dropout"), 0.0)
        config = transformers.ParakeetEncoderConfig(
            hidden_size=fields["d_model"],
            num_hidden_layers=fields["n_layers"],
            num_attention_heads=fields["n_heads"],
            intermediate_size=fields["d_model"] * fields["ff_expansion_factor"],
            conv_kernel_size=fields["conv_kernel_size"],
            subsampling_conv_channels=fields["subsampling_conv_channels"],
            num_mel_bins=fields["feat_in"],
            scale_input=fields["xscaling"],
            attention_bias=fields["use_bias"],
            convolution_bias=fields["use_bias"],
            attn_implementation="eager",
            **off,
        )
        self.encoder = transformers.ParakeetEncoder(config)
        self.proj = torch.nn.Linear(fields["d_model"], dim)


class Salm(torch.nn.Module):
    """config: NeMo's settings."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        text = transformers.Qwen3Config(**config["text_config"], attn_implementation="eager")
        self.llm: Any = transformers.Qwen3ForCausalLM(text)
        inner = self.llm.model
        self.embed_tokens = inner.embed_tokens
        if config.get("lora"):
            self.llm = peft.get_peft_model(self.llm, peft.LoraConfig(**config["lora"]))
        del inner.embed_tokens  # NeMo does so before peft, which newer versions of peft do not take
        self.perception = Perception(config["perception"]["encoder"], text.hidden_size)

    def forward(self, tokens: torch.Tensor, mels: torch.Tensor) -> torch.Tensor:
        """Logits of one document; its audio tokens are replaced by the frames' embeddings."""
        frames = self.perception.proj(self.perception.encoder(mels[None]).last_hidden_state[0])
        is_audio = tokens == AUDIO_TOKEN
        embedded = self.embed_tokens(torch.where(is_audio, 0, tokens))
        embedded = embedded.masked_scatter(is_audio[:, None], frames)
        return self.llm(inputs_embeds=embedded[None], use_cache=False).logits[0]


def save(model: Salm, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.safetensors"
    save_model(model, str(file))  # of shared tensors it keeps one
    save_file({nemo(name): x for name, x in load_file(file).items()}, file, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**CONFIG, "text_config": TEXT}, indent=2) + "\n")


def randomize(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, x in model.state_dict().items():
            if name.endswith("running_var"):
                x.uniform_(0.5, 2.0)
            elif x.ndim == 1:
                x.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.3)
            elif x.ndim:
                x.normal_(0.0, 0.5 if "embed" in name or "bias_" in name else (x.numel() / len(x)) ** -0.5)


def reference(seed: int, folder: Path) -> Arrays:
    """All arrays of the archive. folder: where the checkpoint is saved."""
    torch.manual_seed(seed)
    model = Salm({**CONFIG, "text_config": TEXT}).eval()
    randomize(model)
    for parameter in model.parameters():
        parameter.requires_grad_(True)  # peft freezes the LLM
    save(model, folder)
    weights = {k: x for k, x in load_file(folder / "model.safetensors").items() if x.ndim}
    out: dict[str, Any] = {"config": np.asarray((folder / "config.json").read_text())}
    out |= {f"weight.{k}": x.numpy() for k, x in weights.items()}
    loss = torch.zeros(())
    documents = speech_documents(DOCUMENTS, AUDIO_TOKEN, ENCODER["feat_in"])
    for c, (tokens, mels, first) in enumerate(documents):
        logits = model(tokens, mels)
        loss = loss + summed_loss(logits, tokens, first)
        out |= {f"tokens.{c}": tokens.numpy(), f"mels.{c}": mels.numpy()}
        out[f"logits.{c}"] = logits.detach().numpy()
    loss.backward()
    grads = {nemo(k): p.grad for k, p in model.named_parameters() if p.grad is not None}
    grads["embed_tokens.weight"] = grads.pop("llm.base_model.model.lm_head.weight")  # tied: one parameter
    out |= {f"grad.{k}": x.numpy() for k, x in grads.items()}
    assert {k for k in weights if "running_" not in k} == grads.keys(), weights.keys() ^ grads.keys()
    return out | {"loss": loss.detach().numpy()}


def read_back(folder: Path, npz: Path) -> None:
    """Builds the model from the export's config.json, loads its tensors, and compares the logits."""
    fields, arrays = json.loads((folder / "config.json").read_text()), np.load(npz)
    model = Salm(fields).eval()
    ours = {nemo(name): name for name in model.state_dict()}
    found = load_file(folder / "model.safetensors")
    info = model.load_state_dict({ours.get(k, k): x for k, x in found.items()}, strict=False)
    missing = [name for name in info.missing_keys if not name.endswith("lm_head.weight")]  # tied
    worst = 0.0
    with torch.no_grad():
        for number in range(len(DOCUMENTS)):
            tokens, mels = (torch.from_numpy(arrays[f"{what}.{number}"]) for what in ("tokens", "mels"))
            want = arrays[f"logits.{number}"]
            error = np.linalg.norm(model(tokens, mels).numpy() - want) / np.linalg.norm(want)
            worst = max(worst, float(error))
    lost = {"missing_keys": missing, "unexpected_keys": info.unexpected_keys, "mismatched": 0}
    print(json.dumps({"error": worst, **lost}))


def main() -> None:
    if "--read-back" in sys.argv:
        folder, npz = map(Path, sys.argv[2:])
        return read_back(folder, npz)
    write("canary_qwen", arguments(__doc__), reference)


if __name__ == "__main__":
    main()
