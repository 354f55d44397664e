"""Old configs are accepted: what each removed setting said is said otherwise, or told to be derived."""

import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config import Config, RopeConfig
from jaxthd.config.listing import all_groups, kind_at, value_at
from jaxthd.config.removed import REMOVED, REPLACED
from jaxthd.errors import UserError
from jaxthd.files.config_file import load_config
from jaxthd.files.run_folder import differences, read_config, write_config
from jaxthd.terminal.arguments import parse_command_line

GIVEN: dict[str, tuple[Any, dict[str, Any]]] = {
    "data.rungs": ([[1024, 32, 0]], {}),
    "data.most_rungs": (2, {}),
    "data.prefetch": (0, {}),
    "data.tarred_audio": (["/t.tar"], {"data.manifest": ("synthetic::/t.tar",)}),
    "data.validation_tarred_audio": ("/t.tar", {"data.validation_manifest": "synthetic::/t.tar"}),
    "data.filter.min_seconds": (0.5, {"data.filter.seconds": (0.5, 0.0)}),
    "data.filter.max_seconds": (20.0, {"data.filter.seconds": (0.0, 20.0)}),
    "data.filter.min_tokens_per_second": (0.5, {"data.filter.tokens_per_second": (0.5, 0.0)}),
    "data.filter.max_tokens_per_second": (20.0, {"data.filter.tokens_per_second": (0.0, 20.0)}),
    "data.filter.min_characters_per_second": (0.5, {"data.filter.characters_per_second": (0.5, 0.0)}),
    "data.filter.max_characters_per_second": (20.0, {"data.filter.characters_per_second": (0.0, 20.0)}),
    "data.spec_augment.freq_masks": (2, {"data.spec_augment.freq": (2, 27)}),
    "data.spec_augment.freq_width": (10, {"data.spec_augment.freq": (0, 10)}),
    "data.spec_augment.time_masks": (2, {"data.spec_augment.time": (2, 0.05)}),
    "data.spec_augment.time_width": (0.1, {"data.spec_augment.time": (0, 0.1)}),
    "data.augment.room_probability": (0.25, {"data.augment.shares": ("room=0.25",)}),
    "data.augment.noise_probability": (1.0, {"data.augment.shares": ("noise=1.0",)}),
    "data.augment.low_pass_probability": (0.5, {"data.augment.shares": ("low_pass=0.5",)}),
    "adapt.encoder_lr_factor": (0.1, {"adapt.factors": {"encoder": 0.1, "adapter": 1.0, "llm": 1.0}}),
    "adapt.adapter_lr_factor": (5.0, {"adapt.factors": {"encoder": 1.0, "adapter": 5.0, "llm": 1.0}}),
    "adapt.llm_lr_factor": (0.5, {"adapt.factors": {"encoder": 1.0, "adapter": 1.0, "llm": 0.5}}),
    "adapt.unfreeze": (["head"], {"adapt.freeze": ("!head",)}),
    "posttraining.share_prompts": (False, {"posttraining.share_prompts": False}),
    "rollout.tokens_at_once": (4, {}),
    "rollout.reward_workers": (3, {}),
    "rollout.max_failed_rewards": (0.5, {}),
    "rollout.max_logprob_difference": (0.1, {}),
    "rollout.leave_one_out": (True, {"rollout.advantages": "leave_one_out_normalised"}),
    "rollout.normalise_advantages": (False, {"rollout.advantages": "centred"}),
    "compute.fp8_experts": (True, {"compute.fp8": ("experts",)}),
    "compute.attention_block": (64, {}),
    "compute.loss_block": (1024, {}),
    "compute.vocab_block": (4096, {}),
    "compute.expert_block": (128, {}),
    "compute.expert_products": ("rounds", {}),
    "compute.expert_capacity": (2.0, {}),
    "compute.expert_parallel": (False, {}),
    "compute.scan_chunk": (128, {}),
    "compute.subsampling_frames": (1024, {}),
    "compute.command_buffers": (False, {"compute.xla_options": ("xla_gpu_enable_command_buffer=",)}),
    "compute.encoder_attention": ("blocks", {"compute.encoder_attention": "blocks"}),
    "compute.scan_backend": ("xla", {"compute.scan_backend": "xla"}),
    "compute.kernels_unverified": (True, {}),
    "compute.mamba_chunk": (128, {}),
    "compute.context_cuts": (4, {"compute.context_splits": 4}),
    "compute.remat_encoder": (False, {"compute.remat": "none"}),
    "compute.remat_llm": (False, {"compute.remat": "none"}),
    "compute.remat_keep": ("products", {"compute.remat": "selective"}),
    "compute.remat_stage": ("nothing", {"compute.remat": "none"}),
    "train.beta1": (0.8, {"train.optimizer_options": ("beta1=0.8",)}),
    "train.beta2": (0.99, {"train.optimizer_options": ("beta2=0.99",)}),
    "train.tensorboard": (False, {"train.trackers": ()}),
    "train.max_skipped_steps": (3, {}),
    "train.draw_last_batch": (True, {}),
}
"""A removed setting -> (a value other than its old default, the settings that now say so)."""
ROPE = {"theta": 1e6, "fraction": 0.5}
LATENT = {"kv_lora_rank": 32, "v_head_dim": 16}
MOVED: dict[str, tuple[Any, dict[str, Any]]] = {
    "q_heads": (8, dict.fromkeys(["*.heads", "W.heads", "L.heads"], 8)),
    "kv_heads": (1, dict.fromkeys(["*.kv_heads", "W.kv_heads"], 1)),
    "head_dim": (16, dict.fromkeys(["*.head_dim", "W.head_dim"], 16)),
    "rope_theta": (1e6, dict.fromkeys(["*.rope", "W.rope", "L.rope"], RopeConfig(theta=1e6))),
    "rope": (ROPE, dict.fromkeys(["*.rope", "W.rope", "L.rope"], RopeConfig(**ROPE))),
    "qk_norm": (True, dict.fromkeys(["*.qk_norm", "W.qk_norm"], True)),
    "window": (64, {"W.window": 64, "*.window": 0}),
    "attention_sinks": (True, dict.fromkeys(["*.sinks", "W.sinks"], True)),
    "attention_bias": (True, dict.fromkeys(["*.bias", "W.bias"], True)),
    "attention_gate": (True, dict.fromkeys(["*.gate", "W.gate"], True)),
    "latent_attention": (LATENT, {"L.kv_lora_rank": 32, "L.v_head_dim": 16, "L.heads": 4}),
    "ffn_dim": (96, {"-.inner": 96, "E.inner": 128}),
    "ffn_form": ("swiglu", dict.fromkeys(["-.form", "E.form"], "swiglu")),
    "swiglu_alpha": (1.5, dict.fromkeys(["-.alpha", "E.alpha"], 1.5)),
    "swiglu_limit": (5.0, dict.fromkeys(["-.limit", "E.limit"], 5.0)),
    "ffn_bias": (True, dict.fromkeys(["-.bias", "E.bias"], True)),
    "mamba_heads": (4, {"M.heads": 4}),
    "mamba_head_dim": (16, {"M.head_dim": 16}),
    "mamba_state": (16, {"M.state": 16}),
    "mamba_groups": (1, {"M.groups": 1}),
    "mamba_conv": (3, {"M.conv": 3}),
    "mamba_dt_limit": ([0.0, 1.0], {"M.dt_limit": (0.0, 1.0)}),
    "delta": ({"key_heads": 4, "key_dim": 16}, {"D.key_heads": 4, "D.key_dim": 16, "D.value_heads": 4}),
    "experts": (4, {"E.experts": 4}),
    "experts_per_token": (1, {"E.experts_per_token": 1}),
    "expert_dim": (64, {"E.inner": 64}),
    "shared_expert_dim": (0, {"E.shared_inner": 0}),
    "shared_expert_gate": (True, {"E.shared_gate": True}),
    "latent_dim": (32, {"E.latent": 32}),
    "router": ("softmax", {"E.router.scores": "softmax"}),
    "router_normalised": (False, {"E.router.normalised": False}),
    "router_bias": (True, {"E.router.bias": True}),
    "router_groups": (4, {"E.router.groups": 4}),
    "router_groups_per_token": (2, {"E.router.groups_per_token": 2}),
    "router_scale": (2.5, {"E.router.scale": 2.5}),
}
"""A setting that all blocks had in common -> (a value other than its old default, what blocks now have)."""
ALL_BLOCKS = "M*W-LDE"


