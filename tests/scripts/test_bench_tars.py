"""The benchmark of tar headers: both ways are compared, recording by recording."""

from pathlib import Path

import pytest

from scripts import bench_tars

OPTIONS = ["--recordings", "7", "--tars", "3", "--seconds", "0.01"]


def test_both_ways_find_every_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert bench_tars.main([*OPTIONS, "--folder", str(tmp_path)]) == 0
    assert "the same recordings: 7 and 7" in capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "the tar files are removed"


def test_a_recording_that_one_way_misses_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ways = bench_tars.WAYS
    name, read = next(iter(ways.items()))
    monkeypatch.setattr(bench_tars, "WAYS", {**ways, name: lambda paths: read(paths)[:-1]})
    assert bench_tars.main([*OPTIONS, "--folder", str(tmp_path)]) == 1
