"""Parquet and arrow files as tables whose row groups are read one at a time. It needs pyarrow, nothing else.

Arrow files are mapped into memory, so that a cell costs its own bytes. Of a parquet file the columns of a row
group are read and decompressed whole.
"""

import mmap
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxthd.data.parquet_footer import MAGIC, row_groups
from jaxthd.errors import UserError
from jaxthd.files.stores import is_url

SUFFIXES = (".parquet", ".arrow")
OPEN = 64
"""Tables that a process keeps open."""
_ARROW_FILE = b"ARROW1"
"""First bytes of an arrow file that is not a stream."""


def import_pyarrow(path: str | Path) -> ModuleType:
    """pyarrow. path: the table, for the message of the UserError where it is not installed."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"{path} is a parquet or arrow file, and pyarrow is not installed; expected it: pip install "
            "'jaxthd[parquet]'"
        ) from error
    return pyarrow


def errors_of_tables() -> tuple[type[Exception], ...]:
    """Exceptions that reading a damaged table raises."""
    import pyarrow

    return pyarrow.ArrowException, OSError, ArithmeticError, LookupError, TypeError, ValueError


class Table(ABC):
    """A table in a file. schema: of its columns, as pyarrow gives it. groups: number of its row groups.

    Its methods raise one of errors_of_tables() where the file is damaged.
    """

    schema: Any
    groups: int

    @abstractmethod
    def read(self, group: int, names: Sequence[str]) -> Any:
        """These columns of a group. "column.field" is a struct of that field alone."""

    def count(self, group: int) -> int | None:
        """Rows that the file says a group has, whether it can be read or not; None where it does not say."""
        return None


class ParquetTable(Table):
    def __init__(self, path: Path) -> None:
        from pyarrow.parquet import ParquetFile

        is_local = not is_url(path)
        source = path if is_local else path.open("rb")
        self._file = ParquetFile(source, memory_map=is_local, pre_buffer=False)
        self.schema, self.groups = self._file.schema_arrow, self._file.num_row_groups
        groups, counted = row_groups(path), self._file.metadata.num_rows
        self._rows = [group.rows for group in groups]
        if (sum(self._rows), len(groups)) != (counted, self.groups):
            raise ValueError(f"its footer counts {counted} rows, and {sum(self._rows)} in its groups")
        if groups and _is_joined(path, groups[-1].end):
            raise ValueError("it is several parquet files joined, of which the first alone can be read")

    def read(self, group: int, names: Sequence[str]) -> Any:
        return self._file.read_row_group(group, columns=list(names), use_threads=False)

    def count(self, group: int) -> int | None:
        return self._rows[group]


class ArrowTable(Table):
    """An arrow file, in the format of streams (as datasets writes it) or of files. A group is a batch.

    Raises ValueError for a stream without an end mark, of which batches may be missing, and for one that is
    followed by other bytes.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow
        from pyarrow import ipc

        source = pyarrow.PythonFile(path.open("rb")) if is_url(path) else pyarrow.memory_map(str(path))
        if source.read(len(_ARROW_FILE)) == _ARROW_FILE:
            file = ipc.open_file(source)
            self.schema, self.groups, self._batch = file.schema, file.num_record_batches, file.get_batch
            return
        source.seek(0)
        first, *messages = _messages(source)
        self.schema, self.groups = ipc.read_schema(first), len(messages)
        self._batch = lambda group: ipc.read_record_batch(messages[group], self.schema)
        if any(message.type != "record batch" for message in messages):  # dictionaries
            source.seek(0)
            batches = list(ipc.open_stream(source))
            self.groups, self._batch = len(batches), batches.__getitem__

    def read(self, group: int, names: Sequence[str]) -> Any:
        import pyarrow

        batch = self._batch(group)
        if not names:
            return batch.select([])  # it keeps its number of rows
        columns = {}
        for name in names:
            whole, _, field = ("", "", "") if name in self.schema.names else name.rpartition(".")
            if field:
                of_field = batch.column(whole).field(field)
                columns[whole] = pyarrow.StructArray.from_arrays([of_field], [field])
            else:
                columns[name] = batch.column(name)
        return pyarrow.RecordBatch.from_arrays(list(columns.values()), list(columns))


def _is_joined(path: Path, end: int) -> bool:
    """Whether a file follows another in a parquet file: the footer's places are then those of the first.

    end: of the data, by the footer. Only indexes and Bloom filters lie between it and the footer.
    """
    with path.open("rb") as file:
        if is_url(path):
            file.seek(end)
            return bytes(file.read()).find(2 * MAGIC) >= 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return data.find(2 * MAGIC, end) >= 0


def _messages(source: Any) -> Iterator[Any]:
    """The messages of a stream. Raises ValueError where the stream does not end with the file.

    pyarrow itself takes the end of a file for that of the stream, and reads nothing that follows the end.
    """
    from pyarrow import ipc

    reader, end = ipc.MessageReader.open_stream(source), 0
    while True:
        try:
            message = reader.read_next_message()
        except StopIteration:
            break
        yield message
        end = source.tell()
    mark, size = source.tell() - end, source.size()
    if not mark:
        raise ValueError(f"the stream has no end mark: it ends early, at byte {size}")
    if end + mark < size:
        raise ValueError(f"{size - end - mark} bytes follow the end mark of the stream, at byte {end}")


def open_table(path: Path) -> Table:
    """Opens a parquet or arrow file. Raises one of errors_of_tables()."""
    status = path.stat()
    return _opened(path, status.st_size, status.st_mtime_ns)


@lru_cache(OPEN)
def _opened(path: Path, size: int, changed: int) -> Table:
    """size, changed: of the file; another file at the path is opened anew."""
    return (ParquetTable if path.suffix == ".parquet" else ArrowTable)(path)


@lru_cache(1)
def read_group(table: Table, group: int, names: tuple[str, ...]) -> Any:
    """table.read, which keeps the last group: rows that are read in order decompress each group once."""
    return table.read(group, names)
