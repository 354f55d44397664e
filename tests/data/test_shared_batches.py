"""Of processes on a machine that read the same rows one loads; all have the batches that each would make."""

import json
import os
import pickle
import re
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxthd.data.loader import make_loader
from jaxthd.data.shared_batches import _accepted, _mapped, _written
from tests.data.items import BROKEN, SOURCE, load, quiet
from tests.data.sharing_process import ROWS, parts
from tests.data.test_loader import settings

PLAIN = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}


def three(folder: Path, end: str) -> list[tuple[int, str]]:
    """(exit status, errors) of the processes."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.data.sharing_process", str(port)]
    running = [
        subprocess.Popen([*command, str(i), folder, end], env=PLAIN, stderr=subprocess.PIPE, text=True)
        for i in range(len(ROWS))
    ]
    return [(each.wait(), each.communicate(timeout=120)[1]) for each in running]


@cache
def alone(rows: tuple[int, ...] | None) -> dict[str, Any]:
    """What a process that knows nothing of others makes of these rows. None: all."""
    made = {"rows": rows, "on_skip": quiet}
    with make_loader([SOURCE], load, settings(), **made) as loader:
        found = dict(parts(loader, lambda state: json.loads(json.dumps(state))))
    with make_loader([SOURCE], load, settings(), **made, repeat=False) as loader:
        return found | {"pass": list(loader)}


def assert_same(found: list[Any], own: list[Any], whole: list[Any]) -> None:
    """Batches are to the bit those of a process alone; reports have all rows, and its keys."""
    for (batch, report), (expected, own_report), (_, of_all) in zip(found, own, whole, strict=True):
        for x, y in zip(*map(jax.tree.leaves, (batch, expected)), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)
        assert report == own_report._replace(rows=of_all.rows)


@pytest.mark.parametrize("end", ["killed", pytest.param("hangs", marks=pytest.mark.exhaustive)])
def test_one_process_loads_for_all_that_read_its_rows(end: str, tmp_path: Path):
    ended = three(tmp_path, end)
    found = [pickle.loads((tmp_path / f"{i}.pickle").read_bytes()) for i in range(3)]
    whole = alone(None)
    for rows, each in zip(ROWS, found, strict=True):
        own = alone(rows)
        for part in ("first", "on", "again"):
            assert_same(each[part], own[part], whole[part])
        empty = len(whole["pass"]) - len(own["pass"])  # other rows go on
        assert_same(each["pass"][: len(own["pass"])], own["pass"], whole["pass"][: len(own["pass"])])
        assert not any(batch.segment_ids.any() for batch, _ in each["pass"][len(whole["pass"]) - empty :])
        assert each["state"] == whole["state"]
        assert each["after"]["streams"] == whole["after"]["streams"]
        assert each["restored"] == each["state"]["latest"]
        assert each["keys"] == [list(keys) for keys in whole["pass"][0][1].keys]
    assert found[1]["loaded"]
    assert not found[2]["loaded"]
    assert found[0]["read"] == found[2]["read"]
    skipped = [json.loads(line)["key"] for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert f"item-{BROKEN}" in skipped
    assert len(set(skipped)) == len(skipped) == 4
    # Whoever ends or hangs is the one that is named, not those that wait for its batches.
    what = "is gone" if end == "killed" else "did not come within 3 s"
    for i, (status, errors) in enumerate(ended):
        assert status == (-9 if (i, end) == (1, "killed") else 1)
        assert i == 1 or re.search(rf"process 1 \(pid \d+ on \S+\) {what}", errors), errors


def test_arrays_come_as_they_were_and_may_be_written_to():
    value = {"x": np.arange(5, dtype=np.int8), "y": np.zeros((0, 3)), "z": np.eye(3)[:, ::2], "s": ("a", 1)}
    file, size = _written(value)
    copies = [_mapped(file, size) for _ in range(2)]
    copies[0]["x"][0] = 9
    again = copies[1] | {"later": _mapped(file, size)["x"]}
    for name, expected in [*value.items(), ("later", value["x"])]:
        np.testing.assert_array_equal(again[name], expected)


def test_who_is_not_of_the_run_is_dropped():
    server = socket.socket(socket.AF_UNIX)
    server.bind("")
    server.listen()
    stranger, other = (socket.socket(socket.AF_UNIX) for _ in range(2))
    with server, stranger, other:
        for client, word in ((stranger, b"guess!"), (other, b"secret")):
            client.connect(server.getsockname())
            client.sendall(word)
        (connection,) = _accepted(server, "secret", 1)
        with connection:
            other.sendall(b"x")
            assert connection.recv(1) == b"x"
        assert stranger.recv(1) == b""
