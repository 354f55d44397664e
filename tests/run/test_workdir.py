"""A workdir belongs to one run of one config; what may change between restarts may."""

import fcntl
import json
import signal
import subprocess
import sys
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config import BlockSizes, Config, MeshConfig
from jaxthd.config.values import with_value
from jaxthd.errors import UserError
from jaxthd.files.run_folder import flat, read_config
from jaxthd.run.workdir import FREE, OPTIMIZATION, STARTING, opened


def make_run(workdir: Path, config: Config) -> None:
    with opened(workdir, config) as run:
        run.keep(0)
        (workdir / "checkpoints" / "5").mkdir(parents=True)


def test_a_run_of_another_config_is_refused_field_by_field(tmp_path: Path):
    make_run(tmp_path, Config())
    other = with_value(with_value(Config(), "data.capacity", 256), "model.llm.blocks.M.dt_limit", (0.0, 1.0))
    for _ in range(2):
        with (
            pytest.raises(UserError) as raised,
            opened(tmp_path, with_value(other, "train.validate_every", 7)),
        ):
            pass
        lines = str(raised.value).splitlines()
        assert lines[0] == f"{tmp_path} holds a run of another config; fields that differ:"
        assert lines[1] == "  data.capacity: 2048 in the run, 256 now"
        assert lines[2] == "  model.llm.blocks.M.dt_limit: [0.0, Infinity] in the run, [0.0, 1.0] now"
        assert lines[3].endswith(f"jaxthd train {tmp_path}")
        assert lines[4].endswith(f"--workdir NEW --train.init-from {tmp_path}")


@pytest.mark.parametrize("holds", ["checkpoints", "metrics.jsonl"])
def test_a_checkpoint_or_a_line_of_metrics_makes_it_a_run(holds: str, tmp_path: Path):
    """Until then it may be any folder, or one whose run did not start."""
    (tmp_path / "notes.txt").write_text("")
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "checkpoints").mkdir()
    with opened(tmp_path, Config()):
        pass
    other = with_value(Config(), "train.seed", 1)
    with opened(tmp_path, other) as run:
        run.keep(0)
    if holds == "checkpoints":
        (tmp_path / holds / "10").mkdir()
    else:
        (tmp_path / holds).write_text("{}\n")
    with pytest.raises(UserError, match=r"train.seed: 1 in the run, 0 now"), opened(tmp_path, Config()):
        pass


def test_what_does_not_change_what_is_learned_may_change(tmp_path: Path):
    make_run(tmp_path, Config())
    others = {
        "mesh": MeshConfig(data=2, context=4),
        "data.manifest": ("moved.jsonl",),
        "data.validation_manifest": "moved.jsonl::moved.tar",
        "data.workers": 7,
        "compute.context_exchange": "all_gather",
        "compute.remat": "none",
        "compute.block_sizes": BlockSizes(scan=32),
        "train.keep_checkpoints": 1,
    }
    config = Config()
    for name, value in others.items():
        config = with_value(config, name, value)
    with opened(tmp_path, config) as run:
        assert {x.name.partition(".")[2] for x in run.changes} >= {"context", "workers", "keep_checkpoints"}
        assert read_config(tmp_path) == Config(), "nothing is written before there is a step to do"
        run.keep(5)
    assert read_config(tmp_path).data.workers == 7


def test_the_optimization_may_change_where_that_is_asked_for(tmp_path: Path):
    """Each change is kept with the first step that it counts for, also where later steps are lost."""
    make_run(tmp_path, Config())
    other = with_value(with_value(Config(), "train.steps", 90), "train.learning_rate", 1e-4)
    with pytest.raises(UserError) as raised, opened(tmp_path, other, ["train.steps"]):
        pass
    assert "train.steps" not in str(raised.value)
    assert f"jaxthd train {tmp_path} --train.learning-rate 0.0001" in str(raised.value)
    asked = ["train.steps", "train.learning_rate"]

    def continued(config: Config, step: int) -> list[tuple[str, str, str]]:
        with opened(tmp_path, config, asked) as run:
            return [tuple(x) for x in run.keep(step)]

    first = [("train.steps", "200", "90"), ("train.learning_rate", "0.001", "0.0001")]
    assert continued(other, 30) == first
    # The run was killed before it saved a step: what it changed still counts from there on.
    assert continued(other, 30) == first
    assert continued(other, 40) == []
    more = with_value(other, "train.steps", 300)
    assert continued(more, 50) == [("train.steps", "90", "300")]
    stored = [json.loads(line) for line in (tmp_path / "changes.jsonl").read_text().splitlines()]
    assert [(x["first_step"], x["field"], x["to"]) for x in stored] == [
        (31, "train.steps", "90"),
        (31, "train.learning_rate", "0.0001"),
        (51, "train.steps", "300"),
    ]
    # The checkpoints after step 20 are damaged: all of it counts from step 21 on, each field once.
    assert continued(more, 20) == [("train.steps", "200", "300"), first[1]]
    # What is changed back has not changed.
    assert continued(Config(), 20) == []
    assert (tmp_path / "changes.jsonl").read_text() == ""


