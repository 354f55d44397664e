"""Forms of answers: written around transcripts, and read off answers."""

from typing import Any

import numpy as np
import pytest

from jaxthd.config import Config, DataConfig, ModelConfig
from jaxthd.data.example import Example, Samples, Turn
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.answers import FORMS, answer_form, language_of
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.errors import UserError
from jaxthd.packing.document import Document


@pytest.mark.parametrize(
    ("fields", "language"),
    [
        ({}, ""),
        ({"language": "en"}, "en"),
        ({"lang": "EN-us"}, "en"),
        ({"source_lang": "pt_BR", "lang": None}, "pt"),
        ({"language": "Cantonese"}, "yue"),
        ({"language": "yue"}, "yue"),
        ({"language": "sk"}, "sk"),
        ({"language": "Klingon"}, "klingon"),
    ],
)
def test_the_language_of_a_line(fields: dict[str, Any], language: str):
    assert language_of(fields) == language


@pytest.mark.parametrize(
    ("fields", "answer"),
    [
        ({}, "language None<asr_text>One two."),
        ({"language": "de"}, "language German<asr_text>One two."),
        ({"language": "klingon"}, "language Klingon<asr_text>One two."),
    ],
)
def test_qwen3_asr_s_form(fields: dict[str, Any], answer: str):
    form = answer_form("qwen3_asr")
    assert form.write("One two.", fields) == answer
    assert form.write(answer, fields) == answer
    assert form.read(answer) == "One two."


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("The spoken content of the audio is \"One 'two'.\".", "One 'two'."),
        ("The content of the input audio is 'One two'", "One two"),
        ("The transcription of the audio is One two.", "One two"),
    ],
)
def test_audio_flamingo_3_s_form(answer: str, text: str):
    form = answer_form("audio_flamingo3")
    assert form.read(answer) == text
    assert form.write(answer, {}) == answer
    assert form.write("One.", {}) == 'The spoken content of the audio is "One.".'
    assert form.read(form.write(text, {})) == text


def test_moss_s_form():
    form = answer_form("moss")
    two = "[0.48][S01]One two.[1:02.5][1:03][S02] Three\nfour. [75.20]"
    assert form.read(two) == "One two. Three\nfour."
    assert form.write(two, {"duration": 80.0}) == two
    assert form.write("One.", {"duration": 1.5}) == "[0.00][S01]One.[1.50]"
    assert form.read(form.write("One.", {"duration": 1.5})) == "One."
    assert form.write("One.", {"duration": None}) == "One."


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_of_no_form_is_the_text(name: str):
    assert answer_form(name).read("One two.") == "One two."


def test_another_name_is_refused():
    with pytest.raises(UserError, match=r"data\.answer is 'x'; expected one of plain, qwen3_asr"):
        answer_form("x")


def test_documents_hold_answers_in_the_form():
    """Earlier answers of a conversation too; what the user says stays."""
    config = Config(model=ModelConfig(), data=DataConfig(answer="qwen3_asr"))
    make = SpeechDocuments(config, tokenizer := ByteTokenizer(), train=False)
    clip = Samples(np.random.default_rng(0).normal(size=8000).astype(np.float32), 16000)
    turns = (
        Turn("user", (clip,)),
        Turn("assistant", ("a",)),
        Turn("user", ("b",)),
        Turn("assistant", ("c",)),
    )
    made = make(Example("1:x", turns, fields={"lang": "fr"}))
    assert isinstance(made, Document)
    text = tokenizer.decode(made.tokens[made.supervised].tolist())
    assert text == "language French<asr_text>alanguage French<asr_text>c"
    assert "b" in tokenizer.decode(made.tokens[~made.supervised].tolist())
