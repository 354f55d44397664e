"""The commands of docs/examples.md run, one after the other, as a reader would type them."""

import json
import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from safetensors.numpy import load_file

from jaxthd.__main__ import main
from jaxthd.convert import import_weights
from jaxthd.data.text.tokenizer import ByteTokenizer, load_tokenizer
from jaxthd.files.jsonl import read_lines
from jaxthd.files.run_folder import read_config
from jaxthd.run.metrics_file import Metrics, read_metrics
from jaxthd.run.signals import STOPPED
from tests.docs.walkthrough import code_of, commands_of, no_simulation, run, section

PAGE = "examples.md"
FIRST, LAST = 60, 64
STEPS = {"400": str(FIRST), "800": str(LAST), "100": "2"}
"""Steps of the page -> those that are run."""
CONFIG = """
from jaxthd.config import *
from jaxthd.models.blocks import Attention, Mamba2
def config():
    encoder = EncoderConfig(
        layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4, num_mels=16, chunk_seconds=1.0
    )
    llm = LLMConfig(
        pattern="M*", dim=16,
        blocks={
            "*": Attention(heads=2, kv_heads=2, head_dim=8), "M": Mamba2(heads=2, head_dim=8, state=8)
        },
    )
    return Config(
        data=DataConfig(
            validation_manifest="", capacity=128, audio_capacity=480, max_documents=8, packing_bins=2,
            workers=0,
        ),
        model=ModelConfig(encoder=encoder, llm=llm),
        compute=ComputeConfig(block_sizes=BlockSizes(attention=32, loss=32)),
        rollout=RolloutConfig(prompts=2, group_size=4, answers_at_once=8, max_new_tokens=12),
        train=TrainConfig(
            learning_rate=1e-2, warmup_steps=1, ctc_loss=0.1, validate_every=0, checkpoint_every=FIRST,
            max_new_tokens=3,
        ),
    )
""".replace("FIRST", str(FIRST))


def commands(title: str) -> list[list[str]]:
    """The words of each command below a heading."""
    return commands_of(section(PAGE, title), STEPS)


def write_recordings(folder: Path, seed: int) -> None:
    """20 recordings of noise, whose texts can be told from nothing, and a text beside each."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for i, seconds in enumerate(rng.uniform(0.1, 0.8, 20), 1):
        soundfile.write(folder / f"{i}.wav", rng.normal(0, 0.1, int(seconds * 16000)), 16000)
        (folder / f"{i}.txt").write_text(f"{'abc'[i % 3]} {'abc'[i % 2]}\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a user's recordings, in which the page's first example has been followed."""
    folder = tmp_path_factory.mktemp("user")
    write_recordings(folder / "speech", 0)
    (folder / "my.py").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        no_simulation(patch)
        (code,) = code_of(section(PAGE, "From a folder of recordings"), "python")
        exec(compile(code, PAGE, "exec"), {"__name__": "docs_examples"})
        for words in commands("From a folder of recordings"):
            main(words[1:])
    return folder


@pytest.mark.exhaustive
def test_a_folder_of_recordings_becomes_a_run(folder: Path) -> None:
    train, dev = (read_lines(folder / "speech" / f"{name}.jsonl") for name in ("train", "dev"))
    assert (len(train), len(dev)) == (18, 2)
    assert {line["audio_filepath"] for line in (*train, *dev)} == {f"{i}.wav" for i in range(1, 21)}
    metrics = read_metrics(folder / "runs" / "my")
    assert metrics[-1]["loss"] < 0.5 * metrics[0]["loss"]
    summary = json.loads((folder / f"runs/my/evaluations/{FIRST}/dev/summary.json").read_text())
    assert summary["sets"]["dev"]["documents"] == 2


@pytest.mark.exhaustive
def test_post_training_begins_with_that_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    no_simulation(monkeypatch)
    preferences, dpo, grpo = commands("Post-training")
    run([*preferences, "--max-new-tokens", "12"], capsys)
    pairs = read_lines(Path("pairs.jsonl"))
    assert len(pairs) > 3
    assert all(pair["chosen_wer"] < pair["rejected_wer"] for pair in pairs)
    run(dpo, capsys)
    first, last = read_metrics(Path("runs/dpo"))
    assert first["preference_loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert first["margin"] == pytest.approx(0, abs=1e-5)
    assert last["margin"] != 0, "the policy has left the reference"
    run(grpo, capsys)
    steps = read_metrics(Path("runs/grpo"))
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["logprob_difference"] < 3e-5 for line in steps)
    answers = read_lines(Path("runs/grpo/rollouts.jsonl"))
    assert {"a a", "b b", "a b", "b a", "c a", "c b"} & {line["answer"] for line in answers}


