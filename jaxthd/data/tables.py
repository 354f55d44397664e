"""Parquet and arrow files as tables whose row groups are read one at a time. It needs pyarrow, nothing else.

Arrow files are mapped into memory, so that a cell costs its own bytes. Of a parquet file the columns of a row
group are read and decompressed whole.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxthd.errors import UserError

SUFFIXES = (".parquet", ".arrow")
OPEN = 64
"""Tables that a process keeps open."""
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

    def count(self, group: int) -> int:
        """Rows of a group that cannot be read; 1 where the file does not say."""
        return 1


class ParquetTable(Table):
    def __init__(self, path: Path) -> None:
        from pyarrow.parquet import ParquetFile

        self._file = ParquetFile(path, memory_map=True, pre_buffer=False)
        self.schema, self.groups = self._file.schema_arrow, self._file.num_row_groups

    def read(self, group: int, names: Sequence[str]) -> Any:
        return self._file.read_row_group(group, columns=list(names), use_threads=False)

    def count(self, group: int) -> int:
        return self._file.metadata.row_group(group).num_rows


class ArrowTable(Table):
    """An arrow file, in the format of streams (as datasets writes it) or of files. A group is a batch."""

    def __init__(self, path: Path) -> None:
        import pyarrow
        from pyarrow import ipc

        source = pyarrow.memory_map(str(path))
        if source.read(len(_ARROW_FILE)) == _ARROW_FILE:
            file = ipc.open_file(source)
            self.schema, self.groups, self._batch = file.schema, file.num_record_batches, file.get_batch
            return
        source.seek(0)
        first, *messages = ipc.MessageReader.open_stream(source)
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
