"""Runs every command of jaxthd on a tiny speech LLM of each family of decoders: a table.

    python scripts/check_families.py [--families qwen3 gpt_oss ...] [--steps N] [--workdir FOLDER]

The models are those of configs/tiny_families.py. For each of them, with the commands that a user would type:

    validate       the settings are valid without a warning
    describe, estimate, plan     print their tables
    train          on synthetic speech, --steps steps: the loss falls
    lora           four more steps with LoRA on all projections of the decoder: only LoRA changes
    evaluate, score, generate    the run's word error rate, log-probabilities, answers
    dpo, grpo      two steps each from the run; DPO's pairs by jaxthd preferences
    export         convert export and import: the arrays are the same, bit by bit

Exits 1 unless all of them do. Takes about five minutes a family on two idle cores, most of it compilation.
Commands run in one process for each family, after the other; what they print is kept in FOLDER/FAMILY.log.
"""

import argparse
import contextlib
import json
import math
import subprocess
import sys
import tempfile
import time
import traceback
import wave
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxthd.checkpoints.weights import load_weights, named_weights
from jaxthd.config import Config
from jaxthd.files.config_file import load_config
from jaxthd.files.run_folder import read_config
from jaxthd.parallel.mesh import make_mesh
from jaxthd.run.metrics_file import read_metrics
from jaxthd.steps.blueprint import Blueprint
from jaxthd.terminal.tables import Claim, conclude, show
from jaxthd.validate import DeviceFacts, findings

CONFIGS = Path(__file__).parents[1] / "configs"
TINY = CONFIGS / "tiny_families.py"
VARIANT = """import runpy


def config():
    return runpy.run_path({tiny!r})["config"]({family!r})
"""
TEXTS = ("one two three", "seven", "red lights on", "stop")


class Step(NamedTuple):
    """What a check did. found: a figure to show. failure: "" if it did what it should."""

    name: str
    found: str
    failure: str
    seconds: float


def write_config(family: str, folder: Path) -> Path:
    """A config file of the family's tiny run."""
    path = folder / f"{family}.py"
    path.write_text(VARIANT.format(tiny=str(TINY), family=family))
    return path


def write_manifest(folder: Path) -> Path:
    """Recordings of noise, each with a text, of 0.5 to 2 seconds."""
    draw, lines = np.random.default_rng(0), []
    for number, text in enumerate(TEXTS):
        samples = (draw.standard_normal(8000 * (number + 1)) * 3000).astype(np.int16)
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(samples.tobytes())
        line = {"audio_filepath": f"{number}.wav", "text": text, "duration": len(samples) / 16000}
        lines.append(json.dumps(line))
    path = folder / "manifest.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def command(name: str, *arguments: Any) -> None:
    """Runs a command of jaxthd in this process."""
    import_module(f"jaxthd.{name}").main(list(map(str, arguments)))


def losses(run: Path, *, every: int = 1) -> list[float]:
    found = [line["loss"] for line in read_metrics(run) if "loss" in line]
    if not found or not all(map(math.isfinite, found)):
        raise AssertionError(f"losses of {run.name} are {found}")
    return found[::every]


