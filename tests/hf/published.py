"""The references in tests/references (scripts/references makes them) as checkpoints on disk."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from scripts.comparison.published import Published, group

REFERENCES = Path(__file__).parents[1] / "references"
LLMS = ("nemotron_h", "nemotron_h_latent")
QWEN = ("qwen3", "qwen3_moe", "qwen3_next")
DEEPSEEK = ("deepseek_v3", "moonlight")
FAMILIES = (*LLMS, *QWEN, *DEEPSEEK, "gpt_oss", "nemotron_omni", "canary_qwen")


def load_reference(name: str) -> dict[str, np.ndarray]:
    return dict(np.load(REFERENCES / f"{name}.npz"))


def write_published(name: str, folder: Path) -> Path:
    """The reference's checkpoint as a folder."""
    arrays = load_reference(name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(str(arrays["config"]))
    save_file(group(arrays, "weight"), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def published(name: str, folder: Path) -> Published:
    """The reference, written to `folder` and imported from there."""
    return Published.of(load_reference(name), write_published(name, folder))
