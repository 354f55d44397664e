"""Lhotse Shar directories: cuts.*.jsonl(.gz) with recording.*.tar beside them, read in any order.

The lines of cuts are plain JSON and are read without Lhotse, which depends on PyTorch and stops at the first
invalid line.
"""

import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.config import DataConfig
from jaxthd.data.example import Example, Turn
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.cuts import alternatives_of_cut, name_of_cut, turns_of_cut
from jaxthd.data.sources.lines import lines_of, parse, read_examples, refuse_marked, string
from jaxthd.data.sources.source import Source, digest_of_files
from jaxthd.data.sources.tarred import TarIndex, index_tars
from jaxthd.errors import UserError

TEXTS = ("context", "system_prompt")
"""Fields of a cut that may be in separate files beside the cuts."""


class Shard(NamedTuple):
    """The files of one shard. texts: the files of those fields of TEXTS that have one, by field."""

    cuts: Path
    recording: Path
    texts: dict[str, Path]


def shar_shards(folder: Path, setting: str) -> list[Shard]:
    """The shards of a directory, by name. Raises UserError if it has none, or one without recordings."""
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        named = re.fullmatch(r"([^.]+)((?:\..+)?)\.(jsonl|jsonl\.gz|tar)", path.name)
        if named and (named[3] == "tar") == (named[1] == "recording"):
            paths = found.setdefault(named[2], {})
            if named[1] in paths:
                raise UserError(
                    f"{paths[named[1]]} and {path} are one shard; expected one of them: remove one"
                )
            paths[named[1]] = path
    shards = []
    for suffix, paths in sorted(found.items()):
        if "cuts" in paths:
            if "recording" not in paths:
                raise UserError(
                    f"{paths['cuts']} has no recording{suffix}.tar beside it; expected the audio of the cuts "
                    f"({setting}): write the Shar directory with the field recording"
                )
            texts = {name: paths[name] for name in TEXTS if name in paths}
            shards.append(Shard(paths["cuts"], paths["recording"], texts))
    if not shards:
        raise UserError(
            f"{folder} holds no cuts.*.jsonl or cuts.*.jsonl.gz; expected a Lhotse Shar directory, or a "
            f"manifest instead of a folder: correct {setting}"
        )
    return shards


class SharSource(Source):
    """A Lhotse Shar directory. It reads and raises as read_shar does."""

    reads_columns = False

    @staticmethod
    def recognises(path: str) -> bool:
        return Path(path).is_dir()

    def read(self, data: DataConfig) -> tuple[list[Example], list[Skipped]]:
        setting, tars = self.setting.field, self.setting.tarred_audio
        if tars:
            raise UserError(
                f"{self.path} ({setting}) is a folder, and {tars} its tar files; expected a manifest with "
                "tar files, or a Shar directory alone, which has its own: correct one"
            )
        return read_shar(
            Path(self.path),
            setting,
            prompt=data.prompt,
            placeholder=data.audio_placeholder,
            prompts=self.setting.prompts,
            unread=self.unread_recordings,
        )

    def digest(self) -> str:
        shards = shar_shards(Path(self.path), self.setting.field)
        files = [path for shard in shards for path in (shard.cuts, *shard.texts.values())]
        return digest_of_files(files, [shard.recording for shard in shards])


def read_shar(
    folder: Path,
    setting: str = "data.manifest",
    *,
    prompt: str = "{audio}",
    placeholder: str = "{audio}",
    prompts: bool = False,
    unread: Counter[str] | None = None,
) -> tuple[list[Example], list[Skipped]]:
    """Reads a Lhotse Shar directory: every cut becomes an Example or a Skipped, in the order of shards.

    See turns_of_cut. The key's name is the cut's id. Only the headers of tar files are read; recordings are
    not opened. The other arguments and the errors are those of read_manifest.
    Source: lhotse.shar.
    """
    shards = shar_shards(folder, setting)
    indexes = index_tars([shard.recording for shard in shards])
    recordings = [_members_of_cuts(index) for index in indexes]
    texts = [_texts(shard) for shard in shards]

    def turns(cut: dict[str, Any], shard: int) -> tuple[Turn, ...]:
        name = string(cut, "id")
        refuse_marked(cut)
        clip = indexes[shard].clip(recordings[shard].get(name, name))
        if clip.member and clip.member.name.endswith(".nodata"):
            raise ValueError("the cut has no recording")
        more = texts[shard].get(name, {})
        return turns_of_cut(cut, clip, prompt, placeholder, more, prompts=prompts, unread=unread)

    return read_examples(
        [shard.cuts for shard in shards],
        name_of_cut,
        turns,
        alternatives_of_cut,
        title=f"{folder} ({setting})",
        expected="one cut a line, with supervisions that have text",
    )


def _members_of_cuts(index: TarIndex) -> dict[str, str]:
    """The name of each cut's recording, by cut. Metadata members are ignored: the cut has the same data."""
    names = (name for name in index.members if not name.endswith((".json", ".nometa")))
    return {name.rpartition(".")[0]: name for name in names}


def _texts(shard: Shard) -> dict[str, dict[str, Any]]:
    """The fields of each cut that are in separate files, by cut."""
    found: dict[str, dict[str, Any]] = {}
    for field, path in shard.texts.items():
        read = 0
        try:
            for line in lines_of(path):
                read += 1
                entry = parse(line)
                if field in entry:
                    found.setdefault(string(entry, "cut_id"), {})[field] = entry[field]
        except ValueError as error:
            message = f"{path} line {read}: {error}; expected a cut_id and {field}: write the file anew"
            raise UserError(message) from error
    return found
