"""JSONL files: one JSON object a line. A kill may have cut the last line short."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jaxthd.files.atomic import write_atomically


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The file's entries; none if there is no file. Lines that a kill cut short are skipped."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries


def keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Rewrites the file, if there is one, without truncated and unwanted lines. Returns the kept entries."""
    kept = [entry for entry in read_lines(path) if wanted(entry)]
    if path.exists():
        write_lines(path, kept)
    return kept


def write_lines(path: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Replaces the file in one go, once the last entry is there. Raises OSError, which names the file."""
    with naming(path):
        write_atomically(path, map(_line, entries))


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """append_lines of one."""
    append_lines(path, [entry])


def append_lines(path: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Appends lines and hands them to the operating system together, so that a kill does not lose them. None
    for no entries, not even a file.

    Numbers that are not finite become null. Raises OSError, which names the file.
    """
    text = "".join(map(_line, entries))
    if text:
        with naming(path), path.open("a") as file:
            file.write(text)


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(finite(entry), allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """Replaces numbers that are not finite, which JSON lacks, with None; also inside lists and dicts."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the file's name to an OSError raised inside: one from writing, as on a full disk, has none."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
