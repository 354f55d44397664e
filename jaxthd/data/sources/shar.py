"""Lhotse Shar directories: cuts.*.jsonl(.gz) with recording.*.tar beside them, read in any order.

The lines of cuts are plain JSON and are read without Lhotse, which depends on PyTorch and stops at the first
invalid line.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.config import DataConfig
from jaxthd.data.example import Turn
from jaxthd.data.sources.containers import damaged, refuse_unread, require_all_parts
from jaxthd.data.sources.cuts import CutLines
from jaxthd.data.sources.lines import (
    Entry,
    Line,
    json_object,
    numbered_lines,
    parse,
    refuse_marked,
    string,
)
from jaxthd.data.sources.source import Files
from jaxthd.data.sources.tarred import TarIndex, index_tars
from jaxthd.errors import UserError
from jaxthd.files.remote_path import as_path

TEXTS = ("context", "system_prompt")
"""Fields of a cut that may be in separate files beside the cuts, under the names that data.columns gives."""


INDEX = "shar_index.json"
"""A file that lists the shards, as some programs write it: {"fields": {"cuts": [path, ...], ...}}."""
_NAME = re.compile(r"([^.]+)((?:\..+)?)\.(jsonl|jsonl\.gz|tar)")


class Names(NamedTuple):
    """The names that files of recordings and of TEXTS begin with, before the shard's number."""

    recording: str = "recording"
    texts: tuple[str, ...] = TEXTS


class Shard(NamedTuple):
    """The files of one shard. texts: the files of those fields of Names.texts that have one, by field."""

    cuts: Path
    recording: Path
    texts: dict[str, Path]

    @property
    def files(self) -> list[Path]:
        """Returns all files of the shard, cuts first."""
        return [self.cuts, self.recording, *self.texts.values()]


def shar_shards(folder: Path, setting: str, names: Names = Names()) -> list[Shard]:  # noqa: B008 - a tuple
    """The shards of a directory, by name.

    Raises UserError if it has none, or if one is missing in whole or in part: where numbers, fields or its
    index name what is not there.
    """
    found: dict[str, dict[str, Path]] = {}
    is_tar = {names.recording: {True}, "cuts": {False}} | {name: {False} for name in names.texts}
    read = "|".join(map(re.escape, is_tar))
    refuse_unread(folder, re.compile(rf"({read})(\..+)?\.(jsonl|jsonl\.gz|tar)"), setting)
    for path in sorted(folder.iterdir()):
        named = _NAME.fullmatch(path.name)
        if named and (named[3] == "tar") in is_tar.get(named[1], {True, False}):
            paths = found.setdefault(named[2], {})
            if named[1] in paths:
                raise UserError(
                    f"{paths[named[1]]} and {path} are one shard; expected one of them: remove one"
                )
            paths[named[1]] = path
    if not any("cuts" in paths for paths in found.values()):
        raise UserError(
            f"{folder} holds no cuts.*.jsonl or cuts.*.jsonl.gz; expected a Lhotse Shar directory, or a "
            f"manifest instead of a folder: correct {setting}"
        )
    _require_whole(found, setting, names)
    shards = [
        Shard(paths["cuts"], paths[names.recording], {x: paths[x] for x in names.texts if x in paths})
        for _, paths in sorted(found.items())
        if "cuts" in paths
    ]
    require_all_parts([shard.cuts for shard in shards], f"{folder} ({setting})", "number these anew")
    _require_listed(folder, shards, setting, names)
    return shards


def _require_whole(found: dict[str, dict[str, Path]], setting: str, names: Names) -> None:
    """Raises UserError for a shard without cuts or recordings, or without a text field that others have.

    found: the files of a directory by their numbers and fields. A field without cuts counts only with a
    number, or as recordings: other tar files may lie in the directory.
    """
    texts = {name: paths[name] for paths in found.values() for name in paths if name in names.texts}
    audio = names.recording
    for suffix, paths in sorted(found.items()):
        if "cuts" not in paths:
            if audio in paths or re.match(r"\.\d+", suffix):
                path = paths.get(audio) or next(iter(paths.values()))
                raise UserError(
                    f"{path} has no cuts{suffix}.jsonl.gz beside it; expected the cuts of each shard "
                    f"({setting}): fetch them, or take the file away"
                )
            continue
        if audio not in paths:
            raise UserError(
                f"{paths['cuts']} has no {audio}{suffix}.tar beside it; expected the audio of the cuts "
                f"({setting}): write the Shar directory with the field {audio}"
            )
        if missing := sorted(texts.keys() - paths.keys()):
            raise UserError(
                f"{paths['cuts']} has no {missing[0]}{suffix}.jsonl.gz beside it, and other shards have one "
                f"({texts[missing[0]].name}); expected the field of all shards, as Lhotse does, or of none "
                f"({setting}): fetch or write it, or move the shard to a directory of its own"
            )


