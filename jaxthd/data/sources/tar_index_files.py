"""Index files of tar files: where each member lies, so that a later run reads no headers.

AUDIO.tar.index lies beside its tar file, or with the user's cache where that folder is not written to. Its
first line says what it is of: the tar file's size and a digest of its first and last bytes. It counts while
it is no older than the tar file.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxthd.data.example import Member
from jaxthd.files import stores
from jaxthd.files.atomic import write_atomically
from jaxthd.files.stores import is_url
from jaxthd.files.user_cache import user_cache

LEAST = 1 << 24
"""Bytes of a tar file that has an index file; the headers of a smaller one are read as fast."""
_ENDS = 1 << 16
"""Bytes at each end of a tar file that the digest is of."""
_FORM = 1

Members = dict[str, Member | str]


def read_index(path: Path, *, beside: bool = False) -> tuple[Members, str] | None:
    """(a tar file's members, what is wrong with its end), from its index file; None without a current one.

    Members are as in TarIndex. beside: only from one that lies beside the tar file. Raises OSError and
    StorageError for the tar file itself.
    """
    changed = path.stat().st_mtime_ns
    head = ""
    for place in _places(path)[: 1 if beside else None]:
        with suppress(OSError, ValueError, LookupError, TypeError):
            if place.stat().st_mtime_ns < changed:
                continue
            first, _, body = place.read_text().partition("\n")
            head = head or _head(path)
            stored: dict[str, Any] = json.loads(first)
            if stored["of"] == head and stored["digest"] == _digest(body):
                lines = map(json.loads, body.splitlines())
                return {name: x if isinstance(x, str) else Member(name, *x) for name, x in lines}, stored[
                    "end"
                ]
    return None


def keep_index(path: Path, members: Mapping[str, Member | str], end: str) -> None:
    """Writes the index file of a tar file, beside it if possible. Nothing is written to a store."""
    text = _text(path, members, end)
    for place in _places(path):
        with suppress(OSError):
            if not is_url(place):
                place.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(place, text)
                return


def write_index(path: Path, members: Mapping[str, Member | str], end: str) -> None:
    """Writes the index file of a tar file beside it, on a disk or in a store. Raises OSError, and for stores
    as stores.write."""
    place, text = _places(path)[0], _text(path, members, end)
    if is_url(place):
        stores.write(str(place), text.encode())
    else:
        write_atomically(place, text)


def _text(path: Path, members: Mapping[str, Member | str], end: str) -> str:
    entries = ((name, x if isinstance(x, str) else (x.start, x.size)) for name, x in members.items())
    body = "".join(json.dumps(entry) + "\n" for entry in entries)
    first = json.dumps({"of": _head(path), "end": end, "digest": _digest(body)})
    return f"{first}\n{body}"


def _places(path: Path) -> tuple[Path, Path]:
    name = hashlib.blake2b(str(path.absolute()).encode(), digest_size=16).hexdigest()
    return path.with_name(f"{path.name}.index"), user_cache() / "tars" / f"{name}.index"


def _head(path: Path) -> str:
    """Returns size and a digest of the ends, by which a tar file is known."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(_ENDS)
        file.seek(max(size - _ENDS, 0))
        return f"{_FORM} {size} {hashlib.blake2b(first + file.read(_ENDS), digest_size=16).hexdigest()}"


def _digest(body: str) -> str:
    return hashlib.blake2b(body.encode(), digest_size=16).hexdigest()
