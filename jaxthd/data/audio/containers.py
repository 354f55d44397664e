"""The bytes of sound files: as soundfile reads them, and headers against what follows.

A View gives soundfile the bytes of a file, or of one inside of another, with a header mended or without an
end. The rest compares what a file says to hold with what it holds. Those of FLAC and MP3 are in files of
their own.
"""

import io
import re
import struct
from typing import Any, NamedTuple

from jaxthd.errors import StorageError

ENDLESS = 1 << 40
"""Size in bytes of a view without an end. Readers that derive a length from it arrive at centuries."""
DURATION_SLACK = 0.25
"""Seconds by which a file may end before the duration that its manifest or its header gives (rounding, codec
padding)."""
TAIL = 1 << 17
"""Bytes at a file's end in which its last frame or page is searched. An Ogg page has at most 65,307."""
NEAR = 1 << 17
"""Bytes by which a size may miss 2^31 or 2^32 that stands for unknown: sox, arecord and others write such."""


class View:
    """Bytes `start` to `start + size` of an open file, for soundfile. It reads no more than requested.

    endless: it says to have 2^40 bytes, so that a decoder which would derive the length from the size goes on
    until no more bytes come. patch: bytes that replace those of the file from a position on, which mend a
    header. error: the OSError that ended the reading; libsndfile itself sees only an end of file.
    """

    def __init__(
        self,
        file: io.BufferedIOBase,
        start: int,
        size: int,
        *,
        endless: bool = False,
        patch: tuple[int, bytes] = (0, b""),
    ) -> None:
        self.size = size
        self.error: Exception | None = None
        self._file, self._start, self._at = file, start, 0
        self._stated_size, self._patch = ENDLESS if endless else size, patch

    def again(self, **changes: Any) -> "View":
        """Returns a view of the same bytes with a position of its own. changes: endless, or patch."""
        return View(self._file, self._start, self.size, **changes)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Goes to a position in bytes, which may be beyond the end, and returns it."""
        at = offset + (0, self._at, self._stated_size)[whence]
        if at >= 0:  # otherwise the position stays, which libsndfile notices
            self._at = at
        return self._at

    def tell(self) -> int:
        """Returns the position in bytes."""
        return self._at

    def read(self, size: int) -> bytes:
        """Returns up to `size` bytes."""
        buffer = bytearray(max(min(size, self.size - self._at), 0))
        return bytes(buffer[: self.readinto(buffer)])

    def readinto(self, buffer: Any) -> int:
        """Fills the buffer as far as the bytes go, and returns how many there were."""
        if self._at >= ENDLESS - 1024:  # mpg123 takes a file for a pipe whose last 128 bytes it cannot read
            buffer[:] = bytes(len(buffer))
            return len(buffer)
        wanted = memoryview(buffer)[: max(self.size - self._at, 0)]
        try:
            self._file.seek(self._start + self._at)
            count = self._file.readinto(wanted)
            if count < len(wanted):
                raise OSError("the file has become shorter since its headers were read")
        except (OSError, StorageError) as error:
            self.error = error
            return 0
        at, data = self._patch
        first, last = max(at, self._at), min(at + len(data), self._at + count)
        if first < last:
            wanted[first - self._at : last - self._at] = data[first - at : last - at]
        self._at += count
        return count


class SampleData(NamedTuple):
    """The part of a WAV, AIFF, CAF, W64 or AU file that holds samples.

    start: its position. stated: its bytes as the header says; None for a length that is not known, as streams
    are written. size: bytes to the end of the file. size_at, size_form: where the header says it, and how
    (struct). extra: what the stated size there has more than `stated`.
    """

    start: int
    stated: int | None
    size: int
    size_at: int
    size_form: str
    extra: int


class _Chunks(NamedTuple):
    """The layout of a container's chunks: name, size, content. whole: the size counts name and size too."""

    magic: bytes
    first: int
    name: int
    size: str
    data: bytes
    align: int
    whole: bool
    before_samples: int


_W64_NAME = bytes.fromhex("f3acd3118cd100c04f8edb8a")
_CHUNKED = (
    _Chunks(b"RIFF", 12, 4, "<I", b"data", 2, False, 0),
    _Chunks(b"RF64", 12, 4, "<I", b"data", 2, False, 0),
    _Chunks(b"RIFX", 12, 4, ">I", b"data", 2, False, 0),
    _Chunks(b"FORM", 12, 4, ">I", b"SSND", 2, False, 8),
    _Chunks(b"caff", 8, 4, ">q", b"data", 1, False, 4),
    _Chunks(b"riff\x2e\x91\xcf\x11", 40, 16, "<q", b"data" + _W64_NAME, 8, True, 0),
)


