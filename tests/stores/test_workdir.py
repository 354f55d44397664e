"""A run whose data and workdir are in S3 is killed while it saves, and goes on elsewhere, to the same bits.
Nightly:

python -m pytest -m nightly tests/stores --python-reference PYTHON

PYTHON has moto and flask. Every process has a cache of its own, as on a machine of its own.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import utils

from jaxthd.checkpoints.stored import read_about
from jaxthd.errors import StorageError, UserError
from jaxthd.files import stores
from jaxthd.files.run_folder import read_config, source_of
from jaxthd.files.run_store import RunStore, read_record
from jaxthd.run.signals import STOPPED
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import abstract_state
from tests.stores.servers import BUCKET, ROOT, SECRET, Server
from tests.survival import tiny
from tests.survival.damage import restore
from tests.survival.runs import TIMED, write_recordings

pytestmark = pytest.mark.nightly

STEPS, EVERY = 12, 4
SETTINGS = (
    f"--train.steps {STEPS} --train.checkpoint-every {EVERY} --train.keep-checkpoints 2 "
    "--train.validate-every 4 --data.workers 1"
)


class Runs:
    """Runs of one config, by the names of their workdirs in the store or on the disk."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder, self.server = folder, server
        data = folder / "data"
        data.mkdir()
        write_recordings(data)
        for path in data.iterdir():
            server.put(f"data/{path.name}", path.read_bytes())

    def start(self, workdir: str, machine: str, *settings: str) -> subprocess.Popen[bytes]:
        """Starts, or continues, a run in `workdir` on a machine of that name."""
        manifest = f"{self.server.url}/data/manifest.jsonl"
        command = [sys.executable, "-m", "jaxthd.train", "--config", str(tiny.__file__), "--workdir", workdir]
        command += ["--data.manifest", manifest, "--data.validation-manifest", manifest]
        environment = (
            os.environ
            | self.server.environment
            | {
                "JAX_PLATFORMS": "cpu",
                "JAX_COMPILATION_CACHE_DIR": str(self.folder / "compiled"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "XDG_CACHE_HOME": str(self.folder / machine),
                "JAXTHD_STORE_SECONDS": "12",
            }
        )
        with self.log(machine).open("ab") as log:
            return subprocess.Popen(
                [*command, *SETTINGS.split(), *settings], cwd=ROOT, env=environment, stdout=log, stderr=log
            )

    def log(self, machine: str) -> Path:
        return self.folder / f"{machine}.log"

    def finish(self, workdir: str, machine: str, *settings: str) -> str:
        """Runs it to its end; returns what it printed."""
        status = self.start(workdir, machine, *settings).wait()
        said = self.log(machine).read_text()
        assert status == 0, said[-3000:]
        return said


@pytest.fixture(scope="module")
def runs(s3_process: Server, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), s3_process)


@pytest.fixture(scope="module")
def uninterrupted(runs: Runs) -> Path:
    """A run in a folder, as it should be."""
    folder = runs.folder / "uninterrupted"
    runs.finish(str(folder), "first")
    return folder


