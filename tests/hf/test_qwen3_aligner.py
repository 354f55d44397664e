"""Qwen3's forced aligner: what transformers tells of each document alone (tests/references/
forced_aligner.py), jaxthd align tells of documents that are packed, on meshes, from the folder alone."""

import json
import math
import re
import wave as wave_files
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jaxthd
from jaxthd.align import main
from jaxthd.checkpoints.sources import published_config
from jaxthd.config import Config, MarksConfig, MeshConfig, ModelConfig
from jaxthd.convert import export_weights, import_weights
from jaxthd.data.text.marks import marked_words
from jaxthd.errors import UserError
from jaxthd.files.run_folder import flat
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from jaxthd.hf.fields import read_object
from jaxthd.hf.qwen3_aligner import ALIGNER_AUTHORS
from jaxthd.inference.alignment.marks import repaired
from jaxthd.inference.model import Model
from jaxthd.run import startup
from jaxthd.steps.blueprint import Blueprint
from tests.hf.published import assert_identical, change_published, shapes_of, tensors, write_published
from tests.hf.speech_folders import MARKED, aligner_as_authors, write_aligner
from tests.hf.test_speech_live import run_module
from tests.references.waves import wave

REFERENCE = json.loads((Path(__file__).parents[1] / "references" / "forced_aligner.json").read_text())
SAID = (
    (0.3, "Turn on, the light!"),
    (2.6, "it's half-past two o'clock; \u6211\u4eec go"),
    (1.17, "so"),
    (5.03, "one two three four five six seven eight nine ten eleven twelve"),
    (0.77, "\u5317\u4eac \u304b\u306a ok"),
)
ONE = MeshConfig()
SIZES = {"capacity": 512, "audio_capacity": 2400, "workers": 0}


def write_manifest(folder: Path) -> Path:
    """Recordings with their texts."""
    lines = []
    for number, (seconds, text) in enumerate(SAID):
        samples = np.round(wave(number, seconds) * 32768).astype(np.int16)
        with wave_files.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(samples.tobytes())
        lines.append({"audio_filepath": f"{number}.wav", "duration": len(samples) / 16000, "text": text})
    path = folder / "said.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the aligner in both forms and a manifest."""
    work = tmp_path_factory.mktemp("aligner")
    write_aligner(work / "aligner")
    aligner_as_authors(write_aligner(work / "authors"))
    write_manifest(work)
    return work


def configured(folder: Path, mesh: MeshConfig = ONE, **data: Any) -> Config:
    config = published_config([folder])
    return replace(config, mesh=mesh, data=replace(config.data, **SIZES, rows=mesh.data, **data))


def aligned(work: Path, mesh: MeshConfig = ONE, name: str = "aligner", **data: Any) -> list[Any]:
    model = Model(configured(work / name, mesh, **data), [work / name])
    return model.align([(work / f"{n}.wav", text) for n, (_, text) in enumerate(SAID)])


def assert_told(found: list[Any]) -> None:
    """Asserts that documents have the words and times of the library, which cuts milliseconds off."""
    for document, want in zip(found, REFERENCE["documents"], strict=True):
        assert [word.text for word in document.words] == want["words"]
        times = [(word.start, word.end) for word in document.words]
        np.testing.assert_allclose(times, want["times"], rtol=0, atol=1e-3)
        assert all(0 < word.score <= 1 for word in document.words)
    # The encoder hears half a second at least.
    seconds = [document.seconds for document in found]
    np.testing.assert_allclose(seconds, [max(x, 0.5) for x, _ in SAID], rtol=0, atol=0.02)


MESHES = (MeshConfig(1, 2, 1, 1), MeshConfig(2, 1, 2, 1), MeshConfig(1, 2, 1, 2), MeshConfig(2, 2, 1, 2))


@pytest.mark.parametrize(
    "mesh", [ONE, *(pytest.param(mesh, marks=pytest.mark.exhaustive) for mesh in MESHES)], ids=str
)
def test_documents_packed_on_a_mesh_are_told_as_the_library_tells_each_alone(
    work: Path, mesh: MeshConfig
) -> None:
    assert_told(aligned(work, mesh))


