"""`jaxthd import-config`: the file that it writes, and what it says of each key."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxthd.checkpoints.weights import load_weights, named_weights
from jaxthd.config import Config, ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.config_file import load_config
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from jaxthd.import_config import import_config, main
from jaxthd.models.front_ends import FastConformer, QFormer
from jaxthd.nemo.experiment import Experiment
from jaxthd.nemo.parameters import frozen, lora_targets, names_of
from jaxthd.nemo.translation import Report
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from jaxthd.validate import DeviceFacts, findings
from tests.hf.folders import write_llm
from tests.hf.nemo_archives import checkpoint, nemo_weights, write_nemo
from tests.hf.published import write_published
from tests.nemo.experiments import experiment, write_experiment

TINY = (
    ("model.pretrained_llm", "qwen"),
    ("model.pretrained_asr", "canary.nemo"),
    ("model.prompt_format", "qwen3"),
    (
        "model.freeze_params",
        [r"^llm\..+$", r"^embed_tokens\..+$", r"^perception\.(preprocessor|encoder)\..+$"],
    ),
)


CONNECTOR = experiment()["model"]["perception"]["modality_adapter"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a user of NeMo's, with an LLM and a recogniser."""
    folder = tmp_path_factory.mktemp("nemo")
    write_llm(folder / "qwen", ["one two three"])
    write_nemo(folder / "canary.nemo", checkpoint(nemo_weights()))
    return folder


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same, as the working directory."""
    monkeypatch.chdir(folder)
    return folder


def imported(folder: Path, *changes: tuple[str, Any], overrides: Sequence[str] = ()) -> tuple[Config, Report]:
    """The config that the written file makes."""
    text, found = import_config(write_experiment(folder, *changes), overrides)
    (folder / "my.py").write_text(text)
    return load_config(folder / "my.py"), found


def test_the_file_is_a_config_that_can_run(here: Path):
    """Every part of it: the validator has nothing to say, and the weights are those of the checkpoints."""
    config, found = imported(here, *TINY)
    assert not findings(config, DeviceFacts(platform="cpu", devices=1, kind="simulated"))
    assert found.lost == found.unknown == []
    assert config.model.llm == model_config(here / "qwen").llm
    assert (config.model.adapter_bias, config.model.adapter_dim) == (True, 0)
    assert {*config.adapt.freeze} == {"encoder.*", "decoder.*", "embedding"}, "the head is the embedding"
    assert config.data.template == "chat_template"
    assert config.data.validation_manifest == f"dev={here / 'b.json'}"
    weights = named_weights(
        load_weights(config.train.init_from, Blueprint(config), make_mesh(config.mesh), partly=True)
    )
    (name,) = (name for name in weights if name.startswith("encoder.") and name.endswith("norm_out.weight"))
    assert (weights[name][1] == nemo_weights()["encoder.layers.1.norm_out.weight"]).all()


@pytest.mark.parametrize("is_here", [True, False])
@pytest.mark.parametrize("name", ["MultiLayerProjectionConnector", "QformerConnector"])
def test_a_connector_reads_blocks_of_the_encoder(
    name: str, is_here: bool, here: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whether the checkpoints are on this disk or not; NeMo's encoder has another name behind a connector."""
    settings = {
        "prompt_size": 5,
        "qformer_num_hidden_layers": 1,
        "encoder_config": {"d_model": 32, "encoder_attention_heads": 4},
    }
    adapter = {"_target_": f"nemo.x.{name}", "target_layer_ids": [-2]}
    adapter |= settings if name == "QformerConnector" else {}
    freeze = [r"^llm\..+$", r"^perception\.encoder\..+$"]
    changes = (("model.perception.modality_adapter", adapter), ("model.freeze_params", freeze))
    other = here / "elsewhere"
    other.mkdir(exist_ok=True)
    if not is_here:
        monkeypatch.chdir(other)
    text, found = import_config(write_experiment(other, *TINY, *changes))
    assert any("perception.encoder_multilayer.encoder.*, and trains" in why for _, why in found.notes)
    assert not [loss for loss in found.lost if "modality_adapter" in loss.key]
    (here / "my.py").write_text(text)
    config = load_config(here / "my.py")
    encoder = config.model.audio_encoder
    assert isinstance(encoder, QFormer if name == "QformerConnector" else FastConformer)
    assert (encoder.output_layers, encoder.layers) == ((0, 1), 2)
    assert not [pattern for pattern in config.adapt.freeze if pattern.startswith(("encoder", "adapter"))]
    assert not findings(config, DeviceFacts(platform="cpu", devices=1, kind="simulated"))
    if isinstance(encoder, QFormer):
        assert (encoder.queries, encoder.query_layers, encoder.query_heads) == (5, 1, 4)
    both = [r"^perception\.encoder(_multilayer\.encoder)?\..+$"]
    text, _ = import_config(write_experiment(other, *TINY, *changes[:1], ("model.freeze_params", both)))
    (here / "my.py").write_text(text)
    frozen_parts = {*load_config(here / "my.py").adapt.freeze}
    assert frozen_parts == (
        {"encoder.blocks.*", "encoder.subsampling.*"} if name == "QformerConnector" else {"encoder.*"}
    )


