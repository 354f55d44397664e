"""The tiny model of each family of decoders (configs/tiny_families.py), and every command of jaxthd on it.

Nightly, but for a few commands on one family; scripts/check_families.py runs them by the family's name.
"""

import json
import math
import os
import runpy
import subprocess
import sys
import wave
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.checkpoints.weights import load_weights, named_weights
from jaxthd.config import Config
from jaxthd.files.jsonl import read_lines
from jaxthd.files.run_folder import read_config
from jaxthd.hf.registry import export_families
from jaxthd.parallel.mesh import make_mesh
from jaxthd.planning.parameters import parameter_groups
from jaxthd.run.metrics_file import read_metrics
from jaxthd.steps.blueprint import Blueprint
from jaxthd.validate import DeviceFacts, findings
from tests.quick_compilation import QUICK

TINY = Path(__file__).parents[1] / "configs" / "tiny_families.py"
FAMILIES = runpy.run_path(str(TINY))["FAMILIES"]
LIBRARY = {
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron3": "NemotronHForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5": "Qwen3_5ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "moonlight": "DeepseekV3ForCausalLM",
    "bamba": "BambaForCausalLM",
    "granite4": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "kimi_linear": "KimiLinearForCausalLM",
    "olmo_hybrid": "OlmoHybridForCausalLM",
}
STEPS = 24
PLAIN = "--train.ctc-loss 0 --train.warmup-steps 0 --train.validate-every 0 --data.workers 0"
GRPO = (
    "--train.objective grpo --train.steps 2 --rollout.prompts 2 --rollout.group-size 4 --rollout.rewards wer "
    "--rollout.max-new-tokens 6 --rollout.temperature 2.0"
)
TEXTS = ("one two three", "seven", "red lights on", "stop")


def config_of(family: str) -> Config:
    return runpy.run_path(str(TINY))["config"](family)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tiny_model_is_valid_and_of_its_family(family: str):
    """Its decoder would be exported as the library's class, by no other family's format."""
    config = config_of(family)
    assert findings(config, DeviceFacts(platform="cpu", devices=1, kind="simulated")) == []
    assert export_families(config.model)["llm"].title.startswith(LIBRARY[family])
    assert sum(group.parameters for group in parameter_groups(config)) < 1.5e6


class Commands:
    """The commands on one family's model, in processes of their own, as a user runs them."""

    def __init__(self, family: str, work: Path) -> None:
        self.work, self.config_file = work, work / f"{family}.py"
        self.config_file.write_text(
            "import runpy\n\n\ndef config():\n"
            f"    return runpy.run_path({str(TINY)!r})['config']({family!r})\n"
        )

    def call(self, name: str, *arguments: Any) -> None:
        ran = subprocess.run(
            [sys.executable, "-m", f"jaxthd.{name}", *map(str, arguments)],
            capture_output=True,
            text=True,
            env=os.environ | {"XLA_FLAGS": QUICK},
        )
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]

    @cached_property
    def manifest(self) -> Path:
        """Recordings of noise, each with a text, of 0.5 to 2 seconds."""
        draw, lines = np.random.default_rng(0), []
        for number, text in enumerate(TEXTS):
            samples = (draw.standard_normal(8000 * (number + 1)) * 3000).astype(np.int16)
            with wave.open(str(self.work / f"{number}.wav"), "wb") as file:
                file.setparams((1, 2, 16000, 0, "NONE", ""))
                file.writeframes(samples.tobytes())
            lines.append({"audio_filepath": f"{number}.wav", "text": text, "duration": len(samples) / 16000})
        path = self.work / "manifest.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    @cached_property
    def run(self) -> Path:
        """The workdir of a run on synthetic speech, whose loss falls by a tenth at least."""
        run = self.work / "run"
        steps = ("--train.steps", STEPS, "--train.validate-every", 0)
        self.call("train", self.config_file, "--workdir", run, *steps, "--data.workers", 0)
        found = losses(run)
        assert np.mean(found[-3:]) < 0.9 * np.mean(found[:3])
        return run

    def start_from(self, out: str, *arguments: Any, name: str = "train") -> Path:
        """The workdir of a run that starts from the trained model's weights, without validation."""
        workdir = self.work / out
        start = ("--workdir", workdir, "--train.init-from", self.run, *PLAIN.split())
        self.call(name, self.config_file, *start, *arguments)
        return workdir


def losses(run: Path) -> list[float]:
    found = [line["loss"] for line in read_metrics(run) if "loss" in line]
    assert found
    assert all(map(math.isfinite, found)), found
    return found


