"""A file is replaced whole or not at all."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxthd.files.atomic import write_atomically


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "file"
    write_atomically(file, "before")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_atomically(file, "after, which is longer")
    assert file.read_text() == "before"

    def lines() -> Iterator[str]:
        yield "half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(file, lines())
    assert file.read_text() == "before"
    write_atomically(file, "after")
    assert file.read_text() == "after"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
