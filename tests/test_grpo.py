"""jaxthd grpo as a user sees it: what it writes, how it continues, what it refuses."""

import json
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from jaxthd.config import (
    AdaptConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    PostTrainingConfig,
    RolloutConfig,
    TrainConfig,
)
from jaxthd.errors import UserError
from jaxthd.files.jsonl import read_lines
from jaxthd.grpo import grpo
from jaxthd.inference.generator import for_generation
from jaxthd.models.blocks import Attention, Mamba2
from jaxthd.rl.updates import BOUNDS, Agreement, require_agreement
from jaxthd.run.metrics_file import read_metrics
from jaxthd.run.startup import check
from jaxthd.train import train
from tests.shared_programs import shared_programs, without_clock

STEPS, EVERY = 4, 2


@pytest.fixture(autouse=True, scope="module")
def programs() -> Iterator[None]:
    with shared_programs():
        yield


def write_prompts(folder: Path) -> Path:
    """Twelve short noises and a missing file; returns the manifest."""
    rng, lines = np.random.default_rng(0), []
    for i, seconds in enumerate(rng.uniform(0.1, 0.8, 12)):
        soundfile.write(folder / f"{i}.wav", rng.normal(0, 0.1, int(seconds * 16000)), 16000)
        lines.append({"audio_filepath": f"{i}.wav", "text": "la " * int(rng.integers(1, 5)), "total": i})
    lines.append({"audio_filepath": "missing.wav", "text": "not there"})
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return manifest


def config_of(manifest: Path) -> Config:
    return Config(
        data=DataConfig(
            manifest=(str(manifest),),
            validation_manifest=str(manifest),
            capacity=96,
            audio_capacity=512,
            max_documents=8,
            rows=2,
        ),
        model=ModelConfig(
            encoder=EncoderConfig(
                num_mels=16, layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4, chunk_seconds=1.0
            ),
            llm=LLMConfig(
                pattern="M*-",
                dim=16,
                blocks={"*": Attention(heads=2, kv_heads=1, head_dim=8), "M": Mamba2(heads=4, head_dim=8)},
            ),
        ),
        posttraining=PostTrainingConfig(reference_every=3),
        rollout=RolloutConfig(
            prompts=4,
            group_size=3,
            answers_at_once=6,
            max_new_tokens=6,
            top_p=0.9,
            temperature=0.8,
            rewards=("length", "wer=0.5", "equals=0"),
            reward_options=("equals.field=total",),
            updates=2,
            dynamic_sampling=2,
            validation_prompts=3,
        ),
        train=TrainConfig(
            objective="grpo",
            steps=STEPS,
            learning_rate=1e-2,
            warmup_steps=0,
            checkpoint_every=EVERY,
            validate_every=STEPS,
            validation_batches=1,
            max_new_tokens=4,
        ),
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return config_of(write_prompts(tmp_path_factory.mktemp("recordings")))


@pytest.fixture(scope="module")
def whole(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("whole")
    grpo(config, workdir)
    return workdir


def test_a_step_says_what_it_drew_and_how_drawing_and_training_agree(whole: Path, config: Config):
    lines = [line for line in read_metrics(whole) if line["step"]]
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line["logprob_difference"] < 3e-5
        assert {"reward", "reward_length", "reward_wer", "reward_equals", "kl", "entropy"} <= line.keys()
        assert line["reward_failures"] == 0
    assert len({line["compilations"] for line in lines}) == 1, "nothing is compiled after the first step"
    assert abs(lines[0]["kl"]) < 1e-6 < abs(lines[2]["kl"]), "the reference is the first policy"
    assert lines[3]["kl"] < lines[2]["kl"], "the reference was refreshed after step 3"
    drawn = read_lines(whole / "rollouts.jsonl")
    for line in lines:
        of_step = [x for x in drawn if x["step"] == line["step"]]
        assert len(of_step) % config.rollout.group_size == 0
        assert line["reward"] == pytest.approx(np.mean([x["reward"] for x in of_step]))
        assert all(
            x["reward"] == pytest.approx(x["rewards"]["length"] + 0.5 * x["rewards"]["wer"]) for x in of_step
        )
    assert len({x["answer"] for x in drawn}) > len(drawn) // 2, "answers differ"
    assert read_lines(whole / "skipped.jsonl")[0]["key"].endswith("missing.wav")
    assert (whole / "curves.png").exists()
    first, last = (line for line in read_metrics(whole) if "validation_pass_at_k" in line)
    assert (first["step"], last["step"]) == (0, STEPS)
    for line in (first, last):
        assert 0 <= line["validation_pass_at_1"] <= line["validation_pass_at_k"] <= 1
        assert line["validation_reward_drawn"] <= line["validation_reward_best"]


def test_the_report_tells_rewards_and_its_commands_are_those_of_such_a_run(whole: Path, config: Config):
    report = (whole / "report.txt").read_text().splitlines()
    rewards = [line["reward"] for line in read_metrics(whole) if line["step"]]
    first, last = np.mean(rewards[:2]), np.mean(rewards[2:])
    assert f"  reward {first:.3f} -> {last:.3f} (means of 2 steps)" in report
    held_out = [x["validation_reward"] for x in read_metrics(whole) if "validation_reward" in x]
    assert f"  validation reward {held_out[0]:.3f} -> {held_out[-1]:.3f}" in report
    assert not any(line.startswith("  loss ") for line in report), "its value tells nothing"
    shown = next(at for at, line in enumerate(report) if line.startswith("Drawn in the last step (of a pro"))
    best, worst = (float(line.split()[0]) for line in report[shown + 2 : shown + 4])
    assert best > worst
    last_step = [x for x in read_lines(whole / "rollouts.jsonl") if x["step"] == STEPS]
    assert {f"{best:.3f}", f"{worst:.3f}"} <= {f"{x['reward']:.3f}" for x in last_step}
    assert report[-3:] == [
        f"  jaxthd generate {whole} --audio FILE",
        f"  jaxthd grpo {whole} --train.steps {2 * STEPS}",
        f"  jaxthd convert export {whole} --out FOLDER",
    ]
    check(for_generation(config, 1), trains=False)
    with pytest.raises(UserError, match="group_size"):  # which says nothing about one answer
        check(for_generation(config, 1))


def test_a_run_that_was_killed_continues_bit_identically(whole: Path, config: Config, tmp_path: Path):
    """What a kill leaves: the checkpoint of step 2, and lines of steps after it."""
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))
    grpo(config, tmp_path)
    assert without_clock(read_metrics(tmp_path)) == without_clock(read_metrics(whole))
    assert read_lines(tmp_path / "rollouts.jsonl") == read_lines(whole / "rollouts.jsonl")


