"""Four users' first hours, as the pages tell them: the very commands and code of each page, at a tiny size.

    python -m pytest -m nightly tests/docs/test_journeys.py --python-reference PYTHON

PYTHON, of this Python's version, has lhotse, torch and transformers; what needs them is not run without it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import soundfile

from jaxthd.files.jsonl import write_lines
from jaxthd.files.run_folder import read_config
from jaxthd.run.metrics_file import read_metrics
from tests.data.sets import sound, write_parquet
from tests.docs.walkthrough import DOCS, code_of, commands_of, no_simulation, run, section
from tests.hf.folders import write_llm
from tests.hf.nemo_archives import checkpoint, nemo_weights, write_nemo
from tests.hf.published import write_published
from tests.nemo.experiments import write_experiment

pytestmark = pytest.mark.nightly
TEXTS = ("one two three", "seven", "red lights on", "stop", "four five")
ROOT = DOCS.parent


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, as the working directory."""
    monkeypatch.chdir(tmp_path)
    no_simulation(monkeypatch)
    return tmp_path


def recordings(count: int) -> Iterator[tuple[str, float, str]]:
    """(file, seconds, text) of recordings of noise in the working directory, of many lengths."""
    rng = np.random.default_rng(0)
    for number in range(count):
        seconds, name = round(0.31 + 0.09 * (number % 7), 2), f"{number}.wav"
        soundfile.write(name, rng.normal(0, 0.1, round(16000 * seconds)), 16000)
        yield name, seconds, TEXTS[number % len(TEXTS)]


