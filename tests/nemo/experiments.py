"""NeMo experiments that tests write."""

import copy
from pathlib import Path
from typing import Any

import yaml

BASE: dict[str, Any] = {
    "model": {
        "pretrained_llm": "llm",
        "pretrained_asr": "asr.nemo",
        "audio_locator_tag": "<audio>",
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4},
        "perception": {
            "modality_adapter": {
                "_target_": "nemo.collections.speechlm2.modules.perception.IdentityConnector",
                "d_model": 32,
            }
        },
    },
    "trainer": {"devices": 1, "max_steps": 100, "limit_train_batches": 20, "gradient_clip_val": 1.0},
    "data": {
        "train_ds": {
            "input_cfg": [{"type": "lhotse_as_conversation", "manifest_filepath": "a.json"}],
            "seed": 1,
        },
        "validation_ds": {"datasets": {"dev": {"manifest_filepath": "b.json"}}},
    },
}
"""An experiment with what NeMo needs, and no more."""


def experiment(*changes: tuple[str, Any]) -> dict[str, Any]:
    """BASE with the values at dotted paths; "0" is the first entry of a list."""
    values = copy.deepcopy(BASE)
    for path, value in changes:
        node: Any = values
        *above, last = path.split(".")
        for name in above:
            node = node[int(name)] if isinstance(node, list) else node.setdefault(name, {})
        node[int(last) if isinstance(node, list) else last] = value
    return values


def write_experiment(folder: Path, *changes: tuple[str, Any]) -> Path:
    """Writes BASE with changes as YAML."""
    path = folder / "salm.yaml"
    path.write_text(yaml.safe_dump(experiment(*changes)))
    return path