def test_the_command_aligns_with_a_folder_of_either_form_alone(
    work: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "simulate_devices", lambda devices: True)
    extra = work / "more.jsonl"
    wordless = json.dumps({"audio_filepath": "2.wav", "duration": 1.17, "text": "..."})
    extra.write_text((work / "said.jsonl").read_text() + wordless + "\n")
    options = [x for name, n in SIZES.items() for x in (f"--data.{name.replace('_', '-')}", str(n))]
    for name in ("aligner", "authors"):
        out = work / f"times-{name}"
        main([str(work / name), "--manifest", str(extra), "--out", str(out), *options])
        lines = [json.loads(line) for line in (out / "words.jsonl").read_text().splitlines()]
        assert [line["key"] for line in lines] == [f"{n + 1}:{n}.wav" for n in range(len(SAID))]
        for line, want in zip(lines, REFERENCE["documents"], strict=True):
            assert [word["word"] for word in line["words"]] == want["words"]
            times = [(word["start"], word["end"]) for word in line["words"]]
            np.testing.assert_allclose(times, want["times"], rtol=0, atol=1.001e-3)
        (skipped,) = map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
        assert "its text has no word" in skipped["reason"]
        assert "28 words of 5 recordings" in capsys.readouterr().out


def test_an_export_is_the_original_bit_by_bit_in_both_forms(work: Path, tmp_path: Path) -> None:
    """Like the original in its form, and else in transformers'."""
    for name in ("aligner", "authors"):
        folder = work / name
        import_weights([str(folder)], tmp_path / name)
        export_weights(tmp_path / name, tmp_path / f"{name}-like", like=folder)
        assert_identical(tensors(tmp_path / f"{name}-like"), tensors(folder))
        like, original = (read_object(x / "config.json") for x in (tmp_path / f"{name}-like", folder))
        stored, wanted = (
            {x: y for x, y in flat(fields).items() if not re.search("(text|audio)_config", x)}
            for fields in (like, original)
        )
        assert {key: stored[key] for key in wanted} == wanted
        export_weights(tmp_path / name, tmp_path / f"{name}-out")
        assert_identical(tensors(tmp_path / f"{name}-out"), tensors(work / "aligner"))
        assert model_config(tmp_path / f"{name}-out") == model_config(folder)
        export_weights(tmp_path / name, tmp_path / f"{name}-authors", form="qwen3_aligner_authors")
        assert_identical(tensors(tmp_path / f"{name}-authors"), tensors(work / "authors"))
        assert model_config(tmp_path / f"{name}-authors") == model_config(folder)
    with pytest.raises(UserError, match=r"model\.marks\.classes is 120; expected 0 for Qwen3ASRForCond"):
        export_weights(tmp_path / "aligner", tmp_path / "wrong", form="qwen3_asr")


def test_settings_are_read_from_both_forms(work: Path, tmp_path: Path) -> None:
    for name in ("aligner", "authors"):
        model = model_config(work / name)
        assert model.marks == MarksConfig(MARKED, 0.05, 263)
        assert not model.llm.tied_embedding
    published = write_aligner(tmp_path / "published")
    (published / "processor_config.json").unlink()
    assert model_config(published).marks.seconds == 0.08
    assert open_checkpoint(write_published("qwen3_asr", tmp_path / "asr")).family.format == "qwen3_asr"
    change_published(published, lambda settings, _: settings.update(token_classification_bias=True))
    with pytest.raises(UserError, match="token_classification_bias: True"):
        model_config(published)


def test_the_published_size_is_that_of_the_published_file() -> None:
    """Of Qwen3-ForcedAligner-0.6B-hf, with a header of tensors' names: bfloat16."""
    text = {"vocab_size": 152064, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    text |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6}
    audio = {"encoder_layers": 24, "encoder_attention_heads": 16, "d_model": 1024, "output_dim": 1024}
    thinker = {"model_type": "qwen3_forced_aligner", "classify_num": 5000}
    thinker |= {"text_config": {**text, "rms_norm_eps": 1e-6}, "audio_config": audio}
    authors = {"model_type": "qwen3_asr", "timestamp_segment_time": 80, "thinker_config": thinker}
    assert ALIGNER_AUTHORS.recognises(authors)
    model = ALIGNER_AUTHORS.configure(authors, ModelConfig())
    assert model.marks == MarksConfig(5000, 0.08, 151705)
    numbers = sum(math.prod(shape) for shape in shapes_of(Config(model=model)).values())
    assert 0 < 1_835_545_960 - 2 * numbers < 100_000


