"""Recordings: any file libsndfile reads -> 16 kHz mono samples -> encoder chunks."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import soxr
from jaxtyping import Float32

from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.data.audio.cells import CellError
from jaxthd.data.audio.containers import DURATION_SLACK
from jaxthd.data.audio.decoder import DECODED, UNKNOWN, open_recording
from jaxthd.data.example import Cell, Channels, Clip, Member, Samples
from jaxthd.files.remote_path import as_path

MIN_SAMPLES = 320
"""Fewest samples: two mel frames, since the standard deviation divides by their number less one."""
RATES = range(1_000, 1_000_001)
"""Accepted sampling rates in Hz; others come from damaged headers."""
LOUDEST = 1e6
"""Largest sample accepted in a file of floats. No scale in use exceeds it; float32 features stay finite."""

LEAST_POWER = 1e-4
"""Least power of the channels' mean, as a share of a channel's. Two independent channels have 0.5, a voice in
one of eight 0.125. Below it (-40 dB) are channels in opposite phase whose levels differ by less than 2%."""
HEARD = 1e-6
"""Least mean square of a channel that is heard (-60 dB). Below it lies what a lossy codec leaves of silence,
which may well be in opposite phase: so it was in MP3 ranges of 1,000 samples."""
CANCELLED = (
    "its channels cancel: they are in opposite phase, so their mean is silence; name one of its channels "
    "(a cut's channel), or write the file anew with one of them"
)


class AudioError(ValueError):
    """A recording that cannot be used. The message names the file and the cause."""


class TooLongError(AudioError):
    """A recording that is longer than may be read."""


def load_audio(
    path: str | Path,
    offset: float = 0.0,
    duration: float | None = None,
    most_seconds: float = math.inf,
    member: Member | Cell | None = None,
    channels: Channels | None = None,
) -> Float32[np.ndarray, " samples"]:
    """Reads `duration` seconds from `offset` seconds (None: to the end), as 16 kHz mono in [-1, 1].

    A range equals the same samples of the whole file. Only that range is decoded, and what the codec needs
    before it; formats in which nothing can be sought are decoded from their beginning. It takes no more
    memory than its samples need, whatever length the header claims. Channels are averaged; other rates are
    resampled (soxr, HQ).
    member: the recording inside the tar file or the table `path`; None: the file is the recording. channels:
    those that are averaged; None: all.
    Raises AudioError for a file that is missing, unreadable, or ends before `offset` or more than 0.25 s
    before offset + duration; without a duration, for one whose header does not fit what there is (cut short,
    joined); for more than `most_seconds`; for a rate outside 1 to 1,000 kHz; for samples that are not finite,
    or beyond 1e6; for fewer than 320 of them (two mel frames); for channels that do not match `channels`, or
    that cancel.
    """
    path = as_path(path)
    name = f"{path}: {member.name}" if member else str(path)
    _require_file(path)
    if offset < 0 or (duration is not None and duration <= 0):
        raise AudioError(
            f"{name}: offset {offset} s, duration {duration} s; expected offset >= 0, duration > 0"
        )
    seconds = math.inf if duration is None else duration
    with _readable(name), open_recording(path, member, offset + seconds) as recording:
        file, length = recording.file, recording.length
        rate, start = file.samplerate, round(offset * file.samplerate)
        _require_rate(rate, name)
        if length and length <= offset * rate:
            raise AudioError(f"{name}: offset {offset} s is past the end at {length / rate:.3f} s")
        used = _used_channels(channels, file.channels, name)
        at = recording.skip_to(start)
        if at < start:
            raise AudioError(f"{name}: offset {offset} s is past the end at {at / rate:.3f} s")
        there = UNKNOWN if length is None else max(length - start, 0)
        wanted = round(min(seconds * rate, most_seconds * rate + 1, there))
        samples, cancels = _read_mono(file, wanted, used)
        fault = None
        if duration is None and len(samples) and len(samples) <= most_seconds * rate:
            fault = recording.why_not_whole(start + len(samples), every_byte=True)
    if not len(samples):
        raise AudioError(
            f"{name}: offset {offset} s is past the end"
            if start and length is None
            else f"{name}: no samples; the file is empty or cut short"
        )
    if len(samples) > most_seconds * rate:
        raise TooLongError(f"{name}: {_too_long(most_seconds)}")
    if duration is not None and len(samples) / rate < duration - DURATION_SLACK:
        raise AudioError(
            f"{name}: {len(samples) / rate:.3f} s from offset {offset} s, the manifest says {duration} s; "
            "the file is cut short, or the manifest is of another file"
        )
    if fault:
        raise AudioError(f"{name}: libsndfile cannot read it whole: {fault}")
    if cancels:
        raise AudioError(f"{name}: {CANCELLED}")
    return _resampled(samples, rate, name)


def _too_long(most_seconds: float) -> str:
    holds = f"more than {most_seconds} s, which is all that data.audio_capacity holds"
    return f"{holds}: raise that, or divide the recording"


class RecordingLength(NamedTuple):
    """frames: samples of one channel. rate: in Hz."""

    frames: int
    rate: int
    channels: int

    @property
    def seconds(self) -> float:
        """Returns the seconds from the first sample to the last."""
        return self.frames / self.rate


def recording_length(path: Path, member: Member | Cell | None = None) -> RecordingLength:
    """Returns the length of what load_audio reads without a duration.

    Reads headers alone where these can be trusted, and the file's end. Reads the headers of all frames of an
    MP3 file of up to 1 MB, and of one whose Xing or Info header does not fit its size. Decodes MP3 without
    such a header, and FLAC whose last frame is not recognised.
    Raises AudioError as load_audio does for a file that is missing, unreadable, empty, or cut short.
    """
    name = f"{path}: {member.name}" if member else str(path)
    _require_file(path)
    with _readable(name), open_recording(path, member, every_byte=False) as recording:
        file = recording.file
        _require_rate(file.samplerate, name)
        frames = recording.count_frames()
        fault = recording.why_not_whole(frames, every_byte=False) if frames else "it has no samples"
        if fault:
            raise AudioError(f"{name}: libsndfile cannot read it whole: {fault}")
        return RecordingLength(frames, file.samplerate, file.channels)


def clip_seconds(clip: Clip | Samples, opened: bool) -> float | str:
    """Returns the seconds of a recording from its offset on, or why it cannot be read.

    opened: whether its header is read. Otherwise its file is looked up: the seconds are those that the data
    set gives, or 0.
    """
    if isinstance(clip, Samples):
        return clip.duration
    try:
        if opened:
            there = recording_length(clip.path, clip.member).seconds - clip.offset
            return max(there, 0.0) if clip.duration is None else clip.duration
        if clip.member is None and not clip.path.is_file():
            return f"{clip.path}: no such file"
    except (ValueError, OSError) as error:
        return str(error)
    return clip.duration or 0.0


def _require_file(path: Path) -> None:
    """Raises AudioError if there is no such file."""
    try:
        exists = path.is_file()
    except OSError as error:  # a name too long, a folder without permission
        raise AudioError(f"{path}: cannot be looked up ({error}); correct its path") from error
    if not exists:
        raise AudioError(f"{path}: no such file; correct its path")


def _require_rate(rate: int, name: str) -> None:
    if rate not in RATES:
        raise AudioError(f"{name}: {rate} samples a second; expected {RATES[0]} to {RATES[-1]}")


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """Turns what reading a file raises into AudioError. name: the recording's, for messages."""
    try:
        yield
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        # A file without a header, such as .raw, raises TypeError: its rate would have to be given.
        raise AudioError(f"{name}: libsndfile cannot read it ({error})") from error
    except CellError as error:
        raise AudioError(f"{name}: {error}") from error


