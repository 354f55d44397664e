"""Sizes of buffers that are not given are derived from the data, said once and kept with the run."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.config import Config, DataConfig, ModelConfig, TrainConfig
from jaxthd.config.values import Unset
from jaxthd.files.run_folder import read_config, write_config
from jaxthd.models.front_ends.whisper.settings import Whisper
from jaxthd.planning import sizes
from jaxthd.planning.lengths import draw, measure, read_examples
from jaxthd.planning.search import SIZES, make_plan, with_data
from jaxthd.planning.sizes import with_sizes
from jaxthd.terminal.arguments import parse_command_line

LETTERS_A_SECOND = {"long texts": 60, "short texts": 4}
DOCUMENTS = 1_000


def write_lines(path: Path, kind: str, count: int = DOCUMENTS) -> str:
    """A manifest of log-normal lengths: speech of up to 30 s with texts of so many letters, or text alone."""
    rng = np.random.default_rng(0)
    if kind == "text":
        letters = rng.lognormal(np.log(200), 1.0, count).astype(int).clip(2, 4000)
        lines: list[dict[str, Any]] = [
            {
                "id": f"{i}",
                "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a" * n}],
            }
            for i, n in enumerate(letters)
        ]
    else:
        seconds = rng.lognormal(np.log(6), 0.7, count).clip(0.5, 30)
        lines = [
            {"audio_filepath": f"{i}.wav", "duration": x, "text": "a" * int(x * LETTERS_A_SECOND[kind])}
            for i, x in enumerate(seconds)
        ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def on(manifest: str, **data: Any) -> Config:
    return Config(data=DataConfig(manifest=(manifest,), validation_manifest="", **data))


def numbers(config: Config) -> dict[str, int]:
    return {name: getattr(config.data, name) for name in SIZES}


@pytest.mark.parametrize("kind", [*LETTERS_A_SECOND, "text"])
def test_a_default_costs_at_most_a_tenth_more_than_what_plan_recommends(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Work on padding is counted, in products with weights. Without derived sizes it was up to 3.0 times."""
    monkeypatch.setattr("jaxthd.planning.lengths.LEAST_DRAWN", DOCUMENTS)
    config = on(write_lines(tmp_path / "m.jsonl", kind))
    ((examples,), given) = read_examples(config, say=[].append), with_sizes(config, tmp_path / "run")
    stream = draw([measure(examples, config)[0]], config.data, least=DOCUMENTS)
    plan = make_plan(stream, given, epoch=DOCUMENTS)
    assert not plan.configured.skipped
    assert 1 + plan.configured.overhead <= 1.1 * (1 + plan.recommended.overhead)
    derived = make_plan(stream, config, epoch=DOCUMENTS).configured
    assert 1 + derived.overhead <= 1.1 * (1 + plan.recommended.overhead), "jaxthd plan shows what a run takes"


def test_windows_that_are_mostly_silence_do_not_fill_a_buffer_of_tokens(tmp_path: Path):
    """A recording of 2 s has about 40 slots, and a window of 30 s that is encoded whole: a buffer of 2,048
    slots would hold 50 of them, 75,000 positions of the encoder."""
    lines = [
        {"audio_filepath": f"{i}.wav", "duration": 1.5 + i % 10 / 10, "text": "a" * (10 + i % 7)}
        for i in range(200)
    ]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    encoder = Whisper(model_dim=16, heads=2)
    config = replace(on(str(tmp_path / "m.jsonl")), model=ModelConfig(encoder=encoder))
    found = with_sizes(config, tmp_path / "run").data
    windows = math.ceil(DataConfig().capacity * encoder.unit[0] / (2 * encoder.positions))
    assert found.audio_capacity == windows * 2 * encoder.positions
    assert windows <= found.max_documents
    assert found.capacity <= 512


def test_what_is_derived_is_said_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config, run = on(write_lines(tmp_path / "m.jsonl", "long texts", 100)), tmp_path / "run"
    found = with_sizes(config, run)
    said = ", ".join(f"data.{name} {value:,}" for name, value in numbers(found).items())
    assert capsys.readouterr().out.startswith(f"{said}: derived from the lengths of 100 documents")
    run.mkdir()
    write_config(run, found)
    (run / "checkpoints" / "1").mkdir(parents=True)
    write_lines(tmp_path / "m.jsonl", "short texts", 100)
    assert numbers(with_sizes(config, run)) == numbers(found) == numbers(read_config(run))
    assert not capsys.readouterr().out
    assert numbers(with_sizes(config, tmp_path / "other")) != numbers(found)


@pytest.mark.parametrize("name", SIZES)
def test_what_is_given_stays(name: str, tmp_path: Path):
    manifest = write_lines(tmp_path / "m.jsonl", "long texts", 100)
    default = int(getattr(DataConfig(), name))
    found = with_sizes(on(manifest, **{name: default}), tmp_path)
    assert getattr(found.data, name) == default
    assert numbers(found) != {each: getattr(DataConfig(), each) for each in SIZES}
    line = parse_command_line(
        "train", [*given_in(tmp_path, manifest), f"--data.{name.replace('_', '-')}", str(default)], {}, ""
    )
    unset = {each for each in SIZES if isinstance(getattr(line.config.data, each), Unset)}
    assert unset == set(SIZES) - {name}


