"""Two processes of jaxthd grpo are one run: they draw, reward and train as one does, and end together."""

import json
import re
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxthd.config import Config, MeshConfig
from jaxthd.data import prompts
from jaxthd.data.prompts import PromptStream
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.errors import UserError
from jaxthd.files.jsonl import read_lines
from jaxthd.grpo import grpo
from jaxthd.rl.rewards import rewarder as rewarders
from jaxthd.rl.rewards.group import Group, Rewarded
from jaxthd.rl.rewards.registry import RewardSetting
from jaxthd.rl.rewards.rewarder import Rewarder
from jaxthd.run.metrics_file import read_metrics
from jaxthd.run.signals import STOPPED
from tests.data.sets import read_manifest
from tests.parallel.test_distributed import CLOCK, end, two
from tests.test_grpo import config_of, write_prompts

STEPS = 10
FAILS = '''
def sometimes(group):
    """Raises for the prompts of two lines, which different processes reward."""
    if group.fields["total"] in (3, 8):
        raise ValueError("not these")
    return [float(len(answer)) for answer in group.answers]
'''


def config(manifest: Path) -> Config:
    """On the mesh of most runs here. A function fails on some prompts. The programs are small."""
    base = config_of(manifest)
    model = replace(base.model, llm=replace(base.model.llm, pattern="M*"))
    compute = replace(base.compute, remat="none")
    rewards = (*base.rollout.rewards, "fails_on_some.sometimes=0.1")
    rollout = replace(base.rollout, rewards=rewards, reward_folders=(str(manifest.parent),))
    data = replace(base.data, max_skipped_share=1.0)
    train = replace(base.train, steps=STEPS, validate_every=STEPS)
    mesh = MeshConfig(data=2, context=2)
    return replace(base, mesh=mesh, data=data, model=model, compute=compute, rollout=rollout, train=train)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    manifest = write_prompts(folder)
    (folder / "fails_on_some.py").write_text(FAILS)
    (folder / "settings.py").write_text(
        "from pathlib import Path\nfrom tests.parallel.test_grpo_in_processes import config as make\n\n\n"
        f"def config():\n    return make(Path({str(manifest)!r}))\n"
    )
    return manifest


@pytest.fixture(scope="module")
def one(manifest: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process with four devices."""
    workdir = tmp_path_factory.mktemp("one")
    grpo(config(manifest), workdir)
    return workdir


def compared(workdir: Path, one: Path) -> int:
    """Asserts that a run equals the one process's, up to rounding; returns its last step."""
    lines, all_of_one = read_metrics(workdir), read_metrics(one)
    for got, want in zip(lines, all_of_one[: len(lines)], strict=True):
        assert got.keys() - CLOCK - {"changed", "resharding_seconds"} == want.keys() - CLOCK
        for name in want.keys() - CLOCK:
            if not name.endswith(("_seconds", "_per_second")) and "difference" not in name:
                assert got[name] == pytest.approx(want[name], rel=1e-4, abs=1e-5), (got["step"], name)
    last = int(lines[-1]["step"])
    for name in ("rollouts.jsonl", "failures.jsonl"):
        got, want = ([rounded(x) for x in read_lines(folder / name)] for folder in (workdir, one))
        assert got == [x for x in want if x["step"] <= last]
        assert got
    return last


def rounded(line: dict[str, Any]) -> dict[str, Any]:
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in line.items() if k != "log_prob"}


def in_two(monkeypatch: pytest.MonkeyPatch, run: Callable[[int], Any]) -> list[Any]:
    """What `run`(number) returns in two threads that exchange values as two processes do, by JSON."""
    own, values, barrier = threading.local(), ["", ""], threading.Barrier(2, timeout=60)

    def exchange(value: Any) -> list[Any]:
        values[own.number] = json.dumps(value)
        barrier.wait()
        found = [json.loads(text) for text in values]
        barrier.wait()
        return found

    def process(number: int) -> Any:
        own.number = number
        try:
            return run(number)
        except BaseException:
            barrier.abort()
            raise

    two = SimpleNamespace(process_count=lambda: 2, process_index=lambda: own.number)
    monkeypatch.setattr(rewarders, "jax", two)
    monkeypatch.setattr(rewarders, "exchange", exchange)
    monkeypatch.setattr(prompts, "exchange", exchange)
    with ThreadPoolExecutor(2) as threads:
        return [each.result() for each in [threads.submit(process, number) for number in range(2)]]


def group(number: int) -> Group:
    answers = ("a" * number, "b")
    return Group(
        key=f"{number}", fields={"total": number}, answers=answers, tokens=(1, 1), ended=(True, True)
    )


