"""The tiny model of each family, and the commands on it. scripts/check_families.py runs all on all."""

import json
from pathlib import Path

import pytest

from jaxthd.hf.registry import export_families
from jaxthd.planning.parameters import parameter_groups
from jaxthd.validate import DeviceFacts, findings
from scripts.check_families import Checks, check, import_tiny

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


@pytest.mark.exhaustive
def test_a_tiny_model_learns(tmp_path: Path):
    found = check("qwen3", tmp_path / "qwen3", 24, ["describe", "estimate", "train"])
    log = (tmp_path / "qwen3.log").read_text()
    assert not any(step.failure for step in found), (found, log[-2000:])
    assert [step.name for step in found] == ["describe", "estimate", "train"]
    assert "* attention" in log


def test_a_check_that_fails_says_so(tmp_path: Path, monkeypatch):
    def broken(self: Checks) -> str:
        raise SystemExit("no such command")

    monkeypatch.setattr(Checks, "describe", broken)
    (found,) = check("qwen3", tmp_path / "qwen3", 1, ["describe"])
    assert json.loads(json.dumps(found))[2] == "SystemExit: no such command"


@pytest.mark.exhaustive
def test_another_one_learns_scores_and_answers(tmp_path: Path):
    found = check("gpt_oss", tmp_path / "gpt_oss", 24, ["train", "score", "generate"])
    log = (tmp_path / "gpt_oss.log").read_text()
    assert not any(step.failure for step in found), (found, log[-2000:])
