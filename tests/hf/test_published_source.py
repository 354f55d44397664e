"""A published folder as the source of a command: what is taken from it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxthd.checkpoints.sources import load_config, published_config
from jaxthd.config import DataConfig
from jaxthd.errors import UserError
from jaxthd.files.run_folder import is_published
from jaxthd.run.continuing import OPTIONS
from jaxthd.terminal.arguments import parse_command_line
from tests.hf.published import write_published
from tests.hf.speech_folders import as_authors, write_folder


@pytest.mark.parametrize(
    ("name", "template", "prompt", "answer"),
    [
        ("qwen3_asr", "chat_template", None, "qwen3_asr"),
        ("qwen2_audio", "chat_template", None, "plain"),
        (
            "audioflamingo3",
            "chat_template",
            "Transcribe the input speech.{audio}",
            "audio_flamingo3",
        ),
        ("moss", "chat_template", None, "moss"),
        ("glmasr", "chat_template", "{audio}Please transcribe this audio into text", "plain"),
        (
            "granite_speech",
            "chat_template",
            "{audio}can you transcribe the speech into a written format?",
            "plain",
        ),
    ],
)
def test_a_folder_gives_its_template_its_prompt_and_its_answers(
    name: str, template: str, prompt: str | None, answer: str, tmp_path: Path
):
    folder = write_folder(name, tmp_path / "Model-1B")
    config = load_config(folder)
    assert config.data.tokenizer == str(folder)
    assert (config.data.template, config.data.answer) == (template, answer)
    assert config.data.prompt == (DataConfig().prompt if prompt is None else prompt)
    assert config.train.init_from == (str(folder),)
    assert config.model.encoder is not None


def test_a_template_of_the_folder_counts_before_the_family_s(tmp_path: Path):
    """Qwen2-Audio's tokenizer has one that knows no audio; a processor's has its own file."""
    folder = write_folder("qwen2_audio", tmp_path / "folder")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    of_family = published_config([folder]).data.template_source
    assert "audio" in of_family
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert published_config([folder]).data.template_source == ""


def test_what_is_a_published_folder(tmp_path: Path):
    folder = write_folder("qwen3_asr", tmp_path / "published")
    authors = as_authors(write_folder("qwen3_asr", tmp_path / "authors"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("no json")
    (tmp_path / "settings").mkdir()
    (tmp_path / "settings" / "config.json").write_text('{"model": {}, "data": {}, "train": {}}')
    found = {x.name: is_published(x) for x in sorted(tmp_path.iterdir())}
    assert found == {"authors": True, "other": False, "published": True, "settings": False}
    assert load_config(authors).model == load_config(folder).model


def test_a_folder_without_a_tokenizer_gives_none(tmp_path: Path):
    folder = write_published("voxtral", tmp_path / "voxtral")
    assert load_config(folder).data == DataConfig()


def test_the_command_line_changes_what_a_folder_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_folder("glmasr", tmp_path / "GLM-ASR-Nano")
    monkeypatch.chdir(tmp_path)
    argv = [str(folder), "--data.prompt", "{audio}", "--train.steps", "7"]
    line = parse_command_line("train", argv, OPTIONS)
    base = load_config(folder)
    assert line.config == replace(
        base, data=replace(base.data, prompt="{audio}"), train=replace(base.train, steps=7)
    )


def test_a_folder_of_an_unknown_family_is_told(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "moonshine"}')
    with pytest.raises(UserError, match="model_type 'moonshine'"):
        load_config(tmp_path)