@pytest.mark.exhaustive
def test_a_run_goes_on_elsewhere_and_is_adapted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """LoRA, a frozen encoder, another manifest: nothing is said twice but the workdir."""
    monkeypatch.chdir(folder)
    no_simulation(monkeypatch)
    write_recordings(folder / "es", 1)
    for name in ("train", "dev"):
        (folder / "es" / f"{name}.jsonl").write_text((folder / "speech" / f"{name}.jsonl").read_text())

    # --- a bigger mesh ---
    (bigger,) = commands("Continue on a bigger mesh")
    shown = run(bigger, capsys)
    changes = f"mesh.context 1 -> 2, mesh.tensor 1 -> 2, train.steps {FIRST} -> {LAST}"
    assert f"from step {FIRST + 1} on: {changes}" in shown
    metrics = read_metrics(Path("runs/my"))
    assert [line["step"] for line in metrics] == list(range(1, LAST + 1))
    assert metrics[FIRST]["changed"].endswith(f"train.steps {FIRST} -> {LAST}")
    assert read_config(Path("runs/my")).mesh.sizes == (1, 2, 1, 2)
    before = Path("runs/my/config.json").read_text()
    assert "nothing to do" in run(["jaxthd", "train", "runs/my", "--mesh.tensor", "1"], capsys)
    assert Path("runs/my/config.json").read_text() == before

    # --- adapting: stopped in the middle, continued on another mesh ---
    adapt, resume, *rest = commands("Adapt with LoRA, evaluate, hand on")
    assert [words[1] for words in rest] == [
        *("describe", "evaluate", "evaluate", "generate", "score", "convert"),
    ]
    step = Metrics.step

    def stopped(self: Metrics, line: Mapping[str, Any]) -> None:
        step(self, line)
        if line["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "step", stopped)
        with pytest.raises(SystemExit) as status:
            run(adapt, capsys)
        assert status.value.code == STOPPED
        assert "stopped by SIGTERM after step 3" in capsys.readouterr().out
    assert "continuing from step 3" in run(resume, capsys)
    assert [line["step"] for line in read_metrics(Path("runs/es"))] == list(range(1, FIRST + 1))

    # --- what comes after takes the workdir alone ---
    describe, evaluate, otherwise, generate, score, export = rest
    assert re.search(r"encoder .* none ", run(describe, capsys)), (
        "the frozen encoder has no parameter that trains"
    )
    assert f"runs/es/evaluations/{FIRST}/dev" in run(evaluate, capsys)
    assert f"runs/es/evaluations/{FIRST}/dev-2" in run(otherwise, capsys)
    first, second = (
        json.loads(Path(f"runs/es/evaluations/{FIRST}/{name}/summary.json").read_text())
        for name in ("dev", "dev-2")
    )
    assert first["sets"]["dev"]["documents"] == second["sets"]["dev"]["documents"] == 2
    assert first["sets"]["dev"]["loss"] == pytest.approx(second["sets"]["dev"]["loss"])
    assert re.findall(r"^(es/\d\.wav): ", run(generate, capsys), re.M) == ["es/1.wav", "es/2.wav"]
    assert "2 documents" in run(score, capsys)
    assert len(Path("runs/es/scores.jsonl").read_text().splitlines()) == 2
    run(export, capsys)
    exported = Path("exported/llm")
    text = "número 7, ¿sí?"
    assert load_tokenizer(exported).encode(text) == ByteTokenizer().encode(text)
    names = {name for file in exported.glob("*.safetensors") for name in load_file(file)}
    assert len(names) > 10
    assert not any("lora" in name for name in names)
    # The exported parts are a whole model again, with the tokenizer.
    parts = [f"exported/{part}" for part in ("llm", "encoder", "adapter")]
    again = import_weights(parts, Path("again"))
    assert load_tokenizer(again.data.tokenizer).decode(ByteTokenizer().encode(text)) == text
