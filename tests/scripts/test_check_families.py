"""The tiny model of each family, and the commands on it. scripts/check_families.py runs all on all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxthd.hf.registry import export_families
from jaxthd.planning.parameters import parameter_groups
from jaxthd.validate import DeviceFacts, findings
from scripts.check_families import Checks, check, import_tiny
from tests.test_train import UNOPTIMISED

FAMILIES = import_tiny()["FAMILIES"]
CPU = DeviceFacts(platform="cpu", devices=1, kind="simulated")
LIBRARY = {
    "nemotron_h": "NemotronHForCausalLM",
    "nemotron3": "NemotronHForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "moonlight": "DeepseekV3ForCausalLM",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_tiny_model_is_valid_and_of_its_family(family: str):
    """Its decoder would be exported as the library's class, by no other family's format."""
    config = import_tiny()["config"](family)
    assert findings(config, CPU) == []
    assert export_families(config.model)["llm"].title.startswith(LIBRARY[family])
    assert sum(group.parameters for group in parameter_groups(config)) < 1.5e6


def test_a_check_that_fails_says_so(tmp_path: Path, monkeypatch):
    def broken(self: Checks) -> str:
        raise SystemExit("no such command")

    monkeypatch.setattr(Checks, "describe", broken)
    (found,) = check("qwen3", tmp_path / "qwen3", 1, ["describe"])
    assert json.loads(json.dumps(found))[2] == "SystemExit: no such command"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "checks"),
    [("qwen3", ["describe", "train", "score", "generate"])],
)
def test_commands_work_on_a_tiny_model(family: str, checks: list[str], tmp_path: Path):
    """In a process of its own: commands choose the number of simulated devices."""
    options = ["--families", family, "--steps", "24", "--workdir", str(tmp_path), "--checks", *checks]
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.check_families", *options],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": UNOPTIMISED},
    )
    log = (tmp_path / f"{family}.log").read_text()
    assert ran.returncode == 0, (ran.stdout, ran.stderr, log[-2000:])
    found = json.loads((tmp_path / f"{family}.json").read_text())
    assert [name for name, *_ in found] == checks
