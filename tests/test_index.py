"""jaxthd index: index files beside tar files, before any run."""

import os
from pathlib import Path

import pytest

import jaxthd.index
from jaxthd.data.sources import tar_index_files, tarred
from jaxthd.errors import UserError
from jaxthd.index import main
from tests.data.sets import write_tar


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two tar files, and a user whose cache is another one."""
    for module in (tarred, jaxthd.index):
        monkeypatch.setattr(module, "LEAST", 1)
    monkeypatch.setattr(tar_index_files, "user_cache", lambda: tmp_path / "cache")
    tars = tmp_path / "tars"
    tars.mkdir()
    for n in range(2):
        write_tar(tars / f"a_{n}.tar", {f"{n}{k}.wav": bytes(1000 * k) for k in range(3 + n)})
    return tars


def test_a_folder_and_braces(folder, capsys, monkeypatch):
    main([str(folder)])
    assert capsys.readouterr() == (
        "2 index files written and 0 kept, of 7 members; 0 tar files need none\n",
        "",
    )
    expected = [tarred._read_headers(folder / f"a_{n}.tar") for n in range(2)]
    monkeypatch.setattr(tarred, "_read_headers", None)
    assert [tarred.index_tar(folder / f"a_{n}.tar") for n in range(2)] == expected
    main([f"{folder}/train.jsonl::{folder}/a_{{0..1}}.tar"])
    assert "0 index files written and 2 kept" in capsys.readouterr().out


def test_what_only_the_cache_has_is_written_beside(folder, capsys, monkeypatch):
    write = tar_index_files.write_atomically
    with monkeypatch.context() as patch:
        patch.setattr(tar_index_files, "write_atomically", refuse)
        with pytest.raises(UserError, match=r"a_0\.tar cannot be written .*where it may be"):
            main([str(folder / "a_0.tar")])
    monkeypatch.setattr(tar_index_files, "write_atomically", lambda p, t: write(p, t))
    main([str(folder / "a_0.tar")])
    assert (folder / "a_0.tar.index").is_file()
    assert "1 index files written" in capsys.readouterr().out


def refuse(path: Path, text: str) -> None:
    raise PermissionError(path)


def test_damage_and_small_files(folder, capsys, monkeypatch):
    os.truncate(folder / "a_0.tar", 2000)
    with pytest.raises(SystemExit) as ended:
        main([str(folder)])
    assert ended.value.code == 1
    said = capsys.readouterr()
    assert "1 index files written" in said.out
    assert said.err.startswith("warning: a_0.tar is damaged")
    monkeypatch.setattr(jaxthd.index, "LEAST", 1 << 24)
    main([str(folder / "a_1.tar")])
    assert capsys.readouterr().out.endswith("of 4 members; 1 tar files need none\n")


def test_what_is_not_there(folder):
    (folder / "empty").mkdir()
    for path in ("none.tar", "empty"):
        with pytest.raises(UserError, match=rf"{path} is no tar file, and no folder"):
            main([str(folder / path)])