def weights_of(run: Path) -> dict[str, np.ndarray]:
    config = read_config(run)
    loaded = load_weights([run], Blueprint(config), make_mesh(config.mesh))
    return {name: np.asarray(x) for name, x in named_weights(loaded).items()}


def changed(old: dict[str, np.ndarray], new: dict[str, np.ndarray]) -> list[str]:
    """The names of the arrays of `old` that are others, bit by bit, in `new`."""
    return [name for name, x in old.items() if x.tobytes() != new[name].tobytes()]


def plan(on: Commands) -> None:
    on.call("plan", on.config_file, "--data.manifest", on.manifest, "--out", on.work / "plan.png")


def lora(on: Commands) -> None:
    """Only LoRA changes in the decoder, and all of it does."""
    options = ("--adapt.lora-rank", 3, "--adapt.lora-targets", "decoder.*", "--train.steps", 4)
    old, new = weights_of(on.run), weights_of(on.start_from("lora", *options))
    assert not [name for name in changed(old, new) if not name.startswith(("encoder.", "adapter."))]
    matrices = {name: x for name, x in new.items() if name.endswith(".lora.b")}
    assert matrices
    assert all(x.any() for x in matrices.values())


def evaluate(on: Commands) -> None:
    on.call("evaluate", on.run, "--out", on.work / "evaluation", "--data.validation-manifest", on.manifest)
    assert any((on.work / "evaluation").rglob("*.jsonl"))


def score(on: Commands) -> None:
    on.call("score", on.run, "--manifest", on.manifest, "--out", on.work / "scores.jsonl")
    found = [sum(line["log_probs"]) for line in read_lines(on.work / "scores.jsonl")]
    assert len(found) == len(TEXTS)
    assert all(-math.inf < x < 0 for x in found), found


def generate(on: Commands) -> None:
    audio = [on.manifest.with_name(f"{number}.wav") for number in range(2)]
    on.call("generate", on.run, "--audio", *audio, "--out", on.work / "a.jsonl", "--max-new-tokens", 6)
    assert len(read_lines(on.work / "a.jsonl")) == len(audio)


def dpo(on: Commands) -> None:
    """On pairs of `jaxthd preferences`, of answers enough that some differ in their errors."""
    pairs, drawn = on.work / "pairs.jsonl", ("--samples", 16, "--max-new-tokens", 12, "--temperature", 2.0)
    on.call("preferences", on.run, "--manifest", on.manifest, "--out", pairs, *drawn)
    data = ("--data.manifest", pairs, "--data.max-documents", 72)
    assert losses(on.start_from("dpo", "--train.objective", "dpo", "--train.steps", 2, *data))


def grpo(on: Commands) -> None:
    out = on.start_from("grpo", *GRPO.split(), name="grpo")
    assert read_lines(out / "rollouts.jsonl")


def convert(on: Commands) -> None:
    """Exported and imported again, the arrays are the same, bit by bit."""
    out, again = on.work / "exported", on.work / "imported"
    on.call("convert", "export", on.run, "--out", out)
    on.call("convert", "import", *(path.parent for path in out.rglob("config.json")), "--out", again)
    old, new = weights_of(on.run), weights_of(again)
    assert old.keys() == new.keys()
    assert not changed(old, new)


COMMANDS: dict[str, Callable[[Commands], object]] = {
    "describe": lambda on: on.call("describe", on.config_file),
    "estimate": lambda on: on.call("estimate", on.config_file, "--no-compile"),
    "plan": plan,
    "train": lambda on: on.run,
    "lora": lora,
    "evaluate": evaluate,
    "score": score,
    "generate": generate,
    "dpo": dpo,
    "grpo": grpo,
    "convert": convert,
}
EXHAUSTIVE = [("qwen3", name) for name in ("describe", "train", "score", "generate")]


@pytest.fixture(scope="module")
def on() -> dict[str, Commands]:
    """The commands of each family whose tests have run."""
    return {}


@pytest.mark.parametrize(
    ("family", "command"),
    [
        pytest.param(
            family,
            command,
            id=f"{family}-{command}",
            marks=pytest.mark.exhaustive if (family, command) in EXHAUSTIVE else pytest.mark.nightly,
        )
        for family in FAMILIES
        for command in COMMANDS
    ],
)
def test_a_command_works_on_a_tiny_model(
    family: str, command: str, on: dict[str, Commands], tmp_path_factory: pytest.TempPathFactory
):
    if family not in on:
        on[family] = Commands(family, tmp_path_factory.mktemp(family))
    COMMANDS[command](on[family])
