"""Writes forced_align.npz: the frames that torchaudio's CTC forced alignment gives to labels.

    python -m tests.references.forced_align

Needs torch and torchaudio.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torchaudio

FILE = Path(__file__).with_name("forced_align.npz")
CLASSES = 6
"""The first is the blank."""
LABELS = ((1,), (2, 2), (1, 2, 3), (4, 4, 4, 5), (3, 3, 1, 5, 5, 2), (1, 2, 1, 2, 1, 1, 2, 2, 5, 4, 3, 3))
EXTRA = (0, 1, 5, 40)
"""Frames besides the fewest that the labels need."""


def main() -> None:
    rng, out = np.random.default_rng(3), {}
    for labels in LABELS:
        for extra in EXTRA:
            repeats = sum(a == b for a, b in pairwise(labels))
            scores = torch.from_numpy(rng.normal(0, 2, (len(labels) + repeats + extra, CLASSES)))
            # Blanks are likely at random places, as a trained model's are between its labels.
            scores[:, 0] += torch.from_numpy(4.0 * (rng.random(len(scores)) < 0.5))
            log_probs = scores.float().log_softmax(-1)
            path, _ = torchaudio.functional.forced_align(log_probs[None], torch.tensor([labels]))
            name = f"{len(out) // 3}"
            out |= {
                f"labels.{name}": np.array(labels, np.int8),
                f"path.{name}": path[0].numpy().astype(np.int8),
            }
            out[f"log_probs.{name}"] = log_probs.numpy()
    np.savez_compressed(FILE, **out)


if __name__ == "__main__":
    main()
