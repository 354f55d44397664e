"""Checkpoints: whole or reported, whatever happens to the disk and to the process."""

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.checkpoints.stored import best_of, find_checkpoint, measured_otherwise, read_about, reason
from jaxthd.errors import UserError
from jaxthd.steps.state import TrainState
from tests.survival.damage import bits, damaged

MESH = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
EVERYWHERE = NamedSharding(MESH, PartitionSpec())


class Moments(NamedTuple):
    count: Any
    mu: Any


def make_state(step: int, width: int = 33) -> TrainState:
    """Random numbers, which do not compress; ragged shapes, several dtypes."""
    rng = np.random.default_rng(step)
    params = {
        "w": rng.normal(size=(40, width)).astype(np.float32),
        "b": jnp.asarray(rng.normal(size=7), jnp.bfloat16),
    }
    state = TrainState(
        step=np.int32(step),
        skipped=np.int32(1),
        skipped_in_a_row=np.int32(0),
        params=params,
        buffers={"bn": {"mean": rng.normal(size=(3, 1)).astype(np.float32)}},
        opt_state=(Moments(np.int32(step), jax.tree.map(lambda x: x * 2, params)), ()),
    )
    return jax.device_put(state, EVERYWHERE)


ABSTRACT = jax.eval_shape(lambda: make_state(0))


def save(folder: Path, steps: dict[int, dict[str, float] | None], keep: int = 9) -> None:
    with Checkpoints(folder, keep) as checkpoints:
        for step, metrics in steps.items():
            checkpoints.save(step, make_state(step), {"at": step}, metrics)


def restore(folder: Path) -> tuple[int, dict[str, Any]] | None:
    """(the step whose state was restored, to the bit; the data position)."""
    with Checkpoints(folder, 9) as checkpoints:
        restored = checkpoints.restore_latest(ABSTRACT, EVERYWHERE)
    if restored is None:
        return None
    state, position = restored
    assert bits(state) == bits(make_state(int(state.step)))
    return int(state.step), position


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def best(folder: Path) -> int | None:
    """The step that is kept as the best."""
    return best_of({int(name): read_about(folder, int(name)) for name in names(folder)})


def test_state_and_position_return_bit_for_bit_on_the_placement_asked_for(tmp_path: Path):
    assert restore(tmp_path) is None
    save(tmp_path, {3: None, 5: None})
    assert restore(tmp_path) == (5, {"at": 5})
    rows = NamedSharding(MESH, PartitionSpec())
    with Checkpoints(tmp_path, 9) as checkpoints:
        state, _ = checkpoints.restore_latest(ABSTRACT, rows)
    assert {x.sharding for x in jax.tree.leaves(state)} == {rows}
    assert jax.tree.structure(state) == jax.tree.structure(make_state(5))


def test_each_array_returns_on_its_own_placement(tmp_path: Path):
    save(tmp_path, {3: None})
    sharded = EVERYWHERE.update(spec=PartitionSpec(("context", "data")))
    placements = jax.tree.map(lambda x: sharded if x.shape == (40, 33) else EVERYWHERE, ABSTRACT)
    with Checkpoints(tmp_path, 9) as checkpoints:
        state, _ = checkpoints.restore_latest(ABSTRACT, placements)
        checkpoints.save(5, state, {"at": 5})
    assert state.params["w"].sharding == sharded
    assert state.params["b"].sharding == EVERYWHERE
    assert bits(state) == bits(make_state(3))
    with Checkpoints(tmp_path, 9) as checkpoints:
        again, _ = checkpoints.restore_latest(ABSTRACT, EVERYWHERE)
    assert bits(again) == bits(make_state(3))


def test_a_state_donated_right_after_saving_is_saved_as_it_was(tmp_path: Path):
    """On a CPU orbax writes from the arrays' own memory."""

    @partial(jax.jit, donate_argnums=0)
    def overwrite(state: TrainState) -> TrainState:
        return jax.tree.map(lambda x: (x * 0 - 7).astype(x.dtype), state)

    def large() -> TrainState:
        return make_state(1)._replace(
            buffers={"x": jax.device_put(np.random.default_rng(0).normal(size=4_000_000), EVERYWHERE)}
        )

    state, want = large(), bits(large())
    with Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(1, state, {})
        for _ in range(3):
            state = overwrite(state)
        jax.block_until_ready(state)
    with Checkpoints(tmp_path, 1) as checkpoints:
        got, _ = checkpoints.restore_latest(jax.eval_shape(large), EVERYWHERE)
    assert bits(got) == want


