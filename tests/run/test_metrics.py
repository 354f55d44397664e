"""Every step once, in both files, whatever cut the run off; and what the user sees of it."""

import io
import json
import math
import resource
import struct
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.figure import Figure
from tensorboardX.proto.event_pb2 import Event

from jaxthd.config import Config, RolloutConfig, TrainConfig
from jaxthd.data.loader import BatchReport, RowReport
from jaxthd.errors import UserError, readable_errors
from jaxthd.figures.axes import points
from jaxthd.kernels.programs import ProgramCount
from jaxthd.objectives import DPO, SFT
from jaxthd.rl.display import drawing_display
from jaxthd.run import metrics_file, progress
from jaxthd.run.display import display_of
from jaxthd.run.measured_by import by_validation
from jaxthd.run.metrics import StepFacts, metrics_line, values
from jaxthd.run.metrics_file import Metrics, lost_text, read_metrics
from jaxthd.run.progress import summary
from jaxthd.run.trackers import tensorboard
from jaxthd.run.trackers.tensorboard import EventFile

DISPLAY = display_of(SFT())
REPORT = BatchReport((RowReport(0, 7, 180, 40, 200, 12.5, 1.25, 7),), (("a", "b"),))
RESULTS = {
    "validation_loss": 1.5,
    "validation_accuracy": 0.625,
    "validation_wer": 1.125,
    "validation_documents": 9.0,
}


def line(step: int, loss: float = 2.5, seconds: float = 0.5, **more: float | int) -> dict[str, Any]:
    optional = dict.fromkeys(("mtp_loss", "ctc_loss", "ctc_uncovered", "max_expert_load", "aux_loss"))
    results = SimpleNamespace(
        loss=loss, grad_norm=3.0, learning_rate=1e-3, skipped=0, objective={}, **optional
    )
    return metrics_line(StepFacts(step, results, REPORT, seconds, ProgramCount(1), 0)) | more


def read_events(folder: Path) -> list[Event]:
    [file] = folder.iterdir()
    data, events = file.read_bytes(), []
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        events.append(Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return events


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(e.step, v.simple_value) for e in read_events(folder) for v in e.summary.value if v.tag == tag]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that stands still until its `now` is set."""
    fake = SimpleNamespace(now=1000.0)
    fake.time = fake.monotonic = lambda: fake.now
    for module in (metrics_file, progress, tensorboard):
        monkeypatch.setattr(module, "time", fake)
    return fake


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """As on a full disk, writing raises OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_line_counts_every_slot_once_and_its_ratios_are_over_all_slots():
    got = line(3, seconds=0.25)
    assert got["real_tokens"] + got["padding_tokens"] == got["capacity_tokens"] == 200
    assert got["padding_ratio"] == pytest.approx(0.1)
    assert got["target_to_input_ratio"] == 0.2
    assert got["tokens_per_second"] == 720
    assert (got["documents"], got["audio_seconds"], got["step_seconds"]) == (7, 12.5, 0.25)
    assert "keys" not in got


def test_a_run_cut_off_and_continued_holds_each_step_once_in_both_files(tmp_path: Path):
    with Metrics(tmp_path, 0, 9) as cut:
        cut.step({"step": 0, **RESULTS})
        for step in range(1, 7):
            cut.step(line(step, loss=100.0 + step))
    # Killed: the last line half written, TensorBoard's last events not written at all.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line(7))[:50])
    folder = tmp_path / "tensorboard"
    [events] = folder.iterdir()
    (folder / "events.out.tfevents.1600000000.elsewhere").write_bytes(events.read_bytes()[:2000])
    events.unlink()
    with Metrics(tmp_path, 4, 9) as continued:
        for step in range(5, 10):
            continued.step(line(step, loss=200.0 + step, validation_loss=step / 2))
    assert [x["step"] for x in read_metrics(tmp_path)] == list(range(10))
    expected = [(s, 100.0 + s) for s in range(1, 5)] + [(s, 200.0 + s) for s in range(5, 10)]
    assert values(read_metrics(tmp_path), "loss") == expected
    assert scalars(folder, "train/loss") == expected
    assert scalars(folder, "validation/loss") == [(0, 1.5)] + [(s, s / 2) for s in range(5, 10)]
    times = {e.step: e.wall_time for e in read_events(folder) if e.summary.value}
    assert times == {x["step"]: x["time"] for x in read_metrics(tmp_path)}


