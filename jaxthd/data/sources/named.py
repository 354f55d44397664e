"""Data sets as settings name them: manifests with plain or tarred audio, Lhotse Shar, synthetic speech."""

import hashlib
from pathlib import Path
from typing import NamedTuple

from jaxthd.config import DataConfig
from jaxthd.data.example import Example
from jaxthd.data.faults import Fault
from jaxthd.data.sources.lines import expand_braces
from jaxthd.data.sources.manifest import read_manifest
from jaxthd.data.sources.shar import read_shar, shar_shards
from jaxthd.data.sources.synthetic import synthetic_manifests
from jaxthd.errors import UserError


class Source(NamedTuple):
    """One data set. setting: the field that names it, for messages.

    path: a manifest, its shards in braces, or a Shar directory. tarred_audio: see read_manifest.
    """

    path: str
    tarred_audio: str
    setting: str

    def read(self, data: DataConfig, number: int = 0) -> tuple[list[Example], list[Fault]]:
        """Its usable lines and its faulty ones. number: among several. Raises as read_manifest, read_shar."""
        prompt, placeholder = data.prompt, data.audio_placeholder
        if not self._is_shar:
            return read_manifest(
                self.path,
                self.setting,
                tarred_audio=self.tarred_audio,
                prompt=prompt,
                placeholder=placeholder,
                number=number,
            )
        if self.tarred_audio:
            raise UserError(
                f"{self.path} ({self.setting}) is a folder, and {self.tarred_audio} its tar files; expected "
                "a manifest with tar files, or a Shar directory alone, which has its own: correct one"
            )
        return read_shar(Path(self.path), self.setting, prompt=prompt, placeholder=placeholder, number=number)

    def digest(self) -> str:
        """Of what its lines say, whole and in order, and of the sizes of the tar files that they refer to.

        The same wherever it lies. Reads no recording.
        """
        digest = hashlib.blake2b()
        if self._is_shar:
            shards = shar_shards(Path(self.path), self.setting)
            files = [path for shard in shards for path in (shard.cuts, *shard.texts.values())]
            tars = [shard.recording for shard in shards]
        else:
            files, tars = ([Path(name) for name in expand_braces(x) if name] for x in self[:2])
        for path in files:
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
        if tars:
            digest.update(repr([path.stat().st_size for path in tars]).encode())
        return digest.hexdigest()[:16]

    @property
    def _is_shar(self) -> bool:
        return Path(self.path).is_dir()


def training_sources(data: DataConfig) -> list[Source]:
    """data.manifest with data.tarred_audio. Raises UserError where they are not as many."""
    tars = data.tarred_audio or ("",) * len(data.manifest)
    if len(tars) != len(data.manifest):
        raise UserError(
            f"data.tarred_audio names {len(tars)} tar files for {len(data.manifest)} manifests; expected one "
            'for each manifest ("" for one with plain files), or none: correct data.tarred_audio'
        )
    return [_source(*pair, "data.manifest", 0) for pair in zip(data.manifest, tars, strict=True)]


def validation_sources(data: DataConfig) -> dict[str, Source]:
    """data.validation_manifest's sets by name, with data.validation_tarred_audio. Raises UserError where they
    are not as many.
    """
    sets, tars = data.validation_sets, data.validation_tarred_audio
    tars = (tars,) if isinstance(tars, str) else tars
    tars = ("",) * len(sets) if tars in ((), ("",)) else tars
    if len(tars) != len(sets):
        raise UserError(
            f"data.validation_tarred_audio names {len(tars)} tar files for {len(sets)} validation sets; "
            'expected one for each ("" for one with plain files), or none: correct '
            "data.validation_tarred_audio"
        )
    return {
        each.name: _source(each.path, tar, "data.validation_manifest", 1)
        for each, tar in zip(sets, tars, strict=True)
    }


def _source(manifest: str, tarred_audio: str, setting: str, split: int) -> Source:
    """With "synthetic" made, if need be. split: 0 for training, 1 for validation."""
    path = str(synthetic_manifests()[split]) if manifest == "synthetic" else manifest
    return Source(path, tarred_audio, setting)
