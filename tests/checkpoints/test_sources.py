"""What a command is told to work with: config files, runs, published checkpoints."""

import json
import shutil
from pathlib import Path

import pytest

import jaxthd
from jaxthd.checkpoints.sources import open_settings, published_config
from jaxthd.config import AdaptConfig, Config, TrainConfig
from jaxthd.errors import UserError
from jaxthd.files import config_file
from jaxthd.files.run_folder import write_config
from tests.hf.published import REFERENCES, write_published

TEXT_ONLY = REFERENCES / "text_only"
OWN = Config(adapt=AdaptConfig(lora_rank=4), train=TrainConfig(steps=9))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    write_config(tmp_path / "run", OWN)
    return tmp_path / "run"


def test_the_settings_of_a_run_are_a_config(run: Path):
    """By its folder, with a checkpoint's name, and by its config.json, here or moved."""
    for source in (run, str(run), f"{run}@best", f"{run}@2400+ema", run / "config.json"):
        config = jaxthd.load_config(source)
        assert (config.adapt, config.train.steps) == (OWN.adapt, 9)
    shutil.copy(run / "config.json", run.parent / "other.json")
    assert jaxthd.load_config(run.parent / "other.json").train.steps == 9
    assert open_settings(run.parent / "other.json").weights == []
    assert open_settings(f"{run}@best").weights == [f"{run}@best"]


def test_a_config_file_may_vary_a_run(run: Path):
    (run.parent / "my.py").write_text(
        "from dataclasses import replace\nfrom pathlib import Path\nfrom jaxthd import load_config\n\n"
        "def config():\n"
        "    base = load_config(Path(__file__).with_name('run'))\n"
        "    return replace(base, train=replace(base.train, steps=3))\n"
    )
    config = jaxthd.load_config(run.parent / "my.py")
    assert (config.adapt, config.train.steps) == (OWN.adapt, 3)
    assert open_settings(run.parent / "my.py").weights == []


def test_a_published_checkpoint_is_a_source(tmp_path: Path):
    """Training starts from it; other commands use its weights. Its config.json names it too."""
    for source in (TEXT_ONLY, TEXT_ONLY / "config.json"):
        settings = open_settings(source)
        assert settings.config.train.init_from == (str(TEXT_ONLY),)
        assert settings.config.data.tokenizer == str(TEXT_ONLY)
        assert (settings.run, settings.weights) == (None, [str(TEXT_ONLY)])
    shutil.copytree(TEXT_ONLY, tmp_path / "chat")
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    (tmp_path / "chat" / "chat_template.jinja").write_text(template)
    assert jaxthd.load_config(TEXT_ONLY).data.template == "plain"
    assert jaxthd.load_config(tmp_path / "chat").data.template == "chat_template"


def test_salm_is_asked_as_canary_qwen_was_trained(tmp_path: Path):
    """Its folder has no tokenizer: data.tokenizer is to name one."""
    write_published("salm", tmp_path / "canary")
    config = published_config([tmp_path / "canary"])
    assert (config.data.template, config.data.prompt) == ("chatml", "Transcribe the following: {audio}")
    assert config.data.tokenizer == "bytes"
    assert config.adapt.lora_rank


def test_what_is_no_source_is_refused_with_what_to_do(run: Path, tmp_path: Path):
    with pytest.raises(UserError, match="holds no run; expected the workdir of one, a published checkpoint"):
        jaxthd.load_config(tmp_path)
    with pytest.raises(FileNotFoundError, match="expected a workdir, a published checkpoint, or a file such"):
        jaxthd.load_config(tmp_path / "none")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(UserError, match="model_type 't5'; expected one of nemotron_h"):
        jaxthd.load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json cannot be read .* copy it anew"):
        jaxthd.load_config(tmp_path)
    # A config file may import the function that reads Python files alone.
    for source in (run, run / "config.json"):
        with pytest.raises(UserError, match=r"call jaxthd\.load_config, which reads runs"):
            config_file.load_config(source)
