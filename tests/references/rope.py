"""Writes tests/references/rope.json: frequencies of rotary embeddings, as transformers computes them.

    python -m tests.references.rope

Needs torch and transformers. A list of objects:
    fields          of config.json, as published checkpoints have them; some in the older form
    features        the features of a head that are rotated
    frequencies     the angle of each pair from one position to the next, float32
    factor          the factor on rotated queries and keys
"""

import json
from typing import Any

import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.references.common import arguments

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
GPT_OSS = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
DEEPSEEK = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}
CASES: list[tuple[int, dict[str, Any]]] = [
    (64, {"rope_theta": 1e6}),
    (64, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    (40, {"rope_theta": 1e7, "partial_rotary_factor": 0.25}),
    (40, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5}}),
    (64, {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 3.0}}),
    (128, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    (64, {"rope_theta": 15e4, "rope_scaling": GPT_OSS, "max_position_embeddings": 131072}),
    (64, {"rope_parameters": GPT_OSS | {"rope_theta": 15e4, "attention_factor": 1.25}}),
    (64, {"rope_theta": 1e4, "rope_scaling": DEEPSEEK, "max_position_embeddings": 163840}),
    (
        64,
        {
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            "max_position_embeddings": 32768,
            "partial_rotary_factor": 0.75,
        },
    ),
]


def of_case(head_dim: int, fields: dict[str, Any]) -> dict[str, Any]:
    given = json.loads(json.dumps(fields))
    config = transformers.Qwen3Config(hidden_size=4 * head_dim, head_dim=head_dim, **given)
    parameters = config.rope_parameters
    features = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    if parameters["rope_type"] == "default":
        step = torch.arange(0, features, 2, dtype=torch.float) / features
        found, factor = 1.0 / (parameters["rope_theta"] ** step), 1.0
    else:
        found, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config)
    return {
        "fields": {"head_dim": head_dim, **fields},
        "features": features,
        "frequencies": [float(f"{x:.9g}") for x in found.tolist()],
        "factor": factor,
    }


def main() -> None:
    options = arguments(__doc__)
    path = options.out / "rope.json"
    path.write_text(json.dumps([of_case(*case) for case in CASES]) + "\n")
    print(f"{path.name}: {len(CASES)} settings, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
