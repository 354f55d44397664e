"""Hugging Face data sets on disk: the rows of parquet and arrow files, read without datasets and PyTorch.

A row is like a line of a manifest, with its recording inside: columns are the line's fields.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.config import DataConfig
from jaxthd.data.audio.cells import is_list, is_struct
from jaxthd.data.example import Cell, Clip, Turn
from jaxthd.data.sources.columns import OF_ITEMS, Columns
from jaxthd.data.sources.containers import damaged, empty, refuse_other_forms
from jaxthd.data.sources.huggingface_files import (
    DICT,
    INFO,
    INFOS,
    STATE,
    SUMMARY,
    counts_of_folder,
    files_of_folder,
    is_table_folder,
    require_counts,
)
from jaxthd.data.sources.lines import Entry, all_files
from jaxthd.data.sources.manifest import name_of_entry, turns_of_entry
from jaxthd.data.sources.preferences import PAIR, history_of, is_preference
from jaxthd.data.sources.recordings import OTHER_MODALITIES, holds_recordings, in_folder
from jaxthd.data.sources.source import Files, FileSource
from jaxthd.data.tables import SUFFIXES, Table, errors_of_tables, import_pyarrow, open_table
from jaxthd.errors import UserError
from jaxthd.files.remote_path import as_path

NAMES = {"audio": ("audio", "audio_filepath"), "text": ("text", "sentence", "transcription", "transcript")}
"""The columns that may hold a field, the first that is there. Other fields have columns of their names."""
ANSWERS = (*PAIR, "completion")
MOST_ROWS = 1_000_000
"""The most rows of a group that cannot be read which are listed each by itself; more end the run."""
_STRINGS = ("string", "large_string")
_READABLE = re.compile(r"(large_)?string|bool|u?int\d+|float|double|halffloat|null|dictionary<.*string.*>")


class HuggingFaceSource(FileSource):
    """Parquet or arrow files: one, shards written with braces, or a folder as datasets writes it.

    A row has the fields of a manifest's line: an utterance, a conversation, or preferences. Its recording is
    in the column `audio` (see open_cell). data.columns names other columns. Only columns of texts, numbers
    and truth values are read, and lists and structs of texts. A row that cannot be read is skipped; so are
    all rows of a parquet file's group that cannot be. Other damage ends the run, and so does a number of rows
    that is not the one that the folder's records count. Recordings are not read here.
    """

    item = "row"
    expected = "columns audio and text, or others that data.columns names"
    remedy = "correct data.columns, or the files"
    alone = "is of parquet or arrow files; expected no tar files, because the recordings are in the tables"

    @staticmethod
    def recognises(path: str) -> bool:
        """Whether a path is a parquet or arrow file, or a folder of such."""
        if path.endswith(SUFFIXES):
            return not os.path.isdir(path) or is_table_folder(Path(path))
        return as_path(path).is_dir() and is_table_folder(as_path(path))

    def turns_of(self, entry: Entry, item: "_Row", data: DataConfig) -> tuple[Turn, ...]:
        """Returns the turns of a row. Raises ValueError."""
        more: dict[str, Any] = {"prompts": self.setting.prompts, "unread": self.unread_recordings}
        return turns_of_entry(entry, item.locate, data.prompt, data.audio_placeholder, **more)

    def items(self, named: Files, data: DataConfig) -> Iterator["_Row"]:
        """Yields the rows of all files, with the columns that data.columns names."""
        return self._rows(self.columns, self.unread_recordings)

    def renamed(self, entry: Entry) -> Entry:
        """Returns a row's fields with those of its messages renamed; its columns are read by their names."""
        return self.columns.in_messages(entry)

    def name_of(self, entry: Entry) -> str:
        """Returns the name of the row's recording, or a conversation's id. Raises ValueError."""
        return name_of_entry(entry, prompts=self.setting.prompts)

    def digest(self) -> str:
        """Returns a digest of the sizes of the files and of the fields of all rows."""
        files = self.named().items
        digest = hashlib.blake2b(repr([path.stat().st_size for path in files]).encode())
        for row in self._rows(Columns()):
            digest.update(json.dumps(row.fields, sort_keys=True).encode() + b"\n")
        return digest.hexdigest()[:16]

    def _rows(self, columns: Columns, unread: Counter[str] | None = None) -> Iterator["_Row"]:
        """unread: counts columns of recordings that are not read. None: such columns are no error."""
        import_pyarrow(self.path)
        setting, files = self.setting.field, self.named().items
        counts: Counter[Path] = Counter()
        for path in files:
            for row in _rows_of(path, columns, self.path, setting, unread):
                counts[path] += 1
                yield row._replace(number=counts.total())
            if not counts[path]:
                raise empty(path, "rows")
        if (folder := as_path(self.path)).is_dir():
            recorded = counts_of_folder(folder, files)
            self.read_notes[:] = require_counts(recorded, counts, setting)

    def named(self) -> Files:
        """Returns the tables and the folder's records. Raises UserError where a table is missing."""
        path, setting = as_path(self.path), self.setting.field
        if path.is_dir():
            files = files_of_folder(path, setting)
            beside = [path / name for name in (STATE, INFO, INFOS, DICT)] + [files[0].parent / SUMMARY]
            return Files(files, records=[each for each in beside if each.is_file()])
        return Files(all_files(self.path, setting))


