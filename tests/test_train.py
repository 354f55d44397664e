"""The run as a user sees it: metrics, one compilation, no silent loss, bit-identical resumption."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import soundfile

from jaxthd.config import (
    Config,
    MeshConfig,
    TrainConfig,
)
from jaxthd.errors import UserError
from jaxthd.run import nonfinite
from jaxthd.run.metrics import OF_DRAWING, TIME_METRICS
from jaxthd.run.metrics_file import Metrics, read_metrics
from jaxthd.train import main, train
from jaxthd.training import loop
from jaxthd.validate import DeviceFacts, validate
from tests.docs.reference import METRICS
from tests.quick_compilation import QUICK
from tests.shared_programs import shared_programs
from tests.survival.tiny import config as survival_config

UNOPTIMISED = QUICK
"""XLA_FLAGS of other processes: they compile as the tests do."""
FIELDS = {
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "real_tokens",
    "padding_tokens",
    "padding_ratio",
    "audio_padding_ratio",
    "target_to_input_ratio",
    "supervised_tokens",
    "documents",
    "audio_seconds",
    "tokens_per_second",
    "step_seconds",
    "device_tokens_per_second",
    *(metric.name for metric in TIME_METRICS if metric.name.removesuffix("_seconds") not in OF_DRAWING),
    "compilations",
    "skipped_updates",
    "skipped_documents",
}


@pytest.fixture(autouse=True, scope="module")
def programs() -> Iterator[None]:
    with shared_programs():
        yield


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 ragged recordings, one longer than the encoder's window, and two more lines that cannot be used."""
    folder = tmp_path_factory.mktemp("recordings")
    rng = np.random.default_rng(0)
    lines = []
    for i, seconds in enumerate([*rng.uniform(0.1, 0.8, 19), 1.7]):
        soundfile.write(folder / f"{i}.wav", rng.normal(0, 0.1, int(seconds * 16000)), 16000)
        lines.append({"audio_filepath": f"{i}.wav", "text": f"number {i} " + "la " * int(rng.integers(8))})
    lines.append({"audio_filepath": "missing.wav", "text": "not there"})
    text = "".join(json.dumps(line) + "\n" for line in lines) + "this is not JSON\n"
    (folder / "manifest.jsonl").write_text(text)
    return folder / "manifest.jsonl"


def tiny(manifest: Path) -> Config:
    base = survival_config()
    paths = {"manifest": (str(manifest),), "validation_manifest": str(manifest)}
    return replace(
        base,
        mesh=MeshConfig(data=2, context=2),
        data=replace(base.data, **paths, rows=4, workers=1),
        model=replace(base.model, llm=replace(base.model.llm, mtp_pattern="*")),
        train=TrainConfig(
            steps=6,
            warmup_steps=2,
            validate_every=3,
            checkpoint_every=2,
            learning_rate=1e-2,
            max_new_tokens=4,
            microbatches=2,
        ),
    )


