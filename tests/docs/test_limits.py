"""What docs/limits.md says is not there is not there: no command, option, setting or registered name."""

import re
from collections.abc import Iterator
from itertools import chain

import pytest

from jaxthd.config.block import block_kinds
from jaxthd.config.front_end import front_ends
from jaxthd.data.sources.registry import SOURCES
from jaxthd.hf.registry import FAMILIES, FORMATS
from jaxthd.objectives.registry import OBJECTIVES
from jaxthd.rl.rewards.registry import BUILT_IN
from tests.docs.command_lines import COMMANDS, OPTIONS, ROOT, options_of_commands

PAGE = ROOT / "docs" / "limits.md"
TITLE = "What jaxthd does not do"
MISSING = {
    "Streaming recognition": "streaming realtime live",
    "A server": "serve server port endpoint endpoints listen",
    "Hot words": "hotwords hot boosting phrases",
    "Diarization": "diarization rttm",
    "Voice activity detection": "vad",
    "Speech as output": "tts speak vocoder codec",
    "Beam search": "beam beams ngram",
    "Images and video": "image images video videos pixel",
    "Other audio encoders": "wav2vec2 hubert wavlm",
    "Object storage": "s3 gs bucket fsspec url urls",
    "Quantized weights": "qlora int8 int4 gguf awq gptq quantize quantization",
    "Offloading": "offload offloading",
    "A critic": "ppo critic",
    "Search over settings": "sweep sweeps trials optuna",
    "Elastic runs": "elastic",
}
"""The beginning of each row -> words that would be in the name of such a thing."""


def rows() -> dict[str, str]:
    """What each row of the table says is missing, without its explanation -> what to use instead."""
    return dict(re.findall(r"^\| \*\*(.+?)\*\*.*? \| (.+) \|$", PAGE.read_text(), re.M))


def names() -> Iterator[str]:
    """Every name that a user can give to a command."""
    yield from (*COMMANDS, *options_of_commands(), *OPTIONS, *FORMATS, *front_ends(), *block_kinds())
    yield from (*SOURCES, *OBJECTIVES, *BUILT_IN, *(family.title for family in FAMILIES))
    # A normaliser's name says how texts are compared.
    yield from chain(*(x.types for x in OPTIONS.values() if x.path != "train.normaliser"))
    yield from (path.name for path in ROOT.iterdir())


def existing(words: str) -> set[str]:
    """The names that have one of these words."""
    parts = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+")
    return {x for x in names() if {*words.split()} & {part.lower() for part in parts.findall(x)}}


@pytest.mark.parametrize("what", MISSING)
def test_what_is_said_to_be_missing_does_not_exist(what: str) -> None:
    """Once it does, its row goes, and the page that tells of it comes in its place."""
    assert not existing(MISSING[what]), f"docs/limits.md: {what}"


def test_every_row_is_held_and_says_what_to_use() -> None:
    assert rows().keys() == MISSING.keys()
    assert all(len(instead) > 20 for instead in rows().values())


def test_what_exists_would_be_found() -> None:
    for words in ("generate", "context", "top", "qwen3", "fastconformer", "muon", "salm", "wer", "dpo"):
        assert existing(words), words


def test_the_page_is_linked_from_the_readme_and_the_index_of_the_site() -> None:
    assert PAGE.read_text().startswith(f"# {TITLE}\n")
    assert (ROOT / "README.md").read_text().count(f"[{TITLE}](docs/limits.md)") == 2
    assert f"- {TITLE}: limits.md" in (ROOT / "docs" / "site" / "mkdocs.yml").read_text()