@pytest.mark.exhaustive
def test_a_run_continues_on_another_mesh_and_draws_on_a_third(whole: Path, config: Config, tmp_path: Path):
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))
    mesh, of_rollouts = MeshConfig(data=2, context=2), MeshConfig(context=2, tensor=2)
    grpo(replace(config, mesh=mesh, rollout=replace(config.rollout, mesh=of_rollouts)), tmp_path)
    assert all(line["resharding_seconds"] > 0 for line in read_metrics(tmp_path)[STEPS // 2 + 1 :])
    drawn = [
        [(x["key"], x["answer"]) for x in read_lines(folder / "rollouts.jsonl")]
        for folder in (tmp_path, whole)
    ]
    assert drawn[0] == drawn[1]
    for got, want in zip(read_metrics(tmp_path)[1:], read_metrics(whole)[1:], strict=True):
        assert got["reward"] == want["reward"]
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-4, abs=1e-6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wants_text", [True, False])
def test_prompts_without_transcripts_are_rewarded_by_their_fields(
    config: Config, tmp_path: Path, wants_text: bool
):
    """Half of the lines have no text, and as many are conversations that end with the user's turn."""
    lines = read_lines(Path(config.data.manifest[0]))[:12]
    for number, line in enumerate(lines):
        line["audio_filepath"] = str(Path(config.data.manifest[0]).parent / line["audio_filepath"])
        if number % 2:
            del line["text"]
        if number % 4 == 1:
            turn = {"role": "user", "content": [{"type": "audio", "path": line.pop("audio_filepath")}]}
            line |= {"id": f"c{number}", "messages": [turn]}
    manifest = tmp_path / "prompts.jsonl"
    manifest.write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = replace(config.data, manifest=(str(manifest),), validation_manifest=str(manifest))
    rewards = ("equals", "format", *(["wer"] if wants_text else []))
    options = ("equals.field=total", "format.pattern=[a-z ].*")
    own = replace(own, max_skipped_share=1.0)
    rollout = replace(config.rollout, rewards=rewards, reward_options=options)
    rollout = replace(rollout, prompts=6, dynamic_sampling=1, updates=1, validation_prompts=12)
    prompts = replace(config, data=own, rollout=rollout, train=replace(config.train, steps=2))
    grpo(prompts, tmp_path / "run")
    drawn, without = read_lines(tmp_path / "run" / "rollouts.jsonl"), 0
    for line in drawn:
        number = int(line["key"].split(":")[0]) - 1
        assert (line["reference"] is None) == bool(number % 2)
        failed = line["reward"] is None
        assert failed == (wants_text and line["reference"] is None), "wer has nothing to compare with"
        without += failed
    failures = read_lines(tmp_path / "run" / "failures.jsonl")
    training = [x for x in failures if "validation" not in x]
    assert len(training) * rollout.group_size == without
    assert all(x["function"] == "wer" and "no reference" in x["reason"] for x in failures)
    assert bool(failures) == wants_text
    lines_of_run = read_metrics(tmp_path / "run")
    assert [x["step"] for x in lines_of_run if "validation_reward" in x] == [0, 2]
    for line in lines_of_run:
        if "validation_reward" in line:
            assert line["validation_reward_best"] >= line["validation_reward_drawn"]
            assert line["validation_reward_failures"] == 6 * wants_text
            assert "validation_pass_at_k" in line, "of the prompts that have a reference"
    assert len({x["compilations"] for x in lines_of_run if x["step"]}) == 1


def test_a_difference_between_drawing_and_training_ends_the_run(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """No two float32 programs agree to 1e-30."""
    for found, dtype, holds in [
        (0.009, "float32", True),
        (0.011, "float32", False),
        (0.4, "bfloat16", True),
        (2e-5, "float64", False),
        (float("nan"), "float32", False),
    ]:
        with nullcontext() if holds else pytest.raises(UserError):
            require_agreement(Agreement(found, 0.0, 1), dtype)
    monkeypatch.setitem(BOUNDS, "float32", 1e-30)
    with pytest.raises(UserError, match=r"differs by .* expected at most 1e-30 in float32"):
        grpo(replace(config, train=replace(config.train, steps=1, validate_every=0)), tmp_path)
    assert not list((tmp_path / "checkpoints").glob("[0-9]*")), "nothing was trained"


def test_objectives_of_the_other_command_are_refused(config: Config, tmp_path: Path):
    with pytest.raises(UserError, match="jaxthd grpo"):
        train(config, tmp_path)
    sft = replace(config, train=replace(config.train, objective="sft"))
    with pytest.raises(UserError, match="jaxthd train"):
        grpo(sft, tmp_path)
    small = replace(config, data=replace(config.data, max_documents=3), adapt=AdaptConfig())
    with pytest.raises(UserError, match="max_documents"):
        grpo(small, tmp_path)
