"""What the commands compute with a folder of a speech LLM, transformers computes with it.

Nightly: needs --python-reference, an interpreter with torch and transformers.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.files.jsonl import read_lines
from tests.hf.speech_folders import NAMES
from tests.test_speech_commands import Commands

ROOT = Path(__file__).parents[2]
SECONDS = (0.3, 0.77, 2.6, 5.03, 31.2, 100.0)
MESHES = ((1, 1, 1, 1), (1, 2, 2, 2), (2, 2, 1, 2))
NEW = 12
pytestmark = pytest.mark.nightly


class Library:
    """The library, in an interpreter of its own."""

    def __init__(self, python: str, on: Commands) -> None:
        self.python, self.on = python, on

    def __call__(self, folder: Path, lines: list[dict[str, Any]], new: int = 0) -> list[dict[str, Any]]:
        """What it makes of the tokens of scored lines."""
        audio = [str(self.on.work / f"{number}.wav") for number in range(len(lines))]
        jobs = [
            {"tokens": x["tokens"], "audio": [file], "new": new} for x, file in zip(lines, audio, strict=True)
        ]
        file = self.on.work / "jobs.json"
        file.write_text(json.dumps(jobs))
        module = ("-m", "tests.references.speech_scores")
        ran = subprocess.run(
            [self.python, *module, self.on.family, str(folder), str(file)],
            capture_output=True,
            text=True,
            cwd=ROOT,
            env={name: x for name, x in os.environ.items() if name != "PYTHONPATH"},
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        found: list[dict[str, Any]] = json.loads(ran.stdout.splitlines()[-1])
        return found


def scored(on: Commands, source: Path, mesh: tuple[int, ...], *more: str) -> list[dict[str, Any]]:
    out = on.work / f"scores-{len([*on.work.glob('scores-*')])}.jsonl"
    axes = zip(("data", "context", "pipeline", "tensor"), mesh, strict=True)
    options = [x for axis, n in axes for x in (f"--mesh.{axis}", n)]
    given = ("--manifest", on.manifest, "--out", out, "--data.workers", 0, "--data.rows", mesh[0])
    given += ("--data.capacity", 4096, "--data.audio-capacity", 40000)
    on.call("score", source, *given, *options, *more)
    return read_lines(out)


@pytest.mark.parametrize("name", NAMES)
def test_the_commands_agree_with_the_library(name: str, request: pytest.FixtureRequest, tmp_path: Path):
    """Every token of recordings from 0.3 to 100 s on three meshes; and of a trained export its greedy answers
    and its tokens."""
    if name == "voxtral":
        pytest.importorskip("mistral_common")
    items = [(seconds, f"word number {k}", None) for k, seconds in enumerate(SECONDS)]
    on = Commands(name, tmp_path, items)
    library = Library(request.config.getoption("--python-reference"), on)
    found = {mesh: scored(on, on.folder, mesh, "--every-token") for mesh in MESHES}
    for mesh, lines in found.items():
        assert len(lines) == len(SECONDS), mesh
        if mesh == MESHES[0]:
            want = library(on.folder, lines)
        for line, x in zip(lines, want, strict=True):
            expected = np.array(x["log_probs"])[np.array(line["positions"]) - 1]
            np.testing.assert_allclose(line["log_probs"], expected, rtol=0, atol=2e-5)

    run = on.train("run", "--train.steps", 6, "--train.learning-rate", 3e-3, "--train.validate-every", 0)
    exported = on.work / "exported"
    on.call("convert", "export", run, "--out", exported, "--like", on.folder)
    prompts = [
        line | {"tokens": line["tokens"][: line["positions"][0]]} for line in scored(on, run, MESHES[0])
    ]
    audio = [on.work / f"{number}.wav" for number in range(len(items))]
    out = on.work / "answers.jsonl"
    on.call("generate", run, "--audio", *audio, "--out", out, "--max-new-tokens", NEW)
    answers = read_lines(out)
    for answer, prompt, x in zip(answers, prompts, library(exported, prompts, NEW), strict=True):
        assert answer["tokens"] == x["answer"][: len(answer["tokens"])], prompt["key"]
        assert answer["tokens"] or answer["end"] != "length"
