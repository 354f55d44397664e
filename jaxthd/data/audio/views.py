"""File objects that soundfile reads: inside of other files, with bytes replaced, without an end."""

import io
from typing import Any

from jaxthd.data.example import Member

ENDLESS = 1 << 40
"""Size in bytes of a view without an end. Readers that derive a length from it arrive at centuries."""


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
        self.error: OSError | None = None
        self._file, self._start, self._at = file, start, 0
        self._stated_size, self._patch = ENDLESS if endless else size, patch

    def again(self) -> "View":
        """Returns a view of the same bytes with a position of its own."""
        return View(self._file, self._start, self.size)

    def with_patch(self, at: int, data: bytes) -> "View":
        """Returns a view of the same bytes in which `data` replaces those from `at` on."""
        return View(self._file, self._start, self.size, patch=(at, data))

    def without_end(self) -> "View":
        """Returns an endless view of the same bytes."""
        return View(self._file, self._start, self.size, endless=True)

    def seek(self, offset: int, whence: int = 0) -> int:
        at = offset + (0, self._at, self._stated_size)[whence]
        if at >= 0:  # otherwise the position stays, which libsndfile notices
            self._at = at
        return self._at

    def tell(self) -> int:
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
        except OSError as error:
            self.error = error
            return 0
        at, data = self._patch
        first, last = max(at, self._at), min(at + len(data), self._at + count)
        if first < last:
            wanted[first - self._at : last - self._at] = data[first - at : last - at]
        self._at += count
        return count


class TarView(View):
    """A member of a tar file."""

    def __init__(self, tar: io.BufferedIOBase, member: Member) -> None:
        super().__init__(tar, member.start, member.size)