class _Row(NamedTuple):
    """A row. fields: as a manifest's entry, or why they cannot be read. cell: its recording; None for text
    alone.

    number, where: as FileSource.items has them.
    """

    fields: Entry | str
    path: Path
    cell: Cell | None = None
    number: int = 0
    where: str = ""

    def entry(self) -> Entry:
        """Returns the row's fields. Raises ValueError for a row that cannot be read."""
        if isinstance(self.fields, str):
            raise ValueError(self.fields)
        return self.fields

    def locate(self, name: str) -> Clip:
        """Returns the row's recording: its cell, or the file `name` from the table's folder."""
        if self.cell is None:
            return in_folder(self.path.parent)(name)
        return Clip(self.path, member=self.cell)


def _rows_of(
    path: Path, names: Columns, title: str, setting: str, unread: Counter[str] | None
) -> Iterator[_Row]:
    """The rows of one file, in order.

    Raises UserError for a file that cannot be opened, and for a group of which the rows cannot be counted.
    """
    broken = errors_of_tables()
    refuse_other_forms(path, "a table")
    try:
        table = open_table(path)
        columns = _Columns.of(table, names)
        if unread is not None:
            columns.require_recordings(f"{title} ({setting})")
    except UserError:
        raise
    except broken as error:
        raise damaged(path, "", error) from error
    for group in range(table.groups):
        where, count = f"{path.name}, group {group}", table.count(group)
        try:
            rows = table.read(group, columns.wanted)
        except broken as error:
            if count is None or not 0 < count <= MOST_ROWS:
                raise damaged(path, f"group {group}", error) from error
            reason = f"{where}: {count} rows cannot be read ({_brief(error)})"
            yield from (_Row(reason, path) for _ in range(count))
            continue
        if count not in (None, rows.num_rows):
            cause = f"it holds {rows.num_rows} rows, and the footer says {count}"
            raise damaged(path, f"group {group}", cause)
        for at, values in enumerate(_values(rows, broken)):
            if unread is not None:
                unread.update(columns.unread)
            if isinstance(values, str):
                yield _Row(f"{where}, row {at} cannot be read ({values})", path)
            else:
                yield columns.row(path, group, at, values)


def _values(rows: Any, broken: tuple[type[Exception], ...]) -> Iterator[Entry | str]:
    """The values of each row by column, or why they cannot be read."""
    try:
        rows.validate(full=True)
        yield from rows.to_pylist()
        return
    except broken:
        pass  # one by one
    for at in range(rows.num_rows):
        try:
            row = rows.slice(at, 1)
            row.validate(full=True)
            yield row.to_pylist()[0]
        except broken as error:
            yield _brief(error)


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


