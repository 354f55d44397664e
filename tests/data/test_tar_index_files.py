"""A tar file's index file says what its headers say, counts while it is the tar file's, and saves reading
them.
"""

import os
from pathlib import Path

import pytest

from jaxthd.data.sources import tar_index_files, tarred
from jaxthd.data.sources.tarred import index_tar
from tests.data.sets import write_tar


@pytest.fixture
def tar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tar file that has a name twice, with an index file."""
    monkeypatch.setattr(tarred, "LEAST", 1)
    monkeypatch.setattr(tar_index_files, "user_cache", lambda: tmp_path / "cache")
    write_tar(
        tmp_path / "a.tar", {f"é {n}.wav": bytes([n]) * (n * 7001) for n in range(20)} | {"./é 3.wav": b"x"}
    )
    return tmp_path / "a.tar"


def no_headers(path: Path) -> tarred.TarIndex:
    raise AssertionError(f"the headers of {path} are read")


def test_the_headers_are_read_once(tar, monkeypatch):
    first = index_tar(tar)
    assert first == tarred._read_headers(tar)
    assert isinstance(first.members["é 3.wav"], str)
    assert tar.with_name("a.tar.index").is_file()
    monkeypatch.setattr(tarred, "_read_headers", no_headers)
    assert index_tar(tar) == first


@pytest.mark.parametrize("change", ["newer", "content", "damaged", "other"])
def test_an_index_of_another_tar_file_does_not_count(tar, change):
    index_tar(tar)
    index = tar.with_name("a.tar.index")
    later = index.stat().st_mtime_ns + 10**9
    if change == "newer":
        os.utime(tar, ns=(later, later))
    elif change == "damaged":
        index.write_bytes(index.read_bytes().replace(b"7001", b"7002"))
    else:
        write_tar(tar, {"b.wav": b"b" * 10, "c.wav": b"c" * (20 if change == "other" else 200_000)})
        os.utime(index, ns=(later, later))
    assert index_tar(tar) == tarred._read_headers(tar)
    assert index_tar(tar).members == tarred._read_headers(tar).members


def test_a_folder_that_is_not_written_to(tar, monkeypatch):
    """The index is kept with the user's cache."""

    def refuse(path: Path, lines: str) -> None:
        if path.parent == tar.parent:
            raise PermissionError(path)
        path.write_text(lines)

    monkeypatch.setattr(tar_index_files, "write_atomically", refuse)
    first = index_tar(tar)
    assert len(list((tar.parent / "cache" / "tars").iterdir())) == 1
    monkeypatch.setattr(tarred, "_read_headers", no_headers)
    assert index_tar(tar) == first


def test_small_and_damaged_tar_files_have_none(tar, monkeypatch):
    tar.write_bytes(tar.read_bytes()[:100_000])
    assert index_tar(tar).damage
    monkeypatch.setattr(tarred, "LEAST", 1 << 24)
    index_tar(write_tar(tar, {"a.wav": b"a"}))
    assert [path.name for path in tar.parent.iterdir()] == ["a.tar"]