def given_in(folder: Path, manifest: str) -> list[str]:
    """The start of a command line: a config file that gives no size."""
    path = folder / "my.py"
    path.write_text(
        "from jaxthd.config import Config, DataConfig\n"
        f"def config(): return Config(data=DataConfig(manifest=({manifest!r},)))\n"
    )
    return [str(path)]


def test_all_given_reads_no_data(tmp_path: Path):
    config = on("missing.jsonl", capacity=64, max_documents=4, audio_capacity=80)
    assert with_sizes(config, tmp_path) is config


def test_data_that_cannot_be_read_leaves_the_defaults(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    found = with_sizes(on(str(tmp_path / "missing.jsonl")), tmp_path)
    assert numbers(found) == numbers(Config())
    assert "the defaults, since lengths of documents cannot be read: " in capsys.readouterr().out


def test_validation_and_documents_that_were_not_read_still_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The defaults held them. Without this, a set of short texts would lose validation with recordings."""
    text = write_lines(tmp_path / "m.jsonl", "text", 100)
    speech = tmp_path / "v.jsonl"
    speech.write_text(json.dumps({"audio_filepath": "a.wav", "duration": 70.0, "text": "one"}) + "\n")
    config = on(text)
    assert with_sizes(config, tmp_path).data.audio_capacity == 0
    with_speech = with_data(config, validation_manifest=str(speech))
    assert with_sizes(with_speech, tmp_path).data.audio_capacity >= 7_000
    monkeypatch.setattr(sizes, "MOST_READ", 50)
    sampled = with_sizes(config, tmp_path).data.capacity
    monkeypatch.setattr(sizes, "MARGIN", 1.0)
    assert sampled >= with_sizes(config, tmp_path).data.capacity
    assert sampled >= 2048


def test_scored_documents_have_room(tmp_path: Path):
    """A published folder has no sizes of a run: three recordings of 100 s were skipped."""
    speech = tmp_path / "v.jsonl"
    line = {"audio_filepath": "a.wav", "duration": 400.0, "text": "one"}
    speech.write_text(json.dumps(line) + "\n")
    config = with_data(on("synthetic"), validation_manifest=str(speech))
    found = sizes.with_room(config)
    assert found.data.capacity >= 5_000
    assert found.data.audio_capacity >= 40_000
    assert found.data.max_documents == DataConfig().max_documents
    assert numbers(sizes.with_room(with_data(config, validation_manifest="missing.jsonl"))) == numbers(
        Config()
    )
    given = with_data(config, **{name: getattr(Config().data, name) + 0 for name in SIZES})
    assert sizes.with_room(given) is given


def test_prompts_and_padded_batches_keep_the_defaults(tmp_path: Path):
    manifest = write_lines(tmp_path / "m.jsonl", "long texts", 10)
    padded = on(manifest, packing="padded")
    drawn = replace(on(manifest), train=replace(Config().train, objective="grpo"))
    for config in (padded, drawn):
        assert numbers(with_sizes(config, tmp_path)) == numbers(Config())


def validated_on(path: Path, letters: list[int], **train: Any) -> Config:
    """A config that validates on texts of so many letters, as bytes."""
    path.write_text(
        "".join(
            json.dumps(
                {
                    "id": f"{i}",
                    "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a" * n}],
                }
            )
            + "\n"
            for i, n in enumerate(letters)
        )
    )
    data = DataConfig(validation_manifest=f"held={path}", tokenizer="bytes", capacity=64, max_documents=2)
    return Config(data=replace(data, audio_capacity=0), train=TrainConfig(**train))


def test_answers_have_room_for_the_longest_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """24 tokens, which suited words, cut 25 of 44 answers of letters."""
    config, run = validated_on(tmp_path / "m.jsonl", [3, 61, 40]), tmp_path / "run"
    found = with_sizes(config, run)
    longest = 62  # its end is supervised too
    assert found.train.max_new_tokens == math.ceil(1.25 * longest)
    assert f"longest answer to validate, of {longest} tokens" in capsys.readouterr().out
    run.mkdir()
    write_config(run, found)
    (run / "checkpoints" / "1").mkdir(parents=True)
    longer = validated_on(tmp_path / "m.jsonl", [100])
    assert with_sizes(longer, run).train.max_new_tokens == found.train.max_new_tokens


@pytest.mark.parametrize(("given", "warns"), [(24, True), (62, False), (0, False)])
def test_a_given_length_stays_and_is_warned_of_where_it_cuts_references(
    given: int, warns: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    config = validated_on(tmp_path / "m.jsonl", [3, 61], max_new_tokens=given)
    assert with_sizes(config, tmp_path / "run") == config
    said = capsys.readouterr().err
    assert ("train.max_new_tokens is 24, but an answer to validate has 62 tokens" in said) == warns
    assert bool(said) == warns
