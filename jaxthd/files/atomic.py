"""Files that are replaced in one go."""

import os
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Replaces the file atomically: if process or machine stop, it holds all of `lines` or its old text.

    lines: text, or an iterable of texts (a generator may take its time; the file is replaced at the end).
    Several processes may write the same file at once: the last one's text stays. Raises OSError.
    """
    scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("w") as file:
            file.writelines([lines] if isinstance(lines, str) else lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
