"""Footers of parquet files, where pyarrow cannot be asked.

pyarrow's description of a column chunk (RowGroupMetaData.column) ends the process where the footer is
damaged: an exception of its C++ code is not caught. So the few numbers that it would tell are read here.

Source: parquet.thrift of Apache Parquet, and the compact protocol of Apache Thrift.
"""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MAGIC = b"PAR1"
"""The first and the last bytes of a parquet file."""
_GROUPS, _COLUMNS, _GROUP_ROWS, _FILE, _METADATA = 4, 1, 3, 1, 3
_COMPRESSED, _DATA_PAGE, _DICTIONARY_PAGE = 7, 9, 11
"""Numbers of fields: of FileMetaData, of RowGroup (two), of ColumnChunk (two), of ColumnMetaData (three)."""


class RowGroup(NamedTuple):
    """rows: how many it has. end: the position after its data. file: that of its columns, if another."""

    rows: int
    end: int
    file: str


def row_groups(path: Path) -> list[RowGroup]:
    """Reads the row groups that the footer of a parquet file, or of a summary of such files, describes.

    Raises ValueError for a footer that is damaged, and OSError.
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 8, 0))
        tail = file.read(8)
        length = int.from_bytes(tail[:4], "little")
        if len(tail) < 8 or tail[4:] != MAGIC or length > size - 8:
            raise ValueError("it has no footer of a parquet file")
        file.seek(size - 8 - length)
        data = file.read(length)
    try:
        return [_row_group(group) for group in _Compact(data).struct().get(_GROUPS, [])]
    except (LookupError, TypeError, AttributeError, ValueError, struct.error, RecursionError) as error:
        raise ValueError(f"its footer is damaged ({error!r})") from error


def _row_group(group: dict[int, Any]) -> RowGroup:
    columns = group.get(_COLUMNS, [])
    ends = [len(MAGIC)]
    for column in columns:
        metadata = column.get(_METADATA, {})
        starts = [metadata[name] for name in (_DICTIONARY_PAGE, _DATA_PAGE) if metadata.get(name)]
        ends.append(min(starts, default=0) + metadata.get(_COMPRESSED, 0))
    name = columns[0].get(_FILE, b"") if columns else b""
    return RowGroup(group[_GROUP_ROWS], max(ends), name.decode())


class _Compact:
    """A reader of Thrift's compact protocol. Structs are {number of the field: value}."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def struct(self) -> dict[int, Any]:
        """Reads a struct up to its end mark. Raises IndexError where the data ends before."""
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            step, kind = head >> 4, head & 15
            number = number + step if step else self._signed()
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind)
        return fields

    def _value(self, kind: int) -> Any:
        readers: dict[int, Callable[[], Any]] = {
            **dict.fromkeys((1, 2, 3), self._byte),
            **dict.fromkeys((4, 5, 6), self._signed),
            7: lambda: self._bytes(8),
            8: lambda: self._bytes(self._unsigned()),
            **dict.fromkeys((9, 10), self._list),
            11: self._map,
            12: self.struct,
        }
        return readers[kind]()

    def _list(self) -> list[Any]:
        head = self._byte()
        count = head >> 4
        if count == 15:
            count = self._unsigned()
        return [self._value(head & 15) for _ in range(count)]

    def _map(self) -> list[tuple[Any, Any]]:
        if not (count := self._unsigned()):
            return []
        kinds = self._byte()
        return [(self._value(kinds >> 4), self._value(kinds & 15)) for _ in range(count)]

    def _byte(self) -> int:
        self._at += 1
        return self._data[self._at - 1]

    def _bytes(self, count: int) -> bytes:
        self._at += count
        if self._at > len(self._data):
            raise IndexError(f"a text of {count} bytes goes beyond its end")
        return self._data[self._at - count : self._at]

    def _unsigned(self) -> int:
        number, shift = 0, 0
        while (byte := self._byte()) & 0x80:
            number |= (byte & 0x7F) << shift
            shift += 7
        return number | byte << shift

    def _signed(self) -> int:
        number = self._unsigned()
        return number >> 1 ^ -(number & 1)
