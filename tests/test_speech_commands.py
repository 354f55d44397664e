"""Every command of jaxthd on a tiny published speech LLM of each family, from its folder alone.

Nightly, but for a few commands on one family.
"""

import json
import os
import subprocess
import sys
import wave as wave_files
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.files.jsonl import read_lines
from jaxthd.hf.checkpoint import model_config
from tests.hf.published import tensors
from tests.hf.speech_folders import NAMES, as_authors, write_folder
from tests.quick_compilation import QUICK
from tests.references.waves import wave
from tests.test_families import losses, weights_of

FAMILIES = (*NAMES, "qwen3_asr_authors")
Item = tuple[float, str, str | None]
"""Seconds of a recording, its transcript, its language."""
ITEMS: tuple[Item, ...] = (
    (0.3, "one two three", "en"),
    (1.1, "seven", "English"),
    (2.6, "red lights on", None),
    (4.3, "stop", "cs-CZ"),
)
TEXTS = tuple(text for _, text, _ in ITEMS)
ENCODERS = dict.fromkeys(("granite_speech", "granite_speech_plus"), "encoder.blocks.*")
"""What of the encoder gets LoRA, where it is no Transformer."""
PLAIN = "--data.workers 0 --data.validation-manifest"


class Commands:
    """The commands on one family's folder, in processes of their own, as a user runs them."""

    def __init__(
        self,
        family: str,
        work: Path,
        items: Iterable[Item] = ITEMS,
        write: Callable[[str, Path], Path] = write_folder,
    ) -> None:
        """write: (name, folder) writes the family's folder."""
        self.family, self.work, self.folder = family, work, work / "published-1.5B"
        self.items = list(items)
        write(family.removesuffix("_authors"), self.folder)
        if family.endswith("_authors"):
            as_authors(self.folder)

    def call(self, name: str, *arguments: Any) -> str:
        ran = subprocess.run(
            [sys.executable, "-m", f"jaxthd.{name}", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=self.work,
            env=os.environ | {"XLA_FLAGS": QUICK},
        )
        assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-3000:]
        return ran.stdout

    @cached_property
    def manifest(self) -> Path:
        """Recordings, each with a text, some with a language."""
        lines = []
        for number, (seconds, text, language) in enumerate(self.items):
            samples = np.round(wave(number, seconds) * 32768).astype(np.int16)
            with wave_files.open(str(self.work / f"{number}.wav"), "wb") as file:
                file.setparams((1, 2, 16000, 0, "NONE", ""))
                file.writeframes(samples.tobytes())
            line = {"audio_filepath": f"{number}.wav", "text": text, "duration": len(samples) / 16000}
            lines.append(line | ({"language": language} if language else {}))
        path = self.work / "manifest.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return path

    def train(self, out: str, *arguments: Any, name: str = "train") -> Path:
        """The workdir of a run that starts from the folder."""
        workdir = self.work / out
        data = ("--data.manifest", self.manifest, *PLAIN.split(), self.manifest)
        self.call(name, self.folder, "--workdir", workdir, *data, "--train.warmup-steps", 0, *arguments)
        return workdir

    @cached_property
    def run(self) -> Path:
        """The workdir of a run whose loss falls by a tenth at least."""
        steps = ("--train.steps", 12, "--train.learning-rate", 3e-3, "--train.validate-every", 12)
        run = self.train("run", *steps)
        found = losses(run)
        assert np.mean(found[-2:]) < 0.9 * found[0], found
        return run


def lora(on: Commands) -> None:
    """Only LoRA changes, and all of it does."""
    options = (
        "--adapt.lora-rank",
        3,
        "--adapt.lora-targets",
        "decoder.*",
        ENCODERS.get(on.family, "encoder.transformer.*"),
    )
    steps = ("--train.steps", 3, "--train.validate-every", 0)
    weights = weights_of(on.train("lora", *options, *steps, "--adapt.freeze", "adapter.*"))
    matrices = {name: x for name, x in weights.items() if name.endswith(".lora.b")}
    assert {name.partition(".")[0] for name in matrices} == {"encoder", "decoder"}
    assert all(x.any() for x in matrices.values())


def evaluate(on: Commands) -> None:
    """The transcripts alone are compared."""
    out = on.work / "evaluation"
    on.call("evaluate", on.run, "--out", out, "--data.validation-manifest", on.manifest)
    found = [line["reference"].strip() for line in read_lines(out / "manifest.jsonl")]
    assert found == list(TEXTS)