def test_a_run_cut_off_before_its_first_checkpoint_starts_from_nothing(tmp_path: Path):
    for loss in (6.0, 5.0):
        with Metrics(tmp_path, 0, 9) as metrics:
            metrics.step({"step": 0, "validation_loss": loss})
    assert values(read_metrics(tmp_path), "validation_loss") == [(0, 5.0)]
    assert scalars(tmp_path / "tensorboard", "validation/loss") == [(0, 5.0)]


def test_numbers_that_are_not_finite_stay_valid_json_and_come_back_as_nan(tmp_path: Path):
    with Metrics(tmp_path, 0, 2) as metrics:
        metrics.step(line(1, loss=math.nan) | {"grad_norm": math.inf})
        metrics.step(line(2))

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    raw = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(raw[0], parse_constant=refuse)["loss"] is None
    read = read_metrics(tmp_path)
    assert math.isnan(read[0]["loss"])
    assert math.isnan(read[0]["grad_norm"])
    assert values(read, "loss") == [(2, 2.5)]
    # And once more through a restart.
    Metrics(tmp_path, 2, 2).__exit__(None, None, None)
    assert math.isnan(scalars(tmp_path / "tensorboard", "train/loss")[0][1])
    assert "loss 2.5000 -> 2.5000" in summary(read_metrics(tmp_path), DISPLAY)


def test_without_tensorboard_no_folder_is_made(tmp_path: Path):
    with Metrics(tmp_path, 0, 1, trackers=()) as metrics:
        metrics.step(line(1))
    assert [x.name for x in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_terminal_shows_one_live_line_and_results_on_lines_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "200")
    with Metrics(tmp_path, 0, 3) as metrics:
        metrics.step(line(1))
        metrics.step(line(2, **RESULTS))
        metrics.say("a warning")
        metrics.step(line(3, loss=0.75))
    written = terminal.getvalue()
    live = [x.split("\n")[0].strip() for x in written.split("\r") if "real tokens/s" in x]
    parts = "gradient 3  360 real tokens/s  padding 10.0%  learning rate 1.00e-03"
    assert f"1/3  ETA ?  loss 2.5000  {parts}" in live[0]
    assert f"3/3  ETA 00:00  loss 0.7500  {parts}" in live[-1]
    lines = [x.split("\r")[-1] for x in written.split("\n")]
    at = lines.index("validation at step 2")
    assert lines[at + 1].split() == ["loss", "accuracy", "documents", "WER"]
    assert lines[at + 2].split() == ["1.5000", "62.5%", "9", "112.5%"]
    assert "a warning" in lines


def drawn(reward: float, **more: float) -> dict[str, Any]:
    return {"step_seconds": 0.5, "reward": reward, "answer_tokens": 6.0, **more}


