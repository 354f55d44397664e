"""The interface of data sources. A source reads one data set, named by a setting, into Examples."""

import gzip
import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jaxthd.config import DataConfig
from jaxthd.data.example import Example
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.containers import parts_of

Likeness = Literal["same", "grown", "other"]
"""A data set against an earlier state of it; "grown": items have been added at its end."""


class SourceSetting(NamedTuple):
    """A data set as the settings name it.

    path: a file or folder, or whatever the source takes it for. source: the name written before the path.
    field: the configuration field that names the data set, for messages. tarred_audio: its tar files, see
        ManifestSource; "" for none. split: whether it is read for training or for validation. prompts:
        whether items without an answer are wanted too (Example.is_unanswered), because answers are drawn.
    """

    path: str
    field: str = "data.manifest"
    tarred_audio: str = ""
    split: Literal["training", "validation"] = "training"
    source: str = ""
    prompts: bool = False


class Containers(NamedTuple):
    """Counts the files of a data set that hold several items each: manifests, tar files, tables.

    named: those that the data set says it has. found: those that are there. notes: sentences about the
    difference, for the start of a run.
    """

    named: int
    found: int
    notes: tuple[str, ...] = ()


class Source(ABC):
    """Reads one data set. A new source is a subclass, registered in jaxthd.data.sources.registry.

    path: the setting's path. title: the data set's name in skipped.jsonl.
    unread_recordings: after `read`, how many items have each field that names a recording and is not read,
        beside one that is.
    reads_columns: whether it reads data.columns.
    """

    reads_columns = True

    def __init__(self, setting: SourceSetting) -> None:
        self.path, self.setting = setting.path, setting
        self.title = f"{setting.source}:{setting.path}" if setting.source else setting.path
        self.unread_recordings: Counter[str] = Counter()

    @staticmethod
    def recognises(path: str) -> bool:
        """Whether this source reads a path that is written without a source's name."""
        return False

    @abstractmethod
    def read(self, data: DataConfig) -> tuple[list[Example], list[Skipped]]:
        """Returns the usable items and the skipped ones, each in the order of the data set.

        Keys are "NUMBER:NAME": the item's number in the data set, a colon, any text. They are unique and do
        not depend on where the data set lies. Recordings are given by path (Clip) or in memory (Samples);
        none is decoded here.
        data: data.prompt and data.audio_placeholder say how a recording with its transcript becomes a
            conversation (jaxthd.data.example.utterance).
        Raises UserError for a data set that cannot be read.
        """

    def extent(self) -> int | None:
        """Returns how much content digest() covers, in bytes; None where `likeness` cannot tell a data set
        that has grown."""
        return None

    def likeness(self, digest: str, extent: int | None) -> Likeness:
        """Compares the data set with what it was when digest() and extent() were these."""
        return "same" if digest == self.digest() else "other"

    @abstractmethod
    def digest(self) -> str:
        """A short text that changes if the items or their order change, but not if the data set is moved.

        A data position saved under another digest is refused. No recording is read.
        """

    def containers(self) -> Containers | None:
        """Counts the containers of the data set; None for a source that has none.

        It reads nothing but lists of files and small metadata. After `read`, the notes have what it came
        upon, too. Raises UserError, as `read` does, for a data set that says that it has more than is there.
        """
        return None

    def files(self) -> list[Path]:
        """The files whose sizes and times of change tell whether the data set has changed.

        These are containers and their indexes; none for a source that cannot tell. Raises as `containers`.
        """
        return []


def counted_files(files: Sequence[Path], left_out: int = 0, notes: Sequence[str] = ()) -> Containers:
    """The containers that a user has named by their files, with a note where names count more parts.

    left_out: containers that the data set's own metadata counts besides. notes: other notes.
    """
    parts = [each for each in parts_of(files) if each.missing]
    named = len(files) + left_out + sum(len(each.missing) for each in parts)
    return Containers(named, len(files), (*(each.note for each in parts), *notes))


class LineFiles(NamedTuple):
    """The content of files of lines, in order, and the sizes of the tar files that they refer to.

    Whether a file is compressed does not matter.
    """

    files: Sequence[Path]
    tars: Sequence[Path] = ()

    def digest(self) -> str:
        return self._digest(self._blocks())

    def extent(self) -> int | None:
        """Returns the bytes of all lines; None with tar files, which grow with their manifest."""
        return None if self.tars else sum(map(len, self._blocks()))

    def likeness(self, digest: str, extent: int | None) -> Likeness:
        """See Source.likeness. A digest of an older jaxthd is of the compressed bytes."""
        as_stored = chain.from_iterable(_blocks(path, opened=open) for path in self.files)
        if digest in (self.digest(), self._digest(as_stored)):
            return "same"
        if extent is None or self.tars:
            return "other"
        content = b"".join(self._blocks())
        before, appended = content[:extent], content[extent:]
        # A last line without an end, to which something is appended, is another line now.
        is_whole = not before or before.endswith(b"\n") or appended.startswith((b"\n", b"\r"))
        return "grown" if appended and is_whole and self._digest([before]) == digest else "other"

    def _digest(self, blocks: Iterable[bytes]) -> str:
        digest = hashlib.blake2b()
        for block in blocks:
            digest.update(block)
        if self.tars:
            digest.update(repr([path.stat().st_size for path in self.tars]).encode())
        return digest.hexdigest()[:16]

    def _blocks(self) -> Iterator[bytes]:
        for path in self.files:
            yield from _blocks(path, opened=gzip.open if path.suffix == ".gz" else open)


def _blocks(path: Path, opened: Callable[[Path, str], Any]) -> Iterator[bytes]:
    with opened(path, "rb") as file:
        while block := file.read(1 << 20):
            yield block
