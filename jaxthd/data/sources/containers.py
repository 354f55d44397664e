"""Files that hold several items: whether all of them are there, whole, and of a form that is read.

A line or a recording that cannot be read is one item that is skipped and listed. A container that is missing,
empty or damaged may have held any number of items, so that it ends the run with a UserError.
"""

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from jaxthd.errors import UserError

LOOKED_AT = 1 << 16
"""Bytes at the beginning of a file that its form is told by."""
PART = re.compile(r"(?<!\d)(\d+)([-_. ]?of[-_. ]?)(\d+)(?!\d)", re.I)
"""The part of a name that counts parts: the part's number, "-of-", how many there are."""
_NUMBER = re.compile(r"(?<!\d)(\d+)(?=(\.\w+)*$)")
_GZIP = b"\x1f\x8b"
_COMPRESSED = {
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ\x00": ("xz", "unxz"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"\x04\x22\x4d\x18": ("lz4", "unlz4"),
    b"PK\x03\x04": ("zip", "unzip"),
    b"7z\xbc\xaf\x27\x1c": ("7z", "7z x"),
    b"\x1f\x9d": ("compress", "uncompress"),
}
_UTF16 = re.compile(rb"(\xff\xfe)?[\t -~]\0[\t -~]\0|(\xfe\xff)?\0[\t -~]\0[\t -~]")
_UNREAD = re.compile(r"\.(bz2|xz|zst|zstd|lz4|zip|7z|lzma|Z)$|\.tar\.gz$|\.tgz$")
_UNFINISHED = re.compile(r"\.(part|partial|incomplete|tmp|crdownload|download|aria2)$")


def damaged(path: Path, where: str, cause: object) -> UserError:
    """The error for a container of which it is not known how many items it held. where: the position."""
    text = " ".join(str(cause).split())[:200]
    return UserError(
        f"{path}{', ' * bool(where)}{where}: {text}; how many items are lost is not known. Expected a whole "
        "file: fetch or write it again, or take it out of the data set"
    )


def empty(path: Path, holds: str) -> UserError:
    """The error for a container without items. holds: what it has none of, such as "lines"."""
    size = path.stat().st_size
    return UserError(
        f"{path} holds no {holds} ({size:,} bytes); expected items in each file of a data set: fetch or "
        "write it again, or take it out of the data set"
    )


def refuse_other_forms(path: Path, expected: str) -> None:
    """Raises UserError for a file that is compressed otherwise than by gzip, is no text or has no lines.

    expected: "lines" for JSON lines, which may be compressed by gzip where the name ends in .gz; "a tar file"
    or "a table" for these, uncompressed.
    """
    with path.open("rb") as file:
        head = file.read(LOOKED_AT)
    if not head:
        raise empty(path, "bytes")
    if form := _form(path, head, expected):
        found, change = form
        read = {
            "lines": "JSON lines, plain or compressed by gzip (.gz)",
            "a tar file": "a tar file that is not compressed",
            "a table": "a parquet or arrow file",
        }[expected]
        raise UserError(f"{path} is {found}; expected {read}: {change}")


def _form(path: Path, head: bytes, expected: str) -> tuple[str, str] | None:
    """(what a file is, what to do) where it is not what is expected."""
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        return "a pointer of Git LFS, not the file itself", "fetch it with git lfs pull"
    for magic, (name, command) in _COMPRESSED.items():
        if head.startswith(magic):
            return f"compressed ({name})", f"decompress it with {command}"
    if re.match(rb"\s*<(!doctype|html|\?xml)", head, re.I):
        return "a page of HTML or XML, as a server sends for an error", "fetch it again"
    is_gzip = head.startswith(_GZIP)
    if expected == "a table":
        is_parquet, is_arrow = head.startswith(b"PAR1"), head.startswith((b"ARROW1", b"\xff\xff\xff\xff"))
        if is_parquet and path.suffix == ".arrow":
            return "a parquet file", "rename it to end in .parquet"
        if is_arrow and path.suffix == ".parquet":
            return "an arrow file", "rename it to end in .arrow"
    if expected != "lines":
        return ("compressed (gzip)", "decompress it with gunzip") if is_gzip else None
    if is_gzip != (path.suffix == ".gz"):
        if is_gzip:
            return "compressed by gzip, and its name does not end in .gz", "rename it"
        return "not compressed by gzip, and its name ends in .gz", "rename it, or fetch it again"
    return _form_of_text(_decompressed(path) if is_gzip else head)


def _decompressed(path: Path) -> bytes:
    """The first bytes of a gzip file; fewer where it is damaged, which its reader says."""
    try:
        with path.open("rb") as stored, gzip.open(stored) as file:
            return file.read(LOOKED_AT)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return b""


def _form_of_text(head: bytes) -> tuple[str, str] | None:
    tables = {b"PAR1": ".parquet", b"ARROW1": ".arrow", b"\xff\xff\xff\xff": ".arrow"}
    for magic, suffix in tables.items():
        if head.startswith(magic):
            article = "an" if suffix == ".arrow" else "a"
            return f"{article} {suffix[1:]} file", f"rename it to end in {suffix}"
    if head[257:262] == b"ustar":
        return "a tar file", "name the manifest of its recordings before it: MANIFEST::TARS"
    if _UTF16.match(head):
        return "text in UTF-16", "convert it with iconv -f UTF-16 -t UTF-8"
    lines = [line.strip() for line in head.removeprefix(b"\xef\xbb\xbf").splitlines() if line.strip()]
    change = "write one object a line, for example with jq -c '.[]'"
    if lines and lines[0].startswith(b"[") and _is_array(lines, is_whole=len(head) < LOOKED_AT):
        return "one JSON array", change
    # A line that is broken after its brace goes on to the end of the object.
    if len(lines) > 1 and lines[0] == b"{" and re.fullmatch(rb'".*[^}]', lines[1]):
        return "JSON with an object over several lines", change.replace(".[]", ".")
    return None