def test_its_paths_are_of_its_own_folder(here: Path):
    """The experiment's are of the working directory."""
    (here / "configs").mkdir(exist_ok=True)
    path = write_experiment(here, *TINY)
    text, _ = import_config(path, folder=here / "configs")
    assert 'HERE / "../qwen"' in text
    assert '"../a.json"' in text
    (here / "configs" / "my.py").write_text(text)
    config = load_config(here / "configs" / "my.py")
    assert config.data.manifest == (str(here / "a.json"),)
    absolute, _ = import_config(
        write_experiment(here, *TINY, ("data.train_ds.input_cfg.0.manifest_filepath", "/a.json"))
    )
    assert '"/a.json"' in absolute


def test_low_rank_matrices_are_on_the_projections_that_peft_would_take(here: Path):
    lora = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"]}
    config, _ = imported(here, *TINY, ("model.lora", lora))
    assert (config.adapt.lora_rank, config.adapt.lora_alpha) == (3, 6.0)
    assert config.adapt.lora_targets == ("decoder.layers.attention.mixer.q", "decoder.layers.mlp.mixer.up")
    assert config.adapt.freeze == ("encoder.*",), "a part with LoRA trains nothing else"
    assert not findings(config, DeviceFacts(platform="cpu", devices=1, kind="simulated"))


@pytest.mark.parametrize(
    ("lora", "is_automodel", "expected"),
    [
        ({}, False, {"q", "v"}),
        ({"target_modules": "all-linear"}, False, {"q", "k", "v", "out", "gate", "up", "down"}),
        ({"target_modules": r".*\.self_attn\.[qk]_proj"}, False, {"q", "k"}),
        ({"target_modules": ["*.mlp.*"]}, True, {"gate", "up", "down"}),
        ({"target_modules": ["o_proj", "q_proj"], "exclude_modules": ["o_proj"]}, True, {"q"}),
        ({"match_all_linear": True, "exclude_modules": ["*.mlp.*"]}, True, {"q", "k", "v", "out"}),
        ({"target_modules": ["none"]}, True, set()),
    ],
)
def test_names_of_peft_and_of_automodel_become_ours(
    lora: dict[str, Any], is_automodel: bool, expected: set[str], folder: Path
):
    names = names_of(
        model_config(folder / "qwen", folder / "canary.nemo"),
        open_checkpoint(folder / "qwen"),
        {"modality_adapter": CONNECTOR},
        embedding_outside=True,
    )
    patterns = lora_targets(names, lora, is_automodel=is_automodel)
    projections = {ours for _, ours in names.projections}
    chosen = {
        x for x in projections if any(x == y or (y[-1] == "*" and x.startswith(y[:-1])) for y in patterns)
    }
    assert {name.rpartition(".")[2] for name in chosen} == expected


def test_patterns_of_parameters_become_ours(tmp_path: Path):
    """On a hybrid model, whose layers are of several kinds and stacked."""
    paths = [write_published(name, tmp_path / name) for name in ("nemotron_h", "fastconformer")]
    model = model_config(*paths, model=ModelConfig(adapter_bias=True))
    model = replace(model, llm=model.llm.without_mtp())
    perception = {"modality_adapter": CONNECTOR}
    names = names_of(model, open_checkpoint(paths[0]), perception, embedding_outside=False)
    every = frozen(names, [r"^llm\..+$"], [])
    assert set(every.patterns) == {"embedding", "head", "decoder.*"}
    assert frozen(names, [r"^llm\..+$"], [r".*mixer\.q_proj.*"]).patterns != every.patterns
    kept = frozen(names, [r"^llm\..+$"], [r".*mixer\.q_proj.*"])
    assert "decoder.layers.attention.mixer.k.*" in kept.patterns
    assert not any("mixer.q" in pattern and "norm" not in pattern for pattern in kept.patterns)
    some = frozen(names, [r"^llm\.backbone\.layers\.0\..+$", r"^nothing$"], [])
    assert some.patterns == ()
    assert any(name.startswith("decoder.layers.") for name in some.partly)
    assert some.unmatched == ("^nothing$",)


