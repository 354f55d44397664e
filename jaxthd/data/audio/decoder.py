"""Sound files as libsndfile decodes them: exact from any sample on, to the end of what decodes."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import soundfile

from jaxthd.data.audio.cells import open_cell
from jaxthd.data.audio.containers import (
    DURATION_SLACK,
    View,
    compare_frames,
    fault_of,
    further_stream,
    mended,
    sds_frames,
)
from jaxthd.data.audio.flac import flac_frames
from jaxthd.data.audio.mpeg import BLOCK, count_frames, ends_where_stated, first_frame, preroll
from jaxthd.data.example import Cell, Member
from jaxthd.files.remote_path import open_range
from jaxthd.files.stores import is_url

UNKNOWN = 1 << 62
"""Frames from which on libsndfile means an unknown number (FLAC as streams are written)."""
LONGEST_PAGE = 255 * 4096
"""Most samples in a page of Vorbis: 255 packets of half the largest block."""
OPUS_PREROLL = 2.0
"""Seconds of Opus to decode before a position. RFC 7845 recommends at least 0.08; after 0.2 no difference was
left in 960 positions, without any there was one of 1e-3."""
DECODED = 1_000_000
"""Samples decoded at a time. PAF of 24 bits has groups of ten: other blocks end in two samples more."""


class Decoder(soundfile.SoundFile):
    """A sound file whose reads go on where the last one ended.

    soundfile seeks after every read of a seekable file, to where it is. That restarts the decoders of MP3 and
    Vorbis between two blocks, and fails for FLAC of unknown length and DWVW.
    """

    def seekable(self) -> bool:
        """Returns False, so that no read is followed by a seek."""
        return False


class Recording(NamedTuple):
    """An open sound file. length: frames; None if only decoding tells. fault: why its header misleads."""

    file: Decoder
    view: View
    length: int | None
    fault: str | None

    def skip_to(self, start: int) -> int:
        """Goes to frame `start`, from which on reads equal those of a file that is read from its beginning.

        Returns the frame that was reached: fewer where the file ends before.
        """
        at = min(_restart(self.file, start, self.length), start)
        if at > 0:
            self.file.seek(at)
        at = max(at, 0)
        block = max(1, DECODED // self.file.channels)
        while at < start:
            count = len(self.file.read(min(block, start - at), dtype="float32", always_2d=True))
            if not count:
                break
            at += count
        return at

    def count_frames(self) -> int:
        """The number of frames, by decoding all of them if nothing else tells."""
        if self.file.format == "FLAC" and (frames := flac_frames(self.view)) is not None:
            return frames if self.length is None else self.length
        if self.length is None or self.file.format == "FLAC":
            return self.skip_to_end()
        return self.length

    def skip_to_end(self) -> int:
        """Decodes the file from where it is and returns the number of frames."""
        block, at = max(1, DECODED // self.file.channels), 0
        while count := len(self.file.read(block, dtype="float32", always_2d=True)):
            at += count
        return at

    def why_not_whole(self, frames: int, *, every_byte: bool) -> str | None:
        """Why `frames`, where decoding ends, may not be all of the recording; None where nothing shows.

        every_byte: reads the file through, as one that was decoded was anyway; otherwise headers.
        """
        kind, rate, view = self.file.format, self.file.samplerate, self.view
        if self.fault:
            return self.fault
        if self.length is not None and (fault := compare_frames(self.length, frames, rate)):
            return fault
        if kind == "MP3":
            return self._stops(frames) if every_byte and self.length is None else None
        every_byte |= view.size <= BLOCK  # no more than one read
        if kind in ("OGG", "FLAC") and every_byte and (fault := further_stream(view, kind)):
            return fault
        if kind == "FLAC":
            there = flac_frames(view)
            return None if there is None else compare_frames(self.length, there, rate)
        return fault_of(view, kind, self.file.extra_info, frames, rate)

    def _stops(self, frames: int) -> str | None:
        """Compares `frames`, where mpg123 ended, with the file's: it gives up after 1 KB of no frames."""
        mp3 = first_frame(self.view)
        there = count_frames(self.view, mp3) * mp3.samples if mp3 else 0
        if mp3 is None or there - frames <= DURATION_SLACK * mp3.rate:
            return None
        return f"it is damaged {frames / mp3.rate:.3f} s after its start, and has {there / mp3.rate:.3f} s"


