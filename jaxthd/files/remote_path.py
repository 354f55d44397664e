"""Paths of objects in stores, by URL, which are read as files are.

What reads a path by its own methods (open, stat, is_file, iterdir, glob, /) needs to know nothing of stores.
An object is pinned when it is looked at first, in this process and in those that the path is sent to: if it
is replaced under a run, reading raises StorageError.
"""

import io
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path, PosixPath
from typing import Any

from jaxthd.errors import UserError
from jaxthd.files import stores
from jaxthd.files.range_cache import RangeCache, shared_cache
from jaxthd.files.stores import ObjectInfo, is_url

BLOCK = 1 << 18
"""Bytes that are fetched at least, where a file is read piece by piece."""
AHEAD = 16
"""Blocks that are fetched at once where they are read one after the other."""
MOST_BLOCKS = 64
"""Blocks that are fetched at once, at most."""
WHOLE = 1 << 24
"""Ranges of up to so many bytes are fetched in one request."""

_pinned: dict[str, ObjectInfo] = {}
"""Objects that this process has looked at, by URL."""


class RemotePath(PosixPath):
    """The path of an object, or of a folder, in a store. It is absolute; str() is its URL.

    Methods that write, and what asks for a name on a disk (os.fspath), raise UserError.
    """

    _known: ObjectInfo | None = None

    def __str__(self) -> str:
        return re.sub(r"^(\w+):/*", r"\1://", super().__str__())

    def __fspath__(self) -> str:
        raise UserError(
            f"{self} is in a store, and is needed on a disk here; expected a local path: copy it, and "
            f"name the copy"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (str(self), self._known)

    def __truediv__(self, other: Any) -> Path:  # type: ignore[override]
        text = str(other)
        return as_path(text) if text.startswith("/") or is_url(text) else super().__truediv__(other)

    def is_absolute(self) -> bool:
        """Returns True."""
        return True

    def absolute(self) -> "RemotePath":
        """Returns the path itself."""
        return self

    def resolve(self, strict: bool = False) -> "RemotePath":
        """Returns the path itself: stores have no links."""
        return self

    @property
    def info(self) -> ObjectInfo:
        """The object's size and etag as they were at first. Raises FileNotFoundError, StorageError."""
        if self._known is None:
            url = str(self)
            if url not in _pinned:
                _pinned[url] = stores.head(url)
            self._known = _pinned[url]
        return self._known

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """Returns size and time of an object. Raises as info."""
        size, _, modified = self.info
        times = (int(modified),) * 3
        more = {"st_mtime_ns": int(modified * 1e9), "st_mtime": modified}
        return os.stat_result((stat.S_IFREG | 0o444, 0, 0, 1, 0, 0, size, *times), more)

    def is_file(self) -> bool:
        """Whether there is such an object. Raises StorageError."""
        try:
            return self.info.size >= 0
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        """Whether there are objects below this path. Raises StorageError."""
        return any(stores.listed(str(self)))

    def exists(self) -> bool:
        """Whether there is such an object or folder."""
        return self.is_file() or self.is_dir()

    def iterdir(self) -> Iterator[Path]:  # type: ignore[override]
        """Yields the paths in a folder, by name. Raises StorageError."""
        found = stores.listed(str(self))
        for name in sorted({*found.files, *found.folders}):
            yield self / name

    def glob(self, pattern: str) -> Iterator[Path]:  # type: ignore[override]
        """Yields the paths of a folder, or of its folders, whose names fit a pattern such as "*.tar"."""
        first, mark, rest = pattern.partition("/")
        for path in self.iterdir():
            if fnmatchcase(path.name, first):
                yield from path.glob(rest) if mark else (path,)

    def open(self, mode: str = "r", buffering: int = -1, *args: Any, **more: Any) -> Any:
        """Opens an object for reading. Raises as info, and UserError for another mode."""
        if mode not in ("r", "rb"):
            raise UserError(f"{self} is in a store, and is not written to; expected a local path: choose one")
        file = RemoteFile(self)
        if not buffering:
            return file
        binary = io.BufferedReader(file, BLOCK if buffering < 2 else buffering)
        encoding = more.get("encoding") or (args[0] if args else "utf-8")
        return binary if mode == "rb" else io.TextIOWrapper(binary, encoding=encoding)

    def read_bytes(self) -> bytes:
        """Reads the whole object. Raises as info."""
        with self.open("rb") as file:
            return bytes(file.read())

    def read_text(self, encoding: str | None = None, errors: str | None = None) -> str:
        """Reads the whole object as text. Raises as info."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def range(self, start: int, end: int) -> bytes:
        """Reads bytes `start` to `end`, from the cache or in one request. Raises StorageError."""
        url, etag = str(self), self.info.etag
        found = _cache().get(url, etag, start, end)
        if found is None:
            found = stores.read(url, start, end, etag)
            _cache().put(url, etag, start, found)
        return found


class RemoteFile(io.RawIOBase):
    """An object that is read by blocks, through the cache."""

    def __init__(self, path: RemotePath) -> None:
        super().__init__()
        self._path, self._size, self._at = path, path.info.size, 0
        self._first, self._fetched = -1, b""

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        """Goes to a position and returns it."""
        self._at = max(offset + (0, self._at, self._size)[whence], 0)
        return self._at

    def tell(self) -> int:
        """Returns the position."""
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer as far as the object goes; returns the bytes. Raises StorageError."""
        wanted = memoryview(buffer).cast("B")
        end = min(self._at + len(wanted), self._size)
        done = 0
        while self._at < end:
            number, within = divmod(self._at, BLOCK)
            last = -(-end // BLOCK)
            block = self._of(number, last)[within : within + end - self._at]
            wanted[done : done + len(block)] = block
            done, self._at = done + len(block), self._at + len(block)
        return done

    def _of(self, number: int, last: int) -> bytes:
        """A block. Those up to `last` are fetched with it, or more where one was read after the other."""
        held = self._first <= number < self._first + -(-len(self._fetched) // BLOCK)
        if not held:
            is_next = number == self._first + -(-len(self._fetched) // BLOCK)
            self._fetched = self._fetch(number, max(AHEAD if is_next else 1, last - number))
            self._first = number
        at = (number - self._first) * BLOCK
        return self._fetched[at : at + BLOCK]

    def _fetch(self, number: int, blocks: int) -> bytes:
        """The block from the cache; or up to `blocks` from there on in one request, which the cache keeps."""
        url, etag = str(self._path), self._path.info.etag
        start = number * BLOCK
        found = _cache().get(url, etag, start, min(start + BLOCK, self._size))
        if found is None:
            end = start + min(blocks, MOST_BLOCKS) * BLOCK
            found = stores.read(url, start, min(end, self._size), etag)
            for at in range(0, len(found), BLOCK):
                _cache().put(url, etag, start + at, found[at : at + BLOCK])
        return found


@lru_cache(1)
def _cache() -> RangeCache:
    return shared_cache()


def _restored(url: str, known: ObjectInfo | None) -> RemotePath:
    path = RemotePath(url)
    path._known = known
    if known is not None:
        _pinned.setdefault(url, known)
    return path


def as_path(text: str | Path) -> Path:
    """The path that a text names: of an object in a store for a URL, else of a file."""
    if isinstance(text, Path):
        return text
    return RemotePath(text) if is_url(text) else Path(text)


def open_range(path: Path, start: int, size: int) -> tuple[io.BufferedIOBase, int]:
    """(an open file, the position in it) of bytes `start` to `start + size` of a file, for one reader.

    Of an object in a store they are fetched in one request, unless they are many.
    """
    if isinstance(path, RemotePath) and size <= WHOLE:
        if start + size > path.info.size:
            raise OSError(f"{path} has {path.info.size} bytes, fewer than its index says")
        return io.BytesIO(path.range(start, start + size)), 0
    file = path.open("rb")
    _ask_for(file, start, size)
    return file, start


def ask_ahead(path: Path, start: int, size: int) -> None:
    """Has the system read bytes of a local file meanwhile, which open_range is asked for soon."""
    if not isinstance(path, RemotePath):
        with suppress(OSError), path.open("rb", buffering=0) as file:
            _ask_for(file, start, size)


def _ask_for(file: io.FileIO | io.BufferedReader, start: int, size: int) -> None:
    # Else the system guesses what is read next: in random order it read 4.7 times what was needed.
    if size <= WHOLE:
        os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)
