"""Tests of the meaning of weights besides the model's fields: LoRA's scale, vocabulary, template."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jaxthd.checkpoints.agreement import (
    lora_factor,
    require_frozen_from_sources,
    require_same_vocabulary,
    say_other_settings,
    say_other_template,
)
from jaxthd.checkpoints.weights import Weights, named_weights, start_state
from jaxthd.config import AdaptConfig, Config, DataConfig, MeshConfig, TrainConfig
from jaxthd.data.text.published_tokenizer import write_tokenizer
from jaxthd.errors import UserError
from jaxthd.hf.checkpoint import model_config
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from tests.hf.published import BASE, write_published

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


# --- what is frozen must come from a checkpoint ---

BOTH = ("*.q", "*.v")


@pytest.mark.parametrize(
    ("adapt", "found", "advice"),
    [
        (
            AdaptConfig(lora_rank=2, lora_targets=BOTH),
            r"encoder \(\d+ arrays\) by adapt.lora_targets '\*\.q', which matches encoder.blocks.attention.q",
            ({"lora_targets": ("decoder.*.q", "decoder.*.v")}, {"freeze": ("!encoder.*",)}),
        ),
        (
            AdaptConfig(lora_rank=2, lora_targets=("decoder.*", "adapter.out"), freeze=("embedding",)),
            r"adapter \(1 array\) by adapt.lora_targets 'adapter.out', which matches adapter.out, and a part",
            ({"lora_targets": ("decoder.*",)}, {"freeze": ("embedding", "!adapter.*")}),
        ),
        (
            AdaptConfig(freeze=("encoder.sub*", "encoder.blocks.*", "head")),
            r"encoder \(\d+ arrays\) by adapt.freeze 'encoder.blocks.\*'; encoder .* 'encoder.sub\*'\. ",
            ({"freeze": ("head",)},),
        ),
    ],
)
@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_frozen_part_that_no_source_holds_is_an_error_whose_advice_helps(
    adapt: AdaptConfig, found: str, advice: tuple[dict[str, tuple[str, ...]], ...], pipeline: int, llm: Path
):
    """An LLM's checkpoint with a new encoder and adapter. The message has the advice, word by word."""
    config = Config(
        model=model_config(llm, model=BASE),
        mesh=MeshConfig(pipeline=pipeline),
        adapt=adapt,
        train=TrainConfig(init_from=(str(llm),)),
    )
    with pytest.raises(UserError, match=f"frozen with random values, .*: {found}") as raised:
        start_state(Blueprint(config), make_mesh(config.mesh))
    names = [name for name in _names(config) if name.startswith(("encoder.", "adapter."))]
    for each in advice:
        for field, patterns in each.items():
            words = " ".join(map(repr, patterns))
            flag = f"--adapt.{field.replace('_', '-')} {words}"
            assert flag in str(raised.value) or "out of adapt.freeze" in str(raised.value)
        require_frozen_from_sources(Blueprint(replace(config, adapt=replace(adapt, **each))), names)
    require_frozen_from_sources(Blueprint(config), [])


def test_without_sources_nothing_may_be_frozen():
    config = Config(adapt=AdaptConfig(freeze=("encoder.*", "!*.norm*")))
    with pytest.raises(
        UserError, match=r"encoder \(\d+ arrays\) by .*: name a checkpoint .*; or leave 'encoder"
    ):
        start_state(Blueprint(config), make_mesh(config.mesh))


def _names(config: Config) -> list[str]:
    return [*named_weights(Weights(*Blueprint(config).abstract_weights))]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_published("qwen3", tmp_path_factory.mktemp("frozen") / "llm")
