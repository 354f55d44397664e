"""A text-only model: an LLM's folder is scored, imported and exported without an encoder and an adapter."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxthd.checkpoints.weights import load_weights, named_weights
from jaxthd.config import Config, DataConfig, EncoderConfig, ModelConfig
from jaxthd.convert import export_weights, import_weights
from jaxthd.describe import describe
from jaxthd.errors import UserError
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from jaxthd.hf.registry import FAMILIES, export_families
from jaxthd.parallel.mesh import make_mesh
from jaxthd.score import main
from jaxthd.steps.blueprint import Blueprint
from jaxthd.training.loop import parameters_text
from tests.hf.published import REFERENCES, assert_identical, tensors, write_published

FOLDER = REFERENCES / "text_only"
PARTS = {"embedding", "decoder", "head"}
SMALL = EncoderConfig(num_mels=16, layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4)


def loaded(sources: list[Any], model: ModelConfig) -> dict[str, Any]:
    config = Config(model=model, data=DataConfig(tokenizer=str(FOLDER)))
    return named_weights(load_weights(sources, Blueprint(config), make_mesh(config.mesh)))


def test_the_command_scores_a_folder_on_a_mesh_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Heads of 24, one key and value head, 4 groups, 6 experts; see tests/references/text_only.py."""
    monkeypatch.setattr("jaxthd.run.startup.simulate_devices", lambda devices: True)
    options = {
        "config": FOLDER,
        "manifest": FOLDER / "documents.jsonl",
        "out": tmp_path / "scores.jsonl",
        "mesh.context": 2,
        "mesh.pipeline": 2,
        "mesh.tensor": 2,
        "data.capacity": 256,
        "data.workers": 0,
    }
    main(["--every-token", *(str(x) for name, value in options.items() for x in (f"--{name}", value))])
    lines = [json.loads(line) for line in options["out"].read_text().splitlines()]
    expected = json.loads((FOLDER / "expected.json").read_text())
    assert not (tmp_path / "skipped.jsonl").exists() or not (tmp_path / "skipped.jsonl").read_text()
    for line, want in zip(lines, expected, strict=True):
        assert line["tokens"] == want["tokens"]
        assert line["positions"] == [*range(1, len(want["tokens"]))]
        np.testing.assert_allclose(line["log_probs"], want["log_probs"], rtol=0, atol=2e-5)


