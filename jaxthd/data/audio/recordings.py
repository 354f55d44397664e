"""Recordings: any file libsndfile reads -> 16 kHz mono samples -> encoder chunks."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
from jaxtyping import Float32

from jaxthd.data.audio.cells import CellError, open_cell
from jaxthd.data.audio.features import HOP, SAMPLE_RATE
from jaxthd.data.example import Cell, Channels, Member, Samples

MIN_SAMPLES = 2 * HOP
"""Fewest samples: two mel frames, since the standard deviation divides by their number less one."""
DURATION_SLACK = 0.25
"""Seconds by which a file may end before the duration its manifest gives (rounding, codec padding)."""
RATES = range(1_000, 1_000_001)
"""Accepted sampling rates in Hz; others come from damaged headers."""
LOUDEST = 1e6
"""Largest sample accepted in a file of floats. No scale in use exceeds it; float32 features stay finite."""


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

    Only that range is read. It takes no more memory than its samples need, whatever length the header claims.
    Channels are averaged; other rates are resampled (soxr, HQ).
    member: the recording inside the tar file or the table `path`; None: the file is the recording. channels:
    those that are averaged; None: all.
    Raises AudioError for a file that is missing, unreadable, or ends before `offset` or more than 0.25 s
    before offset + duration; for more than `most_seconds`; for a rate outside 1 to 1,000 kHz; for samples
    that are not finite, or beyond 1e6; for fewer than 320 of them (two mel frames); for channels that do not
    match `channels`.
    """
    path = Path(path)
    name = f"{path}: {member.name}" if member else str(path)
    try:
        found = path.is_file()
    except OSError as error:  # a name too long, a folder without permission
        raise AudioError(f"{path}: cannot be looked up ({error}); correct audio_filepath") from error
    if not found:
        raise AudioError(f"{path}: no such file; correct audio_filepath in the manifest")
    if offset < 0 or (duration is not None and duration <= 0):
        raise AudioError(
            f"{name}: offset {offset} s, duration {duration} s; expected offset >= 0, duration > 0"
        )
    try:
        with open_recording(path, member) as file:
            rate, length = file.samplerate, file.frames
            if rate not in RATES:
                raise AudioError(f"{name}: {rate} samples a second; expected {RATES[0]} to {RATES[-1]}")
            if 0 < length <= offset * rate:
                raise AudioError(f"{name}: offset {offset} s is past the end at {length / rate:.3f} s")
            used = _used_channels(channels, file.channels, name)
            file.seek(round(offset * rate))
            seconds = math.inf if duration is None else duration
            samples = _read_mono(file, round(min(seconds * rate, most_seconds * rate + 1, length)), used)
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        # A file without a header, such as .raw, raises TypeError: its rate would have to be given.
        raise AudioError(f"{name}: libsndfile cannot read it ({error})") from error
    except CellError as error:
        raise AudioError(f"{name}: {error}") from error
    if not len(samples):
        raise AudioError(f"{name}: no samples; the file is empty or cut short")
    if len(samples) > most_seconds * rate:
        raise TooLongError(f"{name}: more than {most_seconds} s, which is all that data.audio_capacity holds")
    if duration is not None and len(samples) / rate < duration - DURATION_SLACK:
        raise AudioError(
            f"{name}: {len(samples) / rate:.3f} s from offset {offset} s, the manifest says {duration} s; "
            "the file is cut short, or the manifest is of another file"
        )
    return _resampled(samples, rate, name)


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
        raise TooLongError(f"more than {most_seconds} s, which is all that data.audio_capacity holds")
    mono = found.samples.astype(np.float32).reshape(shape[0], -1).mean(axis=1, dtype=np.float32)
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


@contextmanager
def open_recording(path: Path, member: Member | Cell | None = None) -> Iterator[soundfile.SoundFile]:
    """Opens the sound file at `path`, or `member` of the tar file or table there.

    Raises what soundfile raises, OSError, or CellError.
    """
    if isinstance(member, Cell):
        with open_cell(path, member) as data, soundfile.SoundFile(data) as file:
            yield file
        return
    if member is None:
        with soundfile.SoundFile(path) as file:
            yield file
        return
    with path.open("rb") as tar:
        within = _Within(tar, member)
        try:
            with soundfile.SoundFile(within) as file:
                yield file
        finally:
            if within.error:
                raise within.error


class _Within:
    """A member of a tar file as a file object for soundfile. It reads no more than requested.

    error: the OSError that ended the reading; libsndfile itself sees only an end of file.
    """

    def __init__(self, tar: BufferedReader, member: Member) -> None:
        self._tar, self._member, self._at = tar, member, 0
        self.error: OSError | None = None

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._member.size)[whence]
        if at >= 0:  # otherwise the position stays, which libsndfile notices
            self._at = at
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(self._member.size - self._at, 0)]
        try:
            self._tar.seek(self._member.start + self._at)
            found = self._tar.readinto(wanted)
            if found < len(wanted):
                raise OSError("the tar file has become shorter since its headers were read")
        except OSError as error:
            self.error = error
            return 0
        self._at += found
        return found


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
) -> Float32[np.ndarray, " samples"]:
    """Reads up to `wanted` samples from the file's position and averages the channels.

    It reads in blocks of 4 MB, since a header may claim any number of samples.
    """
    block = max(1, (1 << 20) // file.channels)
    blocks = [np.zeros(0, np.float32)]
    while wanted > 0:
        channels = file.read(min(block, wanted), dtype="float32", always_2d=True)
        if not len(channels):
            break
        with np.errstate(over="ignore", invalid="ignore"):  # not finite: the caller checks
            blocks.append(channels[:, used].mean(axis=1, dtype=np.float32))
        wanted -= len(channels)
    return np.concatenate(blocks)


def chunk_audio(
    samples: Float32[np.ndarray, " samples"], chunk_samples: int
) -> list[Float32[np.ndarray, " _"]]:
    """Divides audio into encoder chunks of `chunk_samples`: views, in order, together all samples.

    A tail of less than two mel frames (320 samples) is added to the chunk before it. So the last chunk has at
    least 320 samples (if the audio has) and at most chunk_samples + 319: one mel frame more than the others.
    Raises ValueError for a chunk_samples that is not a multiple of 160 or is under 320.
    """
    if chunk_samples % HOP or chunk_samples < MIN_SAMPLES:
        raise ValueError(
            f"chunk_samples={chunk_samples}; expected a multiple of {HOP} (a mel frame) >= {MIN_SAMPLES}"
        )
    ends = list(range(chunk_samples, len(samples) - MIN_SAMPLES + 1, chunk_samples))
    return np.split(samples, ends)


def recording_seconds(path: Path, member: Member | Cell | None = None) -> float:
    """STUB until w-audio is merged."""
    try:
        with open_recording(path, member) as file:
            return file.frames / file.samplerate
    except (soundfile.SoundFileError, OSError, TypeError, CellError) as error:
        raise AudioError(f"{path}: libsndfile cannot read it ({error})") from error