def test_what_has_no_part_in_the_optimization_may_not_change_even_if_asked(tmp_path: Path):
    make_run(tmp_path, Config())
    for name, value in (("train.seed", 1), ("data.capacity", 256), ("adapt.lora_rank", 4)):
        with (
            pytest.raises(UserError, match=name),
            opened(tmp_path, with_value(Config(), name, value), [name]),
        ):
            pass


def test_other_weights_to_start_from_are_refused_once_there_is_a_checkpoint(tmp_path: Path):
    sources = tmp_path / "a", tmp_path / "b"
    for source in sources:
        source.mkdir()
    a, b = (with_value(Config(), "train.init_from", (str(source),)) for source in sources)
    workdir = tmp_path / "run"
    make_run(workdir, a)
    for asked in ((), ["train.init_from"]):
        with pytest.raises(UserError, match="would do nothing") as raised, opened(workdir, b, asked):
            pass
        lines = str(raised.value).splitlines()
        assert lines[1] == f'  train.init_from: ["{sources[0]}"] in the run, ["{sources[1]}"] now'
        assert lines[3] == f"to start a new run: --workdir NEW --train.init-from {sources[1]}"
    # Left out, they are those that the run began with.
    with opened(workdir, Config()) as run:
        assert not run.changes
        assert run.keep(5) == []
    assert read_config(workdir).train.init_from == (str(sources[0]),)
    # So are those that have been moved.
    (tmp_path / "moved").mkdir()
    sources[0].rename(tmp_path / "moved" / "a")
    moved = with_value(Config(), "train.init_from", (str(tmp_path / "moved" / "a"),))
    with opened(workdir, moved) as run:
        assert run.keep(5) == []
    assert read_config(workdir).train == moved.train


def test_a_run_without_a_checkpoint_starts_from_other_weights(tmp_path: Path):
    """It begins anew, so that they count."""
    with opened(tmp_path, Config()) as run:
        run.keep(0)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with opened(tmp_path, with_value(Config(), "train.init_from", ("/weights",))) as run:
        assert [x.name for x in run.keep(0)] == ["train.init_from"]


@pytest.mark.parametrize(
    ("name", "value", "step", "why"),
    [
        ("train.warmup_steps", 40, 5, ""),
        ("train.warmup_steps", 15, 20, ""),  # the cosine begins where the warm-up ends
        ("train.decay_steps", 7, 5, "the same without it"),
        ("train.learning_rate", 1e-4, 5, ""),
        ("train.min_learning_rate", 1e-6, 5, ""),
        ("train.aux_loss", 0.1, 5, "no experts"),
        ("train.mtp_loss", 0.5, 5, "no multi-token prediction"),
        ("train.ctc_max_labels", 64, 5, "ctc_loss is 0"),
        ("train.profile", "2:4", 5, "steps up to 4 are done"),
        ("train.profile", "4:6", 5, ""),
    ],
)
def test_changes_that_would_do_nothing_are_refused(
    name: str, value: Any, step: int, why: str, tmp_path: Path
):
    make_run(tmp_path, Config())
    with opened(tmp_path, with_value(Config(), name, value), [name]) as run:
        if not why:
            assert [x.name for x in run.keep(step)] == [name]
            return
        with pytest.raises(UserError, match=rf"{name}: .* in the run, .* now \(.*{why}"):
            run.keep(step)
    assert read_config(tmp_path) == Config()


