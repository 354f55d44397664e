"""Lhotse Shar directories: cuts.*.jsonl(.gz) with recording.*.tar beside them, read in any order.

The lines of cuts are plain JSON and are read without Lhotse, which depends on PyTorch and stops at the first
invalid line.
"""

import re
import reprlib
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.config import DataConfig
from jaxthd.data.example import Channels, Clip, Example, Turn, question, utterance
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.lines import (
    json_list,
    json_object,
    lines_of,
    own_prompt,
    parse,
    read_examples,
    refuse_marked,
    seconds,
    string,
)
from jaxthd.data.sources.preferences import alternatives_of, is_preference
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
) -> tuple[list[Example], list[Skipped]]:
    """Reads a Lhotse Shar directory: every cut becomes an Example or a Skipped, in the order of shards.

    A cut is an utterance. The system turn is its custom `system_prompt`, if any; the user turn is its custom
    `context` or else `prompt`; the assistant turn is the texts of its supervisions, in the order of their
    starts, joined by a space. A custom `chosen` and `rejected`, or `completion` and `label`, are
    alternatives, as in a manifest; the supervisions are then not used. A cut uses its own channel or channels
    of the recording, from its start, for its duration. The key's name is the cut's id. Only the headers of
    tar files are read; recordings are not opened. The other arguments and the errors are those of
    read_manifest.
    Source: lhotse.shar and lhotse.cut (MonoCut, MultiCut).
    """
    shards = shar_shards(folder, setting)
    indexes = index_tars([shard.recording for shard in shards])
    recordings = [_members_of_cuts(index) for index in indexes]
    texts = [_texts(shard) for shard in shards]

    def turns(cut: dict[str, Any], shard: int) -> tuple[Turn, ...]:
        name = string(cut, "id")
        refuse_marked(cut)
        custom = json_object(cut.get("custom") or {}, "custom") | texts[shard].get(name, {})
        prompt_of_cut, system = own_prompt(custom, prompt, placeholder)
        clip = _range(cut, indexes[shard].clip(recordings[shard].get(name, name)))
        text = "" if is_preference(custom) or (prompts and not cut.get("supervisions")) else _text(cut)
        if is_preference(custom) or (prompts and not text):
            return question(clip, prompt_of_cut, placeholder, system)
        return utterance(clip, text, prompt_of_cut, placeholder, system)

    return read_examples(
        [shard.cuts for shard in shards],
        lambda cut: string(cut, "id"),
        turns,
        lambda cut: alternatives_of(json_object(cut.get("custom") or {}, "custom")),
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


def _range(cut: dict[str, Any], clip: Clip) -> Clip:
    kind, duration = cut.get("type", "MonoCut"), seconds(cut, "duration")
    if kind not in ("MonoCut", "MultiCut"):
        raise ValueError(f"type is {reprlib.repr(kind)}; expected a MonoCut or a MultiCut, of one recording")
    if not duration:
        raise ValueError(f"duration is {duration}; expected more than 0 seconds")
    if clip.member and clip.member.name.endswith(".nodata"):
        raise ValueError("the cut has no recording")
    return replace(clip, offset=seconds(cut, "start") or 0.0, duration=duration, channels=_channels(cut))


def _channels(cut: dict[str, Any]) -> Channels | None:
    """The channels that a cut uses; None: all."""
    chosen, recording = cut.get("channel"), cut.get("recording")
    if chosen is None or recording is None:
        return None
    chosen_ids = _numbers(chosen if isinstance(chosen, list) else [chosen], "channel")
    recording = json_object(recording, "recording")
    there = _numbers(recording.get("channel_ids") or _sourced(recording), "channels of the recording")
    if not set(chosen_ids) <= set(there):
        raise ValueError(f"channel is {chosen}; expected channels of its recording, {there}")
    if set(chosen_ids) == set(there):
        return None
    return Channels(tuple(map(there.index, chosen_ids)), len(there))


def _sourced(recording: dict[str, Any]) -> list[Any]:
    """The channels of all sources, for a recording that does not list its channels."""
    sources = (json_object(source, "a source") for source in json_list(recording.get("sources"), "sources"))
    return [channel for source in sources for channel in json_list(source.get("channels"), "channels")]


def _numbers(value: Any, what: str) -> list[int]:
    numbers = json_list(value, what)
    if not all(type(number) is int for number in numbers):
        raise ValueError(f"{what} is {reprlib.repr(value)}; expected numbers of channels")
    return numbers


def _text(cut: dict[str, Any]) -> str:
    supervisions = cut.get("supervisions")
    spoken = [json_object(item, "a supervision") for item in json_list(supervisions, "supervisions")]
    spoken = [supervision for supervision in spoken if supervision.get("text") is not None]
    return " ".join(text for text in (string(s, "text") for s in sorted(spoken, key=_start)) if text.strip())


def _start(supervision: dict[str, Any]) -> int | float:
    """Seconds from the start of the cut; negative if the supervision began before it."""
    start = supervision.get("start", 0.0)
    if isinstance(start, bool) or not isinstance(start, int | float):
        raise ValueError(f"start of a supervision is {reprlib.repr(start)}; expected a number of seconds")
    return start