def from_samples(found: Samples, most_seconds: float = math.inf) -> Float32[np.ndarray, " samples"]:
    """Returns a recording in memory in the form that load_audio returns.

    Raises AudioError as load_audio does, and for samples that are not floating-point numbers or have more
    than two dims.
    """
    shape, kind = found.samples.shape, found.samples.dtype
    if found.samples.ndim > 2 or not shape[0] or kind.kind != "f":
        raise AudioError(
            f"samples of shape {shape} and type {kind}; expected floating-point numbers in [-1, 1], of shape "
            "[samples] or [samples, channels]"
        )
    if found.rate not in RATES:
        raise AudioError(f"{found.rate} samples a second; expected {RATES[0]} to {RATES[-1]}")
    if shape[0] > most_seconds * found.rate:
        raise TooLongError(_too_long(most_seconds))
    with np.errstate(over="ignore", invalid="ignore"):  # not finite: checked below
        mono, powers = _averaged(found.samples.astype(np.float32).reshape(shape[0], -1))
    if _cancels(np.array(powers), len(mono)):
        raise AudioError(f"samples: {CANCELLED}")
    return _resampled(mono, found.rate, "samples")


def _resampled(samples: np.ndarray, rate: int, name: str) -> Float32[np.ndarray, " samples"]:
    """Checks the samples and resamples them to 16 kHz. name: the recording's, for messages."""
    if not np.isfinite(samples).all():
        raise AudioError(f"{name}: {int((~np.isfinite(samples)).sum())} samples are not finite")
    if np.abs(samples).max() > LOUDEST:
        raise AudioError(f"{name}: samples as large as {np.abs(samples).max():.3g}; expected -1 to 1")
    if rate != SAMPLE_RATE:
        samples = soxr.resample(samples, rate, SAMPLE_RATE)
    if len(samples) < MIN_SAMPLES:
        raise AudioError(
            f"{name}: too short, {len(samples)} samples at 16 kHz; expected at least {MIN_SAMPLES}"
        )
    return samples