@pytest.mark.parametrize("schedule", ["constant", "warmup_stable_decay"])
def test_a_warm_up_that_is_over_cannot_change(schedule: str, tmp_path: Path):
    config = with_value(Config(), "train.schedule", schedule)
    make_run(tmp_path, config)
    with opened(tmp_path, with_value(config, "train.warmup_steps", 30), ["train.warmup_steps"]) as run:
        with pytest.raises(UserError, match=r"train\.warmup_steps: 20 in the run, 30 now"):
            run.keep(30)
        assert run.keep(28)


def test_a_run_keeps_a_copy_of_its_tokenizer(tmp_path: Path):
    """It may then be moved, and the original too; another tokenizer is refused."""
    folder = tmp_path / "tokenizers"
    folder.mkdir()
    (folder / "a.json").write_text("{}")
    (folder / "b.json").write_text("{ }")
    config = with_value(Config(), "data.tokenizer", str(folder / "a.json"))
    make_run(tmp_path / "run", config)
    (tmp_path / "run").rename(tmp_path / "moved")
    (folder / "a.json").rename(folder / "c.json")
    found = read_config(tmp_path / "moved")
    assert found.data.tokenizer == str(tmp_path / "moved" / "tokenizer")
    assert Path(found.data.tokenizer, "tokenizer.json").read_text() == "{}"
    for same in (found, with_value(Config(), "data.tokenizer", str(folder / "c.json"))):
        with opened(tmp_path / "moved", same) as run:
            assert not run.changes
            run.keep(5)
        assert read_config(tmp_path / "moved") == found
    other = with_value(Config(), "data.tokenizer", str(folder / "b.json"))
    with pytest.raises(UserError, match=r"data\.tokenizer"), opened(tmp_path / "moved", other):
        pass


def test_every_listed_field_exists():
    names = flat(asdict(Config()))
    listed = (*FREE, *OPTIMIZATION, *STARTING)
    assert [x for x in listed if not any(fnmatch(name, x) for name in names)] == []


def test_a_field_added_since_had_its_default_and_one_gone_is_refused(tmp_path: Path):
    make_run(tmp_path, Config())
    stored = json.loads((tmp_path / "config.json").read_text())
    del stored["train"]["microbatches"]
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with opened(tmp_path, Config()):
        pass
    with (
        pytest.raises(UserError, match=r"train.microbatches: 1 in the run, 2 now"),
        opened(tmp_path, with_value(Config(), "train.microbatches", 2)),
    ):
        pass
    stored["train"]["magic"] = True
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with (
        pytest.raises(UserError, match=r"train.magic: true in the run, unknown now"),
        opened(tmp_path, Config()),
    ):
        pass


@pytest.mark.parametrize("content", [None, "", '{"train": {"st', "[1, 2]", b"\xff\xfe\x00"])
def test_a_config_that_cannot_be_read_beside_a_run_is_reported(
    content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    make_run(tmp_path, Config())
    file = tmp_path / "config.json"
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    before = file.read_bytes() if file.exists() else None
    with opened(tmp_path, Config()):
        assert f"warning: {file} cannot be read" in capsys.readouterr().err
    assert (file.read_bytes() if file.exists() else None) == before


HOLD = """
import sys
from pathlib import Path
from jaxthd.config import Config
from jaxthd.run.workdir import opened

with opened(Path(sys.argv[1]), Config()):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_two_runs_at_a_time_are_refused_and_a_kill_frees_the_workdir(tmp_path: Path):
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=rf"in use by another run \(process {other.pid} on "):
            opened(tmp_path, Config()).__enter__()
        other.send_signal(signal.SIGKILL)
    with opened(tmp_path, Config()):
        # Processes that the run starts do not keep it: the data loader's may outlive a kill for a while.
        child = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE
        )
    with opened(tmp_path, Config()):
        child.communicate()


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuse(*_: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with opened(tmp_path, Config()):
        assert "cannot be locked ([Errno 95] Operation not supported)" in capsys.readouterr().err


def test_a_text_only_model_is_another_model(tmp_path: Path):
    text_only = with_value(Config(), "model.encoder", None)
    make_run(tmp_path / "text", text_only)
    assert read_config(tmp_path / "text") == text_only
    with opened(tmp_path / "text", text_only):
        pass
    make_run(tmp_path / "speech", Config())
    for folder, config in (("text", Config()), ("speech", text_only)):
        with pytest.raises(UserError, match=r"model\.encoder"), opened(tmp_path / folder, config):
            pass
