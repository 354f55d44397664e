"""Runs that are killed, stopped and damaged, and what must come of them: scripts/check_survival.py's checks.

This file is the config of the runs, too: a tiny model, noise, four simulated devices.
"""

import contextlib
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import soundfile
from jax.sharding import Sharding, SingleDeviceSharding

from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.config import (
    BlockSizes,
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from jaxthd.files.jsonl import read_lines
from jaxthd.models.blocks import Attention, Mamba2
from jaxthd.run.signals import STOPPED
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import TrainState, abstract_state

STEPS, GRPO_STEPS = 48, 24
GRPO = (
    f"--train.objective grpo --train.steps {GRPO_STEPS} --train.learning-rate 1e-2 "
    "--posttraining.reference-every 5 "
    "--rollout.prompts 4 --rollout.group-size 3 --rollout.answers-at-once 12 "
    "--rollout.max-new-tokens 6 --rollout.temperature 0.9 --rollout.top-p 0.95 --rollout.updates 2 "
    "--rollout.rewards length wer=0.5 --rollout.dynamic-sampling 2"
)
"""Settings of a run of jaxthd grpo."""
TIMED = ("time", "tokens_per_second", "_seconds", "compilations", "goodput", "utilisation")
"""Endings of names of metrics that depend on the process and its clock."""
AUDIO = "audio_seconds"


def config() -> Config:
    return Config(
        mesh=MeshConfig(data=2, context=2),
        data=DataConfig(
            manifest=("manifest.jsonl",),
            validation_manifest="",
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
                blocks={
                    "*": Attention(heads=2, kv_heads=1, head_dim=8),
                    "M": Mamba2(heads=2, head_dim=8, state=8, groups=1),
                },
            ),
        ),
        compute=ComputeConfig(block_sizes=BlockSizes(attention=32, loss=32)),
        train=TrainConfig(steps=STEPS, warmup_steps=2, checkpoint_every=3, trackers=()),
    )


class Row(NamedTuple):
    check: str
    found: str
    holds: bool


def write_recordings(folder: Path) -> None:
    """20 ragged recordings of noise and their manifest."""
    rng = np.random.default_rng(0)
    lines = []
    for i, seconds in enumerate(rng.uniform(0.1, 0.8, 20)):
        soundfile.write(folder / f"{i}.wav", rng.normal(0, 0.1, int(seconds * 16000)), 16000)
        lines.append({"audio_filepath": f"{i}.wav", "text": f"number {i} " + "la " * int(rng.integers(8))})
    (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


class Run:
    """A run of `jaxthd train` or `jaxthd grpo` in `folder`/NAME, restarted by the same command as often as
    needed.
    """

    def __init__(self, folder: Path, name: str, command: str = "train") -> None:
        self.workdir = folder / name
        options = {"config": __file__, "data.manifest": folder / "manifest.jsonl", "workdir": self.workdir}
        self._command = [sys.executable, "-m", f"jaxthd.{command}"]
        self._command += [text for option, value in options.items() for text in (f"--{option}", str(value))]
        self._command += GRPO.split() if command == "grpo" else []
        # The compilation is cached, so that a restart takes seconds.
        cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
        everything = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        self._environment = os.environ | {"JAX_PLATFORMS": "cpu"} | cache | everything
        self._output = folder / f"{name}.log"

    def start(self) -> subprocess.Popen[bytes]:
        with self._output.open("ab") as output:
            return subprocess.Popen(
                self._command, stdout=output, stderr=subprocess.STDOUT, env=self._environment
            )

    def lines(self) -> list[dict[str, Any]]:
        """The metrics lines on disk, without TIMED; an incomplete line is skipped."""
        file = self.workdir / "metrics.jsonl"
        entries = []
        for line in file.read_text().splitlines() if file.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):
                entries.append(
                    {k: v for k, v in json.loads(line).items() if k == AUDIO or not k.endswith(TIMED)}
                )
        return entries

    def step(self) -> int:
        return max((line["step"] for line in self.lines()), default=0)

    def is_saving(self) -> bool:
        return any((self.workdir / "checkpoints").glob(f"*{ocp.utils.TMP_DIR_SUFFIX}*"))

    def log(self) -> str:
        return self._output.read_text()[-2000:]


STUCK_SECONDS, BUSY_SECONDS = 300.0, 2.0
"""A process is stuck that in so long uses less processor time. How long a step takes does not matter: on a
busy machine it may be minutes."""


