"""Damage to checkpoints, and what restores them."""

import contextlib
import io
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.steps.state import TrainState

NODE = bytes.fromhex("0cdb20de")
"""The first bytes of an index of arrays in the files of a checkpoint (a node of OCDBT's B-tree)."""


class Row(NamedTuple):
    """A check: what was done, what came of it, and whether that may be."""

    check: str
    found: str
    holds: bool


def damage(checkpoint: Path, rng: np.random.Generator) -> str:
    """Damages one file of a checkpoint at random; returns what it did.

    Half of the time every file is equally likely, half of the time every byte is.
    """
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.stat().st_size)
    sizes = np.array([p.stat().st_size for p in files])
    weights = sizes / sizes.sum() if rng.integers(2) else None
    file = files[rng.choice(len(files), p=weights)]
    name, content = file.relative_to(checkpoint), bytearray(file.read_bytes())
    start, kind = int(rng.integers(len(content))), rng.choice(["flip", "flip", "truncate", "delete", "zero"])
    if kind == "delete":
        file.unlink()
        return f"{name} deleted"
    if kind == "flip":
        bit = int(rng.integers(8))
        content[start] ^= 1 << bit
        what = f"bit {bit} of byte {start} flipped"
    elif kind == "truncate":
        del content[start:]
        what = f"cut off at byte {start}"
    else:
        end = min(len(content), start + int(rng.integers(1, 4096)))
        content[start:end] = bytes(end - start)
        what = f"bytes {start} to {end} zeroed"
    file.write_bytes(content)
    return f"{name}: {what}"


def flip_array(checkpoint: Path, rng: np.random.Generator) -> str:
    """Flips a bit of an array, which nothing but jaxthd's checksums notices; returns what it did."""
    files = sorted((checkpoint / "state").rglob("d/*"))
    # Arrays come first in a file; behind them lie indexes, most of them replaced by later ones.
    sizes = np.array([len(p.read_bytes().partition(NODE)[0]) for p in files])
    number = rng.choice(len(files), p=sizes / sizes.sum())
    file, at, bit = files[number], int(rng.integers(sizes[number])), int(rng.integers(8))
    content = bytearray(file.read_bytes())
    content[at] ^= 1 << bit
    file.write_bytes(content)
    return f"{file.relative_to(checkpoint)}: bit {bit} of byte {at} of arrays flipped"


def bits(state: TrainState) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def damaged(
    folder: Path, abstract: TrainState, sharding: Sharding, times: int, rng: np.random.Generator
) -> list[Row]:
    """Damages the newest of the checkpoints in `folder`, in a new copy each time, and restores."""
    copy = folder.with_name("damaged")
    steps = sorted((int(p.name) for p in folder.iterdir() if p.name.isdecimal()), reverse=True)[:2]
    want = {}
    for step in steps:
        shutil.copytree(folder, copy)
        if step == steps[1]:
            shutil.rmtree(copy / str(steps[0]))
        want[step] = restore(copy, abstract, sharding)[:2]
        shutil.rmtree(copy)
    rows = []
    for number in range(times):
        shutil.copytree(folder, copy)
        what = damage(copy / str(steps[0]), rng)
        try:
            *got, said = restore(copy, abstract, sharding)
            fallen_back = f"the checkpoint of step {steps[0]} is damaged" in said
            outcome = "the one before restored" if fallen_back else "harmless"
            holds = (
                got == list(want[steps[fallen_back]])
                and fallen_back == (copy / f"{steps[0]}.damaged").exists()
            )
        except Exception as error:
            outcome, holds = f"{type(error).__name__}: {error}", False
        rows.append(Row(f"damage {number + 1}: {what}", outcome, holds))
        shutil.rmtree(copy)
    return rows


def restore(folder: Path, abstract: TrainState, sharding: Sharding) -> tuple[list[bytes], Any, str]:
    """(the bits of the restored state, its data position, what was printed on stderr)."""
    with contextlib.redirect_stderr(io.StringIO()) as said, Checkpoints(folder, keep=3) as checkpoints:
        restored = checkpoints.restore_latest(abstract, sharding)
    if restored is None:
        raise ValueError("nothing was restored")
    return bits(restored[0]), restored[1], said.getvalue()
