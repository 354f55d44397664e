"""Canary-Qwen's folders: what is read off them, kept, merged, written and refused.

What the imported model computes, LoRA's gradients included, is compared in test_families.py.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxthd.checkpoints.weights import load_weights, named_weights, start_state
from jaxthd.config import AdaptConfig, Config, PostTrainingConfig, RopeConfig, TrainConfig
from jaxthd.config.listing import value_at
from jaxthd.convert import export_weights, import_weights
from jaxthd.errors import UserError
from jaxthd.files.run_folder import read_config
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from jaxthd.hf.registry import export_families
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from tests.hf.published import COMPUTE, change_published, tensors, write_published

LORA = AdaptConfig(
    lora_rank=3,
    lora_alpha=5.0,
    lora_dropout=0.01,
    lora_targets=("decoder.layers.attention.mixer.q", "decoder.layers.attention.mixer.v"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_published("canary_qwen", tmp_path_factory.mktemp("canary") / "published")


@pytest.fixture(scope="module")
def imported(folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("canary") / "imported"
    import_weights([str(folder)], out)
    return out


def changed(folder: Path, out: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The folder with another config.json."""
    shutil.copytree(folder, out)
    return change_published(out, lambda fields, _: change(fields))


def test_lora_stays_lora_from_import_to_export(folder, imported, tmp_path):
    assert read_config(imported).adapt == LORA
    assert set(export_families(model_config(folder))) == {"llm", "encoder", "adapter"}, "only when asked for"
    for like in (None, folder):
        out = tmp_path / f"out-{like is None}"
        export_weights(imported, out, form="salm", like=like)
        found, want = tensors(out), tensors(folder)
        counters = {name for name in found if name.endswith("num_batches_tracked")}
        assert found.keys() - counters == want.keys()
        assert all(found[name].tobytes() == x.tobytes() for name, x in want.items())
        written, original = (json.loads((x / "config.json").read_text()) for x in (out, folder))
        assert written["lora"] == original["lora"]
        assert written["pretrained_llm"] == ("" if like is None else "Qwen/Qwen3-1.7B")
        assert model_config(out) == model_config(folder)


def test_without_lora_of_the_same_form_it_is_merged_and_said(folder, capsys):
    """Into w + alpha / rank * b @ a."""
    config = Config(model=model_config(folder), compute=COMPUTE, adapt=replace(LORA, lora_alpha=6.0))
    weights = load_weights([folder], Blueprint(config), make_mesh(config.mesh))
    assert "its LoRA, which is not that of this run, is merged" in capsys.readouterr().out
    found, theirs = named_weights(weights), tensors(folder)
    first = "llm.base_model.model.model.layers.0.self_attn"
    for name in ("q", "v"):
        w, a, b = (
            theirs[f"{first}.{name}_proj.{x}.weight"].astype(np.float64)
            for x in ("base_layer", "lora_A.default", "lora_B.default")
        )
        merged = found[f"decoder.layers.attention.mixer.{name}.w"][0]
        np.testing.assert_allclose(merged, (w + 5 / 3 * b @ a).T, atol=1e-6)
        assert not found[f"decoder.layers.attention.mixer.{name}.lora.b"].any(), "the run's own LoRA is new"


def test_a_run_s_lora_of_another_alpha_starts_the_same_model(imported, capsys):
    config = read_config(imported)
    same, other = (
        named_weights(load_weights([imported], Blueprint(each), make_mesh(each.mesh)))
        for each in (config, replace(config, adapt=replace(config.adapt, lora_alpha=20.0)))
    )
    assert "multiplied by 0.25, so that the model is the same" in capsys.readouterr().err
    for name, x in same.items():
        factor = 0.25 if name.endswith(".lora.b") else 1
        np.testing.assert_array_equal(other[name], np.asarray(x) * np.float32(factor), err_msg=name)


@pytest.mark.exhaustive
def test_without_lora_the_names_are_those_of_a_plain_llm(folder, imported, tmp_path):
    config = read_config(imported)
    export_weights(imported, tmp_path / "parts")
    parts = [str(tmp_path / "parts" / name) for name in ("llm", "encoder", "adapter")]
    import_weights(parts, tmp_path / "again")
    export_weights(tmp_path / "again", tmp_path / "salm", form="salm", like=folder)
    assert "lora" not in json.loads((tmp_path / "salm" / "config.json").read_text())
    names = set(tensors(tmp_path / "salm"))
    assert "llm.model.layers.1.self_attn.q_proj.weight" in names
    assert not any("base_model" in name or "lora" in name for name in names)
    assert model_config(tmp_path / "salm") == config.model