def test_a_folder_becomes_a_model_and_comes_back(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Nothing is initialised at random, there is no encoder anywhere, and the export is the folder."""
    config = import_weights([str(FOLDER)], tmp_path / "imported")
    assert config.model.encoder is None
    params, buffers = jax.eval_shape(lambda: Blueprint(config).initial_weights())
    assert set(params) == PARTS
    assert "encoder" not in buffers
    export_weights(tmp_path / "imported", tmp_path / "exported")
    assert "initialised" not in capsys.readouterr().out
    names = {"config.json", "generation_config.json", "model.safetensors"}
    names |= {"tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "exported").iterdir()} == names
    assert_identical(tensors(tmp_path / "exported"), tensors(FOLDER))
    assert model_config(tmp_path / "exported") == model_config(FOLDER)


def test_the_settings_of_checkpoints_are_those_of_the_parts_they_hold(tmp_path: Path):
    """An encoder where a checkpoint has one, or where the given model has one; else none."""
    encoder = write_published("fastconformer", tmp_path / "encoder")
    omni = write_published("nemotron_omni", tmp_path / "omni")
    text = ModelConfig(encoder=None)
    assert model_config(FOLDER) == model_config(FOLDER, model=text)
    assert model_config(FOLDER).encoder is None
    assert model_config(FOLDER, model=ModelConfig(encoder=SMALL)).encoder == SMALL
    assert model_config(FOLDER, encoder).audio_encoder.dim == 32
    assert model_config(omni).audio_encoder.dim == 32
    assert model_config(omni, model=text) == replace(model_config(omni), encoder=None, adapter_dim=0)
    with pytest.raises(UserError, match=r"encoder alone, and model\.encoder is None"):
        model_config(FOLDER, encoder, model=text)


def test_the_llm_is_taken_out_of_a_speech_model(tmp_path: Path, capsys: pytest.CaptureFixture):
    """Of a published one and of a run; and a speech model starts from a run without an encoder."""
    omni = write_published("nemotron_omni", tmp_path / "omni")
    model = model_config(omni, model=ModelConfig(encoder=None))
    arrays = loaded([omni], model)
    assert {name.partition(".")[0] for name in arrays} == PARTS
    assert "not read, being no part of the model: sound_encoder (" in capsys.readouterr().out
    import_weights([str(omni)], tmp_path / "speech")
    of_run = loaded([tmp_path / "speech"], model)
    assert of_run.keys() == arrays.keys()
    for name, x in arrays.items():
        np.testing.assert_array_equal(of_run[name], x, err_msg=name)

    import_weights([str(FOLDER)], tmp_path / "text")
    capsys.readouterr()
    speech = loaded([tmp_path / "text"], model_config(FOLDER, model=ModelConfig(encoder=SMALL)))
    assert "no source holds them: adapter (1 array), encoder (" in capsys.readouterr().out
    np.testing.assert_array_equal(speech["head"], tensors(FOLDER)["lm_head.weight"])


def test_a_text_only_model_is_called_so():
    """Where a run starts, in its report, and by describe: the LLM's checkpoint alone makes one."""
    text = Config(model=model_config(FOLDER), data=DataConfig(tokenizer=str(FOLDER)))
    speech = replace(text, model=model_config(FOLDER, model=ModelConfig(encoder=SMALL)))
    for say in (describe, lambda config: parameters_text(Blueprint(config))):
        assert "a text-only model, which takes no recordings (model.encoder is None)" in say(text)
        assert "text-only" not in say(speech)


def test_what_a_text_only_model_has_no_use_for_is_refused(tmp_path: Path):
    encoder = write_published("fastconformer", tmp_path / "encoder")
    with pytest.raises(UserError, match=r"encoder alone, and model\.encoder is None"):
        loaded([FOLDER, encoder], model_config(FOLDER))
    with pytest.raises(UserError, match="--adapter-dim is 8"):
        import_weights([str(FOLDER)], tmp_path / "out", adapter_dim=8)
    for format in ("omni", "encoder", "adapter"):
        with pytest.raises(UserError, match=r"model\.encoder is None"):
            export_families(model_config(FOLDER), format)


@pytest.mark.parametrize(
    ("model", "format", "expected"),
    [
        (ModelConfig(encoder=None), None, {"": "llm"}),
        (ModelConfig(encoder=None), "parts", {"llm": "llm"}),
        (ModelConfig(adapter_dim=8), None, {"": "omni"}),
        (ModelConfig(adapter_dim=8), "parts", {"llm": "llm", "encoder": "encoder", "adapter": "adapter"}),
        (ModelConfig(), None, {"llm": "llm", "encoder": "encoder", "adapter": "adapter"}),
        (ModelConfig(), "llm", {"": "llm"}),
    ],
)
def test_the_format_of_an_export_follows_from_the_model(
    model: ModelConfig, format: str | None, expected: dict[str, str]
):
    found = export_families(model, format)
    assert {folder: family.format for folder, family in found.items()} == expected
    with pytest.raises(UserError, match="'gguf'; expected one of parts, peft, llm"):
        export_families(model, "gguf")


def test_every_family_is_read_by_what_its_config_says(tmp_path: Path):
    """And no two of them by the same: of two forms of one model each recognises its own."""
    types = [(name, family.recognises) for family in FAMILIES for name in family.model_types]
    assert len(types) == len(set(types))
    docs = Path(__file__).parents[2] / "docs"
    guide = (docs / "adapting.md").read_text() + (docs / "models.md").read_text()
    for family in FAMILIES:
        assert family.title in guide or family.format in guide
    assert open_checkpoint(FOLDER).family in FAMILIES
