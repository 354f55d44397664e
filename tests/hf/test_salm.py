"""Folders of NeMo's SALM and SALMAutomodel: what is read off them, kept, merged, written and refused.

What the imported models compute, LoRA's gradients included, is compared in test_families.py.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxthd.checkpoints.weights import load_weights, named_weights, start_state
from jaxthd.config import AdaptConfig, Config, LLMConfig, PostTrainingConfig, TrainConfig
from jaxthd.config.listing import value_at
from jaxthd.convert import export_weights, import_weights
from jaxthd.data.example import Turn
from jaxthd.data.text.prompt import PromptTemplate
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.errors import UserError
from jaxthd.files.run_folder import read_config
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from jaxthd.hf.nemo_llm import Naming, llm_tensors
from jaxthd.hf.qwen3 import QWEN3_MOE
from jaxthd.hf.registry import export_families
from jaxthd.models.front_ends import FastConformer, QFormer
from jaxthd.parallel.mesh import make_mesh
from jaxthd.run.metrics_file import read_metrics
from jaxthd.score import score_manifest
from jaxthd.steps.blueprint import Blueprint
from tests.hf.published import (
    COMPUTE,
    REFERENCES,
    SALM,
    arranged,
    change_published,
    published,
    shapes_of,
    tensors,
    write_published,
)
from tests.spoken_words import write_manifest, write_tokenizer

LORA = AdaptConfig(
    lora_rank=3,
    lora_alpha=5.0,
    lora_dropout=0.01,
    lora_targets=("decoder.layers.attention.mixer.q", "decoder.layers.attention.mixer.v"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_published("salm", tmp_path_factory.mktemp("salm") / "published")


@pytest.fixture(scope="module")
def imported(folder, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("salm") / "imported"
    import_weights([str(folder)], out)
    return out


def changed(folder: Path, out: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """The folder with another config.json."""
    shutil.copytree(folder, out)
    return change_published(out, lambda fields, _: change(fields))


@pytest.mark.parametrize("name", SALM)
def test_an_export_like_the_original_is_the_original(name, tmp_path):
    """Of tensors that jaxthd reads, and of those that it does not: filters, counters, blocks that nothing
    reads, multi-token prediction."""
    original = write_published(name, tmp_path / "published")
    import_weights([str(original)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "out", form="salm", like=original)
    found, want = tensors(tmp_path / "out"), tensors(original)
    assert found.keys() == want.keys()
    assert all(found[key].tobytes() == x.tobytes() for key, x in want.items())
    written, fields = (json.loads((x / "config.json").read_text()) for x in (tmp_path / "out", original))
    for key in ("perception", "pretrained_llm", "prompt_format", "encoder_chunk_size_seconds"):
        assert written.get(key) == fields.get(key), key
    assert written.get("lora", {}).items() >= fields.get("lora", {}).items()
    assert model_config(tmp_path / "out") == model_config(original)


def test_lora_stays_lora_from_import_to_export(folder, imported, tmp_path):
    assert read_config(imported).adapt == LORA
    assert set(export_families(model_config(folder))) == {"llm", "encoder", "adapter"}, "only when asked for"
    export_weights(imported, tmp_path / "out", form="salm")
    found, want = tensors(tmp_path / "out"), tensors(folder)
    differing = found.keys() ^ want.keys()
    assert all(name.startswith("perception.preprocessor") for name in differing)
    assert all(x.tobytes() == want[name].tobytes() for name, x in found.items() if x.ndim)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    assert fields["lora"] == json.loads((folder / "config.json").read_text())["lora"]
    assert model_config(tmp_path / "out") == model_config(folder)


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


def test_automodels_lora_is_read_and_merged_where_it_is_of_several_projections(tmp_path):
    """in_proj is five projections here, which would need five copies of its matrix a."""
    folder, rng = write_published("salm_automodel", tmp_path / "folder"), np.random.default_rng(0)
    plain = tensors(folder)
    lora = open_checkpoint(folder).lora
    assert lora is not None
    assert (lora.lora_rank, lora.lora_alpha) == (2, 3.0)
    assert set(lora.lora_targets) == {f"decoder.layers.{x}" for x in ("attention.mixer.q", "mamba.mixer.out")}

    def add(_: dict[str, Any], stored: dict[str, np.ndarray]) -> None:
        for name in [x for x in stored if x.endswith("in_proj.weight")]:
            module, (rows, columns) = name.removesuffix(".weight"), stored[name].shape
            stored[f"{module}.lora_A.weight"] = rng.standard_normal((2, columns)).astype(np.float32)
            stored[f"{module}.lora_B.weight"] = rng.standard_normal((rows, 2)).astype(np.float32)

    change_published(folder, add)
    checkpoint, stored = open_checkpoint(folder), tensors(folder)
    assert checkpoint.lora == lora, "of the others alone"
    module = "llm.model.layers.0.mixer.in_proj"
    a, b = (stored[f"{module}.lora_{x}.weight"] for x in "AB")
    want = plain[f"{module}.weight"] + np.float32(1.5) * (b @ a)
    np.testing.assert_array_equal(checkpoint.reader.read(f"{module}.weight"), want)
    assert not any("in_proj.lora" in name for name in checkpoint.reader.shapes)
    import_weights([str(folder)], tmp_path / "imported")
    assert read_config(tmp_path / "imported").adapt == lora


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
    assert (
        replace(model_config(tmp_path / "salm").encoder, chunk_seconds=30.0)
        == read_config(tmp_path / "again").model.encoder
    )
    assert model_config(tmp_path / "salm").llm == config.model.llm


def test_the_llm_s_settings_are_found_wherever_nemo_has_them(folder, tmp_path, monkeypatch):
    """Where several places have some, NeMo's order counts."""
    llm, want = json.loads((folder / "llm" / "config.json").read_text()), model_config(folder)
    other = llm | {"rms_norm_eps": 0.25}

    def at(name: str, change: Callable[[dict[str, Any]], Any]) -> Path:
        out = changed(
            folder, tmp_path / name, lambda fields: (fields.update(pretrained_llm=""), change(fields))
        )
        shutil.rmtree(out / "llm")
        return out

    nowhere = at("nowhere", lambda fields: fields.update(pretrained_llm="a/b"))
    with pytest.raises(
        UserError, match=r"pretrained_llm 'a/b', where there is no config.json; expected .*llm_backbone"
    ):
        open_checkpoint(nowhere)
    (nowhere / "a" / "b").mkdir(parents=True)
    (nowhere / "a" / "b" / "config.json").write_text(json.dumps(llm))
    assert model_config(nowhere) == want, "beside the folder's config.json"
    monkeypatch.chdir(nowhere / "a")
    assert model_config(at("here", lambda fields: fields.update(pretrained_llm="b"))) == want
    for field in ("llm_config", "text_config"):
        assert model_config(at(field, lambda fields, field=field: fields.update({field: llm}))) == want
    backbone = at("backbone", lambda fields: fields.update(llm_config=other))
    (backbone / "llm_backbone").mkdir()
    (backbone / "llm_backbone" / "config.json").write_text(json.dumps(llm))
    assert model_config(backbone) == want
    named = at("named", lambda fields: fields.update(pretrained_llm="Qwen/Qwen3-4B-Instruct-2507"))
    found = model_config(named).llm
    assert (found.dim, value_at(found, "blocks.*.rope.theta")) == (2560, 5e6)
    unknown = at("unknown", lambda fields: fields.update(llm_config={"model_type": "llama"}))
    with pytest.raises(UserError, match="model_type 'llama'; expected one of qwen3, qwen3_moe, nemotron_h"):
        open_checkpoint(unknown)


