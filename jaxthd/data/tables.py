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

from jaxthd.errors import UserError

SUFFIXES = (".parquet", ".arrow")
OPEN = 64
"""Tables that a process keeps open."""
_PARQUET = b"PAR1"
"""The first and the last bytes of a parquet file."""
_ARROW_FILE = b"ARROW1"
"""How an arrow file begins that is not a stream."""


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
    """What reading a damaged table raises."""
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

        self._file = ParquetFile(path, memory_map=True, pre_buffer=False)
        self.schema, self.groups = self._file.schema_arrow, self._file.num_row_groups
        metadata = self._file.metadata
        rows = sum(metadata.row_group(group).num_rows for group in range(self.groups))
        if rows != metadata.num_rows:
            raise ValueError(f"its footer counts {metadata.num_rows} rows, and {rows} in its groups")
        if self.groups and _is_joined(path, metadata.row_group(self.groups - 1)):
            raise ValueError("it is several parquet files joined, of which the first alone can be read")

    def read(self, group: int, names: Sequence[str]) -> Any:
        return self._file.read_row_group(group, columns=list(names), use_threads=False)

    def count(self, group: int) -> int | None:
        return self._file.metadata.row_group(group).num_rows


class ArrowTable(Table):
    """An arrow file, in the format of streams (as datasets writes it) or of files. A group is a batch.

    Raises ValueError for a stream without an end mark, of which batches may be missing, and for one that is
    followed by other bytes.
    """

    def __init__(self, path: Path) -> None:
        import pyarrow
        from pyarrow import ipc

        source = pyarrow.memory_map(str(path))
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


def _is_joined(path: Path, last: Any) -> bool:
    """Whether a file follows another in a parquet file: the footer's places are then those of the first.

    last: the metadata of the last group. Only indexes and Bloom filters lie between its data and the footer.
    """
    ends = [len(_PARQUET)]
    for number in range(last.num_columns):
        column = last.column(number)
        start = min(filter(None, (column.dictionary_page_offset, column.data_page_offset)), default=0)
        ends.append(start + column.total_compressed_size)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(2 * _PARQUET, max(ends)) >= 0


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
