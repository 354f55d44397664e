"""The run as a user sees it: metrics, one compilation, nothing lost silently, resumed bit for bit."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import soundfile

import jaxthd.train as train_module
from jaxthd.config import (
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from jaxthd.errors import UserError
from jaxthd.jsonl import append_line
from jaxthd.train import train
from jaxthd.validate import DeviceFacts, validate

FIELDS = {
    "step",
    "loss",
    "grad_norm",
    "learning_rate",
    "real_tokens",
    "supervised_tokens",
    "capacity_tokens",
    "documents",
    "audio_seconds",
    "tokens_per_second",
    "step_seconds",
    "compilations",
}


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 ragged recordings, one of them longer than the encoder's window; two more lines cannot be used."""
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
    return Config(
        mesh=MeshConfig(data=2, context=2),
        data=DataConfig(
            manifest=(str(manifest),),
            validation_manifest=str(manifest),
            rows=2,
            capacity=128,
            max_documents=8,
            audio_capacity=320,
            packing_bins=2,
        ),
        model=ModelConfig(
            encoder=EncoderConfig(
                layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4, num_mels=16, chunk_seconds=1.0
            ),
            llm=LLMConfig(
                pattern="M*",
                dim=16,
                q_heads=2,
                kv_heads=1,
                head_dim=8,
                mamba_heads=2,
                mamba_head_dim=8,
                mamba_state=8,
                mamba_groups=1,
            ),
            attention_block=32,
            loss_block=32,
        ),
        train=TrainConfig(steps=6, warmup_steps=2, validate_every=3, checkpoint_every=2, learning_rate=1e-2),
    )


def read_metrics(workdir: Path) -> list[dict]:
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("uninterrupted")
    train(tiny(manifest), workdir)
    return workdir


def test_a_run_writes_a_line_a_step_and_compiles_once(uninterrupted: Path, manifest: Path):
    validate(tiny(manifest), DeviceFacts(platform="cpu", devices=8, kind="cpu"))
    lines = read_metrics(uninterrupted)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(set(line) >= FIELDS for line in lines)
    assert {line["compilations"] for line in lines} == {1}
    assert all(np.isfinite(line["loss"]) and np.isfinite(line["grad_norm"]) for line in lines)
    assert len({line["real_tokens"] for line in lines}) > 1, "batches should be ragged"
    assert all(0 < line["supervised_tokens"] < line["real_tokens"] <= 256 for line in lines)
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [line["step"] for line in lines if "validation_loss" in line] == [3, 6]


def test_what_is_left_out_is_listed_with_a_reason(uninterrupted: Path):
    skipped = [json.loads(line) for line in (uninterrupted / "skipped.jsonl").read_text().splitlines()]
    assert len(skipped) == 2
    reasons = " ".join(entry["reason"] for entry in skipped)
    assert "no such file" in reasons
    assert "not JSON" in reasons


@pytest.mark.parametrize("cut_after", [3, 4])
def test_interrupted_and_resumed_losses_are_bit_identical(
    cut_after: int, manifest: Path, uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Cut after a step that was not saved (3; the checkpoint is of step 2) and after one that was (4)."""

    def cut(path: Path, line: dict) -> None:
        append_line(path, line)
        if line["step"] == cut_after + 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "append_line", cut)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(manifest), tmp_path)
    assert len(read_metrics(tmp_path)) == cut_after + 1
    history = train(tiny(manifest), tmp_path)
    assert [line["step"] for line in history] == list(range(3 if cut_after == 3 else 5, 7))
    same = ("step", "loss", "grad_norm", "learning_rate", "real_tokens", "documents", "audio_seconds")
    want, got = ([{k: line[k] for k in same} for line in read_metrics(w)] for w in (uninterrupted, tmp_path))
    assert got == want
    assert train(tiny(manifest), tmp_path) == []


def test_a_workdir_of_other_data_or_another_model_is_refused(uninterrupted: Path, manifest: Path):
    config = tiny(manifest)
    config = replace(config, train=replace(config.train, steps=8))
    with pytest.raises(UserError, match="capacity: 128 then, 256 now"):
        train(replace(config, data=replace(config.data, capacity=256)), uninterrupted)
    with pytest.raises(UserError, match="prompt"):
        train(replace(config, data=replace(config.data, prompt="say {audio}")), uninterrupted)
    model = replace(config.model, llm=replace(config.model.llm, dim=32))
    with pytest.raises(UserError, match="of another model"):
        train(replace(config, model=model), uninterrupted)


def test_a_loss_that_is_not_finite_stops_the_run_and_is_not_saved(manifest: Path, tmp_path: Path):
    config = tiny(manifest)
    wild = replace(config.train, learning_rate=1e30, clip_norm=1e30, warmup_steps=0, checkpoint_every=1)
    with pytest.raises(UserError, match=r"expected finite numbers.*documents of this step: \d+:"):
        train(replace(config, train=wild), tmp_path)
    saved = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert saved == [line["step"] for line in read_metrics(tmp_path)][-3:]


def test_the_command_simulates_the_devices_it_needs(manifest: Path, tmp_path: Path):
    """As on a fresh machine: no environment variable is set, and the mesh needs four devices."""
    (tmp_path / "tiny.py").write_text(
        f"from pathlib import Path\nfrom tests.test_train import tiny\n\n\n"
        f"def config():\n    return tiny(Path({str(manifest)!r}))\n"
    )
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
    cache = {"JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir)}
    command = [sys.executable, "-m", "jaxthd.train", "--config", tmp_path / "tiny.py", "--workdir", tmp_path]
    ran = subprocess.run(
        [*map(str, command), "--train.steps", "2", "--data.validation-manifest", ""],
        capture_output=True,
        text=True,
        env=plain | cache,
    )
    assert ran.returncode == 0, ran.stderr
    assert "4 CPU devices are simulated" in ran.stdout
    assert len(read_metrics(tmp_path)) == 2


def test_help_lists_every_field_and_a_bad_field_is_refused():
    command = [sys.executable, "-m", "jaxthd.train"]
    shown = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    for name in (
        "--mesh.context",
        "--data.manifest",
        "--data.capacity",
        "--data.max-documents",
        "--train.steps",
    ):
        assert name in shown
    assert "Ranks that share the tokens of a buffer" in shown
    wrong = subprocess.run(
        [*command, "--config", "configs/cp2.py", "--data.capcity", "1"], capture_output=True, text=True
    )
    assert wrong.returncode != 0
    assert "capcity" in wrong.stdout + wrong.stderr


def test_what_the_user_can_mend_ends_in_one_message():
    command = [sys.executable, "-m", "jaxthd.train", "--config", "configs/cp2.py"]
    ran = subprocess.run(
        [*command, "--mesh.tensor", "2", "--data.capacity", "2047"], capture_output=True, text=True
    )
    assert ran.returncode == 1
    assert ran.stderr.startswith("error: ")
    assert "mesh.tensor" in ran.stderr
    assert "data.capacity" in ran.stderr
    assert "Traceback" not in ran.stderr
