"""Lhotse cuts: lines of a manifest cuts.jsonl(.gz) with recordings in files, and of a Shar directory.

The lines are plain JSON and are read without Lhotse, which depends on PyTorch and stops at the first invalid
line.
"""

import reprlib
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from jaxthd.config import DataConfig
from jaxthd.data.example import Alternative, Channels, Clip, Turn, question, utterance
from jaxthd.data.sources.conversations import own_prompt, refuse_tags
from jaxthd.data.sources.lines import (
    READ,
    Entry,
    Line,
    expand_braces,
    json_list,
    json_object,
    lines_of,
    parse,
    refuse_marked,
    seconds,
    string,
)
from jaxthd.data.sources.preferences import alternatives_of, is_preference
from jaxthd.data.sources.recordings import in_folder, other_recordings
from jaxthd.data.sources.source import Files, LineSource
from jaxthd.files.remote_path import as_path

KINDS = ("MonoCut", "MultiCut", "MixedCut", "PaddingCut")
_OF_LHOTSE = frozenset("id start duration channel supervisions features recording custom type".split())  # noqa: SIM905
"""Fields that every cut may have."""
_OF_CUTS = READ | frozenset("start recording supervisions channel features".split())  # noqa: SIM905
LOOKED_AT = 20
"""Lines of a file that are looked at to tell cuts from a manifest's lines."""


class CutLines(LineSource):
    """A source of Lhotse cuts, one a line.

    data.columns names fields of a cut's `custom` and of its supervisions, their own `custom` included: for
    `audio` a recording in the cut's `custom`, for `text` a field of each supervision, or one of the cut's
    `custom` as the whole text.
    """

    def renamed(self, entry: Entry) -> Entry:
        """Returns a cut with `text` in its supervisions and the other fields of columns in its `custom`."""
        columns = self.columns
        if not columns:
            return entry
        cut = {
            name: value for name, value in entry.items() if name in _OF_LHOTSE or name not in columns.dropped
        }
        custom = _object(cut.get("custom"))
        own = columns.rename(custom)
        if isinstance(own.get("audio"), dict) and columns.named.get("audio") in custom:
            cut |= _with_recording(cut, own.pop("audio"), custom, columns.named["audio"])
        supervisions = cut.get("supervisions")
        if columns.named.get("text") in custom and own.get("text") is not None:
            cut["supervisions"] = [{"start": 0.0, "duration": cut.get("duration"), "text": own["text"]}]
        elif isinstance(supervisions, list):
            cut["supervisions"] = list(map(self._spoken, supervisions))
        return cut | ({"custom": own} if isinstance(cut.get("custom"), dict) else {})

    def _spoken(self, supervision: Any) -> Any:
        """A supervision with the text that columns name, of itself or of its `custom`."""
        if not isinstance(supervision, dict):
            return supervision
        fields = _object(supervision.get("custom")) | supervision
        return supervision | {"text": self.columns.rename(fields).get("text")}

    def name_of(self, entry: Entry) -> str:
        """Returns the cut's id."""
        return string(entry, "id")

    def alternatives_of(self, entry: Entry) -> tuple[Alternative, ...]:
        """Returns the answers in the cut's `custom`. Raises ValueError."""
        return alternatives_of(json_object(entry.get("custom") or {}, "custom"))

    def turns_of_cut(
        self, cut: Entry, recording: Clip, data: DataConfig, more: Entry | None = None
    ) -> tuple[Turn, ...]:
        """The turns of a cut. recording: the whole of it. more: fields that replace those of `custom`.

        A cut is an utterance. The system turn is its custom `system_prompt`, if any; the user turn is its
        custom `context` or else data.prompt; the assistant turn is the texts of its supervisions, in the
        order of their starts, joined by a space. A custom `chosen` and `rejected`, or `completion` and
        `label`, are alternatives, as in a manifest; the supervisions are then not used. A cut uses its own
        channel or channels of the recording, from its start, for its duration. Without such texts it is a
        prompt alone, where prompts are wanted.
        Raises ValueError for a cut that cannot be used.
        Source: lhotse.cut (MonoCut, MultiCut).
        """
        placeholder, prompts = data.audio_placeholder, self.setting.prompts
        custom = json_object(cut.get("custom") or {}, "custom") | (more or {})
        prompt_of_cut, system = own_prompt(custom, data.prompt, placeholder)
        clip = _range(cut, recording)
        turns = question(clip, prompt_of_cut, placeholder, system)
        for turn in turns:
            refuse_tags(turn.parts)
        if not (is_preference(custom) or (prompts and not (cut.get("supervisions") and _text(cut)))):
            turns = utterance(clip, _text(cut), prompt_of_cut, placeholder, system)
        self.unread_recordings.update(_other_recordings(cut))
        return turns


class CutSource(CutLines):
    """A manifest of Lhotse cuts whose recordings are files: one, or shards written with braces.

    A cut's recording has sources of type file; a relative path is taken from the manifest's folder, or from
    the working directory if there is such a file. What is not read is skipped: cuts that are mixed or padded,
    or have features alone; recordings with transforms, of other types, and with a cut's channels in several
    files, and a supervision with text that lies outside of the cut.
    """

    expected = "one cut a line, with a recording and supervisions that have text"
    alone = "is of cuts; expected recordings in files, or a Shar directory"

    @staticmethod
    def recognises(path: str) -> bool:
        """Whether one of the first lines is a cut."""
        if not path.endswith((".jsonl", ".jsonl.gz")):
            return False
        file = as_path(expand_braces(path)[0])
        try:
            return any(_is_cut(line) for line in islice(lines_of(file), LOOKED_AT))
        except (ValueError, OSError):
            return False

    def named(self) -> Files:
        """Returns the files of cuts. Raises FileNotFoundError where one is missing."""
        return Files(self.existing())

    def turns_of(self, entry: Entry, item: Line, data: DataConfig) -> tuple[Turn, ...]:
        """Returns the turns of a cut, with its range of the recording's file. Raises ValueError."""
        refuse_marked(entry)
        path, channels = _file_of(entry)
        named, folder = as_path(path), self.folders[item.file]
        clip = Clip(named) if _is_here(named, folder) else in_folder(folder)(path)
        return self.turns_of_cut(entry | channels, clip, data)


