"""Writes top_k.npz: which of many numbers, some of them equal, torch.topk chooses on a CPU.

    python -m tests.references.top_k

Needs torch, for Linux.
"""

from pathlib import Path

import numpy as np
import torch

FILE = Path(__file__).with_name("top_k.npz")
ROWS = 24
SIZES = (
    (12, 64, 5),
    (189, 300, 33),
    (66, 200, 1),
    (200, 330, 2),
    (200, 330, 3),
    (20, 190, 16),
    (190, 900, 188),
)
"""(fewest numbers, most, k)."""
EMPTY, MOST = -128, 127
"""Stand for -inf and inf."""


def row(rng: np.random.Generator, count: int) -> np.ndarray:
    """Numbers as a speaker cache has them: few values, some of them twice in turn, many -inf, some inf."""
    values = rng.integers(0, rng.choice([2, 5, 30, 120]), count)
    if rng.random() < 0.5:
        values = np.repeat(values, 2)[:count]
    if rng.random() < 0.3:
        values = np.sort(values)
    values[rng.random(count) < rng.choice([0.0, 0.5, 0.8])] = EMPTY
    values[rng.integers(0, count, rng.choice([0, 4]))] = MOST
    return values.astype(np.int8)


def floats(values: np.ndarray) -> np.ndarray:
    """The numbers of a row."""
    found = values.astype(np.float32)
    return np.where(values == EMPTY, -np.inf, np.where(values == MOST, np.inf, found)).astype(np.float32)


def main() -> None:
    rng, out = np.random.default_rng(11), {}
    for fewest, most, k in SIZES:
        x, counts, chosen = np.zeros((ROWS, most), np.int8), [], np.zeros((ROWS, most), bool)
        for r in range(ROWS):
            count = int(rng.integers(max(fewest, k + 1), most + 1))
            x[r, :count] = row(rng, count)
            x[r, count:] = MOST
            chosen[r, torch.topk(torch.from_numpy(floats(x[r, :count])), k, sorted=False)[1].numpy()] = True
            counts.append(count)
        name = f"{most}.{k}"
        out |= {
            f"x.{name}": x,
            f"count.{name}": np.asarray(counts),
            f"chosen.{name}": np.packbits(chosen, axis=1),
        }
    np.savez_compressed(FILE, **out)


if __name__ == "__main__":
    main()