def stored_run(folder: Path, changes: dict[str, Any]) -> None:
    """Writes the config.json of a run whose settings an older jaxthd wrote, with these among them."""
    write_config(folder, Config())
    stored = json.loads((folder / "config.json").read_text())
    for path, value in changes.items():
        *groups, name = path.split(".")
        fields = stored
        for group in groups:
            fields = fields[group]
        fields[name] = value
    (folder / "config.json").write_text(json.dumps(stored))


def test_every_removed_setting_is_tried_and_is_none_any_more():
    given = GIVEN.keys() | {f"model.llm.{name}" for name in MOVED}
    assert given == {f"{group}.{name}" for group, names in REMOVED.items() for name in names}
    assert not given & {setting.path for group in all_groups() for setting in group.settings}


@pytest.mark.parametrize("path", GIVEN)
def test_a_stored_one_is_replaced_and_told(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    value, expected = GIVEN[path]
    stored_run(tmp_path, {path: value})
    config = read_config(tmp_path)
    assert {name: attrgetter(name)(config) for name in expected} == expected
    printed = capsys.readouterr().err
    assert f"config.json: {path} {value!r} is no setting any more: " in printed
    assert not differences(tmp_path, config)


def of_blocks(config: Config, names: dict[str, Any]) -> dict[str, Any]:
    return {name: value_at(config, f"model.llm.blocks.{name}") for name in names}


@pytest.mark.parametrize("name", MOVED)
def test_a_stored_one_of_all_blocks_is_moved_to_each(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    value, expected = MOVED[name]
    stored_run(
        tmp_path, {"model.llm.blocks": {}, "model.llm.pattern": ALL_BLOCKS, f"model.llm.{name}": value}
    )
    config = read_config(tmp_path)
    assert of_blocks(config, expected) == expected
    assert f"settings of another name: model.llm.{name} is model.llm.blocks." in capsys.readouterr().err


@pytest.mark.parametrize("name", MOVED)
def test_a_config_file_may_give_one_of_all_blocks(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    value, expected = MOVED[name]
    (tmp_path / "old.py").write_text(
        "from jaxthd.config import *\nfrom jaxthd.config import DeltaConfig, LatentAttentionConfig\n"
        f"def config(): return Config(model=ModelConfig(llm=LLMConfig({ALL_BLOCKS!r}, {name}={value!r})))\n"
    )
    assert of_blocks(load_config(tmp_path / "old.py"), expected) == expected
    assert f"settings of another name: model.llm.{name} is model.llm.blocks." in capsys.readouterr().err


def test_a_file_that_is_read_again_is_not_warned_of_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    stored_run(tmp_path, {"compute.attention_block": 64})
    assert read_config(tmp_path) == read_config(tmp_path)
    assert capsys.readouterr().err.count("compute.attention_block 64 is no setting any more") == 1


def test_several_that_became_one_are_joined(tmp_path: Path):
    stored_run(tmp_path, {"data.filter.min_seconds": 1.0, "data.filter.max_seconds": 9.0})
    assert read_config(tmp_path).data.filter.seconds == (1.0, 9.0)
    stored_run(tmp_path, {"adapt.encoder_lr_factor": 0.1, "adapt.llm_lr_factor": 0.5})
    assert read_config(tmp_path).adapt.lr_factors == ("encoder=0.1", "llm=0.5")
    stored_run(tmp_path, {"train.beta1": 0.8, "train.optimizer_options": ["first_moment=bfloat16"]})
    assert read_config(tmp_path).train.optimizer_options == ("first_moment=bfloat16", "beta1=0.8")
    stored_run(tmp_path, {"train.beta1": 0.8, "train.optimizer": "lion"})
    assert read_config(tmp_path).train.optimizer_options == (), "which never read it"


def test_two_switches_that_became_one_value_are_joined(tmp_path: Path):
    stored_run(tmp_path, {"rollout.leave_one_out": True, "rollout.normalise_advantages": False})
    assert read_config(tmp_path).rollout.advantages == "leave_one_out"


def test_tar_files_join_their_manifests(tmp_path: Path):
    sets = {"data.manifest": ["/a.json", "/b.json"], "data.tarred_audio": ["", "/b.tar"]}
    stored_run(tmp_path, sets)
    assert read_config(tmp_path).data.manifest == ("/a.json", "/b.json::/b.tar")
    stored_run(tmp_path, sets | {"data.tarred_audio": ["/b.tar"]})
    with pytest.raises(UserError, match=r"1 sets of tar files are given for 2 manifests in data\.manifest"):
        read_config(tmp_path)


def test_a_stored_default_is_left_out_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    defaults = {f"{group}.{name}": x.was for group, names in REMOVED.items() for name, x in names.items()}
    stored_run(tmp_path, defaults)
    compute = replace(Config().compute, remat="full")  # such a run goes on bit by bit
    assert read_config(tmp_path) == replace(Config(), compute=compute)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("path", GIVEN)
def test_a_config_file_may_give_one(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Also in a file that another one varies. Elsewhere the dataclasses do not take it."""
    group, _, name = path.rpartition(".")
    value, expected = GIVEN[path]
    call = f"{kind_at(group).__name__}({name}={value!r})"
    for outer in reversed(group.split(".")):
        *above, _ = group.split(".")[: group.split(".").index(outer) + 1]
        kind = kind_at(".".join(above)).__name__ if above else "Config"
        call = f"{kind}({outer}={call})"
    (tmp_path / "old.py").write_text(f"from jaxthd.config import *\n\ndef config(): return {call}\n")
    (tmp_path / "varied.py").write_text(
        "from pathlib import Path\nfrom jaxthd import load_config\n\n"
        "def config(): return load_config(Path(__file__).with_name('old.py'))\n"
    )
    config = load_config(tmp_path / "varied.py")
    assert {name: attrgetter(name)(config) for name in expected} == expected
    assert f"old.py: {path} {value!r} is no setting any more: " in capsys.readouterr().err
    if path not in expected:  # else it is a derived field, which tests and benchmarks give
        with pytest.raises(TypeError, match=name):
            kind_at(group)(**{name: value})


@pytest.mark.parametrize(("group", "name", "old"), REPLACED)
def test_a_value_that_is_none_any_more_is_replaced(
    group: str, name: str, old: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    stored_run(tmp_path, {f"{group}.{name}": old})
    (tmp_path / "old.py").write_text(
        "from jaxthd.config import *\n\n"
        f"def config(): return Config({group}={kind_at(group).__name__}({name}={old!r}))\n"
    )
    now, why = REPLACED[group, name, old]
    for config in (read_config(tmp_path), load_config(tmp_path / "old.py")):
        assert attrgetter(f"{group}.{name}")(config) == now
    said = f"{group}.{name} {old!r} is no choice any more, {now!r} is: {why}"
    assert capsys.readouterr().err.count(said) == 2


def test_fields_of_a_run_that_were_elsewhere_are_found(tmp_path: Path):
    """Settings of the computation were once in model.* and train.*."""
    write_config(tmp_path, Config())
    stored = json.loads((tmp_path / "config.json").read_text())
    compute = stored.pop("compute")
    stored["model"]["dtype"], stored["train"]["xla_options"] = "bfloat16", compute["xla_options"]
    stored["model"]["llm"]["mamba_chunk"] = 64
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert read_config(tmp_path).compute.dtype == "bfloat16"


@pytest.mark.parametrize("path", GIVEN)
def test_a_command_line_may_give_one(path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What took its place counts as given, and goes before what the config file says."""
    value, expected = GIVEN[path]
    (tmp_path / "my.py").write_text("from jaxthd.config import *\n\ndef config(): return Config()\n")
    nested = value if isinstance(value, list) else [value]
    words = [json.dumps(x) if isinstance(x, list) else str(x) for x in nested]
    line = parse_command_line("train", [str(tmp_path / "my.py"), f"--{path.replace('_', '-')}", *words])
    assert {name: attrgetter(name)(line.config) for name in expected} == expected
    assert bool(line.given) == bool(expected)
    said = capsys.readouterr().err
    assert f"the command line: {path} " in said
    assert " is no setting any more: " in said


def test_a_switch_that_was_is_read_in_all_its_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "my.py").write_text("from jaxthd.config import *\n\ndef config(): return Config()\n")
    for words in (
        ["--compute.remat-llm", "False"],
        ["--compute.no-remat-llm"],
        ["--compute.remat_llm=false"],
    ):
        line = parse_command_line("train", [str(tmp_path / "my.py"), *words, "--train.steps", "7"])
        assert (line.config.compute.remat, line.config.train.steps) == ("none", 7)
        assert line.given == ("compute.remat", "train.steps")
    for words in (["--compute.remat-llm"], ["--compute.remat-llm", "true"]):
        assert parse_command_line("train", [str(tmp_path / "my.py"), *words]).config == Config()


def test_tars_are_named_with_the_manifest_that_the_same_line_gives(tmp_path: Path):
    (tmp_path / "my.py").write_text("from jaxthd.config import *\n\ndef config(): return Config()\n")
    words = ["--data.manifest", str(tmp_path / "m.json"), "--data.tarred-audio", str(tmp_path / "a.tar")]
    line = parse_command_line("train", [str(tmp_path / "my.py"), *words])
    assert line.config.data.manifest == (f"{tmp_path}/m.json::{tmp_path}/a.tar",)