def _object(value: Any) -> Entry:
    """The value where it is an object; else one without fields."""
    return value if isinstance(value, dict) else {}


def _with_recording(cut: Entry, recording: Entry, custom: Entry, name: str) -> Entry:
    """The fields of a cut that is of its custom recording: the same range of it, or all where it is not
    aligned. Source: lhotse.custom (load_custom)."""
    found = {"recording": recording, "channel": custom.get(f"{name}_channel_selector")}
    is_aligned = not custom.get(f"{name}_unaligned")
    return found if is_aligned else found | {"start": 0.0, "duration": recording.get("duration")}


def _is_cut(line: bytes) -> bool:
    try:
        entry = parse(line)
    except ValueError:
        return False
    return entry.get("type") in KINDS and not {"audio_filepath", "conversations", "messages"} & set(entry)


def _is_here(path: Path, folder: Path) -> bool:
    """Whether a relative path is that of a file from the working directory and of none from the folder."""
    try:
        return not path.is_absolute() and path.is_file() and not (folder / path).is_file()
    except OSError:  # a name too long; the reader says so
        return False


def _require_one_recording(cut: dict[str, Any]) -> None:
    kind = cut.get("type", "MonoCut")
    if kind not in ("MonoCut", "MultiCut"):
        raise ValueError(f"type is {reprlib.repr(kind)}; expected a MonoCut or a MultiCut, of one recording")


def _file_of(cut: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The file of a cut's recording, and the fields of the cut that say which of the file's channels it has.

    Raises ValueError for a recording that is not read.
    """
    _require_one_recording(cut)
    if cut.get("recording") is None:
        found = "features alone" if cut.get("features") is not None else "no recording"
        if others := _other_recordings(cut):
            found += f", but {others[0]}"
        raise ValueError(f"the cut has {found}; expected a recording in a file")
    recording = json_object(cut["recording"], "recording")
    if recording.get("transforms"):
        raise ValueError(
            f"transforms is {reprlib.repr(recording['transforms'])}; expected a recording as its file has "
            "it: drop them (data.augment has speed and others), or save the cuts with their audio as Shar"
        )
    sources = [json_object(x, "a source") for x in json_list(recording.get("sources"), "sources")]
    chosen = cut.get("channel")
    wanted = (
        set(_numbers(chosen if isinstance(chosen, list) else [chosen], "channel"))
        if chosen is not None
        else set()
    )
    held = [set(_numbers(source.get("channels"), "channels of a source")) for source in sources]
    fitting = [n for n, channels in enumerate(held) if wanted <= channels]
    if len(sources) > 1 and (not wanted or len(fitting) != 1):
        raise ValueError(f"channel is {chosen} of {len(sources)} files; expected channels of one file")
    source = sources[fitting[0] if fitting else 0]
    if source.get("type") != "file":
        kind = reprlib.repr(source.get("type"))
        raise ValueError(
            f"its recording is of type {kind}; expected file: save the cuts with their audio as Shar"
        )
    path = string(source, "source")
    if not path:
        raise ValueError("source is empty; expected the path of a recording")
    return path, {"recording": {"channel_ids": source["channels"]}}


def _other_recordings(cut: dict[str, Any]) -> tuple[str, ...]:
    """The fields of a cut, `custom` included, that name recordings and are not read."""
    return other_recordings(cut, _OF_CUTS)


def _range(cut: dict[str, Any], clip: Clip) -> Clip:
    _require_one_recording(cut)
    duration = seconds(cut, "duration")
    if not duration:
        raise ValueError(f"duration is {duration}; expected more than 0 seconds")
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
    """The texts of a cut's supervisions, in the order of their starts.

    One that begins before the cut or ends after it is used whole, as Lhotse keeps it. Raises ValueError for
    one that lies outside of the cut altogether, since its text is not in the recording.
    """
    supervisions = cut.get("supervisions")
    spoken = [json_object(item, "a supervision") for item in json_list(supervisions, "supervisions")]
    spoken = [s for s in spoken if s.get("text") is not None and string(s, "text").strip()]
    length_of_cut = seconds(cut, "duration") or 0.0
    for supervision in spoken:
        start, length = _start(supervision), supervision.get("duration")
        ends = start + length if isinstance(length, int | float) and abs(length) < 1e9 else start
        if start >= length_of_cut or (start < 0 and ends <= 0):
            raise ValueError(
                f"a supervision lies from {start:g} s to {ends:g} s, outside of the cut, which has "
                f"{length_of_cut:g} s; expected it inside, as its text is not in the recording: drop it, or "
                "correct its start, which counts from the cut's"
            )
    return " ".join(string(s, "text") for s in sorted(spoken, key=_start))


def _start(supervision: dict[str, Any]) -> int | float:
    """Seconds from the start of the cut; negative if the supervision began before it."""
    start = supervision.get("start", 0.0)
    if isinstance(start, bool) or not isinstance(start, int | float) or not abs(start) < 1e9:
        raise ValueError(f"start of a supervision is {reprlib.repr(start)}; expected a number of seconds")
    return start
