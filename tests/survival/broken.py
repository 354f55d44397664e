"""Copies of jaxthd that are broken on purpose: a soak that passes them is worth nothing."""

import shutil
from pathlib import Path

from tests.survival.runs import ROOT

BROKEN = {
    "resume": (
        "training/documents.py",
        "return whole_position(self._current.position)",
        "return whole_position(self._upcoming.position)",
        "kill -9",
    ),
    "checksums": (
        "checkpoints/stored.py",
        "if sums.get(name, array.checksum) != array.checksum]",
        "if False]",
        "flipped array",
    ),
}
"""Name -> (file, text, what stands in its place, the fault that shows it): the data go on a step too far;
damage is not noticed."""


def broken_copy(how: str, folder: Path) -> Path:
    """Writes a copy of the package into the folder, broken in one place; returns the folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "jaxthd", folder / "jaxthd", ignore=shutil.ignore_patterns("__pycache__"))
    name, text, instead, _ = BROKEN[how]
    file = folder / "jaxthd" / name
    content = file.read_text()
    if content.count(text) != 1:
        raise ValueError(f"{name} has {text!r} {content.count(text)} times; expected it once")
    file.write_text(content.replace(text, instead))
    return folder