def wait(process: subprocess.Popen[bytes], until: Callable[[], bool], seconds: float = math.inf) -> None:
    """Waits until the condition holds, the process ends or is stuck, or the time is over."""
    end, busy, since = time.monotonic() + seconds, _processor_seconds(process), time.monotonic()
    while process.poll() is None and time.monotonic() < end and not until():
        time.sleep(0.001)
        if time.monotonic() - since > STUCK_SECONDS:
            before, busy, since = busy, _processor_seconds(process), time.monotonic()
            if busy - before < BUSY_SECONDS:
                print(f"process {process.pid} is stuck: idle for {STUCK_SECONDS:g} s", file=sys.stderr)
                return


def _processor_seconds(process: subprocess.Popen[bytes]) -> float:
    """The seconds of all its threads, as Linux counts them."""
    with contextlib.suppress(OSError):  # it has ended
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def finish(run: Run) -> int:
    process = run.start()
    wait(process, lambda: False)
    process.kill()
    return process.wait()


def differing(lines: list[dict[str, Any]], want: dict[int, dict[str, Any]]) -> list[int]:
    """Steps whose lines differ from the uninterrupted run's."""
    return [line["step"] for line in lines if line != want[line["step"]]]


def killed(
    run: Run, kills: int, want: dict[int, dict[str, Any]], rng: np.random.Generator, step_seconds: float = 0.1
) -> Row:
    """Kills the run in rotation: while starting, while saving, and at a random moment after a random step."""
    steps = max(want)
    saving, lost, wrong, at = 0, [], [], []
    for number in range(kills):
        process, before = run.start(), run.step()
        if number % 5 == 4:
            wait(process, lambda: False, rng.uniform(0, 10))
        else:
            target = before + int(rng.integers(1, 2 + 2 * steps // kills))
            wait(process, lambda: run.step() >= target)  # noqa: B023  (called in this iteration only)
            if number % 2:
                wait(process, run.is_saving)
            else:
                time.sleep(rng.uniform(0, step_seconds))
        process.kill()
        process.wait()
        saving += run.is_saving()
        lines = run.lines()
        at.append(run.step())
        wrong += differing(lines, want)
        saved = max(
            (int(p.name) for p in (run.workdir / "checkpoints").glob("*") if p.name.isdecimal()), default=0
        )
        lost.append(at[-1] - saved)
    status = finish(run)
    wrong += differing(run.lines(), want)
    complete = [line["step"] for line in run.lines()] == list(want)
    found = (
        f"after steps {at}, {saving} while saving; {max(lost)} steps lost at most; exit status {status} "
        f"then, {len(wrong)} lines differ" + ("" if complete and status == 0 else f"; {run.log()}")
    )
    return Row(f"kill -9, {kills} times", found, complete and not wrong and status == 0)


def terminated(run: Run, want: dict[int, dict[str, Any]], rng: np.random.Generator) -> Row:
    process, target = run.start(), int(rng.integers(2, STEPS - 5))
    wait(process, lambda: run.step() >= target)
    time.sleep(rng.uniform(0, 0.1))
    process.send_signal(signal.SIGTERM)
    wait(process, lambda: False)
    status, at = process.wait(), run.step()
    again = finish(run)
    wrong = differing(run.lines(), want)
    complete = [line["step"] for line in run.lines()] == list(want)
    found = f"after step {at}: exit status {status}; continued: {again}, {len(wrong)} lines differ"
    return Row("SIGTERM", found, (status, again) == (STOPPED, 0) and complete and not wrong)


def damage(checkpoint: Path, rng: np.random.Generator) -> str:
    """Damages one file of a checkpoint at random; returns what it did.

    Half of the time every file is equally likely, half of the time every byte is.
    """
    files = sorted(p for p in checkpoint.rglob("*") if p.is_file() and p.stat().st_size)
    sizes = np.array([p.stat().st_size for p in files])
    weights = sizes / sizes.sum() if rng.integers(2) else None
    file = files[rng.choice(len(files), p=weights)]
    name, content = file.relative_to(checkpoint), bytearray(file.read_bytes())
    start, kind = int(rng.integers(len(content))), rng.choice(["flip", "flip", "truncate", "delete", "zero"])
    if kind == "delete":
        file.unlink()
        return f"{name} deleted"
    if kind == "flip":
        bit = int(rng.integers(8))
        content[start] ^= 1 << bit
        what = f"bit {bit} of byte {start} flipped"
    elif kind == "truncate":
        del content[start:]
        what = f"cut off at byte {start}"
    else:
        end = min(len(content), start + int(rng.integers(1, 4096)))
        content[start:end] = bytes(end - start)
        what = f"bytes {start} to {end} zeroed"
    file.write_bytes(content)
    return f"{name}: {what}"


def bits(state: TrainState) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(state)]


def damaged(
    folder: Path, abstract: TrainState, sharding: Sharding, times: int, rng: np.random.Generator
) -> list[Row]:
    """Damages the newest of the checkpoints in `folder`, in a new copy each time, and restores."""
    copy = folder.with_name("damaged")
    steps = sorted((int(p.name) for p in folder.iterdir() if p.name.isdecimal()), reverse=True)[:2]
    want = {}
    for step in steps:
        shutil.copytree(folder, copy)
        if step == steps[1]:
            shutil.rmtree(copy / str(steps[0]))
        want[step] = restore(copy, abstract, sharding)[:2]
        shutil.rmtree(copy)
    rows = []
    for number in range(times):
        shutil.copytree(folder, copy)
        what = damage(copy / str(steps[0]), rng)
        try:
            *got, said = restore(copy, abstract, sharding)
            fallen_back = f"the checkpoint of step {steps[0]} is damaged" in said
            outcome = "the one before restored" if fallen_back else "harmless"
            holds = (
                got == list(want[steps[fallen_back]])
                and fallen_back == (copy / f"{steps[0]}.damaged").exists()
            )
        except Exception as error:
            outcome, holds = f"{type(error).__name__}: {error}", False
        rows.append(Row(f"damage {number + 1}: {what}", outcome, holds))
        shutil.rmtree(copy)
    return rows


def restore(folder: Path, abstract: TrainState, sharding: Sharding) -> tuple[list[bytes], Any, str]:
    """(the bits of the restored state, its data position, what was printed on stderr)."""
    with contextlib.redirect_stderr(io.StringIO()) as said, Checkpoints(folder, keep=3) as checkpoints:
        restored = checkpoints.restore_latest(abstract, sharding)
    if restored is None:
        raise ValueError("nothing was restored")
    return bits(restored[0]), restored[1], said.getvalue()


def train_rows(folder: Path, kills: int, damages: int, seed: int) -> list[Row]:
    """`jaxthd train`: killed and restarted, ended by SIGTERM, with damaged checkpoints; in a new folder.

    Every line of metrics that any of these runs ever wrote must equal the uninterrupted run's, to the bit. Of
    a damaged checkpoint either the damage is reported and the one before restored, or the state is the same.
    """
    rng = np.random.default_rng(seed)
    uninterrupted, row, want = _uninterrupted(folder, "train", STEPS)
    if not row.holds:
        return [row]
    rows = [row, killed(Run(folder, "killed"), kills, want, rng), terminated(Run(folder, "ended"), want, rng)]
    sharding = SingleDeviceSharding(jax.devices()[0])
    checkpoints = uninterrupted.workdir / "checkpoints"
    return rows + damaged(checkpoints, abstract_state(Blueprint(config())), sharding, damages, rng)


def grpo_rows(folder: Path, kills: int, seed: int) -> list[Row]:
    """`jaxthd grpo`, with dynamic sampling and a reference that is refreshed: killed while it draws, rewards,
    updates or saves, and restarted. In the end every answer of rollouts.jsonl must be the same, too.
    """
    rng = np.random.default_rng(seed)
    uninterrupted, row, want = _uninterrupted(folder, "grpo", GRPO_STEPS)
    if not row.holds:
        return [row]
    run = Run(folder, "killed", "grpo")
    rows = [row, killed(run, kills, want, rng, step_seconds=1.0)]
    drawn = [read_lines(x.workdir / "rollouts.jsonl") for x in (run, uninterrupted)]
    found = f"{len(drawn[0])} answers, {len(drawn[1])} wanted"
    return [*rows, Row("rollouts.jsonl", found, drawn[0] == drawn[1])]


def _uninterrupted(folder: Path, command: str, steps: int) -> tuple[Run, Row, dict[int, dict[str, Any]]]:
    """(a run that nothing interrupts, whether it ended well, its lines by step)."""
    write_recordings(folder)
    run = Run(folder, "uninterrupted", command)
    status = finish(run)
    want = {line["step"]: line for line in run.lines()}
    whole = status == 0 and list(want) == list(range(1, steps + 1))
    return run, Row("uninterrupted", f"{len(want)} steps" if whole else run.log(), whole), want