def test_what_is_lost_unknown_or_to_be_looked_at_is_said_key_by_key(
    here: Path, capsys: pytest.CaptureFixture[str]
):
    path = write_experiment(
        here,
        *TINY,
        ("model.perception.modality_adapter", {"_target_": "nemo.x.ConformerEncoder", "n_layers": 2}),
        ("model.freeze_parms", ["^llm"]),
        ("model.perception.encoder", {"att_context_size": [70, 13]}),
        ("model.lora", {"r": 2, "bias": "none", "layers_to_transform": [1]}),
        ("trainer.devices", -1),
        ("trainer.log_every_n_steps", 10),
        ("data.train_ds.input_cfg", [{"type": "txt", "paths": "a.txt"}, {"manifest_filepath": "a.json"}]),
        ("data.train_ds.clipping_enabled", True),
        ("data.train_ds.clipping_prob", 0.5),
    )
    (here / "out.py").unlink(missing_ok=True)
    main([str(path), "--out", str(here / "out.py")])
    out, said = capsys.readouterr()
    assert out == ""
    parts = dict(part.split("\n", 1) for part in said.split("\n\n")[1:])
    lost = parts["no counterpart"]
    for key in (
        "model.perception.modality_adapter._target_",
        "model.perception.modality_adapter.n_layers",
        "model.perception.encoder.att_context_size",
        "model.lora.layers_to_transform",
        "data.train_ds.input_cfg.0.type",
        "data.train_ds.input_cfg.0.paths",
        "data.train_ds.clipping_enabled",
    ):
        assert f"  {key} = " in lost
    assert "model.freeze_params" in parts["unknown to NeMo 3.0, and left out"]
    assert "trainer.devices" in parts["to look at"]
    assert "trainer.log_every_n_steps" in parts["not needed"]
    off = parts["off, and nothing is lost"]
    assert {"model.lora.bias", "data.train_ds.clipping_prob"} <= set(off.strip().splitlines()[0].split(", "))
    assert said.rstrip().endswith(f"jaxthd train {here / 'out.py'}")
    assert load_config(here / "out.py").data.manifest == (str(here / "a.json"),)
    with pytest.raises(UserError, match="expected a new file"):
        main([str(path), "--out", str(here / "out.py")])


def test_without_out_the_file_is_printed_alone(here: Path, capsys: pytest.CaptureFixture[str]):
    main([str(write_experiment(here, *TINY)), "trainer.max_steps=7", "+model.lora.r=5"])
    out, said = capsys.readouterr()
    (here / "printed.py").write_text(out)
    config = load_config(here / "printed.py")
    assert (config.train.steps, config.adapt.lora_rank) == (7, 5)
    assert "keys: " in said


def test_checkpoints_that_are_not_here_are_named_with_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    changes = (
        ("model.pretrained_llm", "Qwen/Qwen3-1.7B"),
        ("model.pretrained_asr", "nvidia/canary-1b-flash"),
    )
    text, found = import_config(write_experiment(tmp_path, *changes, ("model.freeze_params", [r"^llm\..+$"])))
    assert 'ENCODER = str(HERE / "nvidia/canary-1b-flash/canary-1b-flash.nemo")' in text
    notes = dict(found.notes)
    assert "hf download Qwen/Qwen3-1.7B --local-dir Qwen/Qwen3-1.7B" in notes["model.pretrained_llm"]
    (tmp_path / "nvidia" / "canary-1b-flash").mkdir(parents=True)
    write_nemo(tmp_path / "nvidia" / "canary-1b-flash" / "other.nemo", checkpoint(nemo_weights()))
    text, _ = import_config(write_experiment(tmp_path, *changes))
    assert 'ENCODER = str(HERE / "nvidia/canary-1b-flash/other.nemo")' in text


def test_multi_token_prediction_is_the_checkpoint_s_or_a_new_one(here: Path):
    off, _ = imported(here, *TINY)
    assert off.model.llm.mtp_pattern == ""
    mtp = {"enabled": True, "hybrid_override_pattern": "*-", "num_nextn_predict_layers": 2}
    on, _ = imported(here, *TINY, ("model.mtp", mtp | {"use_repeated_layer": True}))
    assert (on.model.llm.mtp_pattern, on.model.llm.mtp_depths, on.model.llm.mtp_shared) == ("*-", 2, True)
    assert on.train.mtp_loss == 0.1