def test_nemotron_3_nano_is_known_by_name(folder, tmp_path):
    name = "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    named = changed(folder, tmp_path / "named", lambda fields: fields.update(pretrained_llm=name))
    llm = model_config(named).llm
    assert (llm.letters.count("M"), llm.letters.count("E"), llm.letters.count("*")) == (23, 23, 6)
    assert value_at(llm, "blocks.E.router.scale") == 2.5
    assert (
        export_families(model_config(named), "salm")[""].fields(model_config(named))["pretrained_llm"] == name
    )


def test_encoder_connector_and_chunks_are_those_of_config_json(tmp_path):
    encoders = {name: model_config(write_published(name, tmp_path / name)).audio_encoder for name in SALM}
    assert {name: type(x) for name, x in encoders.items() if type(x) is not FastConformer} == {
        "salm_qformer": QFormer
    }
    layers, qformer = encoders["salm_layers"], encoders["salm_qformer"]
    assert isinstance(layers, FastConformer)
    assert isinstance(qformer, QFormer)
    assert (layers.output_layers, layers.layers, layers.chunk_seconds) == ((0, 1), 2, 0.3013)
    assert (qformer.output_layers, qformer.queries, qformer.pad_to) == ((0, 1), 3, 16)
    whole = encoders["salm"]
    assert isinstance(whole, FastConformer)
    assert (whole.chunk_seconds, whole.longest, whole.output_layers) == (0.0, None, ())
    assert [piece.frames for piece in whole.pieces(160 * 10000)] == [10000]
    assert [piece.tokens for piece in qformer.pieces(16000)] == [3, 3]