@contextmanager
def open_recording(
    path: Path, member: Member | Cell | None = None, until: float = math.inf, *, every_byte: bool = True
) -> Iterator[Recording]:
    """Opens the sound file at `path`, or `member` of the tar file or table there.

    until: seconds of it that are needed, from its beginning; inf: all. every_byte: the headers of all frames
    of an MP3 file are read where all is needed; otherwise a header that agrees with the file's size is
    believed. Raises what soundfile raises, OSError, or CellError.
    """
    if isinstance(member, Cell):
        with open_cell(path, member) as data:
            view = View(data, 0, data.seek(0, 2))
            with _opened(view, view, until, every_byte) as recording:
                yield recording
        return
    start, size = (member.start, member.size) if member else (0, path.stat().st_size)
    file, at = open_range(path, start, size)
    with file:
        view = View(file, at, size)
        with _opened(view, view if member or is_url(path) else path, until, every_byte) as recording:
            yield recording


@contextmanager
def _opened(view: View, source: View | Path, until: float, every_byte: bool) -> Iterator[Recording]:
    """source: what libsndfile reads where the header needs no mending; a path, since it is read faster."""
    headers = view.again()
    views = [view, headers]
    try:
        whole = mended(headers)
        views.append(whole)
        with Decoder(source if whole is headers else whole) as file:
            if (file.format, file.subtype) == ("RAW", "ULAW"):
                # libsndfile takes any bytes for sound where the name ends so.
                raise soundfile.SoundFileError("its name ends in .au or .snd, and it has no header of AU")
            if file.format == "SDS":
                there = min(sds_frames(file.extra_info), file.frames)
                yield Recording(file, headers, there, compare_frames(file.frames, there, file.samplerate))
                return
            if file.format != "MP3":
                yield Recording(file, headers, file.frames if file.frames < UNKNOWN else None, None)
                return
            other, fault = _mp3(headers, until, every_byte)
            if other is None:
                yield Recording(file, headers, file.frames, fault)
                return
        views.append(other)
        with Decoder(other) as file:
            yield Recording(file, headers, None, fault)
    finally:
        for each in views:
            if each.error:
                raise each.error


def _mp3(view: View, until: float, every_byte: bool) -> tuple[View | None, str | None]:
    """The view by which an MP3 file is read to its end (None: its header says where that is), and its fault.

    Without a Xing or Info header libsndfile estimates the length from the first frame's bit rate and the
    file's size, and reads no further. A file of variable bit rate of 57.7 s was read as 43.5 s.
    """
    mp3 = first_frame(view)
    if mp3 is None or not mp3.stated:
        return view.again(endless=True), None
    if until <= mp3.stated_seconds - DURATION_SLACK:
        return None, None
    if not every_byte and view.size > BLOCK and ends_where_stated(view, mp3):
        return None, None
    frames = count_frames(view, mp3)
    if (frames - mp3.stated) * mp3.samples > DURATION_SLACK * mp3.rate:
        return view.again(patch=(mp3.count_at, (2 * frames).to_bytes(4, "big"))), None
    stated, there = mp3.stated * mp3.samples, frames * mp3.samples
    return None, compare_frames(stated, there, mp3.rate)


def _restart(file: Decoder, start: int, length: int | None) -> int:
    """The frame to seek to so that what is decoded from there on is exact from `start` on; 0: the beginning.

    Tried with each format and subtype that libsndfile writes. Subtypes that are not named here cannot be
    sought (GSM 6.10, G.721, G.723, NMS ADPCM, DPCM, DWVW) or were off at a file's end (ALAC of 20 bits).
    """
    kind, subtype = file.format, file.subtype
    if kind == "MP3":
        return start - preroll(file.samplerate, file.channels)
    if length is None or start >= length:
        return 0
    if subtype == "VORBIS":  # in the last page libvorbis counts from its end, which is off by up to a block
        return min(start, length - LONGEST_PAGE)
    if subtype == "OPUS":
        return min(start, length - LONGEST_PAGE) - round(OPUS_PREROLL * file.samplerate)
    if kind == "SDS" or (kind, subtype) == ("PAF", "PCM_24"):  # blocks, of which the last cannot be sought
        return 0
    exact = subtype.startswith("PCM_") or subtype in (
        "FLOAT",
        "DOUBLE",
        "ULAW",
        "ALAW",
        "IMA_ADPCM",
        "MS_ADPCM",
    )
    return start if exact else 0
