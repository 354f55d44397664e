"""Writes tests/references/fastconformer.npz: a tiny random ParakeetEncoder of the transformers library.

    python -m tests.references.encoder [--checkpoints FOLDER]     # needs torch and transformers; about 5 s

save_pretrained's checkpoint stays in FOLDER. Float32; the model is given one clip at a time, unpadded,
without a mask. Keys (c is a clip's number):
    config                      config.json, as save_pretrained writes it
    weight.NAME                 every parameter and BatchNorm statistic (random too) under its library name
    mels.c                      [mel frames, mels], lengths LENGTHS
    output.c                    [encoder frames, dim], eval mode
    cotangent.c                 [encoder frames, dim], random
    grad.NAME                   gradient of sum over clips of sum(output * cotangent), eval mode, by parameter
    train.clip                  number of the one clip that is run in training mode (every dropout 0)
    train.output                its output with batch statistics
    train.NAME                  running_mean and running_var after that run
"""

from pathlib import Path

import numpy as np
import torch
import transformers

from tests.references.common import Arrays, arguments, write

LENGTHS = (8, 16, 17, 100, 203)
TRAIN_CLIP = 4
CONFIG = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_kernel_size": 9,
    "subsampling_conv_channels": 16,
    "num_mel_bins": 16,
}
NO_DROPOUT = dict.fromkeys(("dropout", "layerdrop", "activation_dropout", "attention_dropout"), 0.0)


def randomize(model: torch.nn.Module) -> None:
    """Gives every weight, bias and statistic a value at which an error in its use would show."""
    with torch.no_grad():
        for name, x in model.state_dict().items():
            if name.endswith("num_batches_tracked"):
                continue
            if name.endswith("running_var"):
                x.uniform_(0.5, 2.0)
            elif x.ndim == 1:
                x.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.2)
            elif "bias_" in name:
                x.normal_(0.0, 0.5)
            else:
                x.normal_(0.0, (x.numel() / len(x)) ** -0.5)


def reference(seed: int, folder: Path) -> Arrays:
    """All arrays of the archive. folder: where the checkpoint is saved."""
    torch.manual_seed(seed)
    config = transformers.ParakeetEncoderConfig(**CONFIG, **NO_DROPOUT, attn_implementation="eager")
    model = transformers.ParakeetEncoder(config).eval()
    randomize(model)
    model.save_pretrained(folder)
    out = {"config": np.asarray((folder / "config.json").read_text())}
    out |= {f"weight.{k}": v.numpy().copy() for k, v in model.state_dict().items() if v.is_floating_point()}

    loss = torch.zeros(())
    for c, length in enumerate(LENGTHS):
        mels = torch.randn(length, CONFIG["num_mel_bins"])
        output = model(mels[None]).last_hidden_state[0]
        cotangent = torch.randn(output.shape)
        loss = loss + (output * cotangent).sum()
        out |= {f"mels.{c}": mels.numpy(), f"output.{c}": output.detach().numpy()}
        out[f"cotangent.{c}"] = cotangent.numpy()
    loss.backward()
    out |= {f"grad.{k}": p.grad.numpy() for k, p in model.named_parameters() if p.grad is not None}

    with torch.no_grad():
        output = model.train()(torch.from_numpy(out[f"mels.{TRAIN_CLIP}"])[None]).last_hidden_state[0]
    out |= {"train.clip": np.asarray(TRAIN_CLIP), "train.output": output.numpy()}
    return out | {f"train.{k}": v.numpy() for k, v in model.state_dict().items() if "running_" in k}


def main() -> None:
    write("fastconformer", arguments(__doc__), reference)


if __name__ == "__main__":
    main()
