"""Headers of sound files against their bytes: what a file says to hold, and what it holds."""

import re
import struct
from typing import NamedTuple

from jaxthd.data.audio.views import View

TAIL = 1 << 17
"""Bytes at a file's end in which its last frame or page is searched. An Ogg page has at most 65,307."""
NEAR = 1 << 17
"""Bytes by which a size may miss 2^31 or 2^32 that stands for unknown: sox, arecord and others write such."""


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
    return view.with_patch(found.size_at, struct.pack(found.size_form, min(size, limit)))


def fault_of(
    view: View, kind: str, log: str, frames: int, rate: int, slack: float, *, every_byte: bool
) -> str | None:
    """Says why a file may not be read to its end as if that were all of it; None where nothing shows.

    kind: libsndfile's name of its format. log: what libsndfile said of its header. frames: as many as decode,
    or as libsndfile says. slack: seconds that may be missing. every_byte: reads the file through for further
    streams after the first, where a format may have them; otherwise headers and the file's end. The message
    has the form "cut short: its header says 3.0 s, 1.8 s are there".
    """
    every_byte |= view.size <= 1 << 20  # no more than one read
    if kind in ("OGG", "FLAC") and every_byte and (fault := _further_stream(view, kind)):
        return fault
    if kind == "OGG":
        return _fault_of_ogg(view)
    if kind == "FLAC":
        stated, there = flac_stated(view), flac_frames(view)
        return compare_frames(stated, there, rate, slack) if stated and there is not None else None
    if kind == "NIST":
        view.seek(0)
        count = re.search(rb"sample_count -i (\d+)", view.read(1024))
        return (
            compare_frames(int(count[1]), frames, rate, slack) if count and int(count[1]) > frames else None
        )
    if kind in _COUNTED_IN_LOG:
        return _fault_in_log(kind, log, frames, rate, slack)
    found = sample_data(view)
    if not found or found.stated is None:
        return None
    if found.stated > found.size:
        stated = round(frames * found.stated / max(found.size, 1))
        return compare_frames(stated, frames, rate, slack, cut=True)
    # libsndfile reads a W64 file to its end, whatever size its header has.
    if found.stated < found.size and kind != "W64" and not _only_chunks(view, found):
        there = round(frames * found.size / max(found.stated, 1)) if found.stated else frames
        return compare_frames(frames, there, rate, slack)
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


def _fault_in_log(kind: str, log: str, frames: int, rate: int, slack: float) -> str | None:
    """Returns what fault_of does, by libsndfile's log."""
    found = re.findall(_COUNTED_IN_LOG[kind], log)
    if not found:
        return None
    if kind == "VOC":
        return "cut short: libsndfile finds it truncated; copy the file anew"
    if kind in ("SVX", "WVE"):
        stated, there = map(int, found[-1])
        return compare_frames(round(frames * stated / max(there, 1)), frames, rate, slack)
    return compare_frames(int(found[-1]), frames, rate, slack)


def sds_frames(log: str) -> int:
    """Frames of a MIDI Sample Dump that are there, by libsndfile's log: it reads silence for the others."""
    found = re.search(r"Frames +: (\d+)", log)
    return int(found[1]) if found else 0


def _is_alac(view: View) -> bool:
    """Whether the description of a CAF file, which comes first, names Apple Lossless."""
    view.seek(28)
    return view.read(4) == b"alac"


def compare_frames(
    stated: int | None, there: int, rate: int, slack: float, *, cut: bool = False
) -> str | None:
    """Compares frames that the header says with those that there are."""
    if stated is None or abs(stated - there) <= slack * rate:
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


def _further_stream(view: View, kind: str) -> str | None:
    """An Ogg or FLAC file in which another stream begins after the first, as `cat` joins files."""
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


# --- FLAC ---


def flac_frames(view: View) -> int | None:
    """Frames of a FLAC file, by the header of its last frame, which says where it begins.

    None where no frame is recognised there: the file is cut within a frame, or something else follows.
    """
    start = _after_id3(view)
    view.seek(start)
    head = view.read(42)
    if head[:4] != b"fLaC" or len(head) < 42:
        return None
    block, largest = struct.unpack(">H", head[10:12])[0], int.from_bytes(head[15:18], "big")
    stated = int.from_bytes(head[21:26], "big") & 0xFFFFFFFFF
    view.seek(max(view.size - max(2 * largest, TAIL), 42))
    tail = view.read(max(2 * largest, TAIL))
    if tail[-128:-125] == b"TAG":
        tail = tail[:-128]
    at = len(tail)
    while (at := tail.rfind(b"\xff", 0, at)) >= 0:
        end = _flac_frame_end(tail, at, block)
        if end is None:
            continue
        if end == stated:
            return end
        # A pattern like a header comes about by chance once in some thousand files; the frame's own checksum
        # decides where the header of the file says otherwise.
        if _crc(tail[at:-2], 0x8005, 16) == int.from_bytes(tail[-2:], "big"):
            return end
    return None


def flac_stated(view: View) -> int:
    """Frames that the header of a FLAC file says; 0 for unknown."""
    view.seek(_after_id3(view))
    return int.from_bytes(view.read(26)[21:], "big") & 0xFFFFFFFFF


def _after_id3(view: View) -> int:
    view.seek(0)
    head = view.read(10)
    if head[:3] != b"ID3" or len(head) < 10:
        return 0
    return 10 + sum((byte & 0x7F) << 7 * (3 - number) for number, byte in enumerate(head[6:]))


def _flac_frame_end(data: bytes, at: int, block: int) -> int | None:
    """The sample after the frame whose header is at `at`; None without one there. block: samples a frame."""
    head = data[at : at + 16]
    if len(head) < 6 or head[1] & 0xFE != 0xF8 or head[3] & 1 or head[2] >> 4 == 0 or head[3] >> 4 > 10:
        return None
    code, rate, first = head[2] >> 4, head[2] & 15, head[4]
    more = 0 if first < 0x80 else 8 - (first ^ 0xFF).bit_length() - 1
    number = first if first < 0x80 else first & (0x3F >> more)
    for byte in head[5 : 5 + more]:
        number = number << 6 | byte & 0x3F
    after = 5 + more
    sizes = {6: 1, 7: 2}.get(code, 0)
    explicit = int.from_bytes(head[after : after + sizes], "big") + 1
    after += sizes + {12: 1, 13: 2, 14: 2}.get(rate, 0)
    if after >= len(head) or _crc(head[:after], 0x07, 8) != head[after]:
        return None
    samples = explicit if sizes else 192 if code == 1 else 576 << code - 2 if code < 6 else 256 << code - 8
    return (number if head[1] & 1 else number * block) + samples


def _crc(data: bytes, polynomial: int, bits: int) -> int:
    """The checksum of FLAC's frame headers (8 bits) and frames (16 bits)."""
    top, mask, crc = 1 << bits - 1, (1 << bits) - 1, 0
    for byte in data:
        crc ^= byte << bits - 8
        for _ in range(8):
            crc = (crc << 1 ^ polynomial if crc & top else crc << 1) & mask
    return crc
