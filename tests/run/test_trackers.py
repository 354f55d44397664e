"""Trackers get every step once, whatever cut the run off; and no failure of theirs reaches the run."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from jaxthd.run.metrics_file import Metrics, read_metrics
from jaxthd.run.trackers import background
from jaxthd.run.trackers.mlflow import MLflow
from jaxthd.run.trackers.tracker import Line, Sent, TrackedRun, scalars


class Service:
    """Stands for W&B: its runs outlive the process; each keeps what it was given."""

    def __init__(self) -> None:
        self.runs: dict[str, list[dict[str, Any]]] = {}
        self.closed: list[bool] = []
        self.settings: list[Any] = []
        self.fails_at: Callable[[str, int], BaseException | None] = lambda call, step: None

    def open(self, run: TrackedRun) -> "Service.Tracker":
        return self.Tracker(self, run)

    class Tracker:
        def __init__(self, service: "Service", run: TrackedRun) -> None:
            self._service = service
            self._may("open", 0)
            self._sent = Sent("fake", run)
            if not self._sent.id:
                self._sent.started(f"run{len(service.runs)}")
            service.runs.setdefault(self._sent.id, [])
            service.settings.append(run.settings)
            for line in run.lines:
                self.write(line)

        def write(self, line: Line) -> None:
            if self._sent.is_news(line["step"]):
                self._may("write", line["step"])
                self._service.runs[self._sent.id].append({"step": line["step"], **scalars(line)})
                self._sent.add(line["step"])

        def close(self, *, failed: bool) -> None:
            self._may("close", 0)
            self._service.closed.append(failed)

        def _may(self, call: str, step: int) -> None:
            if error := self._service.fails_at(call, step):
                raise error


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    fake = Service()
    monkeypatch.setattr("jaxthd.run.metrics_file.TRACKERS", {"fake": fake.open})
    yield fake
    assert not [x for x in threading.enumerate() if x.name == "tracker fake"]


def line(step: int, loss: float) -> dict[str, Any]:
    fields = dict.fromkeys(("grad_norm", "tokens_per_second", "padding_ratio", "learning_rate"), 1.0)
    return {"step": step, "loss": loss, **fields}


def steps_of(run: list[dict[str, Any]]) -> list[tuple[int, float]]:
    return [(x["step"], x["train/loss"]) for x in run]


def test_a_continued_run_goes_on_in_the_trackers_run_without_a_repeated_step(
    tmp_path: Path, service: Service
):
    cut = Metrics(tmp_path, 0, 9, trackers=("fake",))
    for step in range(1, 7):
        cut.step(line(step, float(step)))
    cut.__exit__(RuntimeError, RuntimeError(), None)
    with Metrics(tmp_path, 4, 9, trackers=("fake", "fake"), settings={"a.b": 1}) as continued:
        for step in range(5, 10):
            continued.step(line(step, float(step)))
    assert {name: steps_of(run) for name, run in service.runs.items()} == {
        "run0": [(step, float(step)) for step in range(1, 10)]
    }
    assert service.closed == [True, False]
    assert service.settings == [{}, {"a.b": 1}]


def test_a_tracker_that_is_added_later_gets_the_steps_so_far(tmp_path: Path, service: Service):
    with Metrics(tmp_path, 0, 4, trackers=()) as before:
        for step in range(1, 4):
            before.step(line(step, float(step)))
    with Metrics(tmp_path, 3, 4, trackers=("fake",)) as after:
        after.step(line(4, 4.0))
    assert steps_of(service.runs["run0"]) == [(step, float(step)) for step in range(1, 5)]


def test_a_new_run_in_an_emptied_workdir_is_a_new_run_of_the_tracker(tmp_path: Path, service: Service):
    for _ in range(2):
        with Metrics(tmp_path, 0, 1, trackers=("fake",)) as metrics:
            metrics.step(line(1, 1.0))
        (tmp_path / "metrics.jsonl").unlink()
    assert [*map(steps_of, service.runs.values())] == [[(1, 1.0)], [(1, 1.0)]]


class FakeMLflow(ModuleType):
    """Stands for MLflow: keeps (name, step) of each number, and is cut off once it has `room` of them."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.entities = SimpleNamespace(Metric=self.Metric, Param=SimpleNamespace)
        self.numbers: list[tuple[str, int]] = []
        self.room = sys.maxsize

    class Metric(NamedTuple):
        key: str
        value: float
        timestamp: int
        step: int

    def MlflowClient(self, where: str) -> "FakeMLflow":
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id="1")

    def create_run(self, experiment: str, **_: Any) -> Any:
        return SimpleNamespace(info=SimpleNamespace(run_id="run"))

    def log_batch(self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Any] = ()) -> None:
        for metric in metrics:
            if len(self.numbers) == self.room:
                raise ConnectionError("cut off")
            self.numbers.append((metric.key, metric.step))

    def get_metric_history(self, run_id: str, key: str) -> list[Any]:
        return [SimpleNamespace(step=step) for name, step in self.numbers if name == key]

    def update_run(self, run_id: str, **_: Any) -> None: ...

    def set_terminated(self, run_id: str, status: str) -> None: ...


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeMLflow:
    found = FakeMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", found)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://nowhere")
    return found


