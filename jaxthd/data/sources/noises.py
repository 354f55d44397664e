"""Recordings that augmentation draws from, a line of a manifest each: noises, impulse responses of rooms."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from jaxthd.config import AugmentConfig, DataConfig
from jaxthd.data.audio.augment import Augmentation
from jaxthd.data.audio.recordings import AudioError, recording_length
from jaxthd.data.example import Alternative, Channels, Clip, Turn
from jaxthd.data.skipped import Skipped
from jaxthd.data.sources.lines import Entry, Line, string
from jaxthd.data.sources.recordings import clip_of, in_folder
from jaxthd.data.sources.source import Files, LineSource, SourceSetting
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
    del identity["shares"]  # data positions hold each by itself
    identity |= {f"{change}_probability": share for change, share in config.probabilities.items()}
    for kind, clips in found.items():
        path, setting = getattr(config, f"{kind}_manifest"), f"data.augment.{kind}_manifest"
        if path:
            most = LONGEST_ROOM if kind == "room" else None
            read, unusable = read_recordings(path, setting, most_seconds=most)
            clips += read
            skipped[path] = unusable
            source = RecordingSource(SourceSetting(path, setting))
            identity[f"{kind}_manifest"] = source.digest()
            print(f"{path} ({setting}): {len(read):,} recordings, {len(unusable):,} skipped")
            for note in source.containers().notes:
                print(f"{path} ({setting}) has {note}")
    return AugmentationData(Augmentation(config, found["noise"], found["room"]), skipped, identity)


class RecordingSource(LineSource):
    """A manifest of recordings alone.

    Lines have audio_filepath and may have offset and duration; other fields are ignored.
    """

    expected = "recordings, a line each with audio_filepath"

    def named(self) -> Files:
        """Returns the manifests. Raises FileNotFoundError where one is missing."""
        return Files(self.existing())

    def turns_of(self, entry: Entry, item: Line, data: DataConfig) -> tuple[Turn, ...]:
        """Returns one turn with the recording alone. Raises ValueError."""
        return (Turn("user", (clip_of(entry, "audio_filepath", in_folder(self.folders[item.file])),)),)

    def name_of(self, entry: Entry) -> str:
        """Returns the recording's path. Raises ValueError."""
        return string(entry, "audio_filepath")

    def alternatives_of(self, entry: Entry) -> tuple[Alternative, ...]:
        """Returns no answers for any line."""
        return ()


def read_recordings(
    path: str, setting: str, *, most_seconds: float | None = None
) -> tuple[list[Clip], list[Skipped]]:
    """The recordings of a manifest, with their durations, and what cannot be used.

    Files are opened for their durations. most_seconds: for impulse responses, of which the first channel
    alone is used.
    """
    examples, skipped = RecordingSource(SourceSetting(path, setting)).read(DataConfig())
    with ThreadPoolExecutor(16) as threads:
        judged = list(threads.map(lambda example: _measured(example.clips[0], most_seconds), examples))
    clips = [clip for clip in judged if isinstance(clip, Clip)]
    unusable = [Skipped(x.key, why) for x, why in zip(examples, judged, strict=True) if isinstance(why, str)]
    skipped = sorted([*skipped, *unusable], key=lambda item: int(item.key.partition(":")[0]))
    if not clips:
        raise UserError(
            f"{path} ({setting}) holds no recording that can be used ({len(skipped)} skipped, "
            f"{skipped[0].key} first: {skipped[0].reason}); expected some that decode, and are not too "
            "short or too long: correct the file"
        )
    return clips, skipped


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