def sample_data(view: View) -> SampleData | None:
    """Finds the samples of a WAV, RF64, AIFF, CAF, W64 or AU file; None for others, and without samples."""
    view.seek(0)
    head = view.read(12)
    if head[:4] == b".snd" and len(head) == 12:
        start, stated = struct.unpack(">II", head[4:])
        return _sample_data(view, start, stated, 8, ">I", 0)
    form = next((form for form in _CHUNKED if head.startswith(form.magic)), None)
    at, long_size = (form.first if form else 0), 0
    while form and (chunk := _chunk(view, at, form)):
        name, size, content = chunk
        if name == form.data:
            extra = form.before_samples
            if long_size and size == 2**32 - 1:
                return _sample_data(view, content, long_size, at + form.name, form.size, 0)
            counted = content - at if form.whole else 0
            return _sample_data(
                view, content + extra, size - extra, at + form.name, form.size, extra + counted
            )
        if name == b"ds64":
            view.seek(content)
            long_size = struct.unpack("<Q", view.read(16)[8:].ljust(8, b"\0"))[0]
        at = content + size + -size % form.align
    return None


def mended(view: View) -> View:
    """Returns the view with the size of its samples as it is, where libsndfile would read none otherwise.

    A WAV or AU file of size 0, as it stands while it is written; a CAF file of size -1, or cut short. Not
    one of ALAC that is cut short: of its last packet noise would be read.
    """
    found = sample_data(view)
    if not found or not found.size:
        return view
    is_cut_caf = found.size_form == ">q" and found.stated is not None and found.stated > found.size
    is_cut_caf &= not _is_alac(view)
    if found.stated is not None and not is_cut_caf:
        return view
    size = found.size + found.extra
    limit = 2**32 - 1 if found.size_form[1] == "I" else 2**63 - 1
    return view.again(patch=(found.size_at, struct.pack(found.size_form, min(size, limit))))


def fault_of(view: View, kind: str, log: str, frames: int, rate: int) -> str | None:
    """Says why a file may not be read to its end as if that were all of it; None where nothing shows.

    kind: libsndfile's name of its format. log: what libsndfile said of its header. frames: as many as decode,
    or as libsndfile says. The message has the form "cut short: its header says 3.0 s, 1.8 s are there".
    """
    if kind == "OGG":
        return _fault_of_ogg(view)
    if kind == "NIST":
        view.seek(0)
        count = re.search(rb"sample_count -i (\d+)", view.read(1024))
        return compare_frames(int(count[1]), frames, rate) if count and int(count[1]) > frames else None
    if kind in _COUNTED_IN_LOG:
        return _fault_in_log(kind, log, frames, rate)
    found = sample_data(view)
    if not found or found.stated is None:
        return None
    if found.stated > found.size:
        stated = round(frames * found.stated / max(found.size, 1))
        return compare_frames(stated, frames, rate, cut=True)
    # libsndfile reads a W64 file to its end, whatever size its header has.
    if found.stated < found.size and kind != "W64" and not _only_chunks(view, found):
        there = round(frames * found.size / max(found.stated, 1)) if found.stated else frames
        return compare_frames(frames, there, rate)
    return None


_COUNTED_IN_LOG = {
    "AVR": r"Frames +: (\d+)",
    "MPC2K": r"Frames +: (\d+)",
    "MAT4": r"Cols +: (\d+)",
    "MAT5": r"Cols +: (\d+)",
    "SVX": r"BODY : (\d+) \(should be (\d+)\)",
    "WVE": r"Data length (\d+) should be (\d+)",
    "VOC": r"(truncated)",
}
"""Patterns of the length in libsndfile's log, for formats whose header is not read here: frames, or the
stated size and the one that is there. The last match counts."""


def _fault_in_log(kind: str, log: str, frames: int, rate: int) -> str | None:
    """Returns what fault_of does, by libsndfile's log."""
    found = re.findall(_COUNTED_IN_LOG[kind], log)
    if not found:
        return None
    if kind == "VOC":
        return "cut short: libsndfile finds it truncated; copy the file anew"
    if kind in ("SVX", "WVE"):
        stated, there = map(int, found[-1])
        return compare_frames(round(frames * stated / max(there, 1)), frames, rate)
    return compare_frames(int(found[-1]), frames, rate)


def sds_frames(log: str) -> int:
    """Frames of a MIDI Sample Dump that are there, by libsndfile's log: it reads silence for the others."""
    found = re.search(r"Frames +: (\d+)", log)
    return int(found[1]) if found else 0


def _is_alac(view: View) -> bool:
    """Whether the description of a CAF file, which comes first, names Apple Lossless."""
    view.seek(28)
    return view.read(4) == b"alac"


