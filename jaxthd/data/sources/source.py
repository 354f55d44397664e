"""The interface of data sources. A source reads one data set, named by a setting, into Examples.

Source is what any source must do. FileSource does most of that for items in files; LineSource for JSON lines.
"""

import gzip
import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

from jaxthd.config import DataConfig
from jaxthd.data.example import Alternative, Example, Turn
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.columns import Columns, require_columns
from jaxthd.data.sources.containers import parts_of
from jaxthd.data.sources.lines import Entry, Line, expand_braces, fields_beside, numbered_lines
from jaxthd.data.sources.preferences import alternatives_of
from jaxthd.errors import UserError
from jaxthd.files.remote_path import as_path

Likeness = Literal["same", "grown", "other"]
"""A data set against an earlier state of it; "grown": items have been added at its end."""


class SourceSetting(NamedTuple):
    """A data set as the settings name it.

    path: a file or folder, or whatever the source takes it for. source: the name written before the path.
    field: the configuration field that names the data set, for messages. tarred_audio: its tar files, see
        ManifestSource; "" for none. split: whether it is read for training or for validation. prompts:
        whether items without an answer are wanted too (Example.is_unanswered), because answers are drawn.
    columns: the names of its fields, as data.columns gives them.
    """

    path: str
    field: str = "data.manifest"
    tarred_audio: str = ""
    split: Literal["training", "validation"] = "training"
    source: str = ""
    prompts: bool = False
    columns: tuple[str, ...] = ()


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
    columns: the names of its fields, and after `read` those that no item has. reads_columns: False for a data
        set whose fields are always the same.
    """

    reads_columns = True

    def __init__(self, setting: SourceSetting) -> None:
        self.path, self.setting = setting.path, setting
        self.title = f"{setting.source}:{setting.path}" if setting.source else setting.path
        self.columns = Columns(setting.columns if self.reads_columns else (), self.title)
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


class Files(NamedTuple):
    """The files of a data set.

    items: those of its items, in order. tars: the tar files that they refer to. records: files that say what
    the data set holds. left_out: containers that the records count besides. notes: as in Containers.
    """

    items: Sequence[Path]
    tars: Sequence[Path] = ()
    records: Sequence[Path] = ()
    left_out: int = 0
    notes: tuple[str, ...] = ()


class FileSource(Source):
    """A source of items in files, each a JSON object or what reads like one.

    A subclass names the files, gives their items in order, and makes turns of each. What cannot be used is
    skipped with the reason of a ValueError.
    item, expected, remedy: what messages call an item, what they expect of it, and what they say to change.
    alone: "what it holds; expected what" for a source that has no tar files; "" for one that may have.
    """

    item: ClassVar[str] = "line"
    expected: ClassVar[str]
    remedy: ClassVar[str] = "correct the file"
    alone: ClassVar[str] = ""

    def __init__(self, setting: SourceSetting) -> None:
        super().__init__(setting)
        self.read_notes: list[str] = []
        """What reading has come upon, for `containers`."""

    @abstractmethod
    def named(self) -> Files:
        """Returns the files of the data set. Raises UserError or FileNotFoundError where one is missing."""

    @abstractmethod
    def items(self, named: Files, data: DataConfig) -> Iterator[Any]:
        """Opens what reading needs, yields the items, and notes in `read_notes` what it has come upon.

        Each item has its `number`, from 1, `where` it lies, for messages, and `entry()`, its fields, which
        raises ValueError.
        """

    def renamed(self, entry: Entry) -> Entry:
        """Returns an item's fields by the names that jaxthd gives them, see Columns."""
        return self.columns.rename(entry)

    @abstractmethod
    def name_of(self, entry: Entry) -> str:
        """Returns the name in an item's key. Raises ValueError."""

    def alternatives_of(self, entry: Entry) -> tuple[Alternative, ...]:
        """Returns the answers of an item that is about preferences, else none. Raises ValueError."""
        return alternatives_of(entry)

    @abstractmethod
    def turns_of(self, entry: Entry, item: Any, data: DataConfig) -> tuple[Turn, ...]:
        """Returns the turns of an item. Raises ValueError."""

    def read(self, data: DataConfig) -> tuple[list[Example], list[Skipped]]:
        """See Source.read. Raises UserError, too, for tar files of a source that has none."""
        title, tars = f"{self.path} ({self.setting.field})", self.setting.tarred_audio
        if tars and self.alone:
            holds, _, expected = self.alone.partition("; ")
            raise UserError(f"{title} {holds}, and {tars} its tar files; {expected}: correct one")
        self.read_notes.clear()
        named, examples, skipped = self.named(), list[Example](), list[Skipped]()
        has_other_names = bool(self.columns)
        for item in self.items(named, data):
            key = f"{item.number}:"
            try:
                entry = item.entry()
                entry = self.renamed(entry) if has_other_names else entry
                key += self.name_of(entry)
                answers = self.alternatives_of(entry)
                turns = self.turns_of(entry, item, data)
                examples.append(Example(key, turns, answers, fields_beside(entry)))
            except ValueError as error:
                skipped.append(Skipped(key, item.where + str(error)))
        if not examples:
            require_columns([self.columns])
            listed = "".join(f"\n  {self.item} {key} {reason}" for key, reason in skipped[:5])
            raise UserError(
                f"{title} has no usable {self.item} ({len(skipped)} skipped); expected {self.expected}: "
                f"{self.remedy}{listed}"
            )
        self.read_notes += [
            f"no {self.item} has {column!r}, which data.columns names: {field} is read by its own name"
            for field, column in self.columns.named.items()
            if column in self.columns.absent
        ]
        return examples, skipped

    def containers(self) -> Containers:
        """Counts the files and tar files of the data set; see Source.containers."""
        named = self.named()
        files = [*named.items, *named.tars]
        parts = [each for each in parts_of(files) if each.missing]
        total = len(files) + named.left_out + sum(len(each.missing) for each in parts)
        return Containers(total, len(files), (*(x.note for x in parts), *named.notes, *self.read_notes))

    def files(self) -> list[Path]:
        """Returns the files of items, tar files and records."""
        named = self.named()
        return [*named.items, *named.tars, *named.records]


