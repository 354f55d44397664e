"""Files of one JSON object a line that a kill may have cut short."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any


def keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Rewrites the file, if there is one, to its whole and wanted lines, and returns those.

    A line that is no JSON object was cut short. The file is replaced in one go.
    """
    kept = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if wanted(entry):
            kept.append(entry)
    scratch = path.with_suffix(".tmp")
    scratch.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
    os.replace(scratch, path)
    return kept


def append_line(path: Path, entry: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")
