"""A run's data: manifests mixed, skipped items listed once, positions refused for other data."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import soundfile

from jaxthd.config import (
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    RolloutConfig,
    SpecAugmentConfig,
)
from jaxthd.data import loader as loading
from jaxthd.data.dataset import SpeechData
from jaxthd.data.loader import whole_position
from jaxthd.data.mixing import mixing_weights
from jaxthd.data.sources import synthetic
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.errors import UserError


def write(path: Path, *lines: dict[str, Any] | str) -> str:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return str(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """speech.jsonl: 4 utterances, 2 unusable lines; chats.jsonl: 2 conversations, 1."""
    noise = np.random.default_rng(0).normal(0, 0.1, 8000)
    soundfile.write(tmp_path / "a.wav", noise, 16000)
    heard = {"audio_filepath": "a.wav", "text": "one"}
    chat = {
        "id": "c",
        "audio": "a.wav",
        "conversations": [{"from": "human", "value": "{audio}?"}, {"from": "gpt", "value": "yes"}],
    }
    write(tmp_path / "speech.jsonl", *[heard] * 4, heard | {"audio_filepath": "gone.wav"}, "{")
    write(tmp_path / "chats.jsonl", chat, chat, chat | {"audio": []})
    return tmp_path


def config(folder: Path, *names: str, **data: Any) -> Config:
    defaults = {"validation_manifest": "", "workers": 0, "packing": "padded", "capacity": 64}
    defaults["max_skipped_share"] = 1.0
    return Config(
        data=DataConfig(manifest=tuple(str(folder / n) for n in names), **{**defaults, **data}),
        model=ModelConfig(encoder=EncoderConfig(num_mels=16, chunk_seconds=1.0)),
    )


def skipped(folder: Path) -> list[tuple[str, str]]:
    lines = map(json.loads, (folder / "skipped.jsonl").read_text().splitlines())
    return [(Path(line["manifest"]).name, line["key"]) for line in lines]


def keys(reports: Any) -> list[str]:
    return [key for _, report in reports for row in report.keys for key in row]


def test_manifests_are_one_data_set_and_every_skipped_item_is_listed_once(folder: Path):
    data = SpeechData(config(folder, "speech.jsonl", "chats.jsonl"), folder)
    with data.training() as loader:
        found = keys(islice(loader, 12))
    assert sorted(found) == sorted([*(f"{n}:a.wav" for n in (1, 2, 3, 4)), "1/1:c", "1/2:c"] * 2)
    listed = [("speech.jsonl", "6:"), ("chats.jsonl", "3:c"), ("speech.jsonl", "5:gone.wav")]
    assert skipped(folder) == listed
    assert len(data.skipped) == 3
    again = SpeechData(config(folder, "speech.jsonl", "chats.jsonl"), folder)
    with again.training() as loader:
        list(islice(loader, 6))
    assert skipped(folder) == listed


def test_what_is_skipped_is_counted_over_the_whole_run_and_too_much_stops_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
):
    """Of 9 items two lines are faulty, and one recording is too short: that is seen only when it is read."""
    soundfile.write(folder / "gone.wav", np.zeros(100), 16000)
    some = config(folder, "speech.jsonl", "chats.jsonl", max_skipped_share=0.333334)
    data = SpeechData(some, folder)
    assert "skipped so far: 2 of 9 training items (22.2%): not JSON" in capsys.readouterr().out
    with data.training() as loader:
        list(islice(loader, 6))
    data.require_few_skipped()  # 2 of 6, and 1 of 3
    some = replace(some, data=replace(some.data, max_skipped_share=0.3333))
    with pytest.raises(UserError, match=r"0\.3333 of .*chats.jsonl .*1 items of 3: 1 audio"):
        SpeechData(some, folder)
    only = config(folder, "speech.jsonl", max_skipped_share=0.2)
    data = SpeechData(only, folder)
    with data.training() as loader:
        list(islice(loader, 6))
    with pytest.raises(
        UserError, match=r"0\.2 of .*speech\.jsonl .*2 items of 6 read so far, of 6: .*too short"
    ):
        data.require_few_skipped()
    # The recording is mended: the run goes on, and knows what it has skipped before.
    (folder / "gone.wav").write_bytes((folder / "a.wav").read_bytes())
    some = replace(some, data=replace(some.data, max_skipped_share=0.333334))
    again = SpeechData(some, folder)
    with again.training() as loader:
        list(islice(loader, 6))
    again.require_few_skipped()
    assert "3 of 9 training items (33.3%)" in again.skipped_text()
    assert again.skipped_text(this_call=True).startswith("2 of 9 training items (22.2%)")
    (folder / "other").mkdir()
    with pytest.raises(UserError, match=r"1 items of 6: not JSON"):
        SpeechData(config(folder, "speech.jsonl", max_skipped_share=0.1), folder / "other")


def test_a_temperature_draws_small_manifests_more_often(folder: Path):
    """Of 5 items of speech.jsonl one cannot be decoded; there are 2 of chats.jsonl for every 5."""
    names = ("speech.jsonl", "chats.jsonl")
    for path in map(folder.joinpath, names):
        path.write_text(
            path.read_text() * 20
        )  # grain takes 2 ms to shuffle 4 items, and 0.06 for each of 300

    def ratio(**data: Any) -> float:
        with SpeechData(config(folder, *names, **data), folder).training() as loader:
            found = keys(islice(loader, 300))
        chats = sum(key.startswith("1/") for key in found)
        return chats / ((300 - chats) * 5 / 4)

    assert ratio(weights_temperature=2.0) == pytest.approx((2 / 5) ** 0.5, abs=0.02)
    assert ratio(weights_temperature=2.0, weights=(9.0, 1.0)) == pytest.approx(1 / 3, abs=0.02)
    assert ratio(weights_temperature=1e9) == pytest.approx(1, abs=0.02)
    one = config(folder, "speech.jsonl", weights_temperature=5.0)
    assert mixing_weights(one.data, [4]) is None
    assert mixing_weights(replace(one.data, weights_temperature=1.0), [4, 2]) is None
    sharp = replace(one.data, weights_temperature=0.1)
    assert mixing_weights(sharp, [10**9, 10**8]) == [pytest.approx(1.0), pytest.approx(1e-10)]


def test_validation_is_one_pass_in_order_with_skipped_items_of_its_own(folder: Path):
    both = config(folder, "speech.jsonl", validation_manifest=str(folder / "chats.jsonl"))
    data = SpeechData(both, folder)
    assert data.has_validation
    for _ in range(2):
        with data.validation() as loader:
            assert keys(loader) == ["1:c", "2:c"]
    assert skipped(folder) == [("speech.jsonl", "6:"), ("chats.jsonl", "3:c")]
    assert not SpeechData(config(folder, "speech.jsonl"), folder).has_validation


def test_validation_sets_are_read_each_by_itself_without_the_training_set(folder: Path):
    sets = (f"talk={folder / 'chats.jsonl'}", str(folder / "speech.jsonl"))
    data = SpeechData(config(folder, "gone.jsonl", validation_manifest=sets), folder, training=False)
    assert skipped(folder) == [("chats.jsonl", "3:c"), ("speech.jsonl", "6:")]
    for name, want in (("talk", ["1:c", "2:c"]), ("speech", [f"{n}:a.wav" for n in (1, 2, 3, 4)])):
        with data.validation(name=name) as loader:
            assert keys(loader) == want
        assert [x.key for x in data.validation_examples(name)][: len(want)] == want
    assert data.is_skipped("5:gone.wav", "speech")
    assert not data.is_skipped("5:gone.wav")
    assert not data.is_skipped("1:a.wav", "speech")
    assert skipped(folder)[2:] == [("speech.jsonl", "5:gone.wav")]


@pytest.fixture
def as_processes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """as_processes(f, config, *rows): [f(SpeechData, rows), ...], in threads that exchange like processes."""

    def run(function: Callable[[SpeechData, Any], Any], config: Config, *rows: list[int]) -> list[Any]:
        barrier, given = threading.Barrier(len(rows), timeout=60), {}
        data = [SpeechData(config, folder) for _ in rows]
        own = threading.local()

        def exchange(value: Any) -> list[Any]:
            given[own.number] = json.dumps(value)
            barrier.wait()
            found = [json.loads(given[i]) for i in range(len(rows))]
            barrier.wait()
            return found

        def process(number: int) -> Any:
            own.number = number
            return function(data[number], rows[number])

        monkeypatch.setattr(loading, "exchange", exchange)
        monkeypatch.setattr(jax, "process_count", lambda: len(rows))
        with ThreadPoolExecutor(len(rows)) as threads:
            return list(threads.map(process, range(len(rows))))

    return run


def test_processes_have_as_many_batches_and_count_a_shared_row_once(
    folder: Path, as_processes: Callable[..., list[Any]]
):
    """4 documents, one a row: row 0 has two, hence the second batch is of the first process alone."""
    settings = config(folder, "speech.jsonl", rows=3, validation_manifest=str(folder / "speech.jsonl"))

    def read(data: SpeechData, rows: list[int]) -> list[Any]:
        with data.validation(rows) as loader:
            return [(len(batch.tokens), report, loader.keys(report)) for batch, report in loader]

    (whole,) = as_processes(read, settings, [0, 1, 2])
    for steps, rows in zip(as_processes(read, settings, [0, 1], [1, 2]), ([0, 1], [1, 2]), strict=True):
        assert len(steps) == len(whole) == 2
        for (size, report, keys), (_, one, all_keys) in zip(steps, whole, strict=True):
            assert size == 2
            assert report._replace(keys=one.keys, seconds=one.seconds) == one
            assert report.seconds == tuple(one.seconds[row] for row in rows)
            assert [list(k) for k in report.keys] == [all_keys[row] for row in rows]
            assert keys == all_keys
    assert [report.documents for _, report, _ in whole] == [3, 1]


@pytest.mark.parametrize("split", [[[0, 1, 2]], [[0, 2], [1]], [[0, 1], [1, 2], [0]]])
def test_a_position_saved_by_some_processes_is_continued_by_others(
    split: list[list[int]], folder: Path, as_processes: Callable[..., list[Any]]
):
    settings = config(folder, "speech.jsonl", "chats.jsonl", rows=3)

    def start(data: SpeechData, rows: list[int]) -> Any:
        with data.training(rows) as loader:
            list(islice(loader, 3))
            return whole_position(json.loads(json.dumps(loader.get_state())))

    def go_on(data: SpeechData, rows: list[int]) -> list[Any]:
        with data.training(rows) as loader:
            loader.set_state(position)
            return [loader.keys(report) for _, report in islice(loader, 4)]

    with SpeechData(settings, folder).training() as loader:
        want = [[list(row) for row in report.keys] for _, report in islice(loader, 7)]
    for position in as_processes(start, settings, *split):
        assert None not in position["streams"]
        assert as_processes(go_on, settings, *split) == [want[3:]] * len(split)
        assert as_processes(go_on, settings, [0, 1, 2]) == [want[3:]]


def test_synthetic_may_be_one_of_the_manifests(folder: Path, monkeypatch: pytest.MonkeyPatch):
    made = folder / "chats.jsonl", folder / "speech.jsonl"
    monkeypatch.setattr(synthetic, "synthetic_manifests", lambda *sizes, **kind: made)
    both = config(folder, "speech.jsonl", validation_manifest="synthetic")
    both = replace(both, data=replace(both.data, manifest=(*both.data.manifest, "synthetic")))
    data = SpeechData(both, folder)
    with data.training() as loader:
        assert {"1:a.wav", "1/2:c"} <= set(keys(islice(loader, 6)))
    with data.validation() as loader:
        assert keys(loader) == ["1:a.wav", "2:a.wav", "3:a.wav", "4:a.wav"]


def test_a_position_is_refused_for_other_data_and_kept_for_the_same(folder: Path):
    names = ("speech.jsonl", "chats.jsonl")
    base = config(folder, *names)

    def loader(changed: Config) -> Any:
        return SpeechData(changed, folder).training()

    first = loader(base)
    list(islice(first, 3))
    state = json.loads(json.dumps(first.get_state()))
    again = loader(base)
    again.set_state(state)
    assert keys(islice(again, 3)) == keys(islice(first, 3))
    changes: list[tuple[str, dict[str, Any]]] = [
        ("prompt", {"prompt": "hear {audio}"}),
        ("system_prompt", {"system_prompt": "Listen."}),
        ("template", {"template": "chatml"}),
        ("template_options", {"template_options": "{}"}),
        ("weights", {"weights": (1.0, 2.0)}),
        ("spec_augment", {"spec_augment": SpecAugmentConfig(freq=(1, 27))}),
        ("manifest", {"manifest": base.data.manifest[::-1]}),
    ]
    for field, change in changes:
        with pytest.raises(UserError, match=f"another stream.*{field}: "):
            loader(replace(base, data=replace(base.data, **change))).set_state(state)
    chunks = replace(base.model, encoder=replace(base.model.encoder, chunk_seconds=2.0))
    with pytest.raises(UserError, match=r"chunk_seconds: 1\.0 then, 2\.0 now"):
        loader(replace(base, model=chunks)).set_state(state)
    with (folder / "chats.jsonl").open("r+") as file:
        text = file.read().replace("yes", "yea")
        file.seek(0)
        file.write(text)
    with pytest.raises(UserError, match="manifest: "):
        loader(base).set_state(state)


def test_answers_end_with_the_first_of_the_stop_ids(folder: Path):
    data = SpeechData(config(folder, "speech.jsonl", template="chatml"), folder)
    assert data.stop_ids == (ByteTokenizer.eos_id,)
    with data.training() as loader:
        batch, _ = next(loader)
    assert batch.targets[batch.weights > 0][-1] == data.stop_ids[0]


def test_a_model_without_an_encoder_reads_no_audio_and_skips_documents_with_recordings(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("jaxthd.data.speech.load_audio", None)
    lines = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "x" * n}]}
             for n in (1, 5, 9)]  # fmt: skip
    write(folder / "text.jsonl", *lines, {"audio_filepath": "a.wav", "text": "one"})
    settings = replace(config(folder, "text.jsonl"), model=ModelConfig(encoder=None))
    with SpeechData(settings, folder).training() as loader:
        found = list(islice(loader, 6))
    assert set(keys(found)) == {"1:", "2:", "3:"}
    assert not any(batch.has_audio for batch, _ in found)
    reasons = {
        x["key"]: x["reason"] for x in map(json.loads, (folder / "skipped.jsonl").read_text().splitlines())
    }
    assert reasons["4:a.wav"].startswith("it holds a recording, and the model is text-only")
    # Before anything is compiled: too much of a set, and all of it.
    few = replace(settings, data=replace(settings.data, max_skipped_share=0.2))
    with pytest.raises(UserError, match=r"max_skipped_share 0\.2 of .* cannot be used: 1 items .* text-only"):
        SpeechData(few, folder)
    settings = replace(config(folder, "speech.jsonl"), model=ModelConfig(encoder=None))
    with pytest.raises(UserError, match=r"first item is 1:a\.wav: .* text-only .*; expected .* an encoder"):
        SpeechData(settings, folder)


@pytest.mark.parametrize(("context", "rollout_context"), [(1, 4), (4, 1)])
def test_prompts_fit_the_buffers_of_training_and_the_pages_that_draw_answers(
    folder: Path, context: int, rollout_context: int
):
    """Of 4 context ranks each holds 256 tokens, and no document is divided. The prompts of the validation
    need no buffer of training."""
    turns = {
        name: [{"role": "user", "content": "x" * length}, {"role": "assistant", "content": "y"}]
        for name, length in {"short": 100, "long": 400}.items()
    }
    lines = [{"id": name, "messages": said} for name, said in turns.items()]
    text = write(folder / "text.jsonl", *lines)
    settings = Config(
        mesh=MeshConfig(context=context),
        rollout=RolloutConfig(mesh=MeshConfig(context=rollout_context), group_size=2, max_new_tokens=4),
        data=DataConfig(
            manifest=(text,), validation_manifest=text, capacity=1024, workers=0, max_skipped_share=1.0
        ),
        model=ModelConfig(None, LLMConfig(pattern="M")),
        compute=ComputeConfig(context_layout="whole", context_splits=0),
    )
    data = SpeechData(settings, folder)
    taken = {prompt.example.key for prompt in data.prompts().take(4)}
    assert taken == {"1:short"}
    (line,) = map(json.loads, (folder / "skipped.jsonl").read_text().splitlines())
    assert line["key"] == "2:long"
    assert ("on rollout.mesh" in line["reason"]) == (rollout_context == 4)
    held_out = [prompt.example.key for prompt in data.validation_prompts(2)]
    assert held_out == ["1:short"] + ["2:long"] * (rollout_context == 1)