def weights_of(run: Path) -> dict[str, np.ndarray]:
    config = read_config(run)
    loaded = load_weights([run], Blueprint(config), make_mesh(config.mesh))
    return {name: np.asarray(x) for name, x in named_weights(loaded).items()}


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Checks:
    """The checks of one family, each a method that returns a figure to show, or raises."""

    def __init__(self, family: str, work: Path, steps: int) -> None:
        self.config_file, self.manifest = write_config(family, work), write_manifest(work)
        self.work, self.steps, self.run = work, steps, work / "run"
        self.config: Config = load_config(self.config_file)

    def all(self) -> dict[str, Callable[[], str]]:
        return {
            "validate": self.validate,
            "describe": self.describe,
            "estimate": self.estimate,
            "plan": self.plan,
            "train": self.train,
            "lora": self.lora,
            "evaluate": self.evaluate,
            "score": self.score,
            "generate": self.generate,
            "dpo": self.dpo,
            "grpo": self.grpo,
            "export": self.export,
        }

    def validate(self) -> str:
        found = findings(self.config, DeviceFacts(platform="cpu", devices=1, kind="simulated"))
        assert not found, found
        return ""

    def describe(self) -> str:
        command("describe", self.config_file)
        return ""

    def estimate(self) -> str:
        command("estimate", self.config_file, "--no-compile")
        return ""

    def plan(self) -> str:
        command("plan", self.config_file, "--data.manifest", self.manifest, "--out", self.work / "plan.png")
        return ""

    def train(self) -> str:
        """The loss falls by a tenth at least."""
        sizes = ("--train.steps", self.steps, "--train.validate-every", 0)
        command("train", self.config_file, "--workdir", self.run, *sizes, "--data.workers", 0)
        found = losses(self.run)
        before, after = np.mean(found[:3]), np.mean(found[-3:])
        assert after < 0.9 * before, f"loss {before:.2f} -> {after:.2f}"
        return f"{before:.2f} -> {after:.2f}"

    def lora(self) -> str:
        out = self.work / "lora"
        self._from_run(out, "--adapt.lora-rank", 3, "--adapt.lora-targets", "decoder.*", "--train.steps", 4)
        old, new = weights_of(self.run), weights_of(out)
        changed = {name for name, x in old.items() if x.tobytes() != new[name].tobytes()}
        of_decoder = {name for name in changed if not name.startswith(("encoder.", "adapter."))}
        assert not of_decoder, f"changed beside LoRA: {sorted(of_decoder)}"
        matrices = [name for name in new if name.endswith(".lora.b")]
        assert matrices, "no projection has LoRA"
        still = [name for name in matrices if not new[name].any()]
        assert not still, f"LoRA that did not train: {still}"
        return f"{len(matrices)} matrices"

    def evaluate(self) -> str:
        out = self.work / "evaluation"
        command("evaluate", self.run, "--out", out, "--data.validation-manifest", self.manifest)
        assert any(out.rglob("*.jsonl")), "it wrote nothing"
        return ""

    def score(self) -> str:
        out = self.work / "scores.jsonl"
        command("score", self.run, "--manifest", self.manifest, "--out", out)
        found = [sum(line["log_probs"]) for line in lines_of(out)]
        assert len(found) == len(TEXTS), found
        assert all(math.isfinite(x) and x < 0 for x in found), found
        return f"{np.mean(found):.1f} nats"

    def generate(self) -> str:
        out = self.work / "answers.jsonl"
        audio = [self.work / f"{number}.wav" for number in range(2)]
        command("generate", self.run, "--audio", *audio, "--out", out, "--max-new-tokens", 6)
        assert len(lines_of(out)) == len(audio)
        return ""

    def dpo(self) -> str:
        pairs, out = self.work / "pairs.jsonl", self.work / "dpo"
        drawn = ("--samples", 4, "--max-new-tokens", 6, "--temperature", 2.0)
        command("preferences", self.run, "--manifest", self.manifest, "--out", pairs, *drawn)
        data = ("--data.manifest", pairs, "--data.max-documents", 72)
        self._from_run(out, "--train.objective", "dpo", "--train.steps", 2, *data)
        return f"{losses(out)[-1]:.3f}"

    def grpo(self) -> str:
        out = self.work / "grpo"
        rollout: tuple[Any, ...] = (
            "--rollout.prompts",
            2,
            "--rollout.group-size",
            4,
            "--rollout.rewards",
            "wer",
        )
        rollout += ("--rollout.max-new-tokens", 6, "--rollout.temperature", 2.0)
        self._from_run(out, "--train.objective", "grpo", "--train.steps", 2, *rollout, name="grpo")
        return f"{len(lines_of(out / 'rollouts.jsonl'))} answers"

    def export(self) -> str:
        out, again = self.work / "exported", self.work / "imported"
        command("convert", "export", self.run, "--out", out)
        parts = [path.parent for path in out.rglob("config.json")]
        command("convert", "import", *parts, "--out", again)
        old, new = weights_of(self.run), weights_of(again)
        assert old.keys() == new.keys(), old.keys() ^ new.keys()
        differing = [name for name, x in old.items() if x.tobytes() != new[name].tobytes()]
        assert not differing, differing
        return f"{len(old)} arrays"

    def _from_run(self, out: Path, *arguments: Any, name: str = "train") -> None:
        """A run that starts from the trained model's weights, without validation."""
        start: tuple[Any, ...] = (
            "--train.init-from",
            self.run,
            "--train.ctc-loss",
            0,
            "--train.warmup-steps",
            0,
        )
        start += ("--train.validate-every", 0, "--data.workers", 0)
        command(name, self.config_file, "--workdir", out, *start, *arguments)


def check(family: str, work: Path, steps: int, only: list[str]) -> list[Step]:
    """Runs the checks of one family, and keeps what they print in work.log."""
    work.mkdir(parents=True, exist_ok=True)
    checks, done = Checks(family, work, steps), []
    with work.with_suffix(".log").open("w") as log:
        for name, run in checks.all().items():
            if only and name not in only:
                continue
            start, found, failure = time.perf_counter(), "", ""
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                try:
                    found = run()
                except (Exception, SystemExit) as error:
                    traceback.print_exc()
                    failure = f"{type(error).__name__}: {error}"[:500]
            done.append(Step(name, found, failure, time.perf_counter() - start))
    return done


def main() -> None:
    known = list(import_tiny()["FAMILIES"])
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=known, default=known)
    parser.add_argument("--checks", nargs="+", default=[], help="these alone, with those that they need")
    parser.add_argument("--steps", type=int, default=60, help="steps of the first run")
    parser.add_argument("--workdir", type=Path, help="where runs and logs stay")
    parser.add_argument("--one", metavar="FAMILY", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        found = check(options.one, options.workdir / options.one, options.steps, options.checks)
        (options.workdir / f"{options.one}.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as scratch:
        work = options.workdir or Path(scratch)
        work.mkdir(parents=True, exist_ok=True)
        rows, claims = [], []
        for family in options.families:
            arguments = ["--steps", str(options.steps), "--checks", *options.checks]
            arguments = arguments if options.checks else arguments[:-1]
            command_line = [sys.executable, __file__, "--one", family, "--workdir", str(work), *arguments]
            subprocess.run(command_line, check=True)
            steps = [Step(*x) for x in json.loads((work / f"{family}.json").read_text())]
            rows += [(family, x.name, x.found, f"{x.seconds:.0f}", x.failure or "yes") for x in steps]
            failed = ", ".join(x.name for x in steps if x.failure)
            claims.append(
                Claim(f"{family}: every command works{f', not {failed}' * bool(failed)}", not failed)
            )
        show("Commands on each family", "family|check|found|seconds|works", rows)
        conclude(claims, check=True)


def import_tiny() -> dict[str, Any]:
    """The names of configs/tiny_families.py."""
    import runpy

    return runpy.run_path(str(TINY))


if __name__ == "__main__":
    main()
