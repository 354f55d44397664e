"""Examples become documents, in any process and any order; what cannot is a item."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from jaxthd.config import (
    AugmentConfig,
    Config,
    DataConfig,
    EncoderConfig,
    ModelConfig,
    SpecAugmentConfig,
)
from jaxthd.config.front_end import SpeakerSegment
from jaxthd.data.audio.augment import Augmentation
from jaxthd.data.example import Clip, Example, Member, Samples, Turn
from jaxthd.data.skipped import Skipped
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.models.front_ends import Transcribe, Whisper
from jaxthd.packing.document import Document
from jaxthd.planning.lengths import measure
from tests.data.sets import write_tar
from tests.hf.published import load_reference

CONFIG = Config(model=ModelConfig(encoder=EncoderConfig(num_mels=16, chunk_seconds=1.0)))
MASKED = replace(CONFIG, data=DataConfig(spec_augment=SpecAugmentConfig(freq=(1, 4), time=(2, 0.05))))
TOKENIZER = ByteTokenizer()


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> tuple[Clip, Clip]:
    """2.5 s, three encoder chunks; and 0.5 s of another file."""
    folder, rng = tmp_path_factory.mktemp("audio"), np.random.default_rng(0)
    for name in ("a.wav", "b.wav"):
        soundfile.write(folder / name, rng.normal(0, 0.1, 40000), 16000)
    return Clip(folder / "a.wav"), Clip(folder / "b.wav", 1.0, 0.5)


def utterance(clip: Clip, text: str = "hello", key: str = "a") -> Example:
    return Example(key, (Turn("user", ("hear ", clip, ": ")), Turn("assistant", (text,))))


def document(config: Config, example: Example, epoch: int = 0, *, train: bool = False) -> Document:
    made = SpeechDocuments(config, TOKENIZER, train=train)(example, epoch)
    assert isinstance(made, Document), made
    return made


def features(made: Document) -> np.ndarray:
    return np.concatenate([piece.features for piece in made.pieces])


def test_a_document_is_prompt_audio_and_supervised_transcript(clips: tuple[Clip, Clip]):
    made = document(CONFIG, utterance(clips[0]))
    assert [len(piece.features) for piece in made.pieces] == [100, 100, 50]
    assert made.is_audio.sum() == 13 + 13 + 7
    text = made.tokens[~made.is_audio].tolist()
    answer = [*TOKENIZER.encode("hello"), TOKENIZER.eos_id]
    assert text == [TOKENIZER.bos_id, *TOKENIZER.encode("hear : "), *answer]
    assert made.tokens[made.supervised].tolist() == answer
    assert made.is_audio[1 + len("hear ")], "the recording goes where the prompt says"


def test_speakers_of_the_data_reach_the_front_end_at_the_speed_of_the_recording(clips: tuple[Clip, Clip]):
    """Numbered as they are heard first; an output of 8 frames has who speaks in more than half of them."""
    segments = (
        SpeakerSegment(1.6, 9.0, "early"),
        SpeakerSegment(0.0, 1.0, "b"),
        SpeakerSegment(0.8, 1.65, "c"),
    )
    clip = replace(clips[0], speakers=segments)
    config = replace(CONFIG, model=ModelConfig(encoder=Transcribe(mel_bands=16)))
    bits = features(document(config, utterance(clip)))[::8, -1]
    assert bits.tolist() == [(n < 12) + 2 * (10 <= n < 21) + 4 * (n >= 20) for n in range(32)]
    assert (features(document(config, utterance(clips[0])))[:, -1] == -1).all(), "the data does not say"
    fast = replace(config, data=DataConfig(augment=AugmentConfig(speed=(2.0,))))
    made = SpeechDocuments(fast, TOKENIZER, train=True, augmentation=Augmentation(fast.data.augment))(
        utterance(clip)
    )
    assert isinstance(made, Document)
    bits = features(made)[::8, -1]
    assert bits.tolist() == [(n < 6) + 2 * (5 <= n < 10) + 4 * (n >= 10) for n in range(16)]
    crowd = tuple(SpeakerSegment(n, n + 1, f"{n}") for n in range(9))
    made = SpeechDocuments(config, TOKENIZER, train=False)(utterance(replace(clip, speakers=crowd)))
    assert isinstance(made, Skipped)
    assert "9 speakers are named; expected at most 8" in made.reason


@pytest.mark.parametrize("samples", [3000, 31000, 32000, 140123, 16000 * 12 - 1])
def test_time_marks_stand_between_audio_tokens_as_the_library_writes_them(samples: int):
    """In documents and prompts, and in the lengths that are planned with."""
    clip = Samples(np.random.default_rng(0).normal(0, 0.1, samples).astype(np.float32), 16000)
    example = Example("a", (Turn("user", ("<", clip, ">")), Turn("assistant", ("yes",))))
    encoder = Whisper(mel_bands=16, positions=250, joined=4, tail="ceil", time_marks=2)
    config = replace(CONFIG, model=ModelConfig(encoder=encoder))
    made = document(config, example)
    marks = load_reference("moss")["marks"]
    written = "".join(
        "*" if is_audio else TOKENIZER.decode([token])
        for token, is_audio in zip(made.tokens.tolist(), made.is_audio, strict=True)
    )
    assert f"<{marks[made.is_audio.sum()]}>" in written
    assert made.is_audio.sum() == sum(piece.tokens for piece in made.pieces)
    assert TOKENIZER.decode(made.tokens[made.supervised].tolist()) == "yes"
    prompt = SpeechDocuments(config, TOKENIZER, train=False).prompt(example)
    np.testing.assert_array_equal(prompt.tokens, made.tokens[: len(prompt)])
    assert measure([example], config)[0].tokens.tolist() == [len(made)]


def test_a_conversation_holds_its_recordings_in_order_and_supervises_every_answer(clips: tuple[Clip, Clip]):
    turns = (
        Turn("user", ("A", clips[1], "B", clips[0])),
        Turn("assistant", ("one",)),
        Turn("user", (clips[1],)),
        Turn("assistant", ("two",)),
    )
    made = document(CONFIG, Example("c", turns))
    assert [len(piece.features) for piece in made.pieces] == [50, 100, 100, 50, 50]
    runs = np.diff(np.flatnonzero(np.diff(made.is_audio.astype(int), prepend=0, append=0)))[::2]
    assert runs.tolist() == [7, 33, 7]
    ends = [TOKENIZER.eos_id]
    expected = [*TOKENIZER.encode("one"), *ends, *TOKENIZER.encode("two"), *ends]
    assert made.tokens[made.supervised].tolist() == expected
    np.testing.assert_array_equal(made.pieces[0].features, made.pieces[-1].features)


def test_a_prompt_is_how_a_document_begins_with_recordings_from_files_or_memory(clips: tuple[Clip, Clip]):
    samples, rate = soundfile.read(clips[0].path, dtype="float32")
    load = SpeechDocuments(MASKED, TOKENIZER, train=True)
    for heard in (clips[0], Samples(samples, rate)):
        turns = (Turn("user", ("A", heard, "B")), Turn("assistant", ("one",)), Turn("user", (heard,)))
        prompt = load.prompt(Example("p", turns))
        whole = document(CONFIG, Example("w", (*turns, Turn("assistant", ("two",)))))
        assert prompt.tokens.tolist() == whole.tokens[: len(prompt)].tolist()
        assert whole.supervised[len(prompt) :].all()
        assert not prompt.supervised.any()
        np.testing.assert_array_equal(features(prompt), features(whole))  # neither dithered nor masked
    with pytest.raises(ValueError, match="no such file"):
        load.prompt(Example("p", (Turn("user", (replace(clips[0], path=Path("none.wav")),)),)))


def test_recordings_in_tar_files_are_asked_for_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, start, size, how: asked.append((start, size)))
    tar = write_tar(tmp_path / "a.tar", {"a.wav": b"a" * 700, "b.wav": b"b" * 1300})
    inside = [
        Clip(tar, member=Member(name, *place)) for name, place in (("b", (1536, 1300)), ("a", (512, 700)))
    ]
    others = [
        Clip(tmp_path / "gone.tar", member=Member("c", 0, 1)),
        Clip(tar),
        Samples(np.zeros(400), 16_000),
    ]
    SpeechDocuments(Config(), ByteTokenizer(), train=True).ahead([utterance(x) for x in [*inside, *others]])
    assert asked == [(1536, 1300), (512, 700)]


def test_dither_is_drawn_anew_every_epoch_and_never_in_validation(clips: tuple[Clip, Clip]):
    def chunks(epoch: int, train: bool) -> np.ndarray:
        return features(document(CONFIG, utterance(clips[0]), epoch, train=train))

    np.testing.assert_array_equal(chunks(0, True), chunks(0, True))
    assert (chunks(0, True) != chunks(1, True)).any()
    np.testing.assert_array_equal(chunks(0, False), chunks(1, False))


def test_masks_fall_on_the_dithered_features_and_only_in_training(clips: tuple[Clip, Clip]):
    twice = Example("a", (Turn("user", (clips[0], clips[0])), Turn("assistant", ("x",))))
    plain, masked = (features(document(c, twice, train=True)) for c in (CONFIG, MASKED))
    zeros = masked == 0
    assert 0 < zeros.mean() < 0.5
    np.testing.assert_array_equal(masked[~zeros], plain[~zeros])
    valid, same = (features(document(c, utterance(clips[0]))) for c in (CONFIG, MASKED))
    np.testing.assert_array_equal(valid, same)


def test_masks_are_the_same_in_any_order_and_differ_by_epoch_document_and_recording(clips: tuple[Clip, Clip]):
    twice = Example("t", (Turn("user", (clips[0], clips[0])), Turn("assistant", ("x",))))
    items = [(utterance(clips[0], key=key), epoch) for key in "ab" for epoch in (0, 1)] + [(twice, 0)]
    load = SpeechDocuments(MASKED, TOKENIZER, train=True)
    there = {(e.key, epoch): features(load(e, epoch)) for e, epoch in items}
    back = {(e.key, epoch): features(load(e, epoch)) for e, epoch in reversed(items)}
    for name, array in there.items():
        np.testing.assert_array_equal(array, back[name])
    masks = [array[:250] == 0 for array in there.values()] + [there["t", 0][250:] == 0]
    assert len({mask.tobytes() for mask in masks}) == len(masks) == 6


def test_what_cannot_be_used_is_skipped_with_a_reason(clips: tuple[Clip, Clip]):
    load = SpeechDocuments(replace(CONFIG, data=DataConfig(audio_capacity=200)), TOKENIZER, train=True)
    missing = utterance(replace(clips[0], path=clips[0].path.with_name("none.wav")), key="b")
    for example, reason in (
        (missing, "no such file"),
        (utterance(replace(clips[1], offset=9.0)), "past the end"),
        (utterance(clips[0]), "more than 2.01 s, which is all that data.audio_capacity holds"),
        (utterance(clips[1], text=""), "answer of the assistant is empty"),
    ):
        made = load(example, 0)
        assert isinstance(made, Skipped)
        assert made.key == example.key
        assert reason in made.reason
    assert isinstance(load(utterance(clips[1]), 0), Document)


def test_a_worker_process_needs_neither_jax_nor_grain_and_makes_the_same_document(
    clips: tuple[Clip, Clip], tmp_path: Path
):
    job = (SpeechDocuments(MASKED, TOKENIZER, train=True), utterance(clips[0]), 3)
    (tmp_path / "job").write_bytes(pickle.dumps(job))
    script = """
import pickle, sys
folder = sys.argv[1]
load, example, epoch = pickle.load(open(folder + "/job", "rb"))
pickle.dump(load(example, epoch), open(folder + "/made", "wb"))
print([m for m in ("jax", "grain", "optax", "jaxthd.data.loader") if m in sys.modules])
"""
    ran = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
    theirs = pickle.loads((tmp_path / "made").read_bytes())
    np.testing.assert_array_equal(features(theirs), features(job[0](*job[1:])))
