"""The folder that a command writes its results into; of several processes, only process 0 writes."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from jaxthd.files.atomic import write_atomically
from jaxthd.files.jsonl import append_line, append_lines, keep_lines, naming, write_lines
from jaxthd.parallel.processes import is_first

Line = dict[str, Any]


class OutputFolder:
    """A folder of results, made where it is missing.

    All processes call its methods; those of process 0 write, those of the others do nothing.
    Raises OSError, naming the file, where one cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._writes = path, is_first()
        if self._writes:
            path.mkdir(parents=True, exist_ok=True)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def write_text(self, name: str, text: str) -> None:
        """Replaces a file in one go."""
        if self._writes:
            with naming(self / name):
                write_atomically(self / name, text)

    def write_lines(self, name: str, lines: Iterable[Line]) -> None:
        """Replaces a JSONL file in one go. Every process goes through `lines`: making them may need all."""
        if self._writes:
            write_lines(self / name, lines)
        else:
            for _ in lines:
                pass

    def append_line(self, name: str, line: Line) -> None:
        """Appends one line to a JSONL file, and hands it to the operating system."""
        if self._writes:
            append_line(self / name, line)

    def append_lines(self, name: str, lines: Iterable[Line]) -> None:
        """Appends lines to a JSONL file together, so that a kill does not lose them; none for no lines."""
        if self._writes:
            append_lines(self / name, lines)

    def keep_lines(self, name: str, wanted: Callable[[Line], bool]) -> None:
        """Removes the unwanted lines of a JSONL file, if there is one."""
        if self._writes:
            keep_lines(self / name, wanted)
