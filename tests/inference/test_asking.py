"""Many conversations at once: long recordings in windows, and what cannot be used beside what can."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import soundfile

from jaxthd.data.audio.windows import in_windows
from jaxthd.data.example import Clip, Example, Samples, Turn
from jaxthd.data.inventory import TrainedOn
from jaxthd.errors import UserError
from jaxthd.inference.asking import _Joined, _Part, answer_all
from jaxthd.inference.generator import Answer, AnswerDelta, whole_answer
from tests.data.test_windows import spoken
from tests.inference.test_generation import generator

DRAWN: dict[str, Any] = {"temperature": 1.5, "seed": 7}


def answers(conversations: list[Example], **settings: Any) -> tuple[list[Answer], list[str]]:
    """(the answers, what was said)."""
    found: list[list[AnswerDelta]] = [[] for _ in conversations]
    said: list[str] = []
    for delta in answer_all(generator(), conversations, say=said.append, **settings):
        assert not (found[delta.number] and found[delta.number][-1].end), "after its end"
        found[delta.number].append(delta)
    return [whole_answer(x.key, deltas) for x, deltas in zip(conversations, found, strict=True)], said


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """long.wav of 11 s, two and a half times what fits; a.wav of 1.2 s; cut.wav, which ends too early."""
    for name, seconds in (("long", 11.0), ("a", 1.2), ("cut", 11.0)):
        soundfile.write(tmp_path / f"{name}.wav", spoken(seconds), 8000)
    data = (tmp_path / "cut.wav").read_bytes()
    (tmp_path / "cut.wav").write_bytes(data[: len(data) // 2])
    return tmp_path


def test_good_ones_are_answered_beside_bad_and_long_ones(folder: Path):
    """As each would be alone; a long one as its windows would be, one after the other."""
    long, short = Clip(folder / "long.wav"), Clip(folder / "a.wav")
    turns = {
        "a": (short, "What?"),
        "none": (Clip(folder / "none.wav"),),
        "long": ("Hm: ", long),
        "cut": (Clip(folder / "cut.wav"),),
        "two": (short, long),
        "text": ("hi",),
        "big": ("a" * 420,),
    }
    conversations = [Example(name, (Turn("user", parts),)) for name, parts in turns.items()]
    # A recording of another turn than the only one cannot be answered in parts.
    chat = (Turn("user", (long,)), Turn("assistant", ("yes",)), Turn("user", ("why",)))
    conversations.append(Example("chat", chat))
    with jax.enable_x64(True):
        own = generator()
        found, said = answers(conversations, **DRAWN)
        by_key = {answer.key: answer for answer in found}
        skipped = {key: answer.reason for key, answer in by_key.items() if answer.end == "skipped"}
        assert skipped.keys() == {"none", "cut", "two", "big", "chat"}
        for key, reason in (
            ("none", "none.wav: no such file"),
            ("cut", "libsndfile cannot read it whole"),
            ("two", "more than 4.81 s, which is all that data.audio_capacity holds: raise that, or divide"),
            ("big", "its 461 token slots exceed the capacity of 448; shorten it, or raise data.capacity"),
            ("chat", "more than 4.81 s"),
        ):
            assert reason in skipped[key]
            assert (by_key[key].text, by_key[key].tokens) == ("", ())
        alone = own.generate([conversations[0], conversations[5]], **DRAWN)
        assert [by_key["a"], by_key["text"]] == alone
        (line,) = said
        most = own.most_seconds(conversations[2])
        windows = in_windows(long, most)
        assert f"long: 11.0 s are read in {len(windows)} windows of up to {most:.1f} s" in line
        heard = [window.recording for window in windows]
        each = [Example(f"long/{n}", (Turn("user", ("Hm: ", part)),)) for n, part in enumerate(heard, 1)]
        parts = own.generate(each, **DRAWN)
    assert len(windows) > 2
    assert len({part.tokens for part in parts}) == len(parts), "windows should differ"
    told = by_key["long"]
    assert told.tokens == tuple(token for part in parts for token in part.tokens)
    assert told.text.split() == " ".join(part.text for part in parts).split()
    assert told.windows == len(windows)
    assert told.end == ("length" if any(part.end == "length" for part in parts) else "stop")


def test_the_longest_recording_that_fits_is_the_longest_that_fits():
    """By documents that are made of noise: one more frame than that is refused."""
    noise = np.random.default_rng(0).normal(0, 0.1, 16000 * 6)
    with jax.enable_x64(True):
        own = generator()
        for text in ("", "Hm?" * 120):
            parts = (text,) if text else ()

            def asked(seconds: float, parts: tuple[str, ...] = parts) -> Example:
                sound = Samples(noise[: round(16000 * seconds)], 16000)
                return Example("x", (Turn("user", (*parts, sound)),))

            most = own.most_seconds(asked(1.0))
            assert own.why_unusable(asked(most)) == ""
            assert own.why_unusable(asked(most + 0.04))
        assert most < 4.0, "the text takes slots"
        assert own.most_seconds(Example("x", (Turn("user", ("a" * 407, Samples(noise, 16000))),))) == 0.0


def test_a_window_is_as_short_as_one_says(folder: Path):
    """Also of a recording that fits, and in memory. Shorter than what fits, so that is not said."""
    recording = Samples(spoken(3.4, (1.2, 2.6)), 8000)
    conversation = Example("1:samples", (Turn("user", (recording,)),))
    with jax.enable_x64(True):
        ((whole,), nothing), ((cut,), said) = answers([conversation]), answers([conversation], window=1.5)
        assert (whole.windows, nothing) == (1, [])
        assert cut.windows == len(in_windows(recording, 1.5)) == 3
        assert said == ["samples: 3.4 s are read in 3 windows of up to 1.5 s, their texts are joined"]
        for window in (0.5, -1.0, float("nan")):
            with pytest.raises(UserError, match=r"window is .* expected 1\.0 s or more"):
                answers([conversation], window=window)


def test_windows_are_as_long_as_the_median_of_what_it_was_trained_on():
    """A recording that is no longer than the longest of these is read as a whole."""
    recording = Samples(spoken(3.4, (1.2, 2.6)), 8000)
    conversation = Example("1:samples", (Turn("user", (recording,)),))
    with jax.enable_x64(True):
        ((whole,), _), ((cut,), said) = (
            answers([conversation], trained_on=TrainedOn(longest, 1.5)) for longest in (3.4, 3.3)
        )
    assert whole.windows == 1
    assert cut.windows == 3
    how = "3 windows of up to 1.5 s, the median of what it was trained on"
    assert said == [f"samples: 3.4 s are read in {how}; their texts are joined"]


def test_windows_are_told_one_after_the_other():
    """However their deltas come, with one space between texts that are not empty."""
    told = [
        (1, AnswerDelta(8, " be", (3,), None)),
        (0, AnswerDelta(7, "to ", (1,), None)),
        (3, AnswerDelta(9, "or", (6,), "stop")),
        (1, AnswerDelta(8, "", (4,), "length")),
        (0, AnswerDelta(7, "", (2,), "stop")),
        (2, AnswerDelta(5, " ", (5,), "stop")),
    ]
    joined = _Joined(2, (_Part(5.0),) * 4)
    found = [list(joined.told(*each)) for each in told]
    assert [len(each) for each in found] == [0, 1, 0, 0, 3, 2]
    deltas = [delta for each in found for delta in each]
    assert {delta.number for delta in deltas} == {2}
    assert [delta.end for delta in deltas] == [None] * 5 + ["length"]
    whole = whole_answer("x", deltas)
    assert (whole.text, whole.tokens, whole.windows) == ("to  be or", (1, 2, 3, 4, 5, 6), 4)


def test_more_prompts_than_are_read_at_once(monkeypatch: pytest.MonkeyPatch):
    """Groups of them, and a long one over the bounds of a group: the same answers."""
    rng = np.random.default_rng(3)
    conversations = [Example(f"t{n}", (Turn("user", ("a" * n,)),)) for n in range(1, 7)]
    long = Samples(rng.normal(0, 0.1, 16000 * 10), 16000)
    conversations.insert(3, Example("long", (Turn("user", (long,)),)))
    with jax.enable_x64(True):
        together, _ = answers(conversations)
        monkeypatch.setattr("jaxthd.inference.asking.AT_ONCE", 1)
        grouped, _ = answers(conversations)
    assert grouped == together
    assert [answer.key for answer in together] == [example.key for example in conversations]


def test_windows_that_overlap_tell_once_what_both_hear():
    """Only what no later window can change is told before that has ended."""
    words = [f"w{n}" for n in range(40)]
    told = [
        (0, AnswerDelta(8, " ".join(words[:18]), (1,), None)),
        (0, AnswerDelta(8, f" {words[18]} w1.", (2,), "stop")),
        (1, AnswerDelta(8, "6 w15 w16 w17 w18 w19", (3,), None)),
        (1, AnswerDelta(8, " w20", (4,), "stop")),
        (2, AnswerDelta(8, "w21 w22", (5,), "stop")),
    ]
    joined = _Joined(0, (_Part(5.0), _Part(2.0, 1.0), _Part(5.0)))
    deltas = [delta for each in told for delta in joined.told(*each)]
    assert deltas[1].text == "w0 w1 w2 w3 "
    assert "".join(delta.text for delta in deltas) == " ".join(words[:23])
    assert [delta.end for delta in deltas] == [None] * 4 + ["stop"]