def test_filters_that_are_stored_in_bfloat16_are_those_that_are_computed_with(tmp_path):
    folder = write_published("salm", tmp_path / "folder")
    assert not model_config(folder).audio_encoder.features_identity.get("bfloat16_filters")
    stored = {name: x.astype(ml_dtypes.bfloat16) if x.ndim else x for name, x in tensors(folder).items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    model = model_config(folder)
    assert model.audio_encoder.features_identity["bfloat16_filters"]
    import_weights([str(folder)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "out", form="salm", like=folder, dtype="bfloat16")
    found = tensors(tmp_path / "out")
    kept = {name for name in found if found[name].dtype != stored[name].dtype}
    assert all("running_" in name for name in kept)
    assert all(x.tobytes() == stored[name].tobytes() for name, x in found.items() if name not in kept)
    with pytest.raises(UserError, match="bfloat16_filters is True"):
        export_weights(tmp_path / "imported", tmp_path / "again", form="salm")
    name = "perception.preprocessor.featurizer.fb"
    change_published(folder, lambda _, stored: stored.update({name: stored[name] * np.float32(1.01)}))
    with pytest.raises(UserError, match=r"featurizer\.fb .*is not that of jaxthd's features"):
        open_checkpoint(folder)


@pytest.mark.parametrize("experts", ["rows", "columns"])
def test_packed_experts_are_the_experts_one_by_one(experts, tmp_path):
    """Of Qwen3-MoE, whose gates lie beside the ups: in transformers' memory, and in Automodel's."""
    family = published("qwen3_moe", tmp_path / "qwen3_moe")
    shapes = shapes_of(family.config)
    fields = {"model_type": "qwen3_moe", **json.loads(str(family.arrays["config"]))}
    each, llm = {}, family.config.model.llm
    for tensor in QWEN3_MOE.tensors(llm, fields, shapes):
        each[tensor.name] = family.arrays[f"weight.{tensor.name}"]
    stored = {f"llm.{name}": x for name, x in each.items() if ".experts." not in name}
    stored["llm.model.embed_tokens.weight"] = each["model.embed_tokens.weight"]
    for layer in {name.partition(".experts.")[0] for name in each if ".experts." in name}:
        gate, up, down = (
            np.stack([each[f"{layer}.experts.{i}.{part}_proj.weight"] for i in range(8)])
            for part in ("gate", "up", "down")
        )
        both = np.concatenate([gate, up], axis=1)
        if experts == "rows":
            stored |= {f"llm.{layer}.experts.gate_up_proj": both, f"llm.{layer}.experts.down_proj": down}
        else:
            turned = both.transpose(0, 2, 1), down.transpose(0, 2, 1)
            stored |= dict(
                zip(
                    (f"llm.{layer}.experts.gate_and_up_projs", f"llm.{layer}.experts.down_projs"),
                    turned,
                    strict=True,
                )
            )
    naming = Naming.of_folder(stored)
    assert (naming.is_automodel, naming.experts) == (True, experts)
    table = list(llm_tensors(llm, fields, shapes, naming, has_lora=False))
    assert {t.name for t in table} == stored.keys()
    assert all(t.shape == stored[t.name].shape for t in table)
    ours = arranged(table, stored, shapes)
    want = arranged(list(QWEN3_MOE.tensors(llm, fields, shapes)), each, shapes)
    assert ours.keys() == want.keys()
    assert all(np.array_equal(ours[name], want[name]) for name in want)
    for tensor in table:
        back = tensor.join([ours[part.name][part.at] for part in tensor.slices])
        np.testing.assert_array_equal(back, stored[tensor.name])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda f: f["perception"]["modality_adapter"].update(_target_="x.ConformerEncoder"),
            "ConformerEncoder",
        ),
        (lambda f: f["perception"]["modality_adapter"].update(output_dim=24), "makes no projection"),
        (lambda f: f["perception"].update(rote={"dim": 4}), "config.json has perception.rote"),
        (lambda f: f["perception"]["preprocessor"].update(normalize="all"), "normalize: 'all'"),
        (lambda f: f["perception"]["preprocessor"].pop("window_size"), "window_size: 0.02"),
        (lambda f: f["perception"]["encoder"].update(subsampling="striding"), "subsampling: 'striding'"),
        (lambda f: f["perception"]["encoder"].update(reduction="striding"), "reduction: 'striding'"),
        (lambda f: f["perception"]["encoder"].update(feat_out=7), "feat_out 7"),
        (lambda f: f.update(encoder_chunk_size_seconds=0), "encoder_chunk_size_seconds 0"),
        (lambda f: f["lora"].update(use_rslora=True), "use_rslora: True"),
        (lambda f: f["lora"].update(alpha_pattern={"q_proj": 4}), "alpha_pattern: {'q_proj': 4}"),
        (lambda f: f["lora"].update(rank_pattern={"q_proj": 4}), "rank_pattern: {'q_proj': 4}"),
        (lambda f: f["lora"].update(fan_in_fan_out=True), "fan_in_fan_out: True"),
    ],
)
def test_what_jaxthd_does_not_compute_is_refused(folder, tmp_path, change, said):
    with pytest.raises(UserError, match=said):
        import_weights([str(changed(folder, tmp_path / "changed", change))], tmp_path / "out")


