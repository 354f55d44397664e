"""Recordings that augmentation draws from, a line of a manifest each: noises, impulse responses of rooms."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from jaxthd.config import AugmentConfig
from jaxthd.data.audio.augment import Augmentation
from jaxthd.data.audio.recordings import AudioError, recording_length
from jaxthd.data.example import Channels, Clip
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.containers import parts_of
from jaxthd.data.sources.lines import expand_braces, numbered_lines, parse, string
from jaxthd.data.sources.recordings import clip_of, in_folder
from jaxthd.data.sources.source import LineFiles
from jaxthd.errors import UserError

SHORTEST, LONGEST_ROOM = 0.05, 10.0
"""Seconds of the shortest recording that is used, and of the longest impulse response."""


class AugmentationData(NamedTuple):
    """The augmentation of a run.

    skipped: what cannot be used, by manifest. identity: what it depends on, as JSON decodes it, wherever the
    manifests lie.
    """

    augmentation: Augmentation
    skipped: dict[str, list[Skipped]]
    identity: dict[str, Any]


def read_augmentation(config: AugmentConfig) -> AugmentationData:
    """Reads the manifests of data.augment, and the headers of their recordings.

    Raises UserError for a manifest that is missing, empty or damaged, or holds no usable recording.
    """
    found: dict[str, list[Clip]] = {"noise": [], "room": []}
    skipped, identity = {}, json.loads(json.dumps(asdict(config)))
    for kind, clips in found.items():
        path, setting = getattr(config, f"{kind}_manifest"), f"data.augment.{kind}_manifest"
        if path:
            most = LONGEST_ROOM if kind == "room" else None
            read, unusable = read_recordings(path, setting, most_seconds=most)
            clips += read
            skipped[path] = unusable
            identity[f"{kind}_manifest"] = LineFiles(list(map(Path, expand_braces(path)))).digest()
            print(f"{path} ({setting}): {len(read):,} recordings, {len(unusable):,} skipped")
            for parts in parts_of(map(Path, expand_braces(path))):
                if parts.missing:
                    print(f"{path} ({setting}) has {parts.note}")
    return AugmentationData(Augmentation(config, found["noise"], found["room"]), skipped, identity)


def read_recordings(
    path: str, setting: str, *, most_seconds: float | None = None
) -> tuple[list[Clip], list[Skipped]]:
    """The recordings of a manifest, with their durations, and what cannot be used.

    Lines have audio_filepath and may have offset and duration; other fields are ignored. Files are opened for
    their durations. most_seconds: for impulse responses, of which the first channel alone is used.
    """
    files = [Path(name) for name in expand_braces(path)]
    missing = [str(file) for file in files if not file.is_file()]
    if missing:
        raise UserError(f"there is no {missing[0]}; expected a manifest of recordings: correct {setting}")
    named: list[tuple[str, Clip]] = []
    skipped: list[Skipped] = []
    for number, file, where, line in numbered_lines(files):
        key = f"{number}:"
        try:
            entry = parse(line)
            key += string(entry, "audio_filepath")
            named.append((key, clip_of(entry, "audio_filepath", in_folder(files[file].parent))))
        except ValueError as error:
            skipped.append(Skipped(key, where + str(error)))
    with ThreadPoolExecutor(16) as threads:
        judged = list(threads.map(lambda item: _measured(item[1], most_seconds), named))
    clips = [clip for clip in judged if isinstance(clip, Clip)]
    skipped += [
        Skipped(key, why) for (key, _), why in zip(named, judged, strict=True) if isinstance(why, str)
    ]
    if not clips:
        raise UserError(
            f"{path} ({setting}) holds no recording that can be used ({len(skipped)} skipped"
            f"{_first(skipped)}); expected lines with audio_filepath: correct the file"
        )
    return clips, sorted(skipped, key=lambda item: int(item.key.partition(":")[0]))


def _first(skipped: Sequence[Skipped]) -> str:
    return f", {skipped[0].key} first: {skipped[0].reason}" if skipped else ""


def _measured(clip: Clip, most_seconds: float | None) -> Clip | str:
    """The clip with its duration, or why it cannot be used."""
    try:
        frames, rate, channels = recording_length(clip.path)
    except AudioError as error:
        return str(error)
    there = frames / rate - clip.offset
    seconds = there if clip.duration is None else min(clip.duration, there)
    if not SHORTEST <= seconds <= (most_seconds or 1e9):
        bounds = f"at least {SHORTEST}" if most_seconds is None else f"{SHORTEST} to {most_seconds:g}"
        return f"{clip.path}: {seconds:.3f} s from offset {clip.offset} s; expected {bounds} s"
    first = Channels((0,), channels) if most_seconds is not None and channels > 1 else None
    return replace(clip, duration=seconds, channels=first)
