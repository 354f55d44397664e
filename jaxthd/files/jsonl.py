"""Files of one JSON object a line that a kill may have cut short."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The file's whole lines, none without a file. A line that is no JSON object was cut short."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries


def keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Rewrites the file, if there is one, to its whole and wanted lines, and returns those."""
    kept = [entry for entry in read_lines(path) if wanted(entry)]
    if path.exists():
        write_lines(path, kept)
    return kept


def write_lines(path: Path, entries: Iterable[dict[str, Any]]) -> None:
    """Replaces the file in one go, when the last entry is there. Raises OSError, naming the file."""
    scratch = path.with_suffix(".tmp")
    with naming(path):
        with scratch.open("w") as file:
            file.writelines(map(_line, entries))
        os.replace(scratch, path)


def append_line(path: Path, entry: dict[str, Any]) -> None:
    """Appends one line, on its way to the disk when this returns.

    A number that is not finite becomes null. Raises OSError, naming the file.
    """
    with naming(path), path.open("a") as file:
        file.write(_line(entry))


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(finite(entry), allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """A number that is not finite becomes None: JSON has no word for it. In lists and dicts too."""
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError inside says which file it was about; one from writing (a full disk) does not by itself."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
