"""jaxthd align writes the words of a manifest in time, the same as each document alone has."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

import jaxthd
from jaxthd.align import main
from jaxthd.config import Config, DataConfig, LLMConfig, ModelConfig, TrainConfig
from jaxthd.errors import UserError
from jaxthd.models.front_ends.stacked.settings import Stacked
from jaxthd.run import startup
from tests.helpers import save_run

ENCODER = Stacked(mel_bands=20, stack=2, layers=1, dim=16, heads=1, head_dim=8, ffn_dim=16)
TEXTS = ("one two", "<spk:0>ja <spk:1>nein", "far too much is said here", "so")
SECONDS = (0.9, 0.77, 0.31, 0.5)


def align_config() -> Config:
    return Config(
        data=DataConfig(capacity=256, audio_capacity=512, max_documents=4, workers=0),
        model=ModelConfig(encoder=ENCODER, llm=LLMConfig(pattern="-", dim=16)),
        train=TrainConfig(ctc_loss=0.5, ctc_max_labels=24),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with random weights, and a manifest whose third text is too long for its recording."""
    folder, rng, lines = tmp_path_factory.mktemp("align"), np.random.default_rng(0), []
    for number, (text, seconds) in enumerate(zip(TEXTS, SECONDS, strict=True)):
        soundfile.write(folder / f"{number}.wav", rng.normal(0, 0.1, round(16000 * seconds)), 16000)
        lines.append({"audio_filepath": f"{number}.wav", "duration": seconds, "text": text})
    (folder / "said.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    save_run(align_config(), folder / "run")
    return folder


@functools.cache
def model(folder: Path) -> jaxthd.Model:
    return jaxthd.load(folder / "run")


def test_the_command_writes_words_in_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(startup, "simulate_devices", lambda devices: True)
    out = folder / "times"
    main([str(folder / "run"), "--manifest", str(folder / "said.jsonl"), "--out", str(out)])
    lines = [json.loads(line) for line in (out / "words.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == ["1:0.wav", "2:1.wav", "4:3.wav"]
    words = [[word["word"] for word in line["words"]] for line in lines]
    assert words == [["one", "two"], ["ja", "nein"], ["so"]]
    for line, seconds in zip(lines, np.delete(SECONDS, 2), strict=True):
        times = [time for word in line["words"] for time in (word["start"], word["end"])]
        assert times == sorted(times)
        assert times[0] >= 0
        assert times[-1] <= seconds
        assert all(0 < word["score"] <= 1 for word in line["words"])
    assert [word["speaker"] for word in lines[1]["words"]] == ["0", "1"]
    assert {path.name for path in out.glob("*.vtt")} == {"0.vtt", "1.vtt", "3.vtt"}
    assert len((out / "words.ctm").read_text().splitlines()) == 5
    assert len((out / "speakers.rttm").read_text().splitlines()) == 2
    (skipped,) = map(json.loads, (out / "skipped.jsonl").read_text().splitlines())
    assert "its text is 26 tokens; expected at most 24 (train.ctc_max_labels)" in skipped["reason"]
    shown = capsys.readouterr().out
    assert "5 words of 3 recordings, 2.2 s" in shown
    assert "1 skipped recordings are listed" in shown
    alone = model(folder).align([(folder / "1.wav", TEXTS[1])])
    assert [x.text for x in alone[0].words] == words[1]
    got = [[x.start, x.end] for x in alone[0].words]
    np.testing.assert_allclose(got, [[x["start"], x["end"]] for x in lines[1]["words"]], atol=1e-3)


def test_a_document_that_cannot_be_aligned_says_why(folder: Path) -> None:
    short, one = model(folder).align([(folder / "2.wav", "too much is said"), (folder / "3.wav", "so")])
    assert "need 18 outputs of the encoder, and its recording makes 16" in short.reason
    assert [word.text for word in one.words] == ["so"]


def test_a_model_without_ctc_is_refused(folder: Path) -> None:
    without = replace(align_config(), train=TrainConfig())
    with pytest.raises(UserError, match=r"train\.ctc_loss is 0: the model was not trained to align"):
        _ = jaxthd.load(folder / "run", without).aligner
