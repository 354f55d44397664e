"""Exports against the source of vLLM, which is read and not run: architectures, and names of tensors.

    python -m pytest -m nightly tests/hf/test_vllm.py --vllm-source FOLDER

FOLDER holds the unpacked wheel of vLLM 0.33.
"""

import ast
import re
from pathlib import Path

import pytest

from jaxthd.config import Config
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from tests.hf.published import HYBRIDS, LLAMAS, LLMS, QWEN, shapes_of, write_published
from tests.hf.speech_folders import NAMES, write_folder

pytestmark = pytest.mark.nightly
SERVED = tuple(name for name in HYBRIDS if name != "bamba")
"""Without Bamba, which vLLM had until 0.23."""
PLAIN = (*LLMS, *QWEN, *LLAMAS, *SERVED, "deepseek_v3", "moonlight", "gpt_oss", "nemotron_omni")
SPEECH = [name for name in NAMES if name != "voxtral"]
"""Without the one whose class reads another form of folder, Mistral's own."""
OWN = ("attention_bias", "scale_input")
"""Fields of the encoder that vLLM's Nemotron-Omni gives by itself."""


@pytest.fixture
def models(pytestconfig: pytest.Config) -> Path:
    """The folder of vLLM's classes."""
    given = pytestconfig.getoption("--vllm-source")
    if not given:
        pytest.skip("--vllm-source is not given")
    return Path(given) / "vllm" / "model_executor" / "models"


def registry(models: Path) -> dict[str, str]:
    """Architecture -> the module of its class."""
    tree = ast.parse((models / "registry.py").read_text())
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    first = value.elts[0]
                    found[str(key.value)] = first.value if isinstance(first, ast.Constant) else ""
    return found


def files_of(architecture: str, models: Path) -> list[Path]:
    """The files with its class: one, or one a kind of devices in a package of its own."""
    module = registry(models)[architecture]
    if "." not in module:
        return [models / f"{module}.py"]
    package = models.parents[2].joinpath(*module.split("."))
    return [x for x in package.rglob("*.py") if f"class {architecture}(" in x.read_text()]


def beginnings(file: Path) -> set[str]:
    """What names of tensors may begin with: modules that a class of the file has, what it renames by
    prefix, and what it asks names for."""
    found: set[str] = set()
    tree = ast.parse(file.read_text())
    bases = {
        x.id
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for x in node.bases
        if isinstance(x, ast.Name)
    }
    for node in tree.body:
        above = isinstance(node, ast.ImportFrom) and bases & {alias.name for alias in node.names}
        other = file.with_name(f"{(getattr(node, 'module', '') or '').rpartition('.')[2]}.py")
        if above and other.exists():
            found |= beginnings(other)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(f"{node.attr}.")
        elif isinstance(node, ast.keyword) and node.arg == "orig_to_new_prefix":
            assert isinstance(node.value, ast.Dict)
            found |= {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "startswith":
            found |= {str(x.value) for x in node.args if isinstance(x, ast.Constant)}
    return found


@pytest.mark.parametrize("name", [*PLAIN, *SPEECH])
def test_vllm_has_the_architecture_and_knows_every_tensor(name: str, models: Path, tmp_path: Path) -> None:
    folder = (write_folder if name in NAMES else write_published)(name, tmp_path / name)
    checkpoint = open_checkpoint(folder)
    model = model_config(folder)
    fields = checkpoint.family.fields(model)
    (architecture,) = fields["architectures"]
    assert architecture in registry(models)
    names = [x.name for x in checkpoint.family.tensors(model, fields, shapes_of(Config(model=model)))]
    assert len(names) > 5
    files = files_of(architecture, models)
    assert files
    for file in files:
        begin = tuple(beginnings(file))
        assert not {re.sub(r"\d+", "N", x) for x in names if not x.startswith(begin)}
    if name == "kimi_linear":
        # Fields whose defaults in vLLM are another model's.
        assert fields["mla_use_nope"]
        assert fields["linear_attn_config"]["kda_layers"]
        assert fields["linear_attn_config"]["full_attn_layers"]
    if name == "nemotron_omni":
        sound = fields["sound_config"]
        assert sound["sampling_rate"] == 16000
        assert not any(field in sound for field in OWN)
        assert {"projection_hidden_size", "projection_bias", "num_mel_bins", "subsampling_factor"} <= {*sound}