def test_the_line_of_a_step_leads_with_what_the_run_is_trained_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Rewards, also in a step that found nothing to train on; and the newest of them on held-out prompts."""
    config = Config(train=TrainConfig(objective="grpo"), rollout=RolloutConfig(rewards=("wer",)))
    display = drawing_display(config)
    with Metrics(tmp_path, 0, 3, display=display, trackers=()) as metrics:
        metrics.step({"step": 0, "validation_reward": -0.5, "validation_wer": 0.75})
        metrics.step(line(1) | drawn(-0.75, kl=0.25))
        metrics.step({"step": 2} | drawn(-0.5))
        metrics.step({"step": 3} | drawn(-0.25, validation_reward=-0.125))
    shown = [x for x in capsys.readouterr().out.splitlines() if x.startswith("step")]
    assert shown[0].startswith(
        "step 1/3  ETA ?  reward -0.750  answer tokens 6.0  kl 0.2500  held-out reward -0.500  gradient 3  "
    )
    assert shown[1].split("  ")[2:5] == ["reward -0.500", "answer tokens 6.0", "held-out reward -0.500"]
    found = summary(read_metrics(tmp_path), display)
    assert "\n  reward -0.750 -> -0.250\n" in found
    assert "\n  validation reward -0.500 -> -0.125" in found
    assert "loss" not in found


def test_a_preference_run_shows_accuracy_and_margin(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """First and last values of noisy numbers are means over up to ten steps."""
    display = display_of(DPO())
    with Metrics(tmp_path, 0, 30, display=display, trackers=()) as metrics:
        for step in range(1, 31):
            own = {"accuracy": 0.5 + 0.25 * (step > 20), "margin": float(step)}
            metrics.step(line(step) | own | ({"validation_preference_accuracy": 0.25} if step == 1 else {}))
    shown = capsys.readouterr().out.splitlines()
    assert "  loss 2.5000  accuracy 50.0%  margin 1.000  gradient 3" in shown[0]
    assert "  loss 2.5000  accuracy 50.0%  margin 2.000  held-out preference accuracy 25.0%  " in shown[4]
    found = summary(read_metrics(tmp_path), display)
    assert "accuracy 50.0% -> 75.0% (means of 10 steps)" in found
    assert "margin 5.500 -> 25.500 (means of 10 steps)" in found


def test_what_a_continued_run_does_again_is_said(tmp_path: Path):
    assert lost_text(tmp_path, 0) == ""
    with Metrics(tmp_path, 0, 9, trackers=()) as metrics:
        metrics.step({"step": 0, "validation_loss": 1.0})
        assert lost_text(tmp_path, 0) == ""
        for step in range(1, 8):
            metrics.step(line(step, seconds=step / 2))
    assert lost_text(tmp_path, 7) == ""
    assert lost_text(tmp_path, 6).startswith("1 step(s) are lost, 3.5 s of work: step 7 ran after the checkp")
    assert lost_text(tmp_path, 4).startswith("3 step(s) are lost, 9.0 s of work: steps 5 to 7 ran after the")
    assert "14.0 s of work: steps 1 to 7 ran before a checkpoint was saved" in lost_text(tmp_path, 0)


def test_the_summary_says_which_programs_came_from_the_cache():
    read = {"compilations": 9, "cached_compilations": 4}
    assert ", 9 programs of the step, 4 of them read from the cache," in summary([line(1) | read], DISPLAY)
    old = {name: x for name, x in line(1).items() if name != "cached_compilations"}
    assert ", 1 program of the step compiled," in summary([old], DISPLAY)


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_the_live_line_has_what_fits_and_is_never_cut(
    columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    with Metrics(tmp_path, 0, 90_000) as metrics:
        for step in (1, 2):
            metrics.step(line(step))
    live = [x.split("\n")[0] for x in terminal.getvalue().split("\r") if "ETA" in x]
    assert all(len(x) <= columns for x in live)
    assert all("2.500" in x for x in live)
    assert "gradient 3" in live[-1]
    assert ("real tokens/s" in live[-1]) == (columns > 60)
    assert ("learning rate 1.00e-03" in live[-1]) == (columns == 200)


def test_validation_sets_are_rows_of_one_table():
    sets = {"clean": 0.25, "a-set-of-a-very-long-name-indeed": 0.5}
    results = {"validation_loss": 1.0, "validation_wer": 0.375, "validation_documents": 12.0}
    for name, wer in sets.items():
        results |= {f"validation_{name}_wer": wer, f"validation_{name}_documents": 6.0}
    title, heads, *rows = progress.validation_table(7, results, 60, DISPLAY).splitlines()
    assert title == "validation at step 7"
    assert heads.split() == ["set", "loss", "documents", "WER"]
    assert [row.split() for row in rows] == [
        ["all", "sets", "1.0000", "12", "37.5%"],
        ["clean", "-", "6", "25.0%"],
        ["a-set-of-a-very-long-na…", "-", "6", "50.0%"],
    ]
    assert all(len(row) <= 60 for row in rows)


def test_elsewhere_progress_is_plain_lines_and_not_of_every_step(
    tmp_path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
):
    with Metrics(tmp_path, 20, 200) as metrics:
        for step in range(21, 201):
            clock.now += 0.25
            metrics.step(line(step, **(RESULTS if step in (50, 51) else {})))
    written = capsys.readouterr().out
    assert "\r" not in written
    shown = [x.split()[1] for x in written.splitlines() if x.startswith("step")]
    expected = [*range(21, 31), 50, 51, *range(71, 200, 20), 200]
    assert shown == [f"{step}/200" for step in expected]
    assert written.count("validation at step") == 2
    assert len(read_metrics(tmp_path)) == 180


def test_the_step_that_compiles_distorts_neither_the_time_left_nor_the_rate(
    tmp_path: Path, clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
):
    with Metrics(tmp_path, 0, 100) as metrics:
        for step, seconds in enumerate([60.0, 2.0, 2.0, 2.0], 1):
            clock.now += seconds
            metrics.step(line(step, seconds=seconds))
    first, second, *_, last = capsys.readouterr().out.splitlines()
    assert "ETA ?" in first
    assert "3 real tokens/s" in first
    assert "ETA 03:16" in second
    assert "90 real tokens/s" in second
    assert "ETA 03:12" in last
    assert "90 real tokens/s" in last


@pytest.mark.parametrize("name", ["metrics.jsonl", "tfevents"])
def test_a_full_disk_ends_in_one_message_that_names_the_file(tmp_path: Path, name: str):
    def fill() -> None:
        with readable_errors(), largest_file(20_000):
            if name == "metrics.jsonl":
                with Metrics(tmp_path, 0, 100, trackers=()) as metrics:
                    for step in range(1, 101):
                        metrics.step(line(step))
            with closing(EventFile(tmp_path, [])) as events:
                for step in range(1, 101):
                    events.write(line(step))

    with pytest.raises(SystemExit, match=rf"^error: \[Errno \d+\] .*{name}"):
        fill()


def test_metrics_of_a_folder_without_a_run_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="does not exist"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="holds no line"):
        read_metrics(tmp_path)


def test_results_of_another_validation_are_neither_compared_nor_joined():
    change = {"changed": 'train.steps 3 -> 9, data.validation_manifest "easy" -> "real"'}
    lines = [
        line(1) | {"validation_wer": 0.1},
        line(2) | {"changed": "train.steps 2 -> 3"},
        line(3) | {"validation_wer": 0.05},
        line(4) | change,
        line(5) | {"validation_wer": 0.8},
        line(6) | {"validation_wer": 0.7},
    ]
    assert [[x["step"] for x in part] for part in by_validation(lines)] == [[1, 2, 3], [4, 5, 6]]
    assert [len(part) for part in by_validation(lines[3:])] == [3]
    said = summary(lines, DISPLAY)
    assert "validation has changed before step 4; its results since then:" in said
    assert "validation WER 80.0% -> 70.0%" in said
    assert "changed" not in summary(lines[:3], DISPLAY)
    axes = Figure().subplots()
    points(axes, lines, "validation_wer", "red", "errors", "{:.1%}")
    assert [x.get_xdata().tolist() for x in axes.lines] == [[1, 3], [5, 6]]
    assert axes.get_legend_handles_labels()[1] == ["errors: 80.0% \N{RIGHTWARDS ARROW} 70.0%"]


def test_the_summary_tells_first_and_last_values_and_medians():
    lines = [
        {"step": 0, "validation_loss": 6.0, "validation_wer": 2.0},
        line(1, loss=5.0, seconds=60.0),
        line(2, loss=3.0, **RESULTS),
        line(3, loss=1.0) | {"skipped_updates": 2, "skipped_documents": 4},
    ]
    assert summary(lines, DISPLAY) == (
        "3 steps, median 0.50 s a step, 360 real tokens/s, padding 10.0%, 1 program of the step compiled, "
        "2 update(s) skipped, 4 document(s) skipped\n"
        "  loss 5.0000 -> 1.0000\n"
        "  validation loss 6.0000 -> 1.5000\n"
        "  validation WER 200.0% -> 112.5%\n"
        "  validation accuracy 62.5% -> 62.5%"
    )