def test_a_recording_that_is_longer_than_the_head_tells_is_left_out(work: Path) -> None:
    long = jaxthd.Samples(wave(9, 6.2), 16000)
    model = Model(configured(work / "aligner"), [work / "aligner"])
    refused, one = model.align([(long, "one two"), (work / "2.wav", SAID[2][1])])
    assert refused.reason == (
        "its recording has 6.2 s, and the model tells times up to 6 s; expected a shorter one"
    )
    assert not refused.words
    assert [word.text for word in one.words] == ["so"]


def test_what_needs_tokens_is_refused(work: Path) -> None:
    model = Model(configured(work / "aligner"), [work / "aligner"])
    message = re.escape("the model's head tells 120 times at marks in a text (model.marks.classes)")
    documents = [(work / "0.wav", "one")]
    for use in (
        lambda: model.generator,
        lambda: model.score(documents),
        lambda: startup.prepared(model.config),
        lambda: jaxthd.load(work / "aligner").transcribe(work / "0.wav"),
    ):
        with pytest.raises(UserError, match=message):
            use()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"template": "chatml"}, 'data.template "chatml"'),
        (
            {"tokenizer": "bytes"},
            "the tokenizer has no tokens <|audio_start|>, <|audio_end|> and",
        ),
    ],
)
def test_a_text_without_the_model_s_marks_is_refused(work: Path, data: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        _ = Model(configured(work / "aligner", **data), [work / "aligner"]).aligner


def test_ranks_that_cannot_share_the_head_are_told(work: Path) -> None:
    folder = configured(work / "aligner")
    for config in (
        replace(folder, model=replace(folder.model, marks=MarksConfig(9)), mesh=MeshConfig(tensor=2)),
        replace(folder, model=replace(folder.model, llm=replace(folder.model.llm, tied_embedding=True))),
    ):
        with pytest.raises(UserError, match=r"model\.marks\.classes is \d+ with"):
            startup.check(config, trains=False)
        with pytest.raises(ValueError, match=r"model\.marks\.classes is \d+ with"):
            _ = Blueprint(config).model


def test_words_are_divided_as_the_library_divides_them() -> None:
    for text, words in REFERENCE["divided"]:
        assert marked_words(text) == words
    assert marked_words("<spk:0>ja <ev:cough> <spk:1>nein") == ["ja", "nein"]


def test_times_are_repaired_as_the_library_repairs_them() -> None:
    """Which cuts milliseconds off."""
    for classes, want in REFERENCE["repaired"]:
        assert (1000 * np.array(repaired(classes)) + 1e-6).astype(int).tolist() == want
    assert repaired([]) == []


def test_the_times_that_stay_are_a_longest_sequence() -> None:
    """Of all sequences of up to nine times; and none goes backwards."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        classes = rng.integers(0, 9, rng.integers(1, 10)).tolist()
        found = repaired(classes)
        assert all(a <= b for a, b in pairwise(found))
        longest = max(
            sum(kept)
            for kept in product((False, True), repeat=len(classes))
            if all(
                a <= b for a, b in pairwise([x for x, is_kept in zip(classes, kept, strict=True) if is_kept])
            )
        )
        assert sum(a == b for a, b in zip(classes, found, strict=True)) >= longest


@pytest.mark.nightly
def test_the_library_tells_the_same_now(work: Path, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Of the committed folder, and of an export of it."""
    python = request.config.getoption("--python-reference")
    import_weights([str(work / "authors")], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "out", like=work / "aligner")
    for folder in (work / "aligner", tmp_path / "out"):
        printed = run_module(python, "forced_aligner", folder, work / "said.jsonl")
        found = json.loads(printed.splitlines()[-1])
        assert found.keys() == REFERENCE.keys()
        for document, want in zip(found["documents"], REFERENCE["documents"], strict=True):
            np.testing.assert_allclose(document.pop("margin"), want["margin"], atol=1e-4)
            assert document == {name: x for name, x in want.items() if name != "margin"}
        assert found["repaired"] == REFERENCE["repaired"]
        assert found["divided"] == REFERENCE["divided"]