def _used_channels(channels: Channels | None, there: int, name: str) -> slice | list[int]:
    """Returns the indices of the channels to average."""
    if channels is None or there == len(channels.used):
        return slice(None)
    if there != channels.total:
        raise AudioError(
            f"{name}: {there} channels; expected {channels.total}, as its recording says, or the "
            f"{len(channels.used)} that its cut uses"
        )
    return list(channels.used)


def _read_mono(
    file: soundfile.SoundFile, wanted: int, used: slice | list[int]
) -> tuple[Float32[np.ndarray, " samples"], bool]:
    """Reads up to `wanted` samples from the file's position and averages the channels.

    It reads in blocks of 4 MB, since a header may claim any number of samples. Returns the samples, and
    whether the channels cancel (see CANCELLED).
    """
    block = max(1, DECODED // file.channels)
    blocks, powers = [np.zeros(0, np.float32)], np.zeros(2)
    while wanted > 0:
        channels = file.read(min(block, wanted), dtype="float32", always_2d=True)
        if not len(channels):
            break
        with np.errstate(over="ignore", invalid="ignore"):  # not finite: the caller checks
            mono, power = _averaged(channels[:, used])
            powers += power
        blocks.append(mono)
        wanted -= len(channels)
    samples = np.concatenate(blocks)
    return samples, _cancels(powers, len(samples))


def _averaged(channels: Float32[np.ndarray, "samples channels"]) -> tuple[np.ndarray, tuple[float, float]]:
    """Averages channels. Returns with it the sums of squares of the mean, and of a channel on average."""
    mono = channels.mean(axis=1, dtype=np.float32)
    if channels.shape[1] == 1:
        return mono, (1.0, 1.0)
    each = np.ascontiguousarray(channels).reshape(-1)
    return mono, (float(np.vdot(mono, mono)), float(np.vdot(each, each)) / channels.shape[1])


def _cancels(powers: np.ndarray, samples: int) -> bool:
    """Returns whether the mean of channels that are heard is silence. powers: sums of squares of the mean,
    and of a channel, over so many samples."""
    return bool(powers[1] > HEARD * samples and powers[0] < LEAST_POWER * powers[1])