def _is_array(lines: Sequence[bytes], *, is_whole: bool) -> bool:
    """Whether the first lines that are not blank begin an array of objects, rather than one bad line."""
    if lines[0] == b"[":
        return True
    if not re.match(rb"\[\s*\{", lines[0]):
        return False
    if len(lines) == 1:
        return not is_whole or _is_json(lines[0])
    return not _is_json(lines[0]) and not _is_json(lines[1])


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def refuse_cut_line(path: Path, number: int, line: bytes) -> None:
    """Raises UserError for a last line that has no end and is no JSON: the file is cut within it."""
    try:
        json.loads(line)
    except RecursionError:  # deep, not cut
        return
    except ValueError as error:
        cause = f"the file ends within a line, which is not JSON ({error})"
        raise damaged(path, f"line {number}", cause) from error


class Parts(NamedTuple):
    """Files whose names count them, such as train-00000-of-00003.parquet.

    names: the name with {} for the number. total: how many there are by the names. numbers: those there.
    """

    names: str
    total: int
    numbers: frozenset[int]
    example: Path

    @property
    def missing(self) -> list[int]:
        """Numbers of the parts that are not there, counted from 0, or from 1 where the last part is there."""
        first = 1 if 0 not in self.numbers and self.total in self.numbers else 0
        return sorted(set(range(first, first + self.total)) - self.numbers)

    @property
    def note(self) -> str:
        """Says how many of the parts are there."""
        return f"{len(self.numbers)} of the {self.total} parts that {self.example.name}'s name counts"


def parts_of(files: Iterable[Path]) -> list[Parts]:
    """The sets of parts that the files belong to; files without such a name belong to none."""
    found: dict[tuple[Path, str, int], dict[int, Path]] = defaultdict(dict)
    for path in files:
        if mark := PART.search(path.name):
            name = f"{path.name[: mark.start()]}{{}}{path.name[mark.start(2) :]}"
            found[path.parent, name, int(mark[3])][int(mark[1])] = path
    return [
        Parts(name, total, frozenset(paths), next(iter(paths.values())))
        for (_, name, total), paths in found.items()
    ]


def require_all_parts(files: Sequence[Path], title: str, otherwise: str) -> None:
    """Raises UserError where the files of a folder count more of them than there are, or leave out a number.

    A number is left out where all names have one at their ends, from 0 or 1 on, such as 0000.parquet and
    0002.parquet. title: what messages call the data set. otherwise: what to do if the others are not fetched.
    """
    all_parts = parts_of(files)
    for parts in all_parts:
        if parts.missing or len(parts.numbers) > parts.total:
            absent = parts.names.format(f"{parts.missing[0]:05d}" if parts.missing else "...")
            raise UserError(
                f"{title} has {parts.note}: {absent} is not there, or has another name; expected all of "
                f"them: fetch the others, or {otherwise}"
            )
    prefixes: dict[str, Parts] = {}
    for parts in all_parts:
        other = prefixes.setdefault(parts.names.partition("{}")[0], parts)
        if other.total != parts.total:
            raise UserError(
                f"{title} has {other.example.name} of {other.total} parts and {parts.example.name} of "
                f"{parts.total}; expected the parts of one data set: take away those of the other"
            )
    if not all_parts and (gap := gap_in(files)):
        raise UserError(
            f"{title} has files numbered {gap[0]} to {gap[2]}, and none has the number {gap[1]}; expected "
            f"all of them: fetch the others, or {otherwise}"
        )


def gap_in(files: Sequence[Path]) -> tuple[int, int, int] | None:
    """(first number, a number that is left out, last number) of names that differ in the number at their end.

    None where nothing is left out, where names are no such numbering, and where it begins above 1: years and
    dates are numbers, too.
    """
    marks = [(path, _NUMBER.search(path.name)) for path in files]
    if any(mark is None for _, mark in marks):
        return None
    names = {(p.parent, p.name[: m.start()], p.name[m.end() :]) for p, m in marks if m}
    numbers = {int(m[1]) for _, m in marks if m}
    if len(names) != 1 or min(numbers) > 1:
        return None
    first, last = min(numbers), max(numbers)
    return next(((first, n, last) for n in range(first, last) if n not in numbers), None)


def refuse_unread(folder: Path, wanted: re.Pattern[str], setting: str) -> None:
    """Raises UserError for a file of a folder that would be an item's container if its name ended otherwise.

    Such are files that are compressed otherwise than by gzip, and downloads that have not ended. wanted: the
    names of the containers, which is tried without those endings.
    """
    for path in sorted(folder.iterdir()):
        for ending, what in (
            (_UNREAD, "is compressed in a way that is not read"),
            (_UNFINISHED, "is unfinished"),
        ):
            stem = ending.sub("", path.name)
            if stem != path.name and any(wanted.fullmatch(stem + end) for end in ("", ".tar")):
                raise UserError(
                    f"{path} {what}; expected .jsonl, .jsonl.gz, .tar, .parquet or .arrow: convert it "
                    f"or fetch it again, or take it out of the data set ({setting})"
                )
