"""Utterances become documents; what cannot is reported."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from jaxthd.config import Config, DataConfig, EncoderConfig, ModelConfig
from jaxthd.data.manifest import Utterance
from jaxthd.data.pipeline import make_loader
from jaxthd.data.speech import SkipLog, SpeechDocuments
from jaxthd.data.tokenizer import ByteTokenizer

CONFIG = Config(
    data=DataConfig(prompt="hear {audio}: "),
    model=ModelConfig(encoder=EncoderConfig(num_mels=16, chunk_seconds=1.0)),
)
TOKENIZER = ByteTokenizer()


@pytest.fixture
def utterance(tmp_path: Path) -> Utterance:
    """2.5 s: three encoder chunks."""
    soundfile.write(tmp_path / "a.wav", np.random.default_rng(0).normal(0, 0.1, 40000), 16000)
    return Utterance("a", tmp_path / "a.wav", "hello")


def documents(config: Config, folder: Path, *, train: bool = False) -> tuple[SpeechDocuments, SkipLog]:
    skipped = SkipLog(folder / "skipped.jsonl")
    return SpeechDocuments(config, TOKENIZER, skipped.of("m"), train=train), skipped


def test_a_document_is_prompt_audio_and_supervised_transcript(utterance: Utterance, tmp_path: Path):
    document = documents(CONFIG, tmp_path)[0](utterance, 0)
    assert document is not None
    assert [len(c) for c in document.chunks] == [100, 100, 50]
    assert document.is_audio.sum() == 13 + 13 + 7
    text = document.tokens[~document.is_audio].tolist()
    answer = [*TOKENIZER.encode("hello"), TOKENIZER.eos_id]
    assert text == [TOKENIZER.bos_id, *TOKENIZER.encode("hear : "), *answer]
    assert document.tokens[document.supervised].tolist() == answer
    assert document.is_audio[1 + len("hear ")], "the recording goes where the prompt says"


def test_dither_is_drawn_anew_every_epoch_and_never_in_validation(utterance: Utterance, tmp_path: Path):
    train, valid = (documents(CONFIG, tmp_path, train=t)[0] for t in (True, False))
    first, again, later = (train(utterance, epoch).chunks[0] for epoch in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != later).any()
    np.testing.assert_array_equal(valid(utterance, 0).chunks[0], valid(utterance, 1).chunks[0])


def test_a_prompt_without_audio_makes_text_only_batches(utterance: Utterance, tmp_path: Path):
    text_only = replace(CONFIG, data=DataConfig(prompt="say: ", audio_capacity=0, capacity=64))
    load, skipped = documents(text_only, tmp_path)
    batch, report = next(make_loader([utterance] * 8, load, text_only))
    assert report["documents"] > 1
    assert report["audio_seconds"] == 0
    assert (batch.audio_slots == -1).all()
    assert len(skipped) == 0


def test_what_cannot_be_used_is_reported_once_with_its_reason(utterance: Utterance, tmp_path: Path):
    load, skipped = documents(CONFIG, tmp_path)
    missing = replace(utterance, key="b", audio_path=tmp_path / "none.wav")
    silent = replace(utterance, key="c", text="")
    for epoch in (0, 1):
        assert load(missing, epoch) is None
        assert load(silent, epoch) is None
    lines = (tmp_path / "skipped.jsonl").read_text().splitlines()
    assert len(lines) == len(skipped) == 2
    assert "no such file" in lines[0]
    assert "transcript is empty" in lines[1]


def test_the_skip_log_tells_manifests_apart_and_survives_a_kill(tmp_path: Path):
    path = tmp_path / "skipped.jsonl"
    for _ in range(2):
        log = SkipLog(path)
        log.of("train")("1:a.wav", "broken")
        log.of("validation")("1:a.wav", "broken")
        assert len(log) == 2
        with path.open("a") as file:
            file.write('{"manifest": "train", "key": "2:b')
    assert len(SkipLog(path)) == 0
    assert len(path.read_text().splitlines()) == 2
