"""Headers of FLAC files: how many frames one says, and how many there are by its last frame."""

import struct

from jaxthd.data.audio.containers import TAIL, View, after_tags


def flac_frames(view: View) -> int | None:
    """Frames of a FLAC file, by the header of its last frame, which says where it begins.

    None where no frame is recognised there: the file is cut within a frame, or something else follows.
    """
    start = after_tags(view)
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
        end = _frame_end(tail, at, block)
        if end is None:
            continue
        if end == stated:
            return end
        # A pattern like a header comes about by chance once in some thousand files; the frame's own checksum
        # decides where the header of the file says otherwise.
        if _crc(tail[at:-2], 0x8005, 16) == int.from_bytes(tail[-2:], "big"):
            return end
    return None


def _frame_end(data: bytes, at: int, block: int) -> int | None:
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
