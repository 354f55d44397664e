"""Every second of a run belongs to one cause; steps that a kill made run again are lost."""

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.figures.curves import draw_curves, run_figure, seconds_of
from jaxthd.objectives import SFT
from jaxthd.run import goodput
from jaxthd.run.display import display_of
from jaxthd.run.goodput import FILE, TimeAccount, stored_seconds
from jaxthd.run.metrics import CAUSES, time_line

COMPILE = "/jax/core/compile/backend_compile_duration"
DISPLAY = display_of(SFT())
TRACE = "/jax/core/compile/jaxpr_trace_duration"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until `now` is set."""
    fake = SimpleNamespace(now=100.0)
    fake.monotonic = lambda: fake.now
    monkeypatch.setattr(goodput, "time", fake)
    return fake


def spent(**seconds: float) -> dict[str, float]:
    return dict.fromkeys(CAUSES, 0.0) | {cause: float(x) for cause, x in seconds.items()}


def test_every_second_has_one_cause(tmp_path: Path, clock: SimpleNamespace):
    with TimeAccount(tmp_path, 90.0) as account:
        account.continued(tmp_path / "metrics.jsonl", 0)
        with account.during("restoring"):
            clock.now += 2.0
        account.switch("stepping")  # 12 s since the command began
        clock.now += 3.0
        with account.during("validating"):
            clock.now += 2.0
            with account.during("saving"):
                clock.now += 1.0
        clock.now += 4.0
        account.move(1.5, "data_wait")
        assert account.seconds == spent(
            starting=10, restoring=2, stepping=5.5, data_wait=1.5, validating=2, saving=1
        )
        account.switch("saving")
        clock.now += 7.0
    assert stored_seconds(tmp_path) == spent(
        starting=10, restoring=2, stepping=5.5, data_wait=1.5, validating=2, saving=8
    )
    line = time_line(stored_seconds(tmp_path))
    assert line["goodput"] == pytest.approx(5.5 / 29)
    assert seconds_of([{"step": 1, **line}, {"step": 2}]) == stored_seconds(tmp_path)


def test_a_stall_is_counted_in_place_of_what_it_happened_in(tmp_path: Path, clock: SimpleNamespace):
    with TimeAccount(tmp_path, 100.0) as account:
        account.switch("stepping")
        clock.now += 50.0
        account.stalled(40.0)  # the watchdog's thread, as the run goes on
        account.switch("data_wait")
        clock.now += 3.0
        account.stalled(5.0)  # never more than there is
        assert account.seconds == spent(stepping=10, stalled=43)


def test_drawing_is_work_and_waiting_for_rewards_is_not(tmp_path: Path, clock: SimpleNamespace):
    """Lines of a run that draws nothing have neither; accounts from before there were these causes go on."""
    with TimeAccount(tmp_path, 100.0) as account:
        account.switch("stepping")
        clock.now += 2.0
        with account.during("drawing"):
            clock.now += 5.0
            account.move(1.0, "reward_wait")
        assert account.seconds == spent(stepping=2, drawing=4, reward_wait=1)
        line = time_line(account.seconds)
    assert (line["drawing_seconds"], line["reward_wait_seconds"]) == (4, 1)
    assert line["goodput"] == pytest.approx(6 / 7)
    without = time_line(spent(stepping=3, other=1))
    assert without.keys() & {"drawing_seconds", "reward_wait_seconds"} == set()
    assert seconds_of([{"step": 1, **without}]) == spent(stepping=3, other=1)
    (tmp_path / goodput.FILE).write_text(json.dumps({"stepping": 3.0}))
    assert stored_seconds(tmp_path) == spent(stepping=3)


def test_compiling_counts_once_whatever_it_happens_in_and_not_in_other_threads(
    tmp_path: Path, clock: SimpleNamespace
):
    def compiled(event: str, start: float, end: float) -> None:
        clock.now = float(end)
        jax.monitoring.record_event_duration_secs(event, float(end - start))

    with TimeAccount(tmp_path, 100.0) as account:
        account.switch("stepping")
        compiled(TRACE, 101, 102)  # inside the next
        compiled(TRACE, 100.5, 104)
        compiled(COMPILE, 104, 109)
        jax.monitoring.record_event_duration_secs("/jax/other", 5.0)
        clock.now = 110.0
        with account.during("validating"):
            compiled(COMPILE, 111, 113)
            thread = threading.Thread(target=compiled, args=(COMPILE, 113, 115))
            thread.start()
            thread.join()
        assert account.seconds == spent(compiling=8.5 + 2, stepping=1.5, validating=3)


def test_the_compiler_of_jax_is_heard(tmp_path: Path):
    with TimeAccount(tmp_path, goodput.time.monotonic()) as account:
        jax.jit(lambda x: jnp.sin(x) + 1.25)(np.arange(3.0)).block_until_ready()
        heard = account.seconds["compiling"]
    assert heard > 0
    jax.jit(lambda x: jnp.sin(x) + 2.5)(np.arange(3.0)).block_until_ready()
    assert account.seconds["compiling"] == heard  # a closed account listens no more


def test_devices_wait_for_data_from_when_they_are_done(
    tmp_path: Path, clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
):
    done = threading.Event()
    monkeypatch.setattr(goodput.jax, "block_until_ready", lambda work: done.wait(30))
    with TimeAccount(tmp_path, 100.0) as account:
        account.switch("stepping")
        with account.loading(None):  # the devices finish at 102, the batch is there at 105
            clock.now = 102.0
            done.set()
            for thread in threading.enumerate():
                if thread.name == "end of the step":
                    thread.join()
            clock.now = 105.0
        done.clear()
        with account.loading(None):  # the batch is there first
            clock.now = 106.0
        clock.now = 110.0
        assert account.seconds == spent(stepping=7, data_wait=3)
    done.set()


def test_steps_that_run_again_are_lost_and_time_is_never_counted_twice(
    tmp_path: Path, clock: SimpleNamespace
):
    file = tmp_path / "metrics.jsonl"

    def write(*lines: tuple[int, dict[str, float]]) -> None:
        file.write_text("".join(json.dumps({"step": s, **time_line(x)}) + "\n" for s, x in lines))

    fourth = spent(stepping=4, data_wait=1, compiling=5, other=3)
    sixth = spent(stepping=6, data_wait=1.5, compiling=5, other=3, saving=2, validating=1)
    write((4, fourth), (6, sixth))  # killed; the checkpoint is of step 4
    after = spent(stepping=4, data_wait=1, compiling=5, other=3, saving=2, lost=3.5)
    for last_step in (4, 4):  # killed once more before the first line, or before the old ones are removed
        account = TimeAccount(tmp_path, clock.now)
        account.continued(file, last_step)
        assert account.seconds == after
    write((4, fourth))
    with TimeAccount(tmp_path, clock.now) as account:
        account.continued(file, 4)
        assert account.seconds == after
        clock.now += 2.0
    # A command that ended well: its last seconds, which no line has, go on.
    with TimeAccount(tmp_path, clock.now) as account:
        account.continued(file, 4)
        assert account.seconds == after | {"starting": 2.0}
    # Before the first checkpoint all steps are lost, and a damaged account is that of the last line.
    (tmp_path / FILE).write_text("{")
    write((1, fourth), (2, sixth))
    with TimeAccount(tmp_path, clock.now) as account:
        account.continued(file, 0)
        assert account.seconds == spent(compiling=5, other=3, saving=2, lost=8.5)


def test_the_bar_shows_the_shares(tmp_path: Path):
    seconds: dict[str, Any] = spent(stepping=50, compiling=25, lost=25)
    [bar] = [x for x in run_figure([], DISPLAY, seconds).axes if x.get_title(loc="left").startswith("Where")]
    assert bar.get_title(loc="left") == "Where the time went: 1 min 40 s"
    assert [text.get_text() for text in bar.get_legend().get_texts()] == [
        "stepping 50.0%",
        "compiling 25.0%",
        "lost 25.0%",
    ]
    assert [(x.get_x(), x.get_width()) for x in bar.patches] == [(0, 0.5), (0.5, 0.25), (0.75, 0.25)]
    draw_curves([], tmp_path / "none.png", DISPLAY)
    draw_curves([], tmp_path / "all.png", DISPLAY, dict.fromkeys(CAUSES, 1111.1))  # all causes have room
