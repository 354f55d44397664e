"""The table of NeMo's keys: it knows all of them, and what it promises of each is what the command does."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config.listing import all_groups
from jaxthd.nemo.config_text import of_encoder
from jaxthd.nemo.data import translate_data
from jaxthd.nemo.experiment import Experiment
from jaxthd.nemo.keys import canonical, nearest, row_of, rows
from jaxthd.nemo.model import translate_model
from jaxthd.nemo.training import translate_training
from jaxthd.nemo.translation import Translation, report
from tests.nemo.experiments import write_experiment
from tests.nemo.samples import SAMPLES, Changes

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "tests" / "references" / "nemo_keys.json"


def translated(folder: Path, changes: Changes) -> tuple[Translation, dict[str, Any]]:
    found = Translation(Experiment(write_experiment(folder, *changes)), Path.cwd())
    encoder = {f"encoder.{name}": x for name, x in of_encoder(translate_model(found)).items()}
    translate_data(found)
    translate_training(found)
    return found, {path: setting.value for path, setting in found.settings.items()} | encoder


def test_every_key_that_nemo_reads_is_known():
    keys = json.loads(REFERENCE.read_text())
    assert len(keys) > 640
    assert [key for key in keys if row_of(key) is None] == []


def test_the_settings_of_the_table_exist():
    known = {setting.path for group in all_groups() for setting in group.settings}
    assert {name for row in rows() for name in row.to} - known == set()


def test_every_key_with_a_counterpart_is_tried():
    assert {key for row in rows() if row.to for key in row.keys} == SAMPLES.keys()


@pytest.mark.parametrize("key", SAMPLES)
def test_a_key_becomes_the_settings_that_the_table_names(key: str, tmp_path: Path):
    changes, expected = SAMPLES[key]
    found, settings = translated(tmp_path, changes)
    assert {name: settings.get(name) for name in expected} == expected
    row = row_of(key)
    assert row is not None
    of_table = {name.replace("model.encoder.", "encoder.") for name in row.to}
    assert not expected or of_table & expected.keys(), "the table names another setting"
    assert report(found).unknown == [] or key == "model.perception.preprocessor.features"


def test_a_key_of_any_data_set_is_that_of_train_ds():
    below = ("data", "validation_ds", "datasets", "clean", "input_cfg", 0, "input_cfg", 3, "weight")
    assert canonical(below) == "data.train_ds.weight"
    assert canonical(("data", "train_ds", "input_cfg")) == "data.train_ds.input_cfg"
    assert canonical(("data", "validation_ds", "datasets", "clean")) == "data.validation_ds.datasets"
    assert canonical(("model", "lora", "r")) == "model.lora.r"


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("data.train_ds.batchsize", "data.train_ds.batch_size"),
        ("model.freeze_parms", "model.freeze_params"),
        ("trainer.warmup_steps", "model.lr_scheduler.warmup_steps"),
        ("model.lora.rank", None),
    ],
)
def test_an_unknown_key_has_near_ones(key: str, meant: str | None):
    assert row_of(key) is None
    assert (meant in nearest(key)) if meant else True


@pytest.mark.nightly
def test_nemo_reads_no_other_keys(pytestconfig: pytest.Config, tmp_path: Path):
    """Compares with NeMo itself: --python-reference is an interpreter with nemo-toolkit[asr]."""
    python = pytestconfig.getoption("--python-reference")
    if subprocess.run([python, "-c", "import nemo"], capture_output=True, check=False).returncode:
        pytest.skip("--python-reference has no NeMo")
    code = "from tests.references.nemo_keys import keys; import json; print(json.dumps(sorted(keys())))"
    ran = subprocess.run(
        [python, "-W", "ignore", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    found = set(json.loads(ran.stdout.splitlines()[-1]))
    assert len(found) > 560
    assert [key for key in sorted(found) if row_of(key) is None] == []
    assert found <= set(json.loads(REFERENCE.read_text()))
