"""The inputs of validation are noted: settings, the contents of the sets, the tokens that end an answer."""

import json
from contextlib import closing
from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from jaxthd.checkpoints.stored import measured_otherwise
from jaxthd.config import Config, DataConfig, LLMConfig, ModelConfig, TrainConfig
from jaxthd.data.dataset import SpeechData
from jaxthd.files.run_folder import flat
from jaxthd.run.measured_by import ALWAYS, BY_PREFERENCES, BY_REWARD, measured_by

FLAT = flat(asdict(Config())) | {"model.encoder": None}


def write(path: Path, *answers: str) -> None:
    path.parent.mkdir(exist_ok=True)
    turns = ([{"role": "user", "content": "q"}, {"role": "assistant", "content": a}] for a in answers)
    path.write_text("".join(json.dumps({"messages": x}) + "\n" for x in turns))


def noted(folder: Path, config: Config) -> dict[str, Any]:
    with closing(SpeechData(config, folder, training=False)) as data:
        return measured_by(config, data)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    write(tmp_path / "dev.jsonl", "yes", "no")
    data = DataConfig(validation_manifest=str(tmp_path / "dev.jsonl"), workers=0, audio_capacity=0)
    return Config(data=data, model=ModelConfig(encoder=None, llm=LLMConfig(pattern="*")))


@pytest.mark.parametrize(
    ("section", "change", "said"),
    [
        ("train", {"normaliser": "english"}, "train.normaliser"),
        ("train", {"max_new_tokens": 5}, "train.max_new_tokens"),
        ("train", {"validation_batches": 2}, "train.validation_batches"),
        ("train", {"validate_ema": True}, "train.validate_ema"),
        ("data", {"template": "chatml"}, "data.template"),
        ("data", {"system_prompt": "Answer."}, "data.system_prompt"),
        ("train", {"learning_rate": 1e-5, "steps": 9, "validate_every": 3, "best_by": "wer"}, ""),
        ("data", {"workers": 1, "max_skipped_share": 0.5}, ""),
    ],
)
def test_what_validation_depends_on_is_noted(
    section: str, change: dict[str, Any], said: str, tmp_path: Path, config: Config
):
    other = replace(config, **{section: replace(getattr(config, section), **change)})
    differs = measured_otherwise(noted(tmp_path, config), noted(tmp_path, other))
    assert differs.startswith(f"{said} ") if said else not differs


@pytest.mark.parametrize("experts", [False, True])
def test_records_with_removed_settings_are_compared_by_what_replaced_them(
    experts: bool, tmp_path: Path, config: Config
):
    """An older run goes on: what it measured is compared with what is measured now."""
    now, other = (
        noted(tmp_path, replace(config, compute=replace(config.compute, fp8=fp8)))
        for fp8 in (("experts",) * experts, ("experts",) * (not experts))
    )
    then = now | {"compute.fp8": [], "compute.fp8_experts": experts}
    assert not measured_otherwise(then, now)
    assert measured_otherwise(then, other).startswith("compute.fp8 ")


def test_sets_are_compared_by_their_contents(tmp_path: Path, config: Config):
    before = noted(tmp_path, config)
    write(tmp_path / "elsewhere" / "renamed.jsonl", "yes", "no")
    moved = replace(config.data, validation_manifest=f"a={tmp_path}/elsewhere/renamed.jsonl")
    assert not measured_otherwise(before, noted(tmp_path, replace(config, data=moved)))
    write(tmp_path / "dev.jsonl", "yes", "never")
    assert measured_otherwise(before, noted(tmp_path, config)).startswith("data.validation_manifest dev (")
    none = replace(config, data=replace(config.data, validation_manifest=""))
    assert noted(tmp_path, none) == {}


def test_the_best_depends_on_what_it_is_best_by(tmp_path: Path, config: Config):
    by_reward = replace(config, train=TrainConfig(best_by="reward"))
    drawn = replace(by_reward, rollout=replace(by_reward.rollout, rewards=("cer",)))
    assert "rollout.rewards" in measured_otherwise(noted(tmp_path, by_reward), noted(tmp_path, drawn))
    assert not measured_otherwise(
        noted(tmp_path, config), noted(tmp_path, replace(config, rollout=drawn.rollout))
    )


@pytest.mark.parametrize("pattern", [*ALWAYS, *BY_REWARD, *BY_PREFERENCES])
def test_every_pattern_is_of_a_setting(pattern: str):
    assert any(fnmatch(name, pattern) for name in FLAT)