class LineSource(FileSource):
    """A source of JSON lines. Keys do not depend on how the lines are divided into files."""

    def items(self, named: Files, data: DataConfig) -> Iterator[Line]:
        """Returns the lines of all files."""
        self.folders = [path.parent for path in named.items]
        """The folder of each file, from which relative paths are taken."""
        return numbered_lines(named.items)

    def existing(self) -> list[Path]:
        """Returns the files that `path` names, with braces. Raises FileNotFoundError where one is missing."""
        files = [as_path(name) for name in expand_braces(self.path)]
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(
                    f"no manifest at {file}; expected a file of {self.expected}: correct {self.setting.field}"
                )
        return files

    def digest(self) -> str:
        """Returns a digest of the lines, decompressed, and of the sizes of tar files."""
        return self._digest(self._blocks())

    def extent(self) -> int | None:
        """Returns the bytes of all lines; None with tar files, which grow with their manifest."""
        return None if self.named().tars else sum(map(len, self._blocks()))

    def likeness(self, digest: str, extent: int | None) -> Likeness:
        """See Source.likeness. A digest of an older jaxthd is of the compressed bytes."""
        as_stored = chain.from_iterable(_blocks(path, compressed=False) for path in self.named().items)
        if digest in (self.digest(), self._digest(as_stored)):
            return "same"
        if extent is None or self.named().tars:
            return "other"
        content = b"".join(self._blocks())
        before, appended = content[:extent], content[extent:]
        # A last line without an end, to which something is appended, is another line now.
        is_whole = not before or before.endswith(b"\n") or appended.startswith((b"\n", b"\r"))
        return "grown" if appended and is_whole and self._digest([before]) == digest else "other"

    def _digest(self, blocks: Iterable[bytes]) -> str:
        """Digests lines, and the sizes of the tar files that they refer to."""
        digest = hashlib.blake2b()
        for block in blocks:
            digest.update(block)
        if tars := self.named().tars:
            digest.update(repr([path.stat().st_size for path in tars]).encode())
        return digest.hexdigest()[:16]

    def _blocks(self) -> Iterator[bytes]:
        """Yields the content of the files, whether they are compressed or not."""
        for path in self.named().items:
            yield from _blocks(path, compressed=path.suffix == ".gz")


def _blocks(path: Path, *, compressed: bool) -> Iterator[bytes]:
    with path.open("rb") as stored, gzip.open(stored) if compressed else stored as file:
        while block := file.read(1 << 20):
            yield block
