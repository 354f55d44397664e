"""The LoRA of a run as a folder of peft's: on the base, it is the merged model.

    python -m pytest -m nightly tests/hf/test_peft_folder.py --python-reference PYTHON

PYTHON has torch, transformers and peft: peft itself opens the folder.
"""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxthd.checkpoints.weights import load_weights, named_weights
from jaxthd.config import AdaptConfig, Config, DataConfig
from jaxthd.convert import export_weights
from jaxthd.errors import UserError
from jaxthd.hf.checkpoint import model_config
from jaxthd.hf.nemotron_h import NEMOTRON_H
from jaxthd.hf.qwen2_audio import QWEN2_AUDIO
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from tests.helpers import save_run
from tests.hf.folders import write_llm
from tests.hf.published import write_published

ROOT = Path(__file__).parents[2]
ADAPT = AdaptConfig(
    lora_rank=3,
    lora_alpha=5.0,
    lora_dropout=0.1,
    lora_targets=("decoder.layers.attention.*", "decoder.layers.mlp.mixer.down"),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Config]:
    """A run that adapts a tiny Qwen3, with random weights."""
    folder = tmp_path_factory.mktemp("lora")
    write_llm(folder / "qwen", ("one two",))
    model = replace(model_config(folder / "qwen"), encoder=None)
    data = DataConfig(tokenizer=str(folder / "qwen"), audio_capacity=0)
    config = Config(data=data, model=model, adapt=ADAPT)
    save_run(config, folder / "run")
    return folder, config


def test_the_folder_and_the_base_are_the_merged_model(run: tuple[Path, Config], tmp_path: Path) -> None:
    folder, config = run
    (lora,) = export_weights(folder / "run", tmp_path / "lora", form="peft", like=folder / "qwen")
    (merged,) = export_weights(folder / "run", tmp_path / "merged", form="llm")
    settings = json.loads((lora / "adapter_config.json").read_text())
    assert settings == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(folder / "qwen"),
        "r": 3,
        "lora_alpha": 5.0,
        "lora_dropout": 0.1,
        "bias": "none",
        "target_modules": ["down_proj", "k_proj", "o_proj", "q_proj", "v_proj"],
    }
    low_rank, whole = load_file(lora / "adapter_model.safetensors"), load_file(merged / "model.safetensors")
    ours: dict[str, Any] = named_weights(
        load_weights([folder / "run"], Blueprint(config), make_mesh(config.mesh), partly=False)
    )
    arrays = {"q_proj": "attention.mixer.q", "o_proj": "attention.mixer.out", "down_proj": "mlp.mixer.down"}
    layers = len(ours["decoder.layers.attention.mixer.q.w"])
    assert len(low_rank) == 2 * 5 * layers
    for layer in range(layers):
        for theirs, name in arrays.items():
            module = f"model.layers.{layer}.{'mlp' if theirs == 'down_proj' else 'self_attn'}.{theirs}"
            a, b = (low_rank[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
            base = np.asarray(ours[f"decoder.layers.{name}.w"][layer]).T
            assert a.shape == (3, base.shape[1])
            np.testing.assert_allclose(base + 5 / 3 * b @ a, whole[f"{module}.weight"], atol=1e-6)
            assert np.abs(b @ a).max() > 1e-4


def test_names_are_those_of_transformers_in_memory() -> None:
    names = [
        (QWEN2_AUDIO, "language_model.model.layers.0.self_attn.q_proj"),
        (NEMOTRON_H, "backbone.layers.0.mixer.q_proj"),
    ]
    assert [table.family().in_memory(name) for table, name in names] == [
        "model.language_model.layers.0.self_attn.q_proj",
        "model.layers.0.mixer.q_proj",
    ]


def test_what_peft_cannot_hold_is_refused(run: tuple[Path, Config], tmp_path: Path) -> None:
    _, config = run
    save_run(replace(config, adapt=AdaptConfig()), tmp_path / "plain")
    with pytest.raises(UserError, match="the run has no LoRA; expected plain LoRA"):
        export_weights(tmp_path / "plain", tmp_path / "out", form="peft")
    assert not (tmp_path / "out").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["qwen3", "nemotron_h", "qwen2_audio"])
def test_peft_opens_the_folder_on_its_base(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, record_property: Any
) -> None:
    """As the export that is merged computes it: an LLM, one whose names in memory are not those on disk, and
    the LLM of a speech model, whose encoder has projections of the same names."""
    python = str(request.config.getoption("--python-reference"))
    if subprocess.run([python, "-c", "import peft"], capture_output=True).returncode:
        pytest.skip("--python-reference names no interpreter with peft")
    base = write_published(name, tmp_path / "base")
    is_speech = name == "qwen2_audio"
    model = model_config(base) if is_speech else replace(model_config(base), encoder=None)
    adapt = replace(ADAPT, lora_targets=("decoder.layers.attention.*",))
    data = DataConfig() if is_speech else DataConfig(audio_capacity=0)
    config = Config(data=data, model=model, adapt=adapt)
    rng = np.random.default_rng(0)

    def trained(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        """The low-rank matrices that begin as 0 are something else."""
        is_b = jax.tree_util.keystr(path).replace("'", "").endswith("[lora][b]")
        return jax.numpy.asarray(rng.normal(0, 0.3, x.shape), x.dtype) if is_b else x

    weights = load_weights([base], Blueprint(config), make_mesh(config.mesh))
    save_run(config, tmp_path / "run", weights=jax.tree_util.tree_map_with_path(trained, weights))
    (lora,) = export_weights(tmp_path / "run", tmp_path / "lora", form="peft", like=base)
    (merged,) = export_weights(tmp_path / "run", tmp_path / "merged", like=base)
    command = [python, "-m", "tests.references.peft_folder", *map(str, (base, lora, merged))]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert not done.returncode, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    record_property(f"{name}: peft's logits", f"{found['error']:.1e}, {found['adapted']} projections")
    tensors = load_file(lora / "adapter_model.safetensors")
    assert found["adapted"] == len(tensors) // 2
    assert found["error"] < 1e-5 < 1e-2 < found["moved"]
    assert not found["warned"]