def test_lora_in_some_layers_or_elsewhere_is_refused(folder, tmp_path):
    out, prefix = tmp_path / "some", "llm.base_model.model.model.layers.1.self_attn.q_proj"
    shutil.copytree(folder, out)

    def take(_: dict[str, Any], stored: dict[str, np.ndarray]) -> None:
        stored[f"{prefix}.weight"] = stored.pop(f"{prefix}.base_layer.weight")
        for x in "AB":
            stored.pop(f"{prefix}.lora_{x}.default.weight")

    change_published(out, take)
    with pytest.raises(UserError, match="LoRA on q_proj of layers 0 alone"):
        open_checkpoint(out)
    change_published(
        out,
        lambda _, stored: stored.update({"llm.lm_head.lora_A.default.weight": stored[f"{prefix}.weight"]}),
    )
    with pytest.raises(UserError, match=r"has LoRA on llm\.lm_head; expected"):
        open_checkpoint(out)


def test_a_lora_whose_other_settings_are_empty_is_plain(folder, tmp_path):
    """As peft writes them; and targets that are a regular expression."""
    plain = {
        "alpha_pattern": {},
        "rank_pattern": None,
        "fan_in_fan_out": False,
        "target_modules": "(q|v)_proj",
    }
    same = changed(folder, tmp_path / "same", lambda fields: fields["lora"].update(plain))
    assert open_checkpoint(same).lora == LORA


def test_an_export_has_what_nemo_and_its_vllm_plugin_look_for(folder, tmp_path):
    """Without an original, of a run by the template chatml whose tokenizer has no audio tag."""
    run, config = tmp_path / "run", Config(model=model_config(folder))
    import_weights([str(folder)], run)
    made = read_config(run)
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    shutil.copyfile(REFERENCES / "chat" / "tokenizer.json", tokenizer / "tokenizer.json")
    text = json.loads((run / "config.json").read_text())
    text["data"] |= {"tokenizer": str(tokenizer / "tokenizer.json"), "template": "chatml"}
    (run / "config.json").write_text(json.dumps(text))
    export_weights(run, tmp_path / "out", form="salm")
    out = tmp_path / "out"
    fields = json.loads((out / "config.json").read_text())
    needed = ("pretrained_llm", "pretrained_asr", "audio_locator_tag", "prompt_format", "pretrained_weights")
    assert all(fields[name] not in (None, "") for name in needed)
    assert fields["audio_locator_tag"] == "<|audio|>"
    assert fields["model_type"] == "nemo_speechlm"
    assert Path(fields["pretrained_llm"]) == out / "llm_backbone"
    llm = json.loads((out / "llm_backbone" / "config.json").read_text())
    assert llm == fields["llm_config"]
    assert llm["architectures"] == ["Qwen3ForCausalLM"]
    written, ours = load_tokenizer(out), load_tokenizer(tokenizer / "tokenizer.json")
    assert written.token_text(written.audio_id) == "<|audio|>"
    data = read_config(run).data
    template = PromptTemplate(data, ours)
    ends = json.loads((out / "generation_config.json").read_text())["eos_token_id"]
    assert set(ends if isinstance(ends, list) else [ends]) == set(template.stop_ids)
    turns = [Turn("user", ("what is it",)), Turn("assistant", ("one",)), Turn("user", ("two",))]
    theirs = PromptTemplate(replace(data, template="chat_template", tokenizer=str(out)), written)
    assert theirs.prompt(turns) == template.prompt(turns)
    assert made.model == config.model


