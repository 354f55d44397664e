"""Runs and config files from before blocks had settings of their own, as jaxthd wrote and read them at commit
67c32df6: a saved run of each kind, and config files, in tests/references/old_configs.
"""

import shutil
from pathlib import Path

import pytest

from jaxthd.config.removed import warn_once
from jaxthd.files.config_file import load_config
from jaxthd.files.run_folder import differences, read_config

ROOT = Path(__file__).parents[1]
OLD = ROOT / "tests" / "references" / "old_configs"
RUNS = sorted(path.stem for path in OLD.glob("*.json"))
PATHS = ("data.manifest", "data.validation_manifest", "data.tokenizer", "train.init_from")
DERIVED = ("train.max_new_tokens",)
"""Given in those runs; since then it is derived from the data."""


@pytest.mark.parametrize("name", RUNS)
def test_a_saved_run_of_each_kind_has_the_settings_that_its_config_file_gives_now(name: str, tmp_path: Path):
    shutil.copy(OLD / f"{name}.json", tmp_path / "config.json")
    now = load_config(ROOT / "configs" / f"{name}.py")
    assert read_config(tmp_path / "config.json").model == now.model
    others = [found for found in differences(tmp_path, now) if found.name not in (*PATHS, *DERIVED)]
    assert not others


@pytest.mark.parametrize("path", sorted(OLD.glob("*.py")), ids=lambda path: path.stem)
def test_an_old_config_file_gives_what_the_new_one_gives(path: Path, capsys: pytest.CaptureFixture[str]):
    warn_once.cache_clear()
    assert load_config(path).model == load_config(ROOT / "configs" / path.name).model
    assert "settings of another name" in capsys.readouterr().err
