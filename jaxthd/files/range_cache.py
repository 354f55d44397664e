"""A bounded cache on disk of parts of objects, which several processes of a machine share without locks.

Each part is a file of its own, put in place by an atomic rename, with a checksum at its end: a reader sees a
whole part or none. A part's name is a digest of the object's URL, its etag and the range, so that it never
goes stale.
"""

import hashlib
import os
import shutil
import threading
import time
import zlib
from contextlib import suppress
from pathlib import Path

from jaxthd.files.user_cache import user_cache

LIMIT = "JAXTHD_CACHE_GB"
"""Environment variable: most gigabytes of the cache; 0 for none."""
DEFAULT_GB = 20.0
FREE_SHARE = 0.5
"""The cache takes at most this share of what is free on its disk when a process begins to use it."""
_CHECK = 4
"""Bytes of the checksum at a part's end."""
_FRESH = 60.0
"""Seconds after which a part that is read is marked as used again."""


class RangeCache:
    """The parts of objects in `folder`, at most `limit` bytes of them, least recently used ones removed."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._written = limit  # the first part that is written looks at what earlier processes left
        self._lock = threading.Lock()

    def get(self, url: str, etag: str, start: int, end: int) -> bytes | None:
        """Returns the bytes of a range; None where they are not there, or damaged."""
        path = self._path(url, etag, start, end)
        try:
            held = path.read_bytes()
        except OSError:
            return None
        found = held[:-_CHECK]
        if len(found) != end - start or zlib.crc32(found).to_bytes(_CHECK, "big") != held[-_CHECK:]:
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _FRESH:
                os.utime(path)
        return found

    def put(self, url: str, etag: str, start: int, content: bytes) -> None:
        """Keeps the bytes from `start` on. A disk that is full, or may not be written, keeps nothing."""
        if not self._limit or len(content) > self._limit // 8:
            return
        path = self._path(url, etag, start, start + len(content))
        scratch = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch.write_bytes(content + zlib.crc32(content).to_bytes(_CHECK, "big"))
            os.replace(scratch, path)
        except OSError:
            with suppress(OSError):
                scratch.unlink()
            return
        with self._lock:
            self._written += len(content)
            is_due = self._written > self._limit // 16
            self._written = 0 if is_due else self._written
        if is_due:
            self._make_room()

    def _make_room(self) -> None:
        """Removes the parts that were used longest ago, until a quarter is free."""
        parts = []
        for path in self._folder.glob("??/*"):
            with suppress(OSError):  # another process has removed it
                stat = path.stat()
                parts.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in parts)
        for _, size, path in sorted(parts, key=lambda part: part[0]):
            if total <= 0.75 * self._limit:
                break
            with suppress(OSError):
                path.unlink()
            total -= size

    def _path(self, url: str, etag: str, start: int, end: int) -> Path:
        name = hashlib.blake2b(f"{url}\n{etag}\n{start}-{end}".encode(), digest_size=20).hexdigest()
        return self._folder / name[:2] / name[2:]


def shared_cache() -> RangeCache:
    """The cache of this machine's user, in user_cache()."""
    folder = user_cache() / "ranges"
    asked = os.environ.get(LIMIT)
    limit = float(asked or DEFAULT_GB) * 1e9
    if not asked:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            limit = min(limit, FREE_SHARE * shutil.disk_usage(folder).free)
    return RangeCache(folder, int(limit))