def until(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    while not condition():
        assert process.poll() is None, "it ended before"
        time.sleep(0.01)


def content(folder: Path) -> dict[str, Any]:
    """What a run ends with: lines without times, checksums of weights, data positions, settings."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {name: x for name, x in line.items() if not name.endswith(TIMED) or name == "audio_seconds"}
        for line in lines
    ]
    steps = sorted(int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdecimal())
    return {
        "lines": kept,
        "steps": steps,
        "checkpoints": [read_about(folder / "checkpoints", step).to_json() for step in steps],
        "config": read_config(folder),
    }


def arrays(folder: Path) -> list[bytes]:
    """The bits of the newest checkpoint's state, restored."""
    abstract = abstract_state(Blueprint(tiny.config()))
    sharding = SingleDeviceSharding(jax.devices()[0])
    return restore(folder / "checkpoints", abstract, sharding)[0]


def test_killed_in_the_middle_of_a_save(runs, uninterrupted, s3, tmp_path):
    url = f"{s3.url}/killed"
    # The arrays of the second checkpoint are on their way when the process is killed: half of them arrived.
    s3.faults(
        {
            "match": f"^PUT /{BUCKET}/killed/checkpoints/{2 * EVERY}/state/.*manifest",
            "kind": "slow",
            "seconds": 60,
        }
    )
    process = runs.start(url, "a")
    second = f"{url}/checkpoints/{2 * EVERY}"
    until(lambda: any(stores.listed(f"{second}/state")), process)
    time.sleep(1)
    record = read_record(url)
    assert record is not None
    assert not any(name.startswith(f"checkpoints/{2 * EVERY}/") for name in record.files)
    process.kill()
    process.wait()
    s3.faults({"match": "^GET", "kind": "503", "times": 2}, {"match": "^GET", "kind": "cut", "times": 2})
    said = runs.finish(url, "b")
    assert f"continuing from step {EVERY} in" in said
    folder, _ = source_of(url)
    assert content(folder) == content(uninterrupted)
    assert arrays(folder) == arrays(uninterrupted)
    best = source_of(f"{url}@best")
    assert best == (folder, "best")
    assert SECRET not in said
    # The machine that was killed has that checkpoint, and the store a newer run: it takes that.
    assert "already holds step" in runs.finish(url, "a")


def test_what_was_not_sent_is_used_on_the_same_machine(runs, uninterrupted, s3):
    """Killed while the second checkpoint is sent, which is whole here: nothing is computed twice."""
    url = f"{s3.url}/same"
    s3.faults({"match": f"^PUT /{BUCKET}/same/checkpoints/{2 * EVERY}/", "kind": "slow", "seconds": 60})
    process = runs.start(url, "c")
    until(
        lambda: s3.seen() and list((runs.folder / "c").glob(f"*/runs/*/checkpoints/{2 * EVERY}/state")),
        process,
    )
    time.sleep(1)
    process.kill()
    process.wait()
    s3.faults()
    said = runs.finish(url, "c")
    # The steps do not wait for the store: the run may have been further than the checkpoint on its way.
    assert re.search(rf"continuing from step ({2 * EVERY}|{STEPS}) in", said)
    assert content(source_of(url)[0]) == content(uninterrupted)


def test_a_store_that_is_away_stops_no_run(runs, uninterrupted, s3):
    url = f"{s3.url}/away"
    s3.faults({"match": f"^PUT /{BUCKET}/away/(checkpoints|metrics)", "kind": "503"})
    process = runs.start(url, "d")
    status = process.wait()
    said = runs.log("d").read_text()
    assert status == 1
    assert "The run goes on, in" in said
    assert "the same command on this machine sends it" in said.splitlines()[-1]
    s3.faults()
    assert "already holds step" in runs.finish(url, "d")
    assert content(source_of(url)[0]) == content(uninterrupted)


def test_the_later_of_two_runs_goes_on(runs, uninterrupted, s3):
    url = f"{s3.url}/two"
    first = runs.start(url, "e", "--train.steps", "2000")
    until(lambda: (record := read_record(url)) and any("checkpoints" in name for name in record.files), first)
    second = runs.start(url, "f", "--train.steps", "2000")
    assert first.wait() in (1, STOPPED)
    assert "another run has begun in" in runs.log("e").read_text().splitlines()[-1]
    assert second.poll() is None
    second.terminate()
    assert second.wait() == STOPPED


def test_a_record_holds_whole_states(tmp_path, s3, monkeypatch):
    """Sent, changed and deleted files; a copy is of one record; one that names files elsewhere is refused."""
    store = RunStore(f"{s3.url}/plain/")
    store.fetch()
    store.claim()
    for name in (
        "metrics.jsonl",
        "checkpoints/4/a",
        f"checkpoints/8{utils.TMP_DIR_SUFFIX}1/a",
        "x.1.tmp",
        "lock",
    ):
        path = store.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    assert store.has_new_checkpoints()
    assert store.push()
    assert not store.has_new_checkpoints()
    assert not store.push()
    (first, _) = source_of(store.url)
    assert {str(x.relative_to(first)) for x in first.rglob("*") if x.is_file()} == {
        "metrics.jsonl",
        "checkpoints/4/a",
    }
    shutil.rmtree(store.folder / "checkpoints" / "4")
    (store.folder / "metrics.jsonl").write_text("two")
    assert store.push()
    (second, _) = source_of(store.url)
    assert [path.read_text() for path in second.rglob("*") if path.is_file()] == ["two"]
    assert (first / "checkpoints" / "4" / "a").exists()
    assert not any(stores.listed(f"{store.url}/checkpoints"))
    later = RunStore(store.url)
    later.fetch()
    later.claim()
    (store.folder / "metrics.jsonl").write_text("three")
    with pytest.raises(stores.ConflictError):
        store.push()
    with pytest.raises(UserError, match="holds no run"):
        source_of(f"{s3.url}/nothing")
    s3.put("bad/run.json", b'{"session": "", "files": {"../../x": 1}}')
    with pytest.raises(UserError, match="is no record of a run"):
        source_of(f"{s3.url}/bad")
    s3.put("gone/run.json", b'{"session": "", "files": {"config.json": 1}}')
    with pytest.raises(StorageError, match=r"config\.json is gone"):
        source_of(f"{s3.url}/gone")