def score(on: Commands) -> None:
    """Of the folder itself, every token, on a mesh of four ranks as on one."""
    files = []
    for mesh in ((1, 1, 1, 1), (1, 2, 1, 2)):
        files.append(on.work / f"scores-{len(files)}.jsonl")
        axes = ("data", "context", "pipeline", "tensor")
        options = [x for axis, n in zip(axes, mesh, strict=True) for x in (f"--mesh.{axis}", n)]
        given = ("--manifest", on.manifest, "--out", files[-1], "--every-token", "--data.workers", 0)
        on.call("score", on.folder, *given, *options)
    one, four = map(read_lines, files)
    assert len(one) == len(TEXTS)
    for a, b in zip(one, four, strict=True):
        np.testing.assert_allclose(a["log_probs"], b["log_probs"], atol=2e-4)


def generate(on: Commands) -> None:
    audio = [on.manifest.with_name(f"{number}.wav") for number in range(2)]
    given = ("--audio", *audio, "--out", on.work / "a.jsonl", "--max-new-tokens", 6)
    on.call("generate", on.folder, *given)
    assert len(read_lines(on.work / "a.jsonl")) == len(audio)


def dpo(on: Commands) -> None:
    pairs = on.work / "pairs.jsonl"
    lines = read_lines(on.manifest)
    with pairs.open("w") as file:
        for line, other in zip(lines, TEXTS[1:] + TEXTS[:1], strict=True):
            chosen = line.pop("text")
            file.write(json.dumps(line | {"chosen": chosen, "rejected": other}) + "\n")
    steps = ("--train.objective", "dpo", "--train.steps", 2, "--train.validate-every", 0)
    assert losses(on.train("dpo", "--data.manifest", pairs, *steps))


def grpo(on: Commands) -> None:
    drawn = "--rollout.prompts 2 --rollout.group-size 2 --rollout.rewards wer --rollout.max-new-tokens 4"
    steps = ("--train.objective", "grpo", "--train.steps", 1, "--train.validate-every", 0)
    out = on.train("grpo", *steps, *drawn.split(), name="grpo")
    assert read_lines(out / "rollouts.jsonl")


def convert(on: Commands) -> None:
    """An export of what was imported is the folder bit by bit; that of the run has the same form."""
    on.call("convert", "import", on.folder, "--out", on.work / "imported")
    for source, out in ((on.work / "imported", "again"), (on.run, "trained")):
        on.call("convert", "export", source, "--out", on.work / out, "--like", on.folder)
        assert model_config(on.work / out) == model_config(on.folder)
    want, again, trained = (tensors(on.work / x) for x in (on.folder.name, "again", "trained"))
    assert want.keys() == again.keys() == trained.keys()
    assert all(x.tobytes() == again[name].tobytes() for name, x in want.items())
    fixed = {name for name, x in want.items() if x.tobytes() == trained[name].tobytes()}
    untrained = ("embed_positions.weight", "audio_bos_eos_token.weight", "num_batches_tracked")
    # What is not read, as the vision tower, an export has as the folder has it.
    assert fixed == {name for name in want if name.endswith(untrained) or ".visual." in name}


COMMANDS: dict[str, Callable[[Commands], object]] = {
    "describe": lambda on: on.call("describe", on.folder),
    "estimate": lambda on: on.call("estimate", on.folder, "--no-compile"),
    "plan": lambda on: on.call("plan", on.folder, "--data.manifest", on.manifest, "--out", on.work / "p.png"),
    "train": lambda on: on.run,
    "lora": lora,
    "evaluate": evaluate,
    "score": score,
    "generate": generate,
    "dpo": dpo,
    "grpo": grpo,
    "convert": convert,
}
EXHAUSTIVE = [("qwen3_asr", name) for name in ("train", "evaluate", "score", "generate")]


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
def test_a_command_works_on_a_published_folder(
    family: str, command: str, on: dict[str, Commands], tmp_path_factory: pytest.TempPathFactory
):
    if family == "voxtral":
        pytest.importorskip("mistral_common")
    if family not in on:
        on[family] = Commands(family, tmp_path_factory.mktemp(family))
    COMMANDS[command](on[family])