def test_mlflow_gets_all_of_a_step_where_it_cannot_read_what_it_has(tmp_path: Path, fake: FakeMLflow):
    first, second = (line(step, float(step)) | {"time": 0.0} for step in (1, 2))
    MLflow(TrackedRun(tmp_path, {}, [first], is_new=True))
    fake.get_metric_history = None  # type: ignore[assignment, method-assign]
    MLflow(TrackedRun(tmp_path, {}, [first, second], is_new=False))
    assert sorted(fake.numbers) == sorted((tag, x["step"]) for x in (first, second) for tag in scalars(x))


def test_mlflow_gets_the_rest_of_a_step_that_was_cut_off(tmp_path: Path, fake: FakeMLflow):
    lines = [line(step, float(step)) | {"time": 0.0} for step in (1, 2, 3)]
    fake.room = 8  # a step has five numbers
    cut_off = MLflow(TrackedRun(tmp_path, {}, [], is_new=True))
    cut_off.write(lines[0])
    with pytest.raises(ConnectionError):
        cut_off.write(lines[1])
    fake.room = sys.maxsize
    continued = MLflow(TrackedRun(tmp_path, {}, lines[:2], is_new=False))
    continued.write(lines[2])
    continued.close(failed=False)
    assert sorted(fake.numbers) == sorted((tag, x["step"]) for x in lines for tag in scalars(x))


@pytest.mark.parametrize("call", ["open", "write", "close"])
@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SystemExit(1), ImportError("No module named 'fake'")],
    ids=lambda x: type(x).__name__,
)
def test_a_failure_anywhere_is_reported_once_and_the_run_has_every_step(
    tmp_path: Path, service: Service, call: str, error: BaseException, capsys: pytest.CaptureFixture[str]
):
    service.fails_at = lambda where, step: error if where == call and step in (0, 2) else None
    with Metrics(tmp_path, 0, 5, trackers=("fake",)) as metrics:
        for step in range(1, 6):
            metrics.step(line(step, float(step)))
    assert [x["step"] for x in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]
    printed = capsys.readouterr().out
    assert printed.count("the tracker fake has failed") == 1
    assert str(error) in printed
    assert ("pip install 'jaxthd[fake]'" in printed) == isinstance(error, ImportError)
    # When the run is continued, the tracker gets what it lacks.
    service.fails_at = lambda where, step: None
    with Metrics(tmp_path, 5, 6, trackers=("fake",)) as metrics:
        metrics.step(line(6, 6.0))
    [run] = service.runs.values()
    assert [x["step"] for x in run] == [1, 2, 3, 4, 5, 6]