class _Columns(NamedTuple):
    """The columns of a table that are read.

    fields: {field: column}, of those that are read here. audio: the column of recordings; "" for none.
    rate: that of their sampling rates; "" for none. name: what is read of `audio` for its path; "" for
    nothing. unread: columns with recordings that are not read. other: one of pictures or films beside
    conversations; "" for none. A column whose name occurs twice is not read.
    """

    fields: dict[str, str]
    audio: str
    rate: str
    name: str
    unread: tuple[str, ...]
    other: str

    @classmethod
    def of(cls, table: Table, names: Columns) -> "_Columns":
        """The columns of the fields that `names` does not name have names of NAMES, or the fields' own."""
        there = [name for name, times in Counter(table.schema.names).items() if times == 1]
        names.note(there)
        named = {f: c for f, c in names.named.items() if f in OF_ITEMS and c in there}
        named |= dict.fromkeys(names.dropped, "")
        found = {f: next((n for n in (f, *NAMES.get(f, ())) if n in there), "") for f in OF_ITEMS} | named
        audio, rate = found.pop("audio"), found.pop("sampling_rate")
        kinds = {name: table.schema.field(name).type for name in there}
        if audio and is_list(kinds[audio]) and str(kinds[audio].value_type) in _STRINGS:  # paths, not samples
            found["audio"], audio = audio, ""
        taken = {audio, rate, *named, *named.values(), *found.values()}
        fields = {field: column for field, column in found.items() if column}
        fields |= {name: name for name in there if name not in taken and name not in OF_ITEMS}
        name = audio if audio and str(kinds[audio]) in _STRINGS else ""
        if audio and is_struct(kinds[audio]) and "path" in {field.name for field in kinds[audio]}:
            name = f"{audio}.path"
        fields = {f: c for f, c in fields.items() if _is_readable(kinds[c])}
        rest = [n for n in there if n not in named and n not in {audio, rate, *fields.values()}]
        pictures = [n for n in rest if n.lower() in OTHER_MODALITIES]
        unread = tuple(n for n in rest if n not in pictures and holds_recordings(n, kinds[n]))
        is_chat = any(field in fields for field in ("conversations", "messages", "prompt"))
        return cls(fields, audio, rate, name, unread, pictures[0] if pictures and is_chat else "")

    def require_recordings(self, title: str) -> None:
        """Raises UserError where recordings or pictures would be lost: no column of recordings is read, or
        one of pictures is not.
        """
        if self.other or (self.unread and not self.audio and "audio" not in self.fields):
            name = self.other or self.unread[0]
            reads = "" if self.other else f"audio={name} to read it, if each row has one recording, or "
            raise UserError(
                f"{title} has the column {name!r}, which is not read: its rows would be trained as text "
                f"alone; expected recordings in audio: set data.columns {reads}{name}= to leave it out"
            )

    @property
    def wanted(self) -> list[str]:
        """Returns the columns to read, and the path within that of recordings."""
        return [*self.fields.values(), *([self.name] if self.name else [])]

    def row(self, path: Path, group: int, at: int, values: Entry) -> _Row:
        """Returns row `at` of a group as an entry, with the cell of its recording."""
        entry = {field: _without_nulls(values[column]) for field, column in self.fields.items()}
        entry = {field: value for field, value in entry.items() if value is not None}
        if not self.audio:
            return _Row(entry, path)
        held = values.get(self.audio)
        named = held.get("path") if isinstance(held, dict) else held
        name = Path(named).name if isinstance(named, str) and named else str(entry.get("id", "audio"))
        is_chat = any(field in entry for field in ("conversations", "messages")) or (
            is_preference(entry) and ("prompt" in entry or any(history_of(entry, x) for x in ANSWERS))
        )
        entry |= {"audio": [name]} if is_chat else {"audio_filepath": name}
        return _Row(entry, path, Cell(f"{name} (group {group}, row {at})", self.audio, group, at, self.rate))


def _is_readable(kind: Any) -> bool:
    if is_list(kind):
        return not re.fullmatch(r"(half)?float|double|u?int\d+", str(kind.value_type)) and _is_readable(
            kind.value_type
        )
    if is_struct(kind):
        return all(_is_readable(field.type) for field in kind)
    return bool(_READABLE.fullmatch(str(kind)))


def _without_nulls(value: Any) -> Any:
    """The value without null fields: every struct of a column has all fields, lines of a manifest do not."""
    if isinstance(value, dict):
        return {name: _without_nulls(x) for name, x in value.items() if x is not None}
    return [_without_nulls(x) for x in value] if isinstance(value, list) else value
