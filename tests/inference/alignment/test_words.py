"""Words get the times of their tokens; files say them as their standards do."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxthd.config import EncoderConfig
from jaxthd.data.text.tokenizer import ByteTokenizer, load_tokenizer
from jaxthd.inference.alignment.aligner import AlignedDocument
from jaxthd.inference.alignment.files import ctm, rttm, webvtt, write_word_times
from jaxthd.inference.alignment.pauses import between_pauses
from jaxthd.inference.alignment.viterbi import Alignment
from jaxthd.inference.alignment.words import (
    Frames,
    TimedWord,
    label_spans,
    timed_words,
    word_spans,
    words_of_tokens,
)
from jaxthd.models.front_ends.qwen3_audio.settings import Qwen3Audio
from jaxthd.run.outputs import OutputFolder

BYTES = ByteTokenizer()
TALK = [
    TimedWord("<hm>", 0.5, 0.75, 0.9, "0"),
    TimedWord("two", 0.8, 1.0, 0.5, "0"),
    TimedWord("R&D", 1.25, 1.5, 1.0, "1"),
    TimedWord("later", 3661.5, 3662.0, 1.0, "1"),
]


def one_frame_each(labels: int, silence: int = 2) -> Alignment:
    """Label k in frame silence + k, with the probability 1 / (k + 1)."""
    at = silence + np.arange(labels)
    return Alignment(at, at, -np.log(1 + np.arange(labels)), 0.0)


def test_words_have_the_times_of_their_letters() -> None:
    text = "no  \u00fcber"
    labels = [*BYTES.encode(text), BYTES.eos_id]
    assert len(labels) == len(text) + 2  # one letter is two bytes
    words, path = words_of_tokens(BYTES, labels), one_frame_each(len(labels))
    found = timed_words(words, path, Frames(2 * np.arange(40), None, 0.01))
    assert [x.text for x in found] == ["no", "\u00fcber"]
    np.testing.assert_allclose([x.start for x in found], [0.04, 0.12])
    np.testing.assert_allclose([x.end for x in found], [0.08, 0.22])
    assert found[0].score == pytest.approx((1 / 1 * 1 / 2) ** (1 / 2))


def test_a_token_has_the_characters_that_it_makes_certain(tmp_path: Path) -> None:
    assert label_spans(BYTES, [2, *BYTES.encode("a\u00fc"), 2]) == (
        "a\u00fc",
        [(0, 0), (0, 1), (1, 2), (1, 2), (2, 2)],
    )
    words = Tokenizer(models.BPE({"\u2581": 0, "a": 1, "b": 2, "\u2581a": 3, "<s>": 4}, [("\u2581", "a")]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    words.add_special_tokens(["<s>"])
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "<s>"}))
    tokenizer = load_tokenizer(tmp_path)
    labels = [*tokenizer.encode("ab a bb"), tokenizer.eos_id]
    text, _ = label_spans(tokenizer, labels)
    words, path = words_of_tokens(tokenizer, labels), one_frame_each(len(labels))
    found = timed_words(words, path, Frames(np.arange(20), None, 1.0))
    assert (text, [x.text for x in found]) == ("ab a bb", ["ab", "a", "bb"])
    assert labels == [3, 2, 3, 0, 2, 2, 4]
    assert [(x.start, x.end) for x in found] == [(2, 4), (4, 5), (6, 8)]


def test_tags_are_speakers_and_no_words() -> None:
    text = "<spk:0>hello <EV:laugh> you<spk:12> yes\u4f60\u597d"
    found = [(text[x.start : x.end], x.speaker) for x in word_spans(text)]
    assert found == [("hello", "0"), ("you", "0"), ("yes", "12"), ("\u4f60", "12"), ("\u597d", "12")]


def test_outputs_begin_evenly_in_each_unit() -> None:
    assert EncoderConfig().frame_of_output(np.arange(4)).tolist() == [0, 8, 16, 24]
    of_13 = Qwen3Audio().frame_of_output(np.arange(11, 16))
    assert of_13.tolist() == [88, 96, 100, 108, 116]


def test_words_end_and_begin_where_sound_does() -> None:
    loudness = np.array([-2, -2, 1, 1, 1, 0.9, -1.9, -2, 1.1, 1, 1, 1, 1.2, 1, -1.8, -2.0])
    # Three words: [2, 6), [8, 10), which meets [10, 14). CTC found a label of each, two frames long.
    labels = np.array([[2, 4], [8, 10], [10, 12]])
    starts, ends = between_pauses(loudness, labels, labels)
    assert (starts.tolist(), ends.tolist()) == ([2, 8, 10], [6, 10, 14])
    even, _ = between_pauses(np.ones(16), labels, labels)
    assert even.tolist() == [2, 8, 10]


def test_files_are_as_their_standards_say(tmp_path: Path) -> None:
    assert ctm("a", TALK[:2]) == "a 1 0.500 0.250 <hm> 0.9000\na 1 0.800 0.200 two 0.5000\n"
    assert rttm("a", TALK) == (
        "SPEAKER a 1 0.500 0.500 <NA> <NA> 0 <NA> <NA>\nSPEAKER a 1 1.250 3660.750 <NA> <NA> 1 <NA> <NA>\n"
    )
    assert webvtt(TALK) == (
        "WEBVTT\n\n00:00:00.500 --> 00:00:01.000\n<v 0>&lt;hm&gt; <00:00:00.800>two\n\n"
        "00:00:01.250 --> 00:00:01.500\n<v 1>R&amp;D\n\n01:01:01.500 --> 01:01:02.000\n<v 1>later\n"
    )
    plain = tuple(word._replace(speaker="") for word in TALK)
    documents = [
        AlignedDocument("1:x/a b.wav", plain, 4.0),
        AlignedDocument("2:c.wav", plain, 4.0),
        AlignedDocument("3:c.flac", plain[:1], 1.0),
    ]
    write_word_times(OutputFolder(tmp_path), documents)
    names = {"words.jsonl", "words.ctm", "x_a_b.vtt", "2_c.vtt", "3_c.vtt"}
    assert {path.name for path in tmp_path.iterdir()} == names
    lines = [json.loads(line) for line in (tmp_path / "words.jsonl").read_text().splitlines()]
    assert [line["key"] for line in lines] == ["1:x/a b.wav", "2:c.wav", "3:c.flac"]
    assert lines[2]["words"] == [{"word": "<hm>", "start": 0.5, "end": 0.75, "score": 0.9}]
    assert (tmp_path / "words.ctm").read_text().splitlines()[0] == "x/a_b 1 0.500 0.250 <hm> 0.9000"
