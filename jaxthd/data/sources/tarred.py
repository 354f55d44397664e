"""Recordings in tar files: an index says where each recording lies, so that each can be read by itself.

The index is made once, from the headers. Nothing is extracted, and no member's name is ever used as a path.
"""

import re
import reprlib
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

from jaxthd.data.example import Clip, Member
from jaxthd.data.sources.lines import expand_braces
from jaxthd.errors import UserError

_SEGMENT = re.compile(r"(.+)-sub\d+(\.\w+)?")
"""The suffix that NeMo adds to names when several lines use one recording, which the tar file holds once."""
_TWICE = "is in it more than once"


@dataclass(frozen=True)
class TarIndex:
    """The index of a tar file. members: by name, the file or the reason why it cannot be read.

    damage: why the rest of the tar file could not be read; "" if it was read to its end.
    """

    path: Path
    members: dict[str, Member | str]
    damage: str = ""

    def clip(self, name: str) -> Clip:
        """The recording of that name. Raises ValueError with the reason if there is none."""
        found = self.members.get(_plain(name))
        if isinstance(found, Member):
            return Clip(self.path, member=found)
        if found:
            raise ValueError(f"{self.path}: {name} {found}")
        damage = f" before it is {self.damage}" if self.damage else ""
        raise ValueError(
            f"{self.path}: no {name} among its {len(self.members)} members{damage}; make sure that manifest "
            "and tar file go together"
        )


def index_tar(path: Path) -> TarIndex:
    """Reads the headers of an uncompressed tar file. Damage raises no error: members before it are indexed.

    The index gives a reason in place of a link, of a name that occurs twice or leads out of the archive, and
    of data beyond the end of the file.
    """
    members: dict[str, Member | str] = {}
    try:
        size = path.stat().st_size
        with _Headers(FileIO(path)) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            at = -1
            while (info := tar.next()) is not None:
                if info.size < 0 or info.offset <= at:  # tarfile itself would loop for ever
                    return TarIndex(path, members, f"damaged, at byte {info.offset}")
                at = info.offset
                name = _plain(info.name)
                members[name] = _TWICE if name in members else _member(info, name, size)
                tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep a kilobyte for each
            file.seek(tar.offset)
            if file.read(tarfile.BLOCKSIZE).strip(b"\0"):  # tarfile takes a damaged header for the end
                return TarIndex(path, members, f"damaged, at byte {tar.offset}")
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        # A damaged header may say anything.
        with path.open("rb") as start:
            is_gzip = start.read(2) == b"\x1f\x8b"
        reason = "compressed: decompress it" if is_gzip else f"damaged, or cut short ({error})"
        return TarIndex(path, members, reason)
    return TarIndex(path, members)


class _Headers(BufferedReader):
    """A tar file from which tarfile reads headers.

    It refuses reads of negative size or of a megabyte and more, which damaged headers cause: tarfile would
    allocate that much.
    """

    def read(self, size: int | None = -1) -> bytes:
        if size is None or not 0 <= size < 2**20:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return super().read(size)


def _member(info: tarfile.TarInfo, name: str, size: int) -> Member | str:
    if not info.isreg() or info.issparse():
        return "is no plain file in it"
    if ".." in name.split("/"):
        return "has a name that leads out of it"
    if info.offset_data + info.size > size:
        return "is cut short, with the tar file"
    return Member(name, info.offset_data, info.size)


def _plain(name: str) -> str:
    return re.sub(r"^(\./)+", "", name)


def index_tars(paths: Sequence[Path]) -> list[TarIndex]:
    """The index of each tar file, see index_tar."""
    with ThreadPoolExecutor(16) as threads:
        return list(threads.map(index_tar, paths))


class TarredAudio:
    """The tar files that hold the recordings of a manifest's lines.

    files: the manifest's files. tars: the tar files, with braces. setting: the setting that named them, for
    messages. Either there is one tar file for each file, in order; or one file has several tar files, and the
    shard_id of its lines is the number in a tar file's name ("audio_3.tar").
    Raises UserError if the counts do not match, a tar file is missing, or numbers contradict the order.
    """

    def __init__(self, tars: str, files: Sequence[Path], setting: str) -> None:
        paths = [Path(name) for name in expand_braces(tars)]
        missing = [str(path) for path in paths if not path.is_file()]
        if missing:
            raise UserError(
                f"{len(missing)} of the {len(paths)} tar files of {setting} are not there, {missing[0]} "
                f"first; expected all that {tars} names: correct it"
            )
        self._by_number = len(files) == 1 < len(paths)
        numbers = [shard_number(path) for path in paths]
        known = [number for number in numbers if number is not None]
        if self._by_number:
            if len(set(known)) < len(paths):
                raise UserError(
                    f"{tars} ({setting}): tar files are numbered {numbers[:5]}...; expected a number in each "
                    "name, such as audio_0.tar, that shard_id in the manifest tells: rename them"
                )
        elif len(files) != len(paths):
            raise UserError(
                f"{len(files)} manifests and {len(paths)} tar files ({setting}); expected one tar file for "
                "each manifest, or one manifest: correct their braces"
            )
        else:
            for file, path, number in zip(files, paths, numbers, strict=True):
                if None not in (other := shard_number(file), number) and other != number:
                    raise UserError(
                        f"{file.name} would go with {path.name} ({setting}); expected manifests and tar "
                        "files in one order: correct their braces"
                    )
        indexes = index_tars(paths)
        self._indexes = dict(zip(known if self._by_number else range(len(paths)), indexes, strict=True))

    def locate(self, entry: dict[str, Any], file: int) -> Callable[[str], Clip]:
        """Returns the function name -> Clip for a line of file number `file`. Both raise ValueError."""
        shard = entry.get("shard_id") if self._by_number else file
        if isinstance(shard, bool) or not isinstance(shard, int) or shard not in self._indexes:
            raise ValueError(
                f"shard_id is {reprlib.repr(shard)}; expected the number of a tar file, "
                f"{min(self._indexes)} to {max(self._indexes)}"
            )
        index = self._indexes[shard]

        def clip(name: str) -> Clip:
            segment = _SEGMENT.fullmatch(name)
            if segment and _plain(name) not in index.members:
                name = segment[1] + (segment[2] or "")
            return index.clip(name)

        return clip


def shard_number(path: Path) -> int | None:
    """The last number that stands between "_", "-" or "." in a shard's file name; None without one."""
    numbers = re.findall(r"[_-](\d+)(?=[_.-])", path.name)
    return int(numbers[-1]) if numbers else None