def test_a_tracker_that_hangs_neither_delays_a_step_nor_the_end(
    tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    released = threading.Event()

    def hang(call: str, step: int) -> None:
        if call == "write":
            released.wait(30)

    service.fails_at = hang  # type: ignore[assignment]
    monkeypatch.setattr(background, "CLOSE_SECONDS", 0.1)
    with Metrics(tmp_path, 0, 5, trackers=("fake",)) as metrics:
        for step in range(1, 6):
            metrics.step(line(step, float(step)))
    assert "it has not ended within 0.1 s" in capsys.readouterr().out
    released.set()
    for thread in threading.enumerate():
        if thread.name == "tracker fake":
            thread.join()


FAKE_WANDB = '''
"""Stands for W&B whose service hangs: what HANGS names blocks for ever."""
import atexit, os, time
from types import SimpleNamespace

run, hangs = None, os.environ["HANGS"].split()

def block(what):
    while what in hangs:
        time.sleep(1)

def at_exit():
    block("exit")

def teardown():
    atexit.unregister(at_exit) if "hook" not in hangs else None
    block("teardown")

class Settings(SimpleNamespace):
    model_fields = {}

def init(**_):
    global run
    atexit.register(at_exit)
    block("init")
    run = Run()
    return run

class Run:
    resumed = False

    def log(self, *_, **__):
        block("log")

    def finish(self, **_):
        global run
        block("finish")
        run = None
'''
PROGRAM = """
import sys
from pathlib import Path
from jaxthd.errors import UserError, readable_errors
from jaxthd.run.metrics_file import Metrics
from jaxthd.run.trackers import background
from jaxthd.terminal import leaving

background.CLOSE_SECONDS, leaving.EXIT_SECONDS = 1.0, 1.5
line = dict.fromkeys(("grad_norm", "tokens_per_second", "padding_ratio", "learning_rate"), 1.0)

def command():
    with Metrics(Path(sys.argv[2]), 0, 2, trackers=("wandb",)) as metrics:
        for step in (1, 2):
            metrics.step({"step": step, "loss": 1.0, "time": 1.0, **line})
    print("all is saved")
    if "fails" in sys.argv[1]:
        raise UserError("found, expected, change")

if "library" in sys.argv[1]:
    command()
else:
    with leaving.ends_in_time(), readable_errors():
        command()
"""


@pytest.mark.parametrize(
    ("hangs", "how", "status", "told"),
    [
        pytest.param("", "command", 0, "", marks=pytest.mark.exhaustive),
        ("exit", "library", 0, ""),  # teardown has removed the hook
        pytest.param("finish exit", "library", 0, "has not ended within 1 s", marks=pytest.mark.exhaustive),
        ("finish teardown exit", "library", 0, "has not ended within 1 s"),
        ("init exit", "command fails", 1, "has not ended within 1 s"),
        pytest.param("log exit", "library", 0, "has not ended within 1 s", marks=pytest.mark.exhaustive),
        pytest.param("hook exit", "command", 0, "kept the process alive", marks=pytest.mark.exhaustive),
        ("hook exit", "command fails", 1, "kept the process alive"),
    ],
)
def test_wandb_never_keeps_the_process_alive(tmp_path: Path, hangs: str, how: str, status: int, told: str):
    """Its exit hook waits for its service for ever. All was said and saved before the end."""
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    (tmp_path / "program.py").write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, tmp_path / "program.py", how, tmp_path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()]), "HANGS": hangs},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == status, ended.stderr
    assert "all is saved" in ended.stdout
    assert told in ended.stdout + ended.stderr
    assert ("error: found, expected" in ended.stderr) == bool(status)
    assert "Traceback" not in ended.stderr
    assert [x["step"] for x in read_metrics(tmp_path)] == [1, 2]
