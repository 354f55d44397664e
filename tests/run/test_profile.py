"""The trace that a window of steps leaves, with its steps; a profiler that fails stops nothing."""

from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.profiler import ProfileData

from jaxthd.config import TrainConfig
from jaxthd.run.profile import profiled


def traced(workdir: Path, steps: Iterable[int], window: str, stop: int = 0) -> list[str]:
    """What is said; the step of the window computes something."""
    said: list[str] = []
    compute = jax.jit(lambda x: jnp.sin(x) @ x)
    x = np.ones((64, 64), np.float32)
    with profiled(steps, TrainConfig(profile=window), workdir, said.append) as numbers:
        for step in numbers:
            compute(x).block_until_ready()
            if step == stop:
                break
    return said


def steps_in(workdir: Path) -> list[int]:
    """The steps in the trace, by the annotation that TensorBoard's tools divide it by."""
    [file] = (workdir / "tensorboard").glob("plugins/profile/*/*.xplane.pb")
    return sorted(
        int(value)
        for plane in ProfileData.from_file(str(file)).planes
        for line in plane.lines
        for event in line.events
        if event.name.startswith("train")
        for name, value in event.stats
        if name == "step_num"
    )


def test_the_window_and_no_other_step_is_in_the_trace(tmp_path: Path):
    said = traced(tmp_path, range(1, 8), "3:4")
    assert steps_in(tmp_path) == [3, 4]
    assert len(said) == 1
    assert "the profile of steps 3 to 4" in said[0]


def test_a_run_that_starts_or_stops_inside_the_window_leaves_what_there_is(tmp_path: Path):
    traced(tmp_path, range(4, 9), "3:9", stop=5)
    assert steps_in(tmp_path) == [4, 5]


@pytest.mark.parametrize("window", ["", "9:12"])
def test_without_a_window_or_before_it_nothing_is_traced(tmp_path: Path, window: str):
    assert traced(tmp_path, range(1, 4), window) == []
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["start_trace", "stop_trace"])
def test_a_profiler_that_fails_is_reported_and_every_step_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
):
    def fail(*_: object) -> None:
        raise RuntimeError("another trace is open")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: None)
    monkeypatch.setattr(jax.profiler, name, fail)
    said: list[str] = []
    with profiled(range(1, 6), TrainConfig(profile="2:3"), tmp_path, said.append) as steps:
        assert [*steps] == [1, 2, 3, 4, 5]
    [warning] = said
    assert "steps 2 to 3 cannot be profiled (RuntimeError: another trace is open)" in warning