def test_each_process_rewards_a_share_and_all_have_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "fails_on_some.py").write_text(FAILS)
    name = "fails_on_some.sometimes"
    setting = RewardSetting(name, 1 / 3, {}, {})
    with (
        Rewarder([setting], folders=[str(tmp_path)], max_failed_share=0.01) as first,
        Rewarder([setting], folders=[str(tmp_path)], max_failed_share=0.01) as second,
    ):
        for number in range(6):
            first.submit(number, group(number))
        expected = first.collect(are_counted=False)
        asked: list[list[str]] = [[], []]

        def run(process: int) -> list[Rewarded]:
            rewarder = (first, second)[process]
            for number in (2, 0, 1, 5, 4, 3):  # as groups end
                if rewarder.submit(number, group(number)):
                    asked[process].append(f"{number}")
            return rewarder.collect(are_counted=False)

        assert in_two(monkeypatch, run) == [expected, expected]
        assert asked == [["2", "0", "4"], ["1", "5", "3"]]
        assert [each.failure and each.failure.key for each in expected] == [None, None, None, "3", None, None]

        def fails(process: int) -> str:
            """The second group to fail is too much for both, whoever has computed it."""
            rewarder = (first, second)[process]
            for number in (3, 8):
                rewarder.submit(number, group(number))
            with pytest.raises(UserError, match="max_skipped_share") as raised:
                rewarder.collect()
            return str(raised.value)

        assert len(set(in_two(monkeypatch, fails))) == 1


def test_what_one_process_cannot_read_no_process_takes(
    monkeypatch: pytest.MonkeyPatch, manifest: Path
) -> None:
    settings = config(manifest)
    examples, _ = read_manifest(manifest, prompt=settings.data.prompt)
    documents = SpeechDocuments(settings, load_tokenizer("bytes"), train=False)

    def run(process: int) -> tuple[list[str], dict[str, Any], list[str]]:
        own, skipped = list(examples), []
        gone = own[4 + process]  # a file that this process alone lacks
        clip = replace(gone.clips[0], path=Path("nowhere.wav"))
        own[4 + process] = replace(gone, turns=(replace(gone.turns[0], parts=(clip,)), *gone.turns[1:]))
        stream = PromptStream(
            [own], documents, settings, on_skip=lambda key, why: skipped.append(key), identity={}
        )
        keys = [prompt.example.key for _ in range(4) for prompt in stream.take(4)]
        return keys, stream.get_state(), skipped

    first, second = in_two(monkeypatch, run)
    assert first == second
    fewer = first[1] | {"identity": first[1]["identity"] | {"items": [12]}}
    stream = PromptStream([examples], documents, settings, on_skip=lambda key, why: None, identity={})
    with pytest.raises(UserError, match="Lines without a text"):
        stream.set_state(fewer)
    assert {examples[4].key, examples[5].key} == set(first[2]) - {examples[12].key}
    assert not set(first[0]) & {examples[4].key, examples[5].key, examples[12].key}


@pytest.mark.exhaustive
def test_two_processes_draw_reward_and_train_as_one_through_a_kill_other_meshes_and_a_signal(
    manifest: Path, one: Path, tmp_path: Path
) -> None:
    """On (data, context) = (2, 2) until a kill. Then, with every row on both processes, on (1, 4), where they
    draw on (4, 1), until a signal. One process goes on to the end."""
    with two(manifest, tmp_path, name="grpo") as processes:
        output = end(processes, 1, signal.SIGKILL, after="[3-5]")
        assert processes.wait() == 128 + signal.SIGKILL
    assert re.search(r"^\[0\] error: process 1 \(pid \d+ on .*\) is gone", output, re.MULTILINE)
    assert "Traceback" not in output
    assert compared(tmp_path, one) >= 3

    meshes = ["--mesh.data", "1", "--mesh.context", "4", "--rollout.mesh.data", "4"]
    with two(manifest, tmp_path, *meshes, "--rollout.answers_at_once", "12", name="grpo") as processes:
        output = end(processes, 1, signal.SIGTERM, after="[4-7]")
        assert processes.wait() == STOPPED, output
    assert re.search(r"^\[0\] continuing from step [24]", output, re.MULTILINE)
    last = compared(tmp_path, one)
    assert f"stopped by SIGTERM after step {last}, which is saved" in output
    assert last < STEPS, "the signal came too late to show anything"

    grpo(config(manifest), tmp_path)
    assert compared(tmp_path, one) == STEPS
    assert {x["function"] for x in read_lines(tmp_path / "failures.jsonl")} == {"fails_on_some.sometimes"}
    skipped = [x["key"] for x in read_lines(tmp_path / "skipped.jsonl")]
    assert len(skipped) == 1
    assert skipped[0].endswith("missing.wav")
