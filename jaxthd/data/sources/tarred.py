"""Recordings in tar files: an index says where each recording lies, so that each can be read by itself.

The index is made from the headers, and kept in a file. Nothing is extracted, and no member's name is ever
used as a path.
"""

import re
import reprlib
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from jaxthd.data.example import Clip, Member
from jaxthd.data.sources.containers import PART, empty, refuse_other_forms
from jaxthd.data.sources.tar_index_files import LEAST, keep_index, read_index
from jaxthd.errors import UserError

_SEGMENT = re.compile(r"(.+)-sub\d+(\.\w+)?")
"""The suffix that NeMo adds to names when several lines use one recording, which the tar file holds once."""
_TWICE = "is in it more than once"


@dataclass(frozen=True)
class TarIndex:
    """The index of a tar file. members: by name, the file or the reason why it cannot be read.

    damage: why the rest of the tar file could not be read; "" if it was read to its end. end: what is wrong
    with the end that it was read to: it has no end mark, or bytes follow the mark; "" for a sound one.
    """

    path: Path
    members: dict[str, Member | str]
    damage: str = ""
    end: str = ""

    @property
    def note(self) -> str:
        """Says what is wrong with the tar file; "" for nothing."""
        wrong = self.damage or self.end
        return (
            f"{self.path.name} is {wrong}" if self.damage else f"{self.path.name}: {wrong}" if wrong else ""
        )

    def clip(self, name: str) -> Clip:
        """The recording of that name. Raises ValueError with the reason if there is none."""
        found = self.members.get(_plain(name))
        if isinstance(found, Member):
            return Clip(self.path, member=found)
        if found:
            raise ValueError(f"{self.path}: {name} {found}")
        damage = f" before it is {self.damage}" if self.damage else ""
        change = self.end or "make sure that manifest and tar file go together"
        raise ValueError(f"{self.path}: no {name} among its {len(self.members)} members{damage}; {change}")


def index_tar(path: Path) -> TarIndex:
    """Reads the headers of an uncompressed tar file, or those of a large one from its index file
    (tar_index_files.py), which is made at its first use. Damage raises no error: members before it are
    indexed.

    The index gives a reason in place of a link, of a name that occurs twice or leads out of the archive, and
    of data beyond the end of the file. What follows the end mark is not indexed: it may be a second tar file,
    or what an older and longer one has left there.
    Raises UserError for a file that is compressed or of another form, and for a tar file without members.
    """
    refuse_other_forms(path, "a tar file")
    is_large = path.stat().st_size >= LEAST
    if is_large and (stored := read_index(path)):
        return TarIndex(path, stored[0], end=stored[1])
    index = _read_headers(path)
    if is_large and not index.damage:
        keep_index(path, index.members, index.end)
    return index


def _read_headers(path: Path) -> TarIndex:
    """index_tar without an index file."""
    members: dict[str, Member | str] = {}
    try:
        size = path.stat().st_size
        with _Headers(path.open("rb", buffering=0)) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            at = -1
            while (info := tar.next()) is not None:
                if info.size < 0 or info.offset <= at:  # tarfile itself would loop for ever
                    return TarIndex(path, members, f"damaged, at byte {info.offset}")
                at = info.offset
                name = _plain(info.name)
                members[name] = _TWICE if name in members else _member(info, name, size)
                tar.members.clear()  # type: ignore[attr-defined]  # tarfile would keep a kilobyte for each
            file.seek(tar.offset)
            mark = file.read(tarfile.BLOCKSIZE)
            if mark.strip(b"\0"):  # tarfile takes a damaged header for the end
                return TarIndex(path, members, f"damaged, at byte {tar.offset}")
            if mark and not members:
                raise empty(path, "members")
            return TarIndex(path, members, end=_end(file, tar.offset, mark))
    except UserError:
        raise
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        # A damaged header may say anything.
        return TarIndex(path, members, f"damaged, or cut short ({error})")


def _end(file: BufferedReader, at: int, mark: bytes) -> str:
    """Says what is wrong with the end of a tar file, read to `at`, where the bytes `mark` are; "" if nothing.

    Zeros fill a tar file up to a multiple of 10,240 bytes.
    """
    if len(mark) < tarfile.BLOCKSIZE:
        return (
            f"the tar file ends early, at byte {at + len(mark)}, without an end mark: fetch or write it again"
        )
    while chunk := file.read(2**20 - 1):
        if chunk.strip(b"\0"):
            return (
                f"bytes follow the end mark at byte {at} and are not read, as where tar files are joined: "
                "write one tar file of all members, or name those that were joined"
            )
    return ""