@pytest.fixture(scope="module")
def uninterrupted(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("uninterrupted")
    config = tiny(manifest)
    train(config, workdir)
    return workdir


def test_a_run_writes_a_line_a_step_and_compiles_once(uninterrupted: Path, manifest: Path):
    validate(tiny(manifest), DeviceFacts(platform="cpu", devices=8, kind="cpu"))
    before, *lines = read_metrics(uninterrupted)
    assert before["step"] == 0
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(set(line) >= FIELDS for line in lines)
    documented = set(re.findall(r"^\| `(\w+)` \|", METRICS.read_text(), re.M))
    assert set().union(*map(set, (before, *lines))) <= documented
    assert {line["compilations"] for line in lines} == {1}
    assert all(np.isfinite(line["loss"]) and np.isfinite(line["grad_norm"]) for line in lines)
    assert len({line["real_tokens"] for line in lines}) > 1, "batches should be ragged"
    assert all(0 < line["supervised_tokens"] < line["real_tokens"] <= 512 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["mtp_loss"] < lines[0]["mtp_loss"]
    validated = [line for line in (before, *lines) if "validation_loss" in line]
    assert [line["step"] for line in validated] == [0, 3, 6]
    assert validated[-1]["validation_loss"] < validated[0]["validation_loss"]
    assert all(0 <= line["validation_accuracy"] <= 1 for line in validated)
    assert all(line["validation_wer"] > 0 for line in validated)
    assert all(line["validation_documents"] == 20 for line in validated)


def test_a_run_leaves_pictures_and_what_it_decoded(uninterrupted: Path):
    assert {"curves.png", "config.json", "tensorboard"} <= {path.name for path in uninterrupted.iterdir()}
    written = [json.loads(line) for line in (uninterrupted / "hypotheses.jsonl").read_text().splitlines()]
    assert len(written) == 20
    fields = {"key", "reference", "hypothesis", "audio_seconds", "ended"}
    assert all(set(line) == fields for line in written)
    assert {"number 0", "number 7"} <= {" ".join(line["reference"].split()[:2]) for line in written}


def test_what_is_skipped_documents_is_listed_with_a_reason(uninterrupted: Path):
    skipped = [json.loads(line) for line in (uninterrupted / "skipped.jsonl").read_text().splitlines()]
    assert len(skipped) == 2
    reasons = " ".join(entry["reason"] for entry in skipped)
    assert "no such file" in reasons
    assert "not JSON" in reasons


def cut(monkeypatch: pytest.MonkeyPatch, at: int, how: Callable[[], None]) -> None:
    """Calls `how` once the metrics line of step `at` is written."""
    step = Metrics.step

    def stepped(self: Metrics, line: Mapping[str, Any]) -> None:
        step(self, line)
        if line["step"] == at:
            how()

    monkeypatch.setattr(Metrics, "step", stepped)


def kill() -> None:
    raise KeyboardInterrupt


def unvalidated(manifest: Path) -> Config:
    """The same run without validations, which it does not learn from: two programs less."""
    config = tiny(manifest)
    return replace(config, train=replace(config.train, validate_every=0))


def assert_same_run(workdir: Path, other: Path) -> None:
    same = ("step", "loss", "grad_norm", "learning_rate", "real_tokens", "documents", "audio_seconds")
    got, want = (
        [{k: x.get(k) for k in same} for x in read_metrics(w) if x["step"]] for w in (workdir, other)
    )
    assert got == want


@pytest.mark.parametrize("cut_after", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_interrupted_and_resumed_losses_are_bit_identical(
    cut_after: int, manifest: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Interrupted before the checkpoint of step 2 exists, and one step after that of step 3."""
    with monkeypatch.context() as patch:
        cut(patch, cut_after, kill)
        with pytest.raises(KeyboardInterrupt):
            train(unvalidated(manifest), tmp_path)
    assert len(read_metrics(tmp_path)) == cut_after
    train(unvalidated(manifest), tmp_path)
    assert_same_run(tmp_path, uninterrupted)
    train(unvalidated(manifest), tmp_path)
    assert_same_run(tmp_path, uninterrupted)


@pytest.mark.exhaustive
def test_a_run_chooses_whole_documents_and_goes_on_under_another_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    texts = [" ".join(["word"] * int(n)) for n in np.random.default_rng(0).integers(1, 10, 300)]
    said = [[("user", "a"), ("assistant", text)] for text in texts]
    lines = [{"messages": [{"role": role, "content": x} for role, x in turns]} for turns in said]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    small = tiny(tmp_path / "text.jsonl")
    data = replace(small.data, validation_manifest="", rows=2, capacity=256, audio_capacity=0, workers=0)
    config = replace(
        small,
        data=replace(data, tokenizer="bytes"),
        model=replace(small.model, encoder=None, llm=replace(small.model.llm, mtp_pattern="")),
        compute=replace(small.compute, context_layout="auto"),
        train=replace(small.train, steps=8, microbatches=1, max_new_tokens=0),
    )
    with monkeypatch.context() as patch:
        cut(patch, 6, kill)
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path)
    assert "context layout: whole" in capsys.readouterr().out
    buffers = replace(config.compute, context_layout="buffer")
    train(replace(config, compute=buffers), tmp_path)
    lines = [x for x in read_metrics(tmp_path) if x["step"]]
    assert [line["step"] for line in lines] == list(range(1, 9))
    losses = [line["loss"] for line in lines]
    assert losses[-1] < losses[4] < losses[0] - 1


def test_a_signal_saves_and_ends_the_run_which_then_continues(
    manifest: Path,
    uninterrupted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    """The signal comes while step 4's metrics are written: step 5 is the last. Another one comes when all is
    saved, and the report is not written yet. The restart has no worker.
    """
    draw = loop.draw_curves

    def drawing(*given: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        draw(*given)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "draw_curves", drawing)
        cut(patch, 4, lambda: os.kill(os.getpid(), signal.SIGHUP))
        train(unvalidated(manifest), tmp_path)
    assert "stopped by SIGHUP after step 5" in capsys.readouterr().out
    assert (tmp_path / "report.txt").exists()
    assert read_metrics(tmp_path)[-1]["step"] == 5
    config = unvalidated(manifest)
    train(replace(config, data=replace(config.data, workers=0)), tmp_path)
    assert "continuing from step 5" in capsys.readouterr().out
    assert_same_run(tmp_path, uninterrupted)


def test_a_damaged_newest_checkpoint_costs_the_steps_since_the_one_before(
    manifest: Path, uninterrupted: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    shutil.copytree(uninterrupted, tmp_path, dirs_exist_ok=True)
    (index,) = (tmp_path / "checkpoints" / "6" / "state" / "d").iterdir()  # the index of all other files
    content = bytearray(index.read_bytes())
    content[len(content) // 2] ^= 4
    index.write_bytes(content)
    train(unvalidated(manifest), tmp_path)
    shown = capsys.readouterr()
    assert "step 6 is damaged" in shown.err
    assert "continuing from step 4" in shown.out
    lost = sum(line["step_seconds"] for line in read_metrics(uninterrupted)[-2:])
    assert (
        f"2 step(s) are lost, {lost:,.1f} s of work: steps 5 to 6 ran after the checkpoint that is "
        "continued, and run again"
    ) in shown.out
    assert_same_run(tmp_path, uninterrupted)


def test_a_workdir_of_other_data_or_another_model_is_refused(
    uninterrupted: Path, manifest: Path, tmp_path: Path
):
    config = tiny(manifest)
    config = replace(config, train=replace(config.train, steps=8))
    before = read_metrics(uninterrupted)
    for field, other in (
        ("data.capacity", replace(config, data=replace(config.data, capacity=256))),
        ("data.prompt", replace(config, data=replace(config.data, prompt="say {audio}"))),
        ("train.learning_rate", replace(config, train=replace(config.train, learning_rate=1.0))),
        (
            "model.llm.dim",
            replace(config, model=replace(config.model, llm=replace(config.model.llm, dim=32))),
        ),
    ):
        with pytest.raises(UserError, match=field):
            train(other, uninterrupted, ["train.steps"])
    # The settings are the same, the content of the file is not.
    copy = tmp_path / "recordings"
    shutil.copytree(manifest.parent, copy)
    text = (copy / "manifest.jsonl").read_text()
    (copy / "manifest.jsonl").write_text(text.replace("number 3 ", "number three "))
    with pytest.raises(UserError, match=r"belongs to another stream of documents \(manifest"):
        train(
            replace(config, data=replace(config.data, manifest=(str(copy / "manifest.jsonl"),))),
            uninterrupted,
            ["train.steps"],
        )
    assert read_metrics(uninterrupted) == before


def test_updates_that_are_not_finite_are_skipped_and_named_until_there_are_too_many(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The learning rate ruins the parameters at the first update. Before it, two identical sets are
    validated."""
    config = replace(tiny(manifest), mesh=MeshConfig())
    llm = replace(config.model.llm, pattern="*", mtp_pattern="")
    config = replace(config, model=replace(config.model, llm=llm))
    wild = replace(
        config.train,
        learning_rate=1e30,
        clip_norm=1e30,
        warmup_steps=0,
        checkpoint_every=1,
    )
    sets = replace(config.data, validation_manifest=(f"one={manifest}", str(manifest)))
    monkeypatch.setattr(nonfinite, "MOST_STEPS", 3)
    with pytest.raises(UserError, match=r"So were 3 in a row.*expected finite numbers"):
        train(replace(config, data=sets, train=wild), tmp_path)
    before, *lines = read_metrics(tmp_path)
    measured = ("loss", "accuracy", "documents", "wer", "cut_off")
    names = [f"validation_{name}{x}" for name in ("", "one_", "manifest_") for x in measured]
    assert [name for name in before if name.startswith("validation_")] == names
    assert before["validation_loss"] == before["validation_one_loss"] == before["validation_manifest_loss"]
    assert before["validation_documents"] == 2 * before["validation_one_documents"] == 40
    assert [line["skipped_updates"] for line in lines] == [0, 1, 2, 3]
    listed = [json.loads(line) for line in (tmp_path / "not_finite.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in listed] == [2, 3, 4]
    assert all(
        len(entry["documents"]) == line["documents"] for entry, line in zip(listed, lines[1:], strict=True)
    )
    assert capsys.readouterr().out.count("its update is skipped") == 3
    assert max(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit()) == 3


@pytest.mark.exhaustive
def test_the_command_simulates_the_devices_it_needs(manifest: Path, tmp_path: Path):
    """As on a fresh machine: no environment variable tells of devices, and the mesh needs four."""
    (tmp_path / "tiny.py").write_text(
        f"from pathlib import Path\nfrom tests.test_train import tiny\n\n\n"
        f"def config():\n    return tiny(Path({str(manifest)!r}))\n"
    )
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    cache = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir), "XLA_FLAGS": UNOPTIMISED}
    command = [sys.executable, "-m", "jaxthd.train", "--config", tmp_path / "tiny.py", "--workdir", tmp_path]
    ran = subprocess.run(
        [
            *map(str, command),
            *("--train.steps", "2", "--train.microbatches", "1"),
            *("--data.validation-manifest", "", "--model.llm.mtp-pattern", ""),
        ],
        capture_output=True,
        text=True,
        env=plain | cache,
    )
    assert ran.returncode == 0, ran.stderr
    assert "4 CPU devices are simulated" in ran.stdout
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_help_lists_every_field_and_a_bad_field_is_refused(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        main(["--help-all"])
    assert ended.value.code in (0, None)
    shown = capsys.readouterr().out
    for name in (
        "--mesh.context",
        "--data.manifest",
        "--data.capacity",
        "--data.max-documents",
        "--train.steps",
    ):
        assert name in shown
    assert "Ranks that share the tokens of a buffer" in shown
    with pytest.raises(SystemExit) as ended:
        main(["--config", "configs/cp2.py", "--data.capcity", "1"])
    assert ended.value.code not in (0, None)
    assert "capcity" in "".join(capsys.readouterr())


def test_what_the_user_can_mend_ends_in_one_message():
    command = [sys.executable, "-m", "jaxthd.train", "--config", "configs/cp2.py"]
    ran = subprocess.run(
        [*command, "--mesh.tensor", "3", "--data.capacity", "2047"], capture_output=True, text=True
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: ")
    assert "mesh.tensor" in ran.stderr
    assert "data.capacity" in ran.stderr
    assert "Traceback" not in ran.stderr