def _require_listed(folder: Path, shards: Sequence[Shard], setting: str, names: Names) -> None:
    """Raises UserError where the directory's index lists files that are not those of the shards."""
    index = folder / INDEX
    if not index.is_file():
        return
    try:
        fields = json_object(parse(index.read_bytes())["fields"], "fields")
        listed = {
            name: [folder / path for path in fields.get(name, [])]
            for name in ("cuts", names.recording, *names.texts)
        }
    except (ValueError, LookupError, TypeError) as error:
        raise damaged(index, "", f"it is no index of shards ({error!r})") from error
    there = {path.resolve() for shard in shards for path in shard.files}
    for paths in listed.values():
        absent = [path for path in paths if path.resolve() not in there]
        if absent:
            raise UserError(
                f"{index} lists {len(paths)} files such as {paths[0].name}, of which {len(absent)} are not "
                f"among the directory's shards, {absent[0]} first; expected all of them ({setting}): fetch "
                "them, or name the directories in which they lie"
            )


class SharSource(CutLines):
    """A Lhotse Shar directory. The key's name is the cut's id.

    Only the headers of tar files are read; recordings are not opened. Raises as shar_shards does.
    Source: lhotse.shar.
    """

    expected = "one cut a line, with supervisions that have text"
    alone = "is a folder; expected a manifest with tar files, or a Shar directory alone, which has its own"

    @staticmethod
    def recognises(path: str) -> bool:
        """Whether a path is a folder."""
        return as_path(path).is_dir()

    def named(self) -> Files:
        """Returns the files of all shards, and the index. Raises as shar_shards does."""
        shards, index = self._shards(), as_path(self.path) / INDEX
        number = re.fullmatch(r"\D*\.(\d+)\D*", shards[0].cuts.name)
        begins = f"its shards begin at {shards[0].cuts.name}, not at 0" if number and int(number[1]) else ""
        lines = [path for shard in shards for path in (shard.cuts, *shard.texts.values())]
        recordings = [shard.recording for shard in shards]
        return Files(lines, recordings, [index] * index.is_file(), notes=(begins,) * bool(begins))

    def items(self, named: Files, data: DataConfig) -> Iterator[Line]:
        """Yields the cuts. Notes damage of tar files, and recordings that no cut names."""
        shards = self._shards()
        self._indexes = index_tars([shard.recording for shard in shards])
        self._recordings = [_members_of_cuts(index) for index in self._indexes]
        self._heard: list[set[str]] = [set() for _ in shards]
        self._texts = [_texts(shard) for shard in shards]
        yield from numbered_lines([shard.cuts for shard in shards])
        self.read_notes += [index.note for index in self._indexes if index.note]
        unnamed = [there.keys() - cuts for there, cuts in zip(self._recordings, self._heard, strict=True)]
        if lost := sum(map(len, unnamed)):
            first = next(x.path.name for x, names in zip(self._indexes, unnamed, strict=True) if names)
            self.read_notes.append(f"{lost:,} recordings of tar files are those of no cut, {first} first")

    def turns_of(self, entry: Entry, item: Line, data: DataConfig) -> tuple[Turn, ...]:
        """Returns the turns of a cut, with its recording in the shard's tar file. Raises ValueError."""
        shard, name = item.file, string(entry, "id")
        self._heard[shard].add(name)
        refuse_marked(entry)
        clip = self._indexes[shard].clip(self._recordings[shard].get(name, name))
        if clip.member and clip.member.name.endswith(".nodata"):
            raise ValueError("the cut has no recording")
        return self.turns_of_cut(entry, clip, data, self.columns.rename(self._texts[shard].get(name, {})))

    def _shards(self) -> list[Shard]:
        named = self.columns.named
        names = Names(named.get("audio", "recording"), tuple(named.get(name, name) for name in TEXTS))
        return shar_shards(as_path(self.path), self.setting.field, names)


def _members_of_cuts(index: TarIndex) -> dict[str, str]:
    """The name of each cut's recording, by cut. Metadata members are ignored: the cut has the same data."""
    names = (name for name in index.members if not name.endswith((".json", ".nometa")))
    return {name.rpartition(".")[0]: name for name in names}


def _texts(shard: Shard) -> dict[str, dict[str, Any]]:
    """The fields of each cut that are in separate files, by cut."""
    found: dict[str, dict[str, Any]] = {}
    for field, path in shard.texts.items():
        for line in numbered_lines([path]):
            try:
                entry = parse(line.text)
                if field in entry:
                    found.setdefault(string(entry, "cut_id"), {})[field] = entry[field]
            except ValueError as error:
                raise UserError(
                    f"{path} line {line.number}: {error}; expected a cut_id and {field}: write the file anew"
                ) from error
    return found