def follow(commands: Sequence[list[str]], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Runs the commands of jaxthd among these; returns what each printed, by its name."""
    return {words[1]: run(words, capsys) for words in commands if words[0] == "jaxthd"}


def losses(run_folder: str) -> list[float]:
    return [line["loss"] for line in read_metrics(Path(run_folder)) if "loss" in line]


def packages_of(python: str, name: str) -> str:
    """The folder of packages of an interpreter of this version that has `name`; skips where there is none."""
    code = (
        f"import sys, pathlib as p, {name} as x; print(sys.version_info[:2], p.Path(x.__file__).parents[1])"
    )
    ran = subprocess.run([python, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    if ran.returncode:
        pytest.skip(f"--python-reference has no {name}")
    own = f"{sys.version_info[:2]} "
    said = ran.stdout.splitlines()[-1]
    if not said.startswith(own):
        pytest.skip(f"--python-reference is Python {said}, and this one {own}")
    return said.removeprefix(own)


def run_beside(folder: str, code: str) -> str:
    """Runs Python code in a process that has this folder's packages behind its own; returns its output."""
    path = os.pathsep.join([str(ROOT), folder])
    command = [sys.executable, "-W", "ignore", "-c", code]
    ran = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def test_a_user_of_nemo_s(here: Path, capsys: pytest.CaptureFixture[str]):
    """An experiment with LoRA becomes a config, which runs unedited; the export is read again."""
    write_llm(here / "qwen", TEXTS)
    write_nemo(here / "canary.nemo", checkpoint(nemo_weights()))
    made = [
        {"audio_filepath": name, "duration": seconds, "text": text} for name, seconds, text in recordings(24)
    ]
    write_lines(here / "a.json", made[4:])
    write_lines(here / "b.json", made[:4])
    write_experiment(
        here,
        ("model.pretrained_llm", "qwen"),
        ("model.pretrained_asr", "canary.nemo"),
        ("model.prompt_format", "qwen"),
        ("model.freeze_params", [r"^llm\..+$", r"^embed_tokens\..+$", r"^perception\.encoder\..+$"]),
        (
            "model.lora",
            {"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        ),
        ("model.optimizer.lr", 1e-2),
        ("trainer.max_steps", 8),
        ("trainer.limit_train_batches", 4),
        ("trainer.precision", "bf16-true"),
        ("trainer.limit_val_batches", 2),
        ("data.train_ds.input_cfg.0.tags", {"context": "Transcribe the following:"}),
        ("data.train_ds.batch_size", 4),
        ("data.train_ds.num_workers", 0),
        ("data.validation_ds.datasets.dev.tags", {"context": "Transcribe the following:"}),
        ("exp_manager.create_tensorboard_logger", False),
    )
    commands = commands_of(section("coming_from_nemo.md", "From an experiment to a run"))
    assert [words[1] for words in commands] == ["import-config", "describe", "train", "evaluate", "convert"]
    printed = follow(commands, capsys)
    assert "encoder" in printed["describe"]
    found = losses("runs/my")
    assert len(found) == 8
    assert found[-1] < 0.98 * found[0]
    config = read_config(here / "runs" / "my")
    assert config.adapt.lora_targets == (
        "decoder.layers.attention.mixer.q",
        "decoder.layers.attention.mixer.v",
    )
    assert config.data.prompt == "Transcribe the following: <audio>"
    assert (here / "exported" / "llm" / "tokenizer.json").is_file()
    assert list((here / "runs/my/evaluations/8").glob("*/dev.jsonl"))


def followed_adapting(here: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Follows the page of a user of the hub's to its exported folders."""
    text = section("adapting.md", "From the hub and back")
    write_llm(here / "qwen3-1.7b", TEXTS)
    write_published("fastconformer", here / "parakeet-ctc-1.1b")
    (here / "voices").mkdir()
    heard = [sound(0.3 + 0.07 * (number % 9), seed=number) for number in range(30)]
    rows = [
        {"audio": {"bytes": x, "path": f"{number}.wav"}, "sentence": TEXTS[number % len(TEXTS)]}
        for number, x in enumerate(heard)
    ]
    for name, part in (
        ("train-00000-of-00002", rows[:14]),
        ("train-00001-of-00002", rows[14:26]),
        ("validation", rows[26:]),
    ):
        write_parquet(here / "voices" / f"{name}.parquet", part)
    for name, recording in zip(("one", "two"), heard, strict=False):
        (here / f"{name}.wav").write_bytes(recording)
    config, _ = code_of(text, "python")
    assert "steps=400" in config
    (here / "my.py").write_text(config.replace("steps=400", "steps=8"))
    commands = commands_of(text)
    assert [words[0] for words in commands[:3]] == ["pip", "hf", "hf"]
    # The last of few steps is the best too.
    return follow([[word.replace("@best", "") for word in words] for words in commands], capsys)


def test_a_user_of_the_hub_s(here: Path, capsys: pytest.CaptureFixture[str]):
    printed = followed_adapting(here, capsys)
    found = losses("runs/my")
    assert len(found) == 8
    assert found[-1] < found[0], "the adapter is new, and a part of the LLM trains"
    assert "one.wav" in printed["generate"]
    config = json.loads((here / "exported" / "llm" / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert {path.name for path in (here / "exported").iterdir()} == {"llm", "encoder", "adapter"}


def test_transformers_opens_what_a_user_of_the_hub_s_exports(
    here: Path, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config
):
    python = pytestconfig.getoption("--python-reference")
    packages_of(python, "transformers")
    followed_adapting(here, capsys)
    _, opening = code_of(section("adapting.md", "From the hub and back"), "python")
    asked = (
        "\nprint(type(llm).__name__, type(encoder).__name__, tokenizer.decode(tokenizer('one')['input_ids']))"
    )
    ran = subprocess.run(
        [python, "-W", "ignore", "-c", opening + asked], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.splitlines()[-1] == "Qwen3ForCausalLM ParakeetEncoder one"


CUTS = """
from lhotse import CutSet, MonoCut, Recording, SupervisionSegment
import json

def cut(line):
    name, seconds, text = line
    said = SupervisionSegment(name, name, 0.0, seconds, text=text)
    return MonoCut(name, 0.0, seconds, 0, [said], recording=Recording.from_file(name))

lines = json.load(open("lines.json"))
CutSet.from_cuts(map(cut, lines[4:])).to_file("cuts_train.jsonl.gz")
CutSet.from_cuts(map(cut, lines[:4])).to_file("cuts_dev.jsonl.gz")
"""
MY = """
from jaxthd.config import Config, DataConfig, LLMConfig, ModelConfig, TrainConfig
from jaxthd.models.blocks import Attention, Mamba2
from jaxthd.models.front_ends import FastConformer


def config():
    return Config(
        data=DataConfig(capacity=384, audio_capacity=1600, max_documents=16, workers=0),
        model=ModelConfig(
            encoder=FastConformer(layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4, num_mels=16),
            llm=LLMConfig(
                pattern="M*",
                dim=16,
                blocks={
                    "*": Attention(heads=2, kv_heads=2, head_dim=8),
                    "M": Mamba2(heads=2, head_dim=8, state=8),
                },
            ),
        ),
        train=TrainConfig(
            steps=6, learning_rate=1e-2, warmup_steps=1, validate_every=6, checkpoint_every=6, trackers=()
        ),
    )
"""


def test_a_user_of_lhotse_s(here: Path, capsys: pytest.CaptureFixture[str], pytestconfig: pytest.Config):
    """Cuts, the same cuts as Shar, and batches of Lhotse's sampler, all made and read by Lhotse itself."""
    packages = packages_of(pytestconfig.getoption("--python-reference"), "lhotse")
    (here / "lines.json").write_text(json.dumps(list(recordings(28))))
    (here / "my.py").write_text(MY)
    run_beside(packages, CUTS)
    text = section("data.md", "From Lhotse to a run")
    (to_shar,) = code_of(text, "python")
    (here / "shar").mkdir()
    run_beside(packages, to_shar)
    follow(commands_of(text), capsys)
    cuts, shar = losses("runs/my"), losses("runs/shar")
    assert len(cuts) == 6
    assert cuts == pytest.approx(shar, rel=1e-4), "the same documents in the same order"
    (own,) = code_of(section("data.md", "Batches of your own sampler"), "python")
    said = run_beside(packages, own).splitlines()[-1]
    first, last = (float(word) for word in said.removeprefix("loss ").split(" -> "))
    assert last < 0.8 * first


def test_a_researcher(here: Path, capsys: pytest.CaptureFixture[str]):
    """The notebook, cell by cell in one namespace, as Jupyter does."""
    matplotlib.use("Agg")
    cells = json.loads((DOCS / "notebook.ipynb").read_text())["cells"]
    names: dict[str, Any] = {"__name__": "notebook"}
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    for number, source in enumerate(sources):
        exec(compile(source, f"cell {number}", "exec"), names)
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code"), "outputs are not kept"
    assert set(names["kind"]) == {0, 1, 2, 3}, "padding, audio, prompts and answers are in the picture"
    for found in names["curves"].values():
        assert len(found) == 20
        assert found[-1] < 0.6 * found[0]
    assert len(names["figure"].axes[0].lines) == 2
    assert "slots hold one" in capsys.readouterr().out
    names["plt"].close("all")
