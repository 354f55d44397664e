"""Facts about the machine that are parsed from text."""

from pathlib import Path

import pytest

from jaxthd.kernels import machine

TEXTS = {
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build": "580.159.04",
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023": "535.104.05",
    "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15  Release Build": "570.86.15",
    "nothing of the kind": None,
}


@pytest.mark.parametrize(("text", "version"), TEXTS.items())
def test_the_driver_s_version_is_read(
    text: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "version"
    file.write_text(f"{text}\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n")
    monkeypatch.setattr(machine, "_DRIVER", file)
    assert machine._driver() == version


def test_without_a_driver_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "_DRIVER", tmp_path / "missing")
    assert machine._driver() is None
