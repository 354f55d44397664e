"""The commands of docs/examples.md run, one after the other, as a reader would type them."""

import json
import os
import re
import shlex
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
from jaxthd.files.run_folder import read_config
from jaxthd.run import startup
from jaxthd.run.metrics_file import Metrics, read_metrics

PAGE = Path(__file__).parents[2] / "docs" / "examples.md"
STEPS = {"400": "4", "800": "8"}
"""Steps of the page -> those that are run."""
CONFIG = """
from jaxthd.config import *
def config():
    encoder = EncoderConfig(
        layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4, num_mels=16, chunk_seconds=1.0
    )
    llm = LLMConfig(
        pattern="M*", dim=16, q_heads=2, kv_heads=2, head_dim=8,
        mamba_heads=2, mamba_head_dim=8, mamba_state=8,
    )
    return Config(
        data=DataConfig(
            manifest=("first/train.jsonl",), validation_manifest="", capacity=128, audio_capacity=480,
            max_documents=8, packing_bins=2, workers=0,
        ),
        model=ModelConfig(encoder=encoder, llm=llm),
        compute=ComputeConfig(attention_block=32, loss_block=32),
        train=TrainConfig(warmup_steps=1, validate_every=0, checkpoint_every=2, max_new_tokens=3),
    )
"""


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    lines = [shlex.split(line) for block in blocks for line in block.splitlines()]
    return [[STEPS.get(word, word) for word in words] for words in lines]


def write_recordings(folder: Path, seed: int) -> None:
    folder.mkdir()
    rng, lines = np.random.default_rng(seed), []
    for i, seconds in enumerate(rng.uniform(0.1, 0.8, 12), 1):
        soundfile.write(folder / f"{i}.wav", rng.normal(0, 0.1, int(seconds * 16000)), 16000)
        lines.append(json.dumps({"audio_filepath": f"{i}.wav", "text": f"number {i}"}) + "\n")
    (folder / "train.jsonl").write_text("".join(lines))
    (folder / "dev.jsonl").write_text("".join(lines[:3]))


@pytest.mark.exhaustive
def test_the_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """LoRA, a frozen encoder, another manifest: nothing is said twice but the workdir."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(startup, "simulate_devices", lambda devices: True)
    monkeypatch.setattr("jaxthd.generate.simulate_devices", lambda devices: True)
    (tmp_path / "my.py").write_text(CONFIG)
    write_recordings(tmp_path / "first", 0)
    write_recordings(tmp_path / "es", 1)
    start, bigger, adapt, resume, *rest = commands()
    assert [words[1] for words in rest] == [
        *("describe", "evaluate", "evaluate", "generate", "score", "convert"),
    ]

    def run(words: list[str]) -> str:
        assert words[0] == "jaxthd"
        main(words[1:])
        return capsys.readouterr().out

    # --- a bigger mesh ---
    run(start)
    shown = run(bigger)
    assert "from step 5 on: mesh.context 1 -> 2, mesh.tensor 1 -> 2, train.steps 4 -> 8" in shown
    metrics = read_metrics(Path("runs/my"))
    assert [line["step"] for line in metrics] == list(range(1, 9))
    assert metrics[4]["changed"].endswith("train.steps 4 -> 8")
    assert read_config(Path("runs/my")).mesh.sizes == (1, 2, 1, 2)
    before = (tmp_path / "runs" / "my" / "config.json").read_text()
    assert "nothing to do" in run(["jaxthd", "train", "runs/my", "--mesh.tensor", "1"])
    assert (tmp_path / "runs" / "my" / "config.json").read_text() == before

    # --- adapting: stopped in the middle, continued on another mesh ---
    step = Metrics.step

    def stopped(self: Metrics, line: Mapping[str, Any]) -> None:
        step(self, line)
        if line["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Metrics, "step", stopped)
        assert "stopped by a signal after step 3" in run(adapt)
    assert "continuing from step 3" in run(resume)
    assert [line["step"] for line in read_metrics(Path("runs/es"))] == [1, 2, 3, 4]

    # --- what comes after takes the workdir alone ---
    describe, evaluate, otherwise, generate, score, export = rest
    assert re.search(r"encoder .* none ", run(describe)), "the frozen encoder has no parameter that trains"
    assert "runs/es/evaluations/4/dev" in run(evaluate)
    assert "runs/es/evaluations/4/dev-2" in run(otherwise)
    first, second = (
        json.loads(Path(f"runs/es/evaluations/4/{name}/summary.json").read_text())
        for name in ("dev", "dev-2")
    )
    assert first["sets"]["dev"]["documents"] == second["sets"]["dev"]["documents"] == 3
    assert first["sets"]["dev"]["loss"] == pytest.approx(second["sets"]["dev"]["loss"])
    assert re.findall(r"^(es/\d\.wav): ", run(generate), re.M) == ["es/1.wav", "es/2.wav"]
    assert "3 documents" in run(score)
    assert len(Path("runs/es/scores.jsonl").read_text().splitlines()) == 3
    run(export)
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