def test_defaults_of_nemo_s_that_are_others_than_ours_are_written(here: Path):
    values = experiment(*TINY)
    del values["trainer"]["gradient_clip_val"], values["model"]["optimizer"], values["data"]["validation_ds"]
    (here / "few.yaml").write_text(yaml.safe_dump(values))
    text, _ = import_config(here / "few.yaml")
    (here / "few.py").write_text(text)
    config = load_config(here / "few.py")
    assert config.train.clip_norm == 1e9
    assert config.train.optimizer_options == ("beta1=0.9", "beta2=0.999")
    assert (config.train.schedule, config.train.warmup_steps) == ("constant", 0)
    assert (config.train.validate_every, config.data.validation_manifest) == (0, "")
    assert not config.data.shuffle
    assert config.compute.dtype == "float32"
    assert "# NeMo without trainer.gradient_clip_val" in text


YAML = """
model: {lr: 1e-4, other: "${.lr}", path: "${oc.env:PLACE,there}/a", back: "${trainer.max_steps}"}
trainer: {max_steps: 100, time: 00:03:50:00, list: [{a: 1}, {b: "${..0.a}"}], old: 1, none: null}
data: {day: 2025-01-01, whole: "${trainer.list}"}
"""


def test_numbers_and_interpolations_are_omegaconf_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.yaml"
    path.write_text(YAML)
    monkeypatch.delenv("PLACE", raising=False)
    found = Experiment(path, ["++trainer.list.1.c=[1, 2]", "~trainer.old", "model.back=${model.lr}"])
    assert found.values["model"] == {"lr": 1e-4, "other": 1e-4, "path": "there/a", "back": 1e-4}
    assert found.values["trainer"] == {
        "max_steps": 100,
        "time": "00:03:50:00",
        "list": [{"a": 1}, {"b": 1, "c": [1, 2]}],
        "none": None,
    }
    assert found.values["data"] == {"day": "2025-01-01", "whole": found.values["trainer"]["list"]}
    monkeypatch.setenv("PLACE", "here")
    assert Experiment(path).get("model.path") == "here/a"


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("model: {a: '${b}'}\ndata: {}", [], r"model.a has \$\{b\}, which nothing gives"),
        ("model: {a: '${model.b}', b: '${model.a}'}\ndata: {}", [], "leads back to itself"),
        ("model: [", [], "is no YAML"),
        ("model: !!python/object/apply:os.system [false]\ndata: {}", [], "is no YAML"),
        ("steps: 3", [], "is no experiment of NeMo's"),
        ("defaults: [a]\nmodel: {}\ndata: {}", [], "exp_config.yaml"),
        ("model: {}\ndata: {}", ["model"], "expected KEY=VALUE"),
        ("model: {a: 1}\ndata: {}", ["model.a.b=1"], "has no group 'a'"),
        ("model: {a: 1}\ndata: {}", ["~model.b"], "cannot be applied"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, overrides: list[str], message: str, tmp_path: Path):
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        Experiment(path, overrides)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            (("data.train_ds.input_cfg.0.manifest_filepath", "???"),),
            r"input_cfg.0.manifest_filepath is \?\?\?",
        ),
        ((("model.pretrained_llm", None),), "model.pretrained_llm is missing"),
        ((("model.pretrained_weights", False),), "model.perception.encoder is missing"),
        ((("data.train_ds.input_cfg", [{"type": "txt", "paths": "a"}]),), "names no data that jaxthd reads"),
        ((("data.train_ds.multi_config", True),), "multi_config is true"),
        ((("exp_manager.max_time_per_run", "4 h"),), "expected DD:HH:MM:SS"),
        ((("data.train_ds.noise_path", "n.json"), ("data.train_ds.noise_snr", 5)), "expected two numbers"),
    ],
)
def test_an_experiment_that_cannot_run_is_refused(changes: Any, message: str, tmp_path: Path):
    with pytest.raises(UserError, match=message):
        import_config(write_experiment(tmp_path, *changes))


def test_keys_of_a_group_that_is_off_are_off(tmp_path: Path):
    off = {"enabled": False, "mask_token_id": 990}
    _, found = import_config(write_experiment(tmp_path, ("dflash", off)))
    assert "dflash.mask_token_id" in found.off
    _, found = import_config(write_experiment(tmp_path, ("dflash", off | {"enabled": True})))
    assert {loss.key for loss in found.lost} == {"dflash.enabled", "dflash.mask_token_id"}
