"""JSON lines of one file or several read as one, and the fields of their objects."""

import gzip
import json
import os
import reprlib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from re import fullmatch, split, sub
from typing import Any, NamedTuple

from jaxthd.data.sources.containers import damaged, empty, refuse_cut_line, refuse_other_forms
from jaxthd.errors import UserError
from jaxthd.files.paths import expand_home
from jaxthd.files.remote_path import as_path
from jaxthd.files.stores import is_url

Entry = dict[str, Any]
MOST_SHARDS = 1_000_000
_PLAIN = r"(?:(?!_OP_|_CL_)[^{}])*"
"""Text without braces, in either spelling."""
DEEPEST = 100
"""Lists and objects in one another, at most, in a line."""


def expand_braces(text: str) -> list[str]:
    """Expands braces as a shell does: "{0..3}" ("{00..15}" keeps its zeros) and "{a,b}".

    The last braces change fastest. _OP_ and _CL_ around such are read as braces too, as NeMo writes them on a
    command line. Other braces are plain text. A path that exists is taken as it is, and so is a folder at its
    beginning; ~ is the home folder.
    Raises UserError for a descending range, or one of more than a million numbers.
    """
    text = expand_home(text)
    if not is_url(text) and os.path.exists(text):
        return [text]
    inside = range(len(text)) if "{" in text or "_OP_" in text else ()
    folder = max((n + 1 for n in inside if text[n] == "/" and os.path.isdir(text[: n + 1])), default=0)
    written = sub(rf"_OP_(\d+\.\.\d+|{_PLAIN},{_PLAIN})_CL_", r"{\1}", text[folder:])
    pieces = [text[:folder], *split(r"(\{(?:\d+\.\.\d+|[^{}]*,[^{}]*)\})", written)]
    choices: list[list[str]] = []
    total = 1
    for place, piece in enumerate(pieces, -1):
        ends = fullmatch(r"\{(\d+)\.\.(\d+)\}", piece) if place > 0 else None
        if ends:
            first, last = ends.groups()
            count = int(last) - int(first) + 1
            if not 0 < count * total <= MOST_SHARDS:
                raise UserError(
                    f"{text}: {piece} stands for {max(count, 0):,} numbers; expected {{FIRST..LAST}}, "
                    f"up to {MOST_SHARDS:,} in all"
                )
            width = len(first) if first.startswith("0") else 0
            choices.append([f"{n:0{width}}" for n in range(int(first), int(last) + 1)])
        else:
            choices.append(piece[1:-1].split(",") if place > 0 and place % 2 else [piece])
        total *= len(choices[-1])
    return ["".join(chosen) for chosen in product(*choices)]


def all_files(text: str, setting: str) -> list[Path]:
    """Returns the files that a text names, with braces. Raises UserError where one is missing.

    setting: what names them, for the message.
    """
    files = [as_path(name) for name in expand_braces(text)]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise UserError(
            f"{len(missing)} of the {len(files)} files of {text} ({setting}) are not there, {missing[0]} "
            f"first; expected all of them: correct {setting}"
        )
    return files


READ = frozenset(
    "audio_filepath text offset duration channels lang id shard_id audio audios sound sounds conversations "  # noqa: SIM905
    "messages context prompt system_prompt chosen rejected completion label "
    "speaker_segments".split()
)
"""Fields of lines that become turns and recordings, or that say where these lie. Examples keep the others."""


class Line(NamedTuple):
    """A line of a data set. number: among all lines, from 1. file: the number of its file. where: its
    position, for messages; "" where there is one file."""

    number: int
    file: int
    where: str
    text: bytes

    def entry(self) -> Entry:
        """Returns the line's object. Raises ValueError for what is no JSON object."""
        return parse(self.text)


