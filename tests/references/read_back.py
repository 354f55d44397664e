"""Computes an exported checkpoint's logits with the transformers library and compares them.

    python -m tests.references.read_back EXPORTED REFERENCE.npz    # needs torch and transformers

Prints JSON: the largest relative error of a document's logits, |x - x'| / |x'|, against REFERENCE's (written
by the other modules here), and the tensors that the library found missing or unexpected. Tensors of a vision
tower are not counted.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def main() -> None:
    folder, reference = Path(sys.argv[1]), np.load(sys.argv[2])
    fields = json.loads((folder / "config.json").read_text())
    kind = getattr(transformers, fields["architectures"][0])
    eager = {"attn_implementation": "eager"}
    if fields.keys() & {"num_local_experts", "num_experts"}:
        eager["experts_implementation"] = "eager"  # others want sizes that 16 bytes divide
    model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **eager)
    model.eval()
    worst = 0.0
    with torch.no_grad():
        for name in sorted(k for k in reference.files if k.startswith(("tokens.", "output."))):
            what, _, number = name.partition(".")
            mels = reference[f"mels.{number}"] if f"mels.{number}" in reference.files else None
            if what == "output":
                found, want = model(torch.from_numpy(mels)[None]).last_hidden_state[0], reference[name]
            else:
                audio = {}
                if mels is not None:
                    mask = torch.ones(1, len(mels), dtype=torch.bool)
                    audio = {"input_features": torch.from_numpy(mels)[None], "input_features_mask": mask}
                tokens = torch.from_numpy(reference[name])[None]
                found = model(input_ids=tokens, use_cache=False, **audio).logits[0]
                want = reference[f"logits.{number}"]
            worst = max(worst, float(np.linalg.norm(found.numpy() - want) / np.linalg.norm(want)))
    vision = ("vision_", "multi_modal_projector", "mlp1")
    lost = {
        k: sorted(n for n in info[k] if not n.startswith(vision)) for k in ("missing_keys", "unexpected_keys")
    }
    print(json.dumps({"error": worst, **lost, "mismatched": len(info["mismatched_keys"])}))


if __name__ == "__main__":
    main()
