"""The interface of data sources. A source reads one data set, named by a setting, into Examples."""

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jaxthd.config import DataConfig
from jaxthd.data.example import Example
from jaxthd.data.skipped import Skipped


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

    @abstractmethod
    def digest(self) -> str:
        """A short text that changes if the items or their order change, but not if the data set is moved.

        A data position saved under another digest is refused. No recording is read.
        """


def digest_of_files(files: Iterable[Path], tars: Sequence[Path]) -> str:
    """A digest of the files' contents, in order, and of the sizes of the tar files that they refer to."""
    digest = hashlib.blake2b()
    for path in files:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    if tars:
        digest.update(repr([path.stat().st_size for path in tars]).encode())
    return digest.hexdigest()[:16]