def numbered_lines(files: Sequence[Path]) -> Iterator[Line]:
    """Yields the lines of all files, without blank ones.

    Raises UserError as lines_of does, for a file without a line, and for one that ends within a line.
    """
    before = 0
    for file, path in enumerate(files):
        line_number, is_empty = 0, True
        for line_number, line in enumerate(lines_of(path), start=1):
            if line.strip():
                is_empty = False
                if not line.endswith(b"\n"):
                    refuse_cut_line(path, line_number, line)
                where = f"{path.name} line {line_number}: " if len(files) > 1 else ""
                yield Line(before + line_number, file, where, line)
        if is_empty:
            raise empty(path, "lines")
        before += line_number


def entries_of(path: str) -> dict[int, tuple[Entry, Path]]:
    """The objects of a manifest by line number, as numbered_lines counts, each with its file's folder.

    path: with braces, as in expand_braces. Lines that are no objects are skipped.
    """
    files = [as_path(name) for name in expand_braces(path)]
    found = {}
    for number, file, _, line in numbered_lines(files):
        with suppress(ValueError):
            found[number] = (parse(line), files[file].parent)
    return found


def lines_of(path: Path) -> Iterator[bytes]:
    """Yields lines as bytes, so that a badly encoded line costs only that line. A .gz file is decompressed.

    Raises UserError for a file that has no lines (see refuse_other_forms), and where decompression fails.
    """
    refuse_other_forms(path, "lines")
    line_number = 0
    with path.open("rb") as stored, gzip.open(stored) if path.suffix == ".gz" else stored as lines:
        try:
            for line in lines:
                line_number += 1
                yield line
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            cause: object = error
            if line_number and "Not a gzipped file" in str(error):
                cause = f"bytes follow the end of the compressed data ({error})"
            raise damaged(path, f"after line {line_number}", cause) from error


def parse(line: bytes) -> Entry:
    """A line's JSON object. Raises ValueError."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    return json_object(entry, "the line")


def fields_beside(entry: Entry) -> Entry:
    """Returns the fields that are not READ.

    Raises ValueError where they hold more than DEEPEST lists and objects in one another.
    """
    fields = {name: value for name, value in entry.items() if name not in READ}
    depth, level = 0, list[Any]([fields])
    while level:
        depth += 1
        lists = (v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list))
        level = [inner for values in lists for inner in values if isinstance(inner, dict | list)]
    if depth > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} deep; workers could not be sent the line")
    return fields


def refuse_marked(entry: Entry) -> None:
    """Raises ValueError for an entry marked as one not to be used, as NeMo's filters mark them."""
    custom = entry.get("custom")
    if entry.get("_skipme") or (isinstance(custom, dict) and custom.get("_skipme")):
        raise ValueError("_skipme is set")


def has_text(entry: Entry) -> bool:
    """Whether an utterance has a transcript. A text that is null or blank is none."""
    return entry.get("text") is not None and bool(string(entry, "text").strip())


def json_object(value: Any, what: str) -> Entry:
    """Returns a value that is an object. Raises ValueError for another. what: its name in messages."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is a JSON {type(value).__name__}; expected an object")
    return value


def json_list(value: Any, what: str) -> list[Any]:
    """Returns a value that is a list with items. Raises ValueError. what: its name in messages."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{what} is {reprlib.repr(value)}; expected a list that is not empty")
    return value


def string(entry: Entry, name: str) -> str:
    """Returns a field that is a text. Raises ValueError for one that is missing or of another type."""
    if name not in entry:
        raise ValueError(f"{name} is missing; found {reprlib.repr(sorted(entry))}")
    value = entry[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {reprlib.repr(value)}; expected a string")
    value.encode()  # half a surrogate pair is valid JSON but no text; raises a ValueError
    return value


def seconds(entry: Entry, name: str) -> float | None:
    """Reads a finite number of seconds >= 0; None if the field is absent or null."""
    value = entry.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {reprlib.repr(value)}; expected a number of seconds")
    if not 0 <= value < 1e9:  # also false for NaN; an integer may be too large for a float
        raise ValueError(f"{name} is {reprlib.repr(value)}; expected a number of seconds from 0 to 1e9")
    return float(value)
