"""Voxtral's turns, by mistral-common."""

import pickle
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config import DataConfig
from jaxthd.data.example import Clip, Turn
from jaxthd.data.text.mistral import TekkenTokenizer
from jaxthd.data.text.prompt import PromptTemplate
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.errors import UserError
from tests.hf.speech_folders import write_tekken

pytest.importorskip("mistral_common")
CLIP = Clip(Path("a.wav"))
ASKED, ANSWER = Turn("user", (CLIP,)), Turn("assistant", ("One two.",))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TekkenTokenizer:
    folder = tmp_path_factory.mktemp("tekken")
    write_tekken(folder)
    found = load_tokenizer(folder)
    assert isinstance(found, TekkenTokenizer)
    return found


def shown(tokenizer: TekkenTokenizer, ids: list[int]) -> str:
    """Special tokens by their names."""
    from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy

    return str(tokenizer._own.decode(ids, SpecialTokenPolicy.KEEP))


@pytest.mark.parametrize(
    ("turns", "language", "text", "supervised"),
    [
        ((ASKED, ANSWER), "", "<s>[INST][BEGIN_AUDIO][AUDIO][/INST][TRANSCRIBE]", "One two.</s>"),
        ((ASKED, ANSWER), "en", "<s>[INST][BEGIN_AUDIO][AUDIO][/INST]lang:en[TRANSCRIBE]", "One two.</s>"),
        (
            (Turn("user", ("What is ", CLIP, CLIP, "?")), ANSWER),
            "en",
            "<s>[INST]What is [BEGIN_AUDIO][AUDIO][BEGIN_AUDIO][AUDIO]?[/INST]",
            "One two.</s>",
        ),
        (
            (Turn("system", ("Be brief.",)), Turn("user", ("[INST] is text.",)), ANSWER),
            "",
            "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST][INST] is text.[/INST]",
            "One two.</s>",
        ),
    ],
)
def test_turns_are_written_as_the_library_does(
    tokenizer: TekkenTokenizer, turns: Any, language: str, text: str, supervised: str
):
    template = PromptTemplate(DataConfig(template="mistral"), tokenizer)
    fields = {"language": language}
    ids, marks = template(turns, fields)
    assert shown(tokenizer, [x for x, mark in zip(ids, marks, strict=True) if not mark]) == text
    assert shown(tokenizer, [x for x, mark in zip(ids, marks, strict=True) if mark]) == supervised
    assert template.prompt(turns[:-1], fields) == [x for x, m in zip(ids, marks, strict=True) if not m]
    assert template.end_id == tokenizer.eos_id


def test_transcripts_are_requested_as_the_library_does(tokenizer: TekkenTokenizer):
    """Its own request, of a recording of 31 s, with the placeholders of 60 s."""
    import io

    import numpy as np
    import soundfile
    from mistral_common.protocol.transcription.request import TranscriptionRequest

    with io.BytesIO() as file:
        soundfile.write(file, np.zeros(31 * 16000), 16000, format="WAV")
        request = TranscriptionRequest(audio=file.getvalue(), language="de")
    want = tokenizer.instruct.encode_transcription(request).tokens
    found = PromptTemplate(DataConfig(template="mistral"), tokenizer).prompt([ASKED], {"lang": "de"})
    at = found.index(tokenizer.audio_id)
    assert found[:at] + [tokenizer.audio_id] * 750 + found[at + 1 :] == want


def test_a_language_that_the_library_does_not_know_is_refused(tokenizer: TekkenTokenizer):
    template = PromptTemplate(DataConfig(template="mistral"), tokenizer)
    with pytest.raises(ValueError, match="knows no language 'klingon'"):
        template.prompt([ASKED], {"language": "klingon"})
    with pytest.raises(ValueError, match="no system turn beside recordings"):
        template([Turn("system", ("Be brief.",)), Turn("user", (CLIP, "?")), ANSWER])


def test_other_processes_read_the_file(tokenizer: TekkenTokenizer):
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode("Grüße") == tokenizer.encode("Grüße")
    assert again.decode([tokenizer.bos_id, *again.encode("Grüße")]) == "Grüße"


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path):
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(UserError, match=r"tekken\.json cannot be used"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"expected a tekken\.json"):
        PromptTemplate(DataConfig(template="mistral"), load_tokenizer("bytes"))
