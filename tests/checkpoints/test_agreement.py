"""Tests of the meaning of weights besides the model's fields: LoRA's scale, vocabulary, template."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jaxthd.checkpoints.agreement import (
    lora_factor,
    require_same_vocabulary,
    say_other_settings,
    say_other_template,
)
from jaxthd.config import AdaptConfig, DataConfig
from jaxthd.data.text.published_tokenizer import write_tokenizer
from jaxthd.errors import UserError

LORA = AdaptConfig(lora_rank=4, lora_alpha=16.0)
RUN = Path("runs/a")


def tokenizer(folder: Path, words: list[str], special: list[str]) -> str:
    """A tokenizer.json of these words; returns its folder."""
    folder.mkdir()
    numbers = {word: number for number, word in enumerate([*words, *special])}
    made = Tokenizer(WordLevel(numbers, unk_token="a"))
    made.add_special_tokens(special)
    made.save(str(folder / "tokenizer.json"))
    return str(folder)


def test_lora_of_another_alpha_is_rescaled_and_said(capsys: pytest.CaptureFixture[str]):
    assert lora_factor(RUN, LORA, LORA) == 1
    assert lora_factor(RUN, LORA, replace(LORA, lora_dropout=0.1, freeze=("encoder.*",))) == 1
    assert not capsys.readouterr().err
    assert lora_factor(RUN, LORA, replace(LORA, lora_alpha=64.0)) == 0.25
    said = capsys.readouterr().err
    assert "adapt.lora_alpha 16, and here it is 64" in said
    assert "multiplied by 0.25" in said


def test_lora_that_no_factor_makes_the_same_is_refused():
    with pytest.raises(UserError, match=r"adapt\.dora False, and here it is True"):
        lora_factor(RUN, LORA, replace(LORA, dora=True))
    with pytest.raises(UserError, match=r"adapt\.lora_alpha 16, and here it is 0"):
        lora_factor(RUN, LORA, replace(LORA, lora_alpha=0.0))


def test_another_vocabulary_of_the_same_size_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    there = tokenizer(tmp_path / "a", ["a", "b", "c"], ["<x>"])
    with pytest.raises(UserError, match=r"of its ids 1 is 'b' there, 'c' here, 2 is 'c' there, 'b' here"):
        require_same_vocabulary(RUN, there, tokenizer(tmp_path / "b", ["a", "c", "b"], ["<x>"]), "--weights")
    assert not capsys.readouterr().err
    # A reserved token under another name may be meant.
    require_same_vocabulary(RUN, there, tokenizer(tmp_path / "c", ["a", "b", "c"], ["<audio>"]), "--weights")
    assert "of its ids 3 is '<x>' there, '<audio>' here" in capsys.readouterr().err
    # New tokens after the last are no others, and neither is a vocabulary that nobody knows.
    for same in (tokenizer(tmp_path / "d", ["a", "b", "c"], ["<x>", "<y>"]), str(tmp_path / "none"), there):
        require_same_vocabulary(RUN, there, same, "--weights")
        require_same_vocabulary(RUN, None, same, "--weights")
    assert not capsys.readouterr().err


def test_bytes_are_the_tokenizer_that_their_export_has(tmp_path: Path):
    write_tokenizer("bytes", tmp_path)
    require_same_vocabulary(RUN, str(tmp_path), "bytes", "--weights")
    with pytest.raises(UserError, match="another vocabulary"):
        require_same_vocabulary(RUN, "synthetic", "bytes", "--weights")


def test_other_settings_and_another_template_are_said(capsys: pytest.CaptureFixture[str]):
    say_other_settings(RUN, {})
    say_other_template(RUN, DataConfig(), DataConfig(capacity=7))
    assert not capsys.readouterr().err
    say_other_settings(RUN, {"model.llm.blocks.W.window": (128, 256)})
    assert "model.llm.blocks.W.window: 128 there, 256 here" in capsys.readouterr().err
    say_other_template(RUN, DataConfig(), DataConfig(template="chatml"))
    assert "data.template: 'plain' there, 'chatml' here" in capsys.readouterr().err