class _Headers(BufferedReader):
    """A tar file from which tarfile reads headers.

    It refuses reads of negative size or of a megabyte and more, which damaged headers cause: tarfile would
    allocate that much.
    """

    def read(self, size: int | None = -1) -> bytes:
        """Returns up to `size` bytes. Raises ReadError for a size that no header has."""
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

    paths: the tar files. files: the manifest's files. setting: what names them, for messages. Either there is
    one tar file for each file, in order; or one file has several tar files, and the shard_id of its lines is
    the number in a tar file's name ("audio_3.tar").
    Raises UserError if the counts do not match, or numbers contradict the order; and as index_tar does.
    """

    def __init__(self, paths: Sequence[Path], files: Sequence[Path], setting: str) -> None:
        self._by_number = len(files) == 1 < len(paths)
        numbers = [shard_number(path) for path in paths]
        known = [number for number in numbers if number is not None]
        if self._by_number:
            if len(set(known)) < len(paths):
                raise UserError(
                    f"{paths[0]} and others ({setting}): tar files are numbered {numbers[:5]}...; expected a "
                    "number in each name, such as audio_0.tar, that shard_id in the manifest tells: rename "
                    "them"
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
        self._named: dict[int, set[str]] = {shard: set() for shard in self._indexes}

    @property
    def notes(self) -> list[str]:
        """Says what is wrong with the tar files, and how many members no line has named so far."""
        indexes = list(self._indexes.values())
        members = [sum(isinstance(m, Member) for m in index.members.values()) for index in indexes]
        unnamed = [there - len(used) for there, used in zip(members, self._named.values(), strict=True)]
        notes = [index.note for index in indexes if index.note]
        if sum(unnamed):
            which = indexes[next(n for n, count in enumerate(unnamed) if count)].path.name
            notes.append(
                f"{sum(unnamed):,} of the {sum(members):,} members of tar files are named by no line, "
                f"{which} first"
            )
        return notes

    def locate(self, entry: dict[str, Any], file: int) -> Callable[[str], Clip]:
        """Returns the function name -> Clip for a line of file number `file`. Both raise ValueError."""
        shard = entry.get("shard_id") if self._by_number else file
        if isinstance(shard, bool) or not isinstance(shard, int) or shard not in self._indexes:
            raise ValueError(
                f"shard_id is {reprlib.repr(shard)}; expected the number of a tar file, "
                f"{min(self._indexes)} to {max(self._indexes)}"
            )
        index, named = self._indexes[shard], self._named[shard]

        def clip(name: str) -> Clip:
            """Returns the recording of that name, or of the name without NeMo's suffix. Raises ValueError."""
            segment = _SEGMENT.fullmatch(name)
            if segment and _plain(name) not in index.members:
                name = segment[1] + (segment[2] or "")
            recording = index.clip(name)
            named.add(_plain(name))
            return recording

        return clip


def shard_number(path: Path) -> int | None:
    """The last number that stands between "_", "-" or "." in a shard's file name; None without one.

    Of "audio-00001-of-00004.tar" it is 1.
    """
    numbers = re.findall(r"[_-](\d+)(?=[_.-])", PART.sub(r"\1", path.name))
    return int(numbers[-1]) if numbers else None


class Counted(NamedTuple):
    """The tar files of one folder. total: those that the file `metadata` counts. named: by the setting."""

    metadata: Path
    folder: Path
    total: int
    named: int


def counted_tars(manifest: Path, tars: Sequence[Path]) -> list[Counted]:
    """Returns the counts of NeMo's metadata for each folder of tar files, beside them or their manifest.

    That of a manifest "..._version_1.json" is metadata_version_1.yaml, else metadata.yaml.
    Source: NeMo's convert_to_tarred_audio_dataset.py.
    """
    version = re.search(r"_version_\d+(?=\.json)", manifest.name)
    name = f"metadata{version[0] if version else ''}.yaml"
    folders = sorted({path.parent for path in tars})
    counted = []
    for folder in folders:
        places = [folder / name, *([manifest.parent / name] if len(folders) == 1 else [])]
        for path in places:
            if total := _total(path):
                counted.append(Counted(path, folder, total, sum(tar.parent == folder for tar in tars)))
                break
    return counted


def _total(path: Path) -> int:
    """dataset_config.num_shards of a file of metadata; 0 without it, or in one of another program."""
    try:
        metadata = yaml.safe_load(path.read_text())
        total = metadata["dataset_config"]["num_shards"]
    except (yaml.YAMLError, OSError, UnicodeError, LookupError, TypeError):
        return 0
    return total if type(total) is int and total > 0 else 0


def require_counted_tars(counted: Sequence[Counted], tars: Sequence[Path], setting: str) -> list[str]:
    """Notes on tar files that metadata counts and the setting leaves out.

    Raises UserError where such tar files are not there at all.
    """
    notes = []
    for metadata, folder, total, named in counted:
        if named >= total:
            continue
        suffix = next(path.suffix for path in tars if path.parent == folder)
        there = sum(shard_number(path) is not None for path in folder.glob(f"*{suffix}"))
        if there < total:
            raise UserError(
                f"{metadata} counts {total} tar files, and {folder} holds {there}; expected all of them "
                f"({setting}): fetch the others, or take that file away where these are all that you want"
            )
        notes.append(f"{named} of the {total} tar files that {metadata.name} counts")
    return notes
