"""What a data source is: it reads one data set, as a setting names it, into Examples."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jaxthd.config import DataConfig
from jaxthd.data.example import Example
from jaxthd.data.skipped import Skipped


class SourceSetting(NamedTuple):
    """A data set as the settings name it.

    path: of a file or folder, or whatever the source makes of it. source: the name that stood before it.
    field: of the configuration, that names it; for messages. tarred_audio: its tar files, see
        ManifestSource; "" for none. split: what the data set is read for.
    """

    path: str
    field: str = "data.manifest"
    tarred_audio: str = ""
    split: Literal["training", "validation"] = "training"
    source: str = ""


class Source(ABC):
    """Reads one data set. A new one is a subclass, registered by jaxthd.data.sources.registry.

    path: where it lies, or what else the setting says of it. title: what skipped.jsonl calls it.
    """

    def __init__(self, setting: SourceSetting) -> None:
        self.path, self.setting = setting.path, setting
        self.title = f"{setting.source}:{setting.path}" if setting.source else setting.path

    @staticmethod
    def recognises(path: str) -> bool:
        """Whether this source reads a path that bears no source's name."""
        return False

    @abstractmethod
    def read(self, data: DataConfig) -> tuple[list[Example], list[Skipped]]:
        """The items that can be used and those that cannot, each in the order of the data set.

        Keys are "NUMBER:NAME": the item's number in the data set, a colon, any text; each once, the same
        wherever the data set lies. Recordings are named (Clip) or in memory (Samples); none is decoded here.
        data: its prompt and audio_placeholder say how a recording with its transcript becomes a conversation
            (jaxthd.data.example.utterance).
        Raises UserError for a data set that cannot be read.
        """

    @abstractmethod
    def digest(self) -> str:
        """A short text that changes whenever the items or their order do, and is the same wherever they lie.

        A saved data position is refused for a data set with another digest. No recording is read for it.
        """


def digest_of_files(files: Iterable[Path], tars: Sequence[Path]) -> str:
    """A digest of what the files hold, in order, and of the sizes of the tar files that they refer to."""
    digest = hashlib.blake2b()
    for path in files:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    if tars:
        digest.update(repr([path.stat().st_size for path in tars]).encode())
    return digest.hexdigest()[:16]