def empty(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()


def move_the_position(checkpoint: Path) -> None:
    file = checkpoint / "about" / "metadata"
    about = json.loads(file.read_text())
    about["content"]["position"]["at"] += 1
    file.write_text(json.dumps(about))


def cut_about_short(checkpoint: Path) -> None:
    file = checkpoint / "about" / "metadata"
    file.write_text(file.read_text()[:-5])


def exchange_arrays(checkpoint: Path) -> None:
    """Whole and readable, but another step's."""
    shutil.rmtree(checkpoint / "state")
    shutil.copytree(checkpoint.with_name("1") / "state", checkpoint / "state")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (move_the_position, "do not match their digest"),
        pytest.param(empty, "about", marks=pytest.mark.exhaustive),
        pytest.param(cut_about_short, "JSONDecodeError", marks=pytest.mark.exhaustive),
        (exchange_arrays, "7 of 9 arrays changed: step, params.b, params.w, ..."),
        pytest.param(
            lambda checkpoint: shutil.rmtree(checkpoint / "state"), "state", marks=pytest.mark.exhaustive
        ),
        pytest.param(
            lambda checkpoint: shutil.rmtree(checkpoint / "about"), "about", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_a_damaged_checkpoint_is_reported_and_set_aside_and_the_one_before_used(
    spoil: Any, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    save(tmp_path, {1: None, 2: None, 4: None})
    spoil(tmp_path / "4")
    assert restore(tmp_path) == (2, {"at": 2})
    said = capsys.readouterr().err
    assert "warning: the checkpoint of step 4 is damaged" in said
    assert reason in said
    assert "the one of step 2 is used" in said
    assert names(tmp_path) == ["1", "2", "4.damaged"]
    # The run goes on, and saves the same step again.
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.restore_latest(ABSTRACT, EVERYWHERE)
        checkpoints.save(4, make_state(4), {"at": 4})
    assert restore(tmp_path) == (4, {"at": 4})
    assert names(tmp_path) == ["2", "4", "4.damaged"]
    spoil(tmp_path / "4") if spoil is not exchange_arrays else empty(tmp_path / "4")
    assert restore(tmp_path) == (2, {"at": 2})
    assert names(tmp_path) == ["2", "4.damaged", "4.damaged-again"]


@pytest.mark.parametrize("times", [4, pytest.param(12, marks=pytest.mark.exhaustive)])
def test_random_damage_is_detected_or_harmless(times: int, tmp_path: Path):
    save(tmp_path / "checkpoints", {1: None, 2: None})
    rows = damaged(tmp_path / "checkpoints", ABSTRACT, EVERYWHERE, times, np.random.default_rng(0))
    assert [row for row in rows if not row.holds] == []
    assert {row.found for row in rows} == {"harmless", "the one before restored"}


def test_without_an_intact_checkpoint_nothing_is_started_or_renamed(tmp_path: Path):
    save(tmp_path, {1: None, 2: None})
    empty(tmp_path / "2")
    move_the_position(tmp_path / "1")
    for _ in range(2):
        with pytest.raises(UserError, match=r"(?s)no checkpoint .* step 1: .*digest.*step 2: .*Put a copy"):
            restore(tmp_path)
    assert names(tmp_path) == ["1", "2"]


def test_another_model_is_refused_and_is_no_damage(tmp_path: Path):
    save(tmp_path, {1: None, 2: None})
    wider = jax.eval_shape(lambda: make_state(0, width=34))
    other = ABSTRACT._replace(buffers={"bn": {"mean": jax.ShapeDtypeStruct((3, 1), jnp.bfloat16)}})
    with Checkpoints(tmp_path, 9) as checkpoints:
        with pytest.raises(
            UserError, match=r"step 2 .* another model: 2 arrays differ, params.w is .*33.*34"
        ):
            checkpoints.restore_latest(wider, EVERYWHERE)
        with pytest.raises(UserError, match=r"1 arrays differ, buffers.bn.mean is .*float32.*bfloat16"):
            checkpoints.restore_latest(other, EVERYWHERE)
    assert names(tmp_path) == ["1", "2"]


def loss(value: float) -> dict[str, float]:
    return {"validation_loss": value}


def wer(value: float, loss: float) -> dict[str, float]:
    return {"validation_wer": value, "validation_loss": loss}


@pytest.mark.parametrize(
    ("metrics", "wanted", "kept"),
    [
        ([None, None, None, None], None, ["3", "4"]),
        ([loss(1.0), loss(2.0), loss(3.0), None], 1, ["1", "3", "4"]),
        ([loss(1.0), loss(1.0), loss(3.0), None], 2, ["2", "3", "4"]),
        ([loss(float("nan")), loss(2.0), loss(3.0), loss(float("nan"))], 2, ["2", "3", "4"]),
        ([loss(1.0), wer(0.2, 2.0), wer(0.3, 1.5), None], 2, ["2", "3", "4"]),
        ([wer(0.0, 2.0), wer(0.0, 1.0), wer(0.1, 0.5), loss(0.1)], 2, ["2", "3", "4"]),
        ([wer(float("nan"), 2.0), loss(3.0), loss(4.0), loss(5.0)], 1, ["1", "3", "4"]),
        ([loss(4.0), loss(3.0), loss(2.0), loss(1.0)], 4, ["3", "4"]),
    ],
)
@pytest.mark.parametrize("restarts", [False, True])
def test_the_newest_and_the_best_are_kept(
    metrics: list[Any], wanted: int | None, kept: list[str], restarts: bool, tmp_path: Path
):
    """Lowest WER where one was measured, else lowest loss; what is not finite never."""
    steps = dict(enumerate(metrics, 1))
    for part in [{k: v} for k, v in steps.items()] if restarts else [steps]:
        save(tmp_path, part, keep=2)
    assert names(tmp_path) == kept
    assert best(tmp_path) == wanted


def test_saving_a_step_twice_is_an_error(tmp_path: Path):
    with Checkpoints(tmp_path, 2) as checkpoints:
        checkpoints.save(1, make_state(1), {})
        with pytest.raises(UserError, match=r"step 1 could not be saved .*holds step 1 already"):
            checkpoints.save(1, make_state(1), {})


def test_a_folder_that_cannot_be_written_is_a_readable_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        Checkpoints(tmp_path / "file", 2)
    with Checkpoints(tmp_path / "gone", 2) as checkpoints:
        checkpoints.save(1, make_state(1), {})
        checkpoints._wait()
        shutil.rmtree(tmp_path / "gone")
        (tmp_path / "gone").write_text("")
        with pytest.raises(UserError, match=r"step 2 could not be saved .*that of step 1 is intact"):
            checkpoints.save(2, make_state(2), {})


FULL_DISK = """
import resource, sys
from pathlib import Path
from jaxthd.errors import readable_errors
from tests.checkpoints.test_checkpoint import *

for case in ("next save", "end", "error"):
    try:
        with readable_errors(), Checkpoints(Path(sys.argv[1]) / case, 9) as checkpoints:
            checkpoints.save(1, make_state(1, width=3000), {})
            checkpoints._wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
            checkpoints.save(2, make_state(2, width=3000), {})
            if case == "next save":
                checkpoints.save(3, make_state(3, width=3000), {})
            if case == "error":
                raise OSError("the run's own error")
    except SystemExit as stopped:
        print(case, stopped, sep=": ")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_a_full_disk_ends_the_run_in_one_message_with_the_older_checkpoint_intact(tmp_path: Path):
    """Files are limited to 100 kB, and a checkpoint's arrays take 480: writing raises as on a full disk.

    The folder's name is long: tensorstore's message repeats it before the cause.
    """
    tmp_path /= "x" * 200
    ran = subprocess.run([sys.executable, "-c", FULL_DISK, tmp_path], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    *others, last = ran.stdout.splitlines()
    assert last == "error: error: the run's own error"
    (warned,) = ran.stderr.splitlines()
    wide = jax.eval_shape(lambda: make_state(0, width=3000))
    for case, line in zip(("next save", "end", "error"), [*others, warned], strict=True):
        start = "warning" if case == "error" else f"{case}: error"
        folder = tmp_path / case
        assert line.startswith(
            f"{start}: the checkpoint of step 2 could not be saved in {folder} (ValueError: "
        )
        assert "File too large" in line, line
        assert "that of step 1 is intact" in line
        assert names(folder) != ["1"], "what the failed save wrote"
        with Checkpoints(folder, 9) as checkpoints:
            assert names(folder) == ["1"]
            state, _ = checkpoints.restore_latest(wide, EVERYWHERE)
        assert bits(state) == bits(make_state(1, width=3000))


def test_the_cause_of_a_failed_write_is_kept_where_an_arrays_specification_follows_it():
    """As tensorstore words the failure of a first write to an array."""
    file, given = "/runs/" + 200 * "x" + "/d/1f", '{"driver":"zarr",' + 300 * " " + "}"
    said = (
        f'OUT_OF_RANGE: Error writing "w/.zarray" at local file "{file}": Failed to write 9 bytes to file 4: '
    )
    said += f"File too large [tensorstore_spec='{given}'] [os_error_code='27']"
    line = reason(ValueError(said))
    assert line.startswith('ValueError: OUT_OF_RANGE: Error writing "w/.zarray"')
    assert line.endswith("File too large [os_error_code='27']")
    assert "driver" not in line


def test_a_reward_that_could_not_be_measured_lets_nothing_else_decide(tmp_path: Path):
    with Checkpoints(tmp_path, 1, "reward") as checkpoints:
        for step, reward in {1: 0.9, 2: 0.5, 3: float("nan")}.items():
            found = {"validation_reward": reward, "validation_wer": 0.5 - 0.1 * step}
            checkpoints.save(step, make_state(step), {}, found)
        checkpoints.save(4, make_state(4), {}, {"validation_wer": 0.0})
    assert names(tmp_path) == ["1", "4"]
    assert find_checkpoint(tmp_path, "best")[0] == 1


OLD = {"train.normaliser": "basic", "data.validation_manifest": {"easy": "1a"}}
NEW = OLD | {"data.validation_manifest": {"real": "2b"}}


def test_metrics_that_were_measured_otherwise_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The best of the old ones stays until one is measured in the new way, and is then as old as it is."""

    def save_all(measured_by: dict[str, Any] | None, wers: dict[int, float]) -> str:
        with Checkpoints(tmp_path, 1, measured_by=measured_by) as checkpoints:
            said = checkpoints.new_measure
            for step, wer in wers.items():
                checkpoints.save(step, make_state(step), {}, {"validation_wer": wer})
        return said

    assert save_all(OLD, {1: 0.1, 2: 0.2}) == ""
    assert names(tmp_path) == ["1", "2"]
    said = save_all(NEW, {})
    assert "data.validation_manifest easy (1a) -> real (2b)" in said
    assert "of steps 1, 2" in said
    assert f"{tmp_path.parent}@1" in said
    assert names(tmp_path) == ["1", "2"]
    save_all(NEW, {3: 0.8})
    assert names(tmp_path) == ["3"]
    save_all(NEW, {4: 0.7, 5: 0.9})
    assert names(tmp_path) == ["4", "5"]
    # A set under another name is the same set.
    assert save_all(OLD | {"data.validation_manifest": {"renamed": "2b"}}, {6: 0.75}) == ""
    assert names(tmp_path) == ["4", "6"]
    with Checkpoints(tmp_path, 9, measured_by=OLD) as checkpoints:
        checkpoints.save(7, make_state(7), {}, {"validation_wer": 0.8})
    capsys.readouterr()
    assert find_checkpoint(tmp_path, "best")[0] == 7
    said = capsys.readouterr().out
    assert "@best is the best of steps 7; those of steps 4, 6 are not compared" in said
    assert "renamed (2b) -> easy (1a)" in said


def test_checkpoints_of_an_older_jaxthd_are_compared_among_themselves(tmp_path: Path):
    """Their records do not say how their metrics were measured; they are whole all the same."""
    save(tmp_path, {1: {"validation_wer": 0.1}, 2: {"validation_wer": 0.2}})
    assert "measured_by" not in (tmp_path / "1" / "about" / "metadata").read_text()
    assert find_checkpoint(tmp_path, "best")[0] == 1
    with Checkpoints(tmp_path, 9, measured_by=OLD) as checkpoints:
        assert "an older jaxthd did not note how it validated" in checkpoints.new_measure
        assert best(tmp_path) == 1
        checkpoints.save(3, make_state(3), {}, {"validation_wer": 0.3})
        checkpoints.save(4, make_state(4), {}, {})
    assert best(tmp_path) == 3
    assert read_about(tmp_path, 3).measured_by == OLD
    assert read_about(tmp_path, 4).measured_by is None, "nothing was measured"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"train.normaliser": "english"}, 'train.normaliser "basic" -> "english"'),
        ({"end tokens": [2]}, "end tokens null -> [2]"),
    ],
)
def test_what_is_measured_otherwise_is_named(change: dict[str, Any], said: str):
    assert measured_otherwise(OLD, OLD | change) == said


def test_the_best_may_be_by_reward(tmp_path: Path):
    rewards = {1: 0.2, 2: 0.9, 3: float("nan"), 4: 0.9, 5: 0.1}
    metrics = {s: {"validation_reward": r, "validation_wer": 0.5 - 0.1 * s} for s, r in rewards.items()}
    with Checkpoints(tmp_path, 1, "reward") as checkpoints:
        for step, found in metrics.items():
            checkpoints.save(step, make_state(step), {}, found)
    assert find_checkpoint(tmp_path, "best")[0] == 4, "the highest; of equals by word error rate"
    with Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(6, make_state(6), {}, {"validation_reward": 0.0, "validation_wer": 0.4})
    assert best(tmp_path) == 5, "by word error rate from then on"