def compare_frames(stated: int | None, there: int, rate: int, *, cut: bool = False) -> str | None:
    """Says how the frames that a header states differ from those that there are; None where they do not.

    stated: None for a header that does not say. cut: whether there are fewer in any case.
    """
    if stated is None or abs(stated - there) <= DURATION_SLACK * rate:
        return None
    says = f"its header says {stated / rate:.3f} s, {there / rate:.3f} s are there"
    if cut or stated > there:
        return f"cut short: {says}; copy the file anew, or write its header anew"
    return f"{says}, as in a file that is still being written or was joined; write its header anew"


def _chunk(view: View, at: int, form: _Chunks) -> tuple[bytes, int, int] | None:
    """Name, size of the content, and position of the content of the chunk at `at`; None at the file's end."""
    head = form.name + struct.calcsize(form.size)
    view.seek(at)
    data = view.read(head)
    if len(data) < head:
        return None
    size = struct.unpack(form.size, data[form.name :])[0]
    if form.whole:
        size -= head
    if size < 0 and data[: form.name] != form.data:
        return None
    return data[: form.name], size, at + head


def _sample_data(view: View, start: int, stated: int, at: int, form: str, extra: int) -> SampleData:
    size = max(view.size - start, 0)
    unknown = stated <= 0 or stated >= 2**62
    unknown |= stated > size and form[1] == "I" and min(abs(stated - 2**31), abs(stated - 2**32)) <= NEAR
    found = SampleData(start, stated, size, at, form, extra)
    if unknown and not (stated <= 0 and _only_chunks(view, found._replace(stated=0))):
        return found._replace(stated=None)
    return found._replace(stated=max(stated, 0))


def _only_chunks(view: View, found: SampleData) -> bool:
    """Whether only chunks of text, markers and the like follow the samples, and no more samples."""
    view.seek(0)
    head = view.read(12)
    form = next((form for form in _CHUNKED if head.startswith(form.magic)), None)
    stated = found.stated or 0
    at = found.start + stated
    if not form:  # AU: nothing follows
        return at >= view.size
    at += -stated % form.align
    while at < view.size:
        chunk = _chunk(view, at, form)
        if chunk is None:
            return view.size - at < 16
        name, size, content = chunk
        if not re.fullmatch(rb"[\x20-\x7e]{4}", name[:4]) or size < 0 or content + size > view.size:
            return False
        at = content + size + -size % form.align
    return True


def _fault_of_ogg(view: View) -> str | None:
    """An Ogg file that ends within a page, or whose last page is of another stream than its first."""
    view.seek(0)
    first = view.read(18)[14:]
    view.seek(max(view.size - TAIL, 0))
    tail = view.read(TAIL)
    at = tail.rfind(b"OggS\0")
    if at < 0:
        return None
    head = tail[at : at + 27]
    segments = tail[at + 27 : at + 27 + head[26]] if len(head) == 27 else b""
    if len(head) < 27 or len(segments) < head[26] or at + 27 + len(segments) + sum(segments) > len(tail):
        return "cut short: it ends within an Ogg page; copy the file anew"
    return _JOINED if head[14:18] != first else None


_JOINED = "it holds several streams, of which the first alone would be read; decode them, and write one"


def further_stream(view: View, kind: str) -> str | None:
    """Says that another stream begins after the first of an Ogg or FLAC file, as where `cat` joins files."""
    # A page of type 2 begins a stream of Ogg; "fLaC" and a STREAMINFO of 34 bytes one of FLAC.
    begin = b"OggS\0\2" if kind == "OGG" else b"fLaC\0\0\0\x22"
    follows = b"OggS\0" if kind == "OGG" else begin
    view.seek(0)
    at, begun = 0, False
    while data := view.read(1 << 20):
        here = 0
        while not begun and (here := data.find(follows, here)) >= 0:
            # Several streams of Ogg that begin together are one group (video, chapters), as libsndfile reads.
            begun = kind == "FLAC" or not data.startswith(begin, here)
            here += len(begin)
        if begun and data.find(begin, max(here, 0)) >= 0:
            return _JOINED
        if at + len(data) >= view.size:
            break
        at += len(data) - len(begin)
        view.seek(at)
    return None


def after_tags(view: View) -> int:
    """Position after the ID3v2 tags at the start, which MP3 and FLAC files may have."""
    start = 0
    while True:
        view.seek(start)
        head = view.read(10)
        if len(head) < 10 or head[:3] != b"ID3":
            return start
        size = sum((byte & 0x7F) << 7 * (3 - number) for number, byte in enumerate(head[6:]))
        start += 10 + size + (10 if head[5] & 0x10 else 0)
