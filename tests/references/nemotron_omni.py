"""Writes tests/references/nemotron_omni.npz: a tiny random NemotronH_Omni_Reasoning_V3 of transformers.

    python -m tests.references.nemotron_omni [--checkpoints FOLDER]

Needs torch and transformers; takes about 20 s. Float32, eval mode, no vision input. The model is given one
document at a time, unpadded: a prompt, a recording's frames, a text. save_pretrained's checkpoint stays in
FOLDER, by name.

No clip is a multiple of 8 mel frames long: if one were, the library would insert one more embedding, for a
frame that its encoder masks. Keys (c is a document's number):
    config              config.json, as save_pretrained writes it
    weight.NAME         every tensor on disk except the vision tower's
    mels.c              [mel frames, mels]
    tokens.c            int64 [tokens], with one placeholder for every encoder frame
    logits.c            [tokens, vocabulary]
    loss                sum of -log p(tokens.c[t + 1] | tokens.c[: t + 1]) over the text tokens after the clip
    grad.NAME           gradient of loss, by tensor on disk
    margin              as in text_models.py
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file

from tests.references import text_models
from tests.references.common import (
    Arrays,
    arguments,
    biased_sigmoid,
    gradients,
    speech_documents,
    summed_loss,
    watched,
    write,
)

AUDIO_TOKEN, VOCABULARY = 47, 48
DOCUMENTS = ((3, 61, 5), (1, 203, 9), (2, 20, 1))
"""(prompt tokens, mel frames, text tokens) of each document."""
TEXT: dict[str, Any] = {
    **text_models.NEMOTRON_H,
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "ME*-M",
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "time_step_min": 1e-30,
}
AUDIO: dict[str, Any] = {
    "model_type": "parakeet_encoder",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_kernel_size": 9,
    "subsampling_conv_channels": 8,
    "num_mel_bins": 16,
    "projection_hidden_size": 20,
    "projection_bias": False,
    **dict.fromkeys(("dropout", "layerdrop", "activation_dropout", "attention_dropout"), 0.0),
}
VISION: dict[str, Any] = {
    "vision_config": {
        "model_type": "radio",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "patch_size": 4,
        "image_size": 16,
        "max_img_size": 16,
        "video_temporal_patch_size": 2,
    },
    "vision_hidden_size": 16,
    "projector_hidden_size": 16,
}
VISION_TENSORS = ("vision_model.", "mlp1.", "vision_final_layernorm.")


def on_disk(named: dict[str, torch.Tensor]) -> Arrays:
    """Renames the library's names in memory to the names of checkpoints on disk."""
    renamed = {
        name.replace("audio_tower.", "sound_encoder.encoder.", 1)
        .replace("embed_audio.layer_norm.", "sound_projection.norm.")
        .replace("embed_audio.linear_", "sound_projection.linear"): x
        for name, x in named.items()
        if not name.startswith(("vision_model.", "multi_modal_projector."))
    }
    prefix = "language_model."
    text = {k.removeprefix(prefix): v for k, v in renamed.items() if k.startswith(prefix)}
    out = {prefix + k: v for k, v in text_models.on_disk(text).items()}
    return out | {k: v.detach().numpy().copy() for k, v in renamed.items() if not k.startswith(prefix)}


def randomize(model: torch.nn.Module) -> None:
    text_models.randomize(model)
    with torch.no_grad():
        for name, x in model.state_dict().items():
            if name.endswith("running_var"):
                x.uniform_(0.5, 2.0)
            elif "bias_" in name and "audio_tower" in name:
                x.normal_(0.0, 0.5)
            elif "audio_tower" in name and x.ndim > 2:
                x.normal_(0.0, (x.numel() / len(x)) ** -0.5)


def reference(seed: int, folder: Path) -> Arrays:
    """All arrays of the archive. folder: where the checkpoint is saved."""
    torch.manual_seed(seed)
    config = transformers.NemotronH_Omni_Reasoning_V3_Config(
        text_config=TEXT,
        audio_config=AUDIO,
        audio_token_id=AUDIO_TOKEN,
        attn_implementation="eager",
        **VISION,
    )
    model = transformers.NemotronH_Omni_Reasoning_V3(config).eval()
    randomize(model)
    model.save_pretrained(folder)
    saved = load_file(folder / "model.safetensors")
    saved = {k: v for k, v in saved.items() if not k.startswith(VISION_TENSORS) and v.ndim}
    weights = {k: v for k, v in on_disk(dict(model.state_dict())).items() if v.ndim}
    assert saved.keys() == weights.keys(), saved.keys() ^ weights.keys()

    margins = watched(model, biased_sigmoid)
    out = {"config": np.asarray((folder / "config.json").read_text())}
    out |= {f"weight.{k}": v for k, v in weights.items()}
    loss = torch.zeros(())
    documents = speech_documents(DOCUMENTS, AUDIO_TOKEN, AUDIO["num_mel_bins"])
    for c, (tokens, mels, first) in enumerate(documents):
        logits = model(
            input_ids=tokens[None],
            input_features=mels[None],
            input_features_mask=torch.ones(1, len(mels), dtype=torch.bool),
            use_cache=False,
        ).logits[0]
        loss = loss + summed_loss(logits, tokens, first)
        out |= {f"tokens.{c}": tokens.numpy(), f"mels.{c}": mels.numpy()}
        out[f"logits.{c}"] = logits.detach().numpy()
    loss.backward()
    out |= {f"grad.{k}": v for k, v in on_disk(gradients(model)).items()}
    return out | {"loss": loss.detach().numpy(), "margin": np.asarray(min(margins))}


def main() -> None:
    write("nemotron_omni", arguments(__doc__), reference)


if __name__ == "__main__":
    main()