def test_sizes_are_read_off_the_tensors(folder, tmp_path):
    """As of NeMo's own folders, which name the LLM alone. The tiny LLM has Qwen3's positions and epsilon."""
    bare = changed(folder, tmp_path / "bare", lambda fields: fields.pop("text_config"))
    assert model_config(bare) == model_config(folder)
    config = json.loads((bare / "config.json").read_text())
    assert "text_config" not in config
    (bare / "config.json").write_text(json.dumps(config | {"pretrained_llm": "Qwen/Qwen3-4B-Instruct-2507"}))
    assert value_at(model_config(bare).llm, "blocks.*.rope.theta") == 5e6
    (bare / "config.json").write_text(json.dumps(config | {"pretrained_llm": "Qwen/Qwen3-9B"}))
    with pytest.raises(UserError, match=r"'Qwen/Qwen3-9B' and no text_config"):
        open_checkpoint(bare)
    (bare / "config.json").write_text(json.dumps(config))
    kept = {name: x for name, x in tensors(folder).items() if "q_norm" not in name}
    save_file(kept, bare / "model.safetensors")
    with pytest.raises(UserError, match=r"'Qwen/Qwen3-1.7B', and there is no tensor .*q_norm"):
        open_checkpoint(bare)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda f: f["perception"]["modality_adapter"].update(_target_="x.ConformerEncoder"),
            "ConformerEncoder",
        ),
        (lambda f: f["perception"]["preprocessor"].update(normalize="all"), "normalize: 'all'"),
        (lambda f: f["perception"]["encoder"].update(subsampling="striding"), "subsampling: 'striding'"),
        (lambda f: f["lora"].update(target_modules=["lm_head"]), "target_modules has lm_head"),
        (lambda f: f["lora"].update(use_rslora=True), "use_rslora: True"),
        (lambda f: f["lora"].update(alpha_pattern={"q_proj": 4}), "alpha_pattern: {'q_proj': 4}"),
        (lambda f: f["lora"].update(rank_pattern={"q_proj": 4}), "rank_pattern: {'q_proj': 4}"),
        (lambda f: f["lora"].update(layers_to_transform=[0]), r"layers_to_transform: \[0\]"),
        (lambda f: f["lora"].update(fan_in_fan_out=True), "fan_in_fan_out: True"),
        (lambda f: f["lora"].update(target_modules="(q|v)_proj"), "as a regular expression"),
    ],
)
def test_what_jaxthd_does_not_compute_is_refused(folder, tmp_path, change, said):
    with pytest.raises(UserError, match=said):
        import_weights([str(changed(folder, tmp_path / "changed", change))], tmp_path / "out")


def test_a_lora_whose_other_settings_are_empty_is_plain(folder, tmp_path):
    """As peft writes them."""
    plain = {"alpha_pattern": {}, "rank_pattern": None, "layers_to_transform": None, "fan_in_fan_out": False}
    same = changed(folder, tmp_path / "same", lambda fields: fields["lora"].update(plain))
    assert open_checkpoint(same).lora == LORA


def test_an_export_has_the_name_of_an_llm_of_its_settings(folder):
    """NeMo takes the sizes, the rotary base and the epsilon of the LLM from its name."""
    family, model = open_checkpoint(folder).family, model_config(folder)
    llm = replace(model.llm, dim=2560, pattern="*-" * 36, vocab_size=151936)
    four = llm.with_settings("*", heads=32, kv_heads=8, head_dim=128).with_settings("-", inner=9728)

    def name(letters: str = "", **changes: Any) -> str:
        """letters: of the blocks whose settings change; "": the decoder's do."""
        llm = four.with_settings(letters, **changes) if letters else replace(four, **changes)
        return family.fields(replace(model, llm=llm))["pretrained_llm"]

    assert name() == "Qwen/Qwen3-4B"
    assert name("*", rope=RopeConfig(theta=5e6)) == "Qwen/Qwen3-4B-Instruct-2507"
    assert name(pattern="*-" * 35) == "", "no published one has this size"
    for letters, changes, said in (
        ("*", {"rope": RopeConfig(theta=1e4)}, "rope_theta: 10000.0, not 1000000.0"),
        ("*", {"rope": RopeConfig(theta=1e6, scaling="linear", factor=2.0)}, "rope_scaling: {"),
        ("", {"norm_eps": 1e-5}, "rms_norm_eps: 1e-05, not 1e-06"),
        ("-", {"inner": 9720}, "intermediate_size: 9720, not 9728"),
        ("*", {"heads": 16}, "num_attention_heads: 16, not 32"),
        ("", {"vocab_size": 151669}, "vocab_size: 151669, not 151936"),
        ("", {"tied_embedding": False}, "tie_word_embeddings: False, not True"),
    ):
        with pytest.raises(UserError, match=f"of the size of Qwen/Qwen3-4B and has .*\n  {said}"):
            name(letters, **changes)


def test_models_that_the_format_cannot_hold_are_refused(folder):
    family = open_checkpoint(folder).family
    model = model_config(folder)
    for other in (replace(model, adapter_bias=False), replace(model, adapter_dim=8)):
        with pytest.raises(UserError, match="one linear layer with a bias"):
            family.fields(other)
    assert model.encoder is not None
    with pytest.raises(UserError, match="ffn_dim is 50 with dim 20"):
        family.fields(replace(model, encoder=replace(model.encoder, ffn_dim=50)))
    assert family.lora_fields is not None
    with pytest.raises(UserError, match=r"LoRA on encoder\.blocks"):
        family.lora_fields(LORA, frozenset({"encoder.blocks.ffn1.up"}))
    with pytest.raises(UserError, match="DoRA"):
        family.lora_fields(replace(LORA, dora=True), frozenset(LORA.lora_targets))


def test_a_checkpoint_with_lora_is_no_base_of_its_own_reference(folder):
    """The reference of DPO would be the model without the LoRA that it starts with."""
    config = Config(
        model=model_config(folder),
        adapt=LORA,
        train=TrainConfig(objective="dpo", init_from=(str(folder),)),
        posttraining=PostTrainingConfig(),
    )
    with pytest.raises(UserError, match="has LoRA matrices"):
        start_state(Blueprint(config), make_mesh(config.mesh))