def test_models_that_the_format_cannot_hold_are_refused(folder):
    family = open_checkpoint(folder).family
    model = model_config(folder)
    for other in (replace(model, adapter_bias=False), replace(model, adapter_dim=8)):
        with pytest.raises(UserError, match="one linear layer with a bias"):
            family.fields(other)
    assert model.encoder is not None
    with pytest.raises(UserError, match="ffn_dim is 50 with dim 20"):
        family.fields(replace(model, encoder=replace(model.encoder, ffn_dim=50)))
    with pytest.raises(UserError, match="query_ffn_dim is 8; expected 3072"):
        family.fields(replace(model, encoder=QFormer(query_ffn_dim=8)))
    with pytest.raises(UserError, match="NemotronHForCausalLM"):
        family.fields(replace(model, llm=LLMConfig(pattern="D-")))
    assert family.lora_fields is not None
    with pytest.raises(UserError, match=r"LoRA on encoder\.blocks"):
        family.lora_fields(model, LORA, frozenset({"encoder.blocks.ffn1.up"}))
    with pytest.raises(UserError, match="DoRA"):
        family.lora_fields(model, replace(LORA, dora=True), frozenset(LORA.lora_targets))
    for other in (QFormer(), FastConformer(output_layers=(0, 3)), FastConformer(bfloat16_filters=True)):
        with pytest.raises(UserError, match="choose --format salm"):
            export_families(replace(model, encoder=other), "parts")


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


@pytest.mark.exhaustive
def test_a_folder_alone_with_a_manifest_is_trained_and_handed_on(tmp_path):
    """In one command, on a mesh. The loss falls; the export scores as the run does, and has what jaxthd does
    not read."""
    folder = write_published("salm_qformer", tmp_path / "published")
    write_tokenizer(folder, model_config(folder).llm.vocab_size)
    manifest = write_manifest(tmp_path, model_config(folder).llm.vocab_size)
    options = {
        **{"data.manifest": manifest, "data.template": "plain", "data.capacity": 256, "data.workers": 0},
        **{"data.audio-capacity": 2048, "data.max-documents": 8, "mesh.data": 1, "mesh.context": 2},
        **{"mesh.tensor": 2, "train.steps": 8, "train.learning-rate": 0.01, "train.warmup-steps": 1},
    }
    words = [str(x) for name, value in options.items() for x in (f"--{name}", value)]
    command = [sys.executable, "-m", "jaxthd", "train", str(folder), "--workdir", str(tmp_path / "run")]
    done = subprocess.run(command + words, capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr[-3000:]
    losses = [line["loss"] for line in read_metrics(tmp_path / "run") if "loss" in line]
    assert losses[-1] < 0.8 * losses[0]

    export_weights(tmp_path / "run", tmp_path / "out", form="salm", like=folder, dtype="float32")
    old, new, run = tensors(folder), tensors(tmp_path / "out"), read_config(tmp_path / "run")
    read = {tensor.name for tensor in open_checkpoint(folder).tensors(run.model, shapes_of(run))}
    assert old.keys() == new.keys()
    assert set(old) - read
    assert all(np.array_equal(new[key], old[key]) for key in set(old) - read)
    assert model_config(tmp_path / "out") == run.model
    of_export, of_run = (
        list(score_manifest(run, [tmp_path / source], str(manifest), tmp_path / f"{source}.skipped"))
        for source in ("out", "run")
    )
    for got, want in zip(of_export, of_run, strict=True):
        np.testing.assert_allclose(got.log_probs, want.log_probs, atol=1e-5)
