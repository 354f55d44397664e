"""Shared parts of the modules that make references with torch and transformers; jaxthd is not needed."""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

FOLDER = Path(__file__).parent
MARGIN = 1e-3
"""The least margin of a reference's choices of experts: seeds are tried until it is reached."""
Arrays = dict[str, np.ndarray]


def arguments(doc: str | None) -> argparse.Namespace:
    """Parses the options. out: the folder for references. checkpoints: where save_pretrained's folders are
    kept, or None. seed: the first seed to try. only: names of the references to make; none: all.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--checkpoints", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[])
    return parser.parse_args()


def write(name: str, options: argparse.Namespace, make: Callable[[int, Path], Arrays]) -> None:
    """Writes OUT/NAME.npz of the first seed whose margin suffices.

    make: takes a seed and the folder for the checkpoint; returns all arrays of the archive.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder, seed = (options.checkpoints or Path(scratch)) / name, options.seed
        while (out := make(seed, folder)).get("margin", np.asarray(np.inf)) < MARGIN:
            seed += 1
    path = options.out / f"{name}.npz"
    np.savez_compressed(path, **out)  # type: ignore[arg-type]
    print(f"{path.name}: seed {seed}, margin {out.get('margin', np.inf):.1e}, {path.stat().st_size} bytes")


def watched(model: torch.nn.Module, margin: Callable[[Any, torch.Tensor], torch.Tensor]) -> list[float]:
    """A list to which every run of a gate appends the smallest margin of its choices.

    A gate is a module with `top_k`, whose first result are its logits. margin: of a gate and its logits.
    """
    margins: list[float] = []

    def hook(gate: Any, _args: Any, result: Any) -> None:
        logits = result[0] if isinstance(result, tuple) else result
        margins.append(float(margin(gate, logits.detach()).min()))

    for module in model.modules():
        if hasattr(module, "top_k") and hasattr(module, "weight"):
            module.register_forward_hook(hook)
    return margins


def behind(scores: torch.Tensor, chosen: int) -> torch.Tensor:
    """The score of the last of so many that are chosen, less that of the first that is not, [tokens]."""
    ranked = scores.sort(-1, descending=True).values
    return ranked[:, chosen - 1] - ranked[:, chosen]


def biased_sigmoid(gate: Any, logits: torch.Tensor) -> torch.Tensor:
    """The margin of a gate that ranks sigmoids with a correction bias."""
    return behind(logits.sigmoid() + gate.e_score_correction_bias, gate.top_k)


def softmax(gate: Any, logits: torch.Tensor) -> torch.Tensor:
    """The margin of a gate that ranks a softmax."""
    return behind(logits.softmax(-1), gate.top_k)


def summed_loss(logits: torch.Tensor, tokens: torch.Tensor, first: int = 1) -> torch.Tensor:
    """The sum of -log p(token | those before) over the tokens from `first` on."""
    return torch.nn.functional.cross_entropy(logits[first - 1 : -1], tokens[first:], reduction="sum")


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Each parameter's gradient; zeros where it has none."""
    return {k: torch.zeros_like(p) if p.grad is None else p.grad for k, p in model.named_parameters()}


def speech_documents(
    documents: Sequence[tuple[int, int, int]], audio_token: int, num_mels: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
    """Draws documents of so many prompt tokens, mel frames and text tokens, as they are read: token ids with
    one audio token for each encoder frame; mels [frames, num_mels]; the number of the text's first token.
    """
    for prompt, frames, text in documents:
        embeddings = -(-frames // 8)
        words = torch.randint(audio_token, (prompt + text,))
        audio = torch.full((embeddings,), audio_token)
        tokens = torch.cat([words[:prompt], audio, words[prompt:]])
        yield tokens, torch.randn(frames, num_mels), prompt + embeddings
