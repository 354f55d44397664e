"""Import and export are inverses; a mismatch is reported by name, and nothing is written."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from jaxthd import convert
from jaxthd.checkpoints.weights import Weights, load_model, load_weights, named_weights, start_state
from jaxthd.config import Config, DataConfig, MeshConfig, ModelConfig
from jaxthd.convert import export_weights, import_weights, main
from jaxthd.data.text.prompt import PromptTemplate
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.errors import UserError
from jaxthd.files.run_folder import read_config, write_config
from jaxthd.files.tensor_names import ArraySlice
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from jaxthd.hf.family import TokenIds
from jaxthd.hf.generation_config import added_end_tokens, write_generation_config
from jaxthd.hf.registry import FAMILIES, FORMATS
from jaxthd.models.blocks import Router
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import checkpoint_layout, init_state
from tests.hf.published import BASE, COMPUTE, REFERENCES, assert_identical, tensors, write_published


@pytest.fixture(scope="module")
def omni(tmp_path_factory) -> tuple[Path, Path]:
    """(the published folder, the result of importing it)."""
    folder = tmp_path_factory.mktemp("omni")
    published = write_published("nemotron_omni", folder / "published")
    # A vision tower and a tokenizer, which are passed through.
    vision = {"vision_model.a": np.arange(6, dtype=np.float16), "mlp1.0.weight": np.ones((2, 3), np.float32)}
    save_file(tensors(published) | vision, published / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(REFERENCES / "chat" / "tokenizer.json", published / "tokenizer.json")
    import_weights([str(published)], folder / "imported")
    return published, folder / "imported"


def counters(model: ModelConfig) -> dict[str, np.ndarray]:
    """BatchNorm counters, which export writes and the references omit."""
    names = (
        f"sound_encoder.encoder.layers.{i}.conv.norm.num_batches_tracked"
        for i in range(model.audio_encoder.layers)
    )
    return {name: np.zeros((), np.int64) for name in names}


@pytest.mark.parametrize("is_there", [False, True], ids=["new", "empty"])
def test_what_fails_in_the_middle_leaves_nothing(omni, tmp_path, monkeypatch, is_there: bool):
    """A folder that was there stays, empty: the same command works once the cause is gone."""
    published, imported = omni
    commands = {
        "imported": lambda out: import_weights([str(published)], out),
        "exported": lambda out: export_weights(imported, out, form="parts"),
    }
    with monkeypatch.context() as patch:
        full = OSError("no space left on device")
        patch.setattr(convert.Checkpoints, "save", lambda *_, **__: raising(full))
        patch.setattr(convert, "write_generation_config", lambda *_: raising(full))
        patch.setattr(convert, "write_tokenizer", lambda *_: raising(full))
        for name, command in commands.items():
            if is_there:
                (tmp_path / name).mkdir()
            with pytest.raises(OSError, match="no space left"):
                command(tmp_path / name)
            assert [*tmp_path.rglob("*")] == [tmp_path / name] * is_there
            for folder in tmp_path.iterdir():
                folder.rmdir()
    if is_there:
        (tmp_path / "exported").mkdir()
    commands["exported"](tmp_path / "exported")
    assert (tmp_path / "exported" / "llm" / "config.json").is_file()


def raising(error: Exception) -> None:
    raise error


def test_export_of_an_import_is_bit_identical(omni, tmp_path):
    """Tested in one file and in several; with the vision tower, the tokenizer and the original's settings."""
    published, imported = omni
    want = tensors(published) | counters(model_config(published))
    for number, limit in enumerate((4 * 2**30, 20_000)):
        out = tmp_path / str(number)
        export_weights(imported, out, like=published, limit=limit)
        assert_identical(tensors(out), want)
        assert (len(list(out.glob("*.safetensors"))) > 1) == (out / "model.safetensors.index.json").exists()
        settings, original = (json.loads((x / "config.json").read_text()) for x in (out, published))
        assert original.keys() <= settings.keys()
        assert {k: settings[k] for k in original if k.endswith("token_id")} == {
            k: x for k, x in original.items() if k.endswith("token_id")
        }
        assert (out / "tokenizer.json").exists()
        assert model_config(out) == model_config(published)


END, TURN, RESERVED = 0, 2, 3


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> tuple[Path, Path]:
    """(a published LLM, a run of its weights with chatml and a tokenizer whose eos ends no turn)."""
    folder = tmp_path_factory.mktemp("chat")
    published = write_published("qwen3", folder / "published")
    words = {"<|endoftext|>": END, "<|im_start|>": 1, "<|im_end|>": TURN, "<|reserved|>": RESERVED, "a": 4}
    tokenizer = Tokenizer(WordLevel(words, unk_token="a"))
    tokenizer.add_special_tokens(list(words)[:4])
    tokenizer.save(str(published / "tokenizer.json"))
    settings = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    (published / "tokenizer_config.json").write_text(json.dumps(settings))
    own = {"eos_token_id": [END, RESERVED], "temperature": 0.6, "top_p": 0.95, "pad_token_id": 1}
    (published / "generation_config.json").write_text(json.dumps(own))
    config = import_weights([str(published)], folder / "run")
    chatml = replace(config.data, template="chatml")
    write_config(folder / "run", replace(config, data=chatml))
    return published, folder / "run"


@pytest.mark.parametrize("like", [False, True])
def test_an_export_names_every_token_that_ends_an_answer(chat, tmp_path, like):
    """transformers takes them from generation_config.json, and without that from config.json."""
    published, run = chat
    export_weights(run, tmp_path / "out", like=published if like else None)
    settings, generation = (
        json.loads((tmp_path / "out" / name).read_text())
        for name in ("config.json", "generation_config.json")
    )
    assert settings["eos_token_id"] == generation["eos_token_id"] == [TURN, END, RESERVED]
    # The other entries of the folder that the run came from stay.
    assert (generation["temperature"], generation["top_p"]) == (0.6, 0.95)
    assert generation["pad_token_id"] == 1
    again = import_weights([str(tmp_path / "out")], tmp_path / "again")
    tokenizer = load_tokenizer(again.data.tokenizer)
    assert {*PromptTemplate(again.data, tokenizer).stop_ids} == {TURN, END, RESERVED}


def test_an_export_does_not_need_the_prompt(chat, tmp_path):
    """The tokenizer of an imported model need not have words for jaxthd's default prompt."""
    _, run = chat
    imported = tmp_path / "imported"
    shutil.copytree(run, imported)
    config = read_config(imported)
    write_config(imported, replace(config, data=replace(config.data, prompt="<|reserved|>")))
    export_weights(imported, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"][0] == TURN


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_that_holds_an_llm_has_a_place_for_the_end_tokens(form):
    tokens = TokenIds(bos_id=1, eos_ids=(5, 6), pad_id=0, audio_id=9)
    for family in (f for f in FAMILIES if f.format == form):
        assert (family.token_fields is not None) == family.holds("head"), family.title
        if family.token_fields:
            fields = family.token_fields(tokens)
            assert _of_text(fields)["eos_token_id"] == [5, 6], family.title
            assert added_end_tokens(fields, fields) == {}
            one = family.token_fields(tokens._replace(eos_ids=(5,)))
            assert _of_text(one)["eos_token_id"] == 5


def _of_text(fields: dict[str, Any]) -> dict[str, Any]:
    """The settings of the text model, which may lie in a part of a part."""
    return next((_of_text(fields[x]) for x in ("thinker_config", "text_config") if x in fields), fields)


def test_end_tokens_are_added_where_the_original_names_its_own():
    """A composite model's may stand at the top too, and under llm_config in place of text_config."""
    fields = {"text_config": {"bos_token_id": 1, "eos_token_id": [5, 6], "pad_token_id": 0}}
    added = {"text_config": {"eos_token_id": [5, 6]}}
    assert added_end_tokens({"llm_config": {"eos_token_id": 5}}, fields) == added
    assert added_end_tokens({"eos_token_id": 5, "text_config": {}}, fields) == added | {
        "eos_token_id": [5, 6]
    }
    assert added_end_tokens({"eos_token_id": [6, 5], "text_config": {}}, fields) == added


def test_a_generation_config_that_names_the_tokens_is_left_as_it_is(tmp_path):
    tokens = TokenIds(bos_id=1, eos_ids=(5, 6), pad_id=0, audio_id=9)
    file = tmp_path / "generation_config.json"
    write_generation_config(tmp_path, tokens._replace(eos_ids=(5,)))
    assert json.loads(file.read_text()) == {"bos_token_id": 1, "pad_token_id": 0, "eos_token_id": 5}
    file.write_text(text := '{"eos_token_id": [6, 5]}')
    write_generation_config(tmp_path, tokens)
    assert file.read_text() == text
    file.write_text("[]")
    with pytest.raises(UserError, match=r"generation_config\.json cannot be read \(it is no JSON object\)"):
        write_generation_config(tmp_path, tokens)


def test_parts_make_the_whole_again(omni, tmp_path):
    _, imported = omni
    export_weights(imported, tmp_path / "parts", form="parts")
    sources = [str(tmp_path / "parts" / part) for part in ("llm", "encoder", "adapter")]
    import_weights(sources, tmp_path / "again")
    export_weights(imported, tmp_path / "a")
    export_weights(tmp_path / "again", tmp_path / "b")
    assert_identical(tensors(tmp_path / "b"), tensors(tmp_path / "a"))


def test_a_slice_of_an_array_is_the_same_from_the_host_and_from_a_device(monkeypatch):
    held = {"a": jax.numpy.arange(24.0).reshape(2, 3, 4)}
    index = convert._indexing(make_mesh(MeshConfig()))
    for at in ((), (1,), (1, 2)):
        part = ArraySlice("a", at, (), 0, (), ())
        for is_there in (True, False):
            monkeypatch.setattr(convert, "is_on_host", lambda _, is_there=is_there: is_there)
            np.testing.assert_array_equal(convert._taken(held, index, part), np.asarray(held["a"])[at])


@pytest.mark.parametrize(
    "name", ["nemotron_h", "nemotron_h_latent", "qwen3", "qwen3_moe", "qwen3_next", "gpt_oss"]
)
def test_llms_come_back_bit_identical(name, tmp_path):
    """The encoder is another checkpoint's; the adapter is randomly initialised, and one linear layer."""
    published = write_published(name, tmp_path / "llm")
    encoder = write_published("fastconformer", tmp_path / "encoder")
    config = import_weights([str(published), str(encoder)], tmp_path / "imported")
    assert config.model.llm == model_config(published).llm
    export_weights(tmp_path / "imported", tmp_path / "out")
    assert_identical(tensors(tmp_path / "out" / "llm"), tensors(published))


def test_the_tokenizer_of_an_import_is_the_llms(chat, tmp_path):
    """An encoder's folder may hold the tokenizer of its CTC head, and may be named after the LLM's."""
    published, _ = chat
    encoder = write_published("fastconformer", tmp_path / "encoder")
    shutil.copyfile(REFERENCES / "chat" / "tokenizer.json", encoder / "tokenizer.json")
    config = import_weights([str(published), str(encoder)], tmp_path / "out")
    assert "<|reserved|>" in Path(config.data.tokenizer, "tokenizer.json").read_text()


def test_bfloat16_rounds_once(omni, tmp_path):
    """Scan rates, time steps and statistics stay float32; values already rounded come back unchanged."""
    _, imported = omni
    export_weights(imported, tmp_path / "bf16", dtype="bfloat16")
    export_weights(imported, tmp_path / "f32")
    rounded, exact = tensors(tmp_path / "bf16"), tensors(tmp_path / "f32")
    kept = {name for name, x in rounded.items() if x.dtype == np.float32}
    assert {name.rpartition(".")[2] for name in kept} == {
        "A_log",
        "D",
        "dt_bias",
        "e_score_correction_bias",
        "running_mean",
        "running_var",
    }
    for name, x in rounded.items():
        np.testing.assert_array_equal(x, exact[name].astype(x.dtype))
    import_weights([str(tmp_path / "bf16")], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "again", dtype="bfloat16")
    assert_identical(tensors(tmp_path / "again"), rounded)


@pytest.mark.parametrize(
    "mesh",
    [
        (1, 2, 2, 1),
        *(pytest.param(mesh, marks=pytest.mark.exhaustive) for mesh in [(2, 1, 1, 2), (2, 2, 1, 1)]),
    ],
)
def test_any_mesh_holds_the_same_weights(omni, mesh):
    """Weights are streamed into shards: tensor-sharded, FSDP-sharded and divided into stages."""
    published, imported = omni
    model, data = model_config(published, model=BASE), DataConfig(tokenizer=str(published))
    one = Config(model=model, data=data)
    want = named_weights(load_weights([published], Blueprint(one), make_mesh(one.mesh)))
    config = Config(mesh=MeshConfig(*mesh), model=model, data=data)
    on = make_mesh(config.mesh)
    for source in (published, imported):
        state = start_state(Blueprint(replace_init(config, source)), on)
        used = load_model([source], Blueprint(config), on)
        assert_trees_equal(used, Weights(state.params, state.buffers))
        canonical = checkpoint_layout(state, Blueprint(config), on)
        found = named_weights(Weights(canonical.params, canonical.buffers))
        assert found.keys() == want.keys()
        for name in want:
            np.testing.assert_array_equal(found[name], want[name], err_msg=name)


def assert_trees_equal(found: Any, want: Any) -> None:
    """Compares values and their sharding."""

    def same(x: Any, y: Any) -> None:
        np.testing.assert_array_equal(x, y)
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)

    jax.tree.map(same, found, want)


def replace_init(config: Config, *sources: Path) -> Config:
    return replace(config, train=replace(config.train, init_from=tuple(map(str, sources))))


def test_what_no_source_gives_is_drawn(tmp_path, capsys):
    """The random values are the same as without sources; a later source overrides an earlier one."""
    llm = write_published("nemotron_h", tmp_path / "llm")
    config = Config(model=model_config(llm, model=BASE), compute=COMPUTE)
    mesh = make_mesh(config.mesh)
    fresh = init_state(Blueprint(config), mesh)
    drawn = named_weights(Weights(fresh.params, fresh.buffers))
    found = named_weights(load_weights([llm], Blueprint(config), mesh))
    for name, x in found.items():
        is_drawn = name.startswith(("encoder.", "adapter."))
        assert is_drawn == bool(np.array_equal(x, drawn[name])) or not np.ptp(x), name
    assert "because no source holds them: adapter (1 array), encoder" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"no weights for adapter \(1 array\), encoder .* whole model"):
        load_weights([llm], Blueprint(config), mesh, partly=False)

    weights = tensors(llm)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text((llm / "config.json").read_text())
    save_file({k: x + 1 for k, x in weights.items()}, other / "model.safetensors")
    both = named_weights(load_weights([other, llm], Blueprint(config), mesh))
    np.testing.assert_array_equal(both["head"], weights["lm_head.weight"])


def damaged(name: str, folder: Path) -> str:
    """Damages the checkpoint in `folder`; returns the expected message."""
    file = folder / "model.safetensors"
    named = load_file(file)
    one = "backbone.layers.0.mixer.A_log"
    match name:
        case "missing":
            del named[one]
        case "unknown":
            named["backbone.layers.0.mixer.extra"] = named[one]
        case "misshapen":
            named[one] = named[one][:4]
        case "cut off":
            file.write_bytes(file.read_bytes()[:-100])
            return "no whole safetensors file"
        case "no json":
            (folder / "config.json").write_text("{")
            return "cannot be read"
        case "other family":
            (folder / "config.json").write_text('{"model_type": "t5"}')
            return "model_type 't5'; expected one of nemotron_h"
        case "biases":
            fields = json.loads((folder / "config.json").read_text()) | {"use_bias": True}
            (folder / "config.json").write_text(json.dumps(fields))
            return r"use_bias: True \(jaxthd computes False\)"
        case "shard is gone":
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {one: "model-00001-of-00002.safetensors"}})
            )
            return "lacks model-00001-of-00002.safetensors"
        case "index climbs":
            (folder / "model.safetensors.index.json").write_text(
                json.dumps({"weight_map": {one: "../secret.safetensors"}})
            )
            return "expected files in its own folder"
    save_file(named, file)
    return {
        "missing": f"missing: {one}\n",
        "unknown": "unknown: backbone.layers.0.mixer.extra\n",
        "misshapen": rf"of another shape: {one} \[4\], not \[8\]",
    }[name]


@pytest.mark.parametrize(
    "case",
    [
        "missing",
        "unknown",
        "misshapen",
        "cut off",
        "no json",
        "other family",
        "biases",
        "shard is gone",
        "index climbs",
    ],
)
def test_damaged_checkpoints_are_refused(case, tmp_path):
    """The message names the damage, and nothing is written."""
    llm = write_published("nemotron_h", tmp_path / "llm")
    encoder = write_published("fastconformer", tmp_path / "encoder")
    message = damaged(case, llm)
    with pytest.raises(UserError, match=message):
        import_weights([str(llm), str(encoder)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_settings_are_named(omni):
    published, imported = omni
    model = model_config(published, model=BASE)
    config = Config(
        model=replace(model, llm=model.llm.with_settings("E", router=Router()).with_settings("*", heads=8))
    )
    with pytest.raises(
        UserError, match=r"model.llm.blocks.\*.heads: 4 there, 8 here\n.*router.scale: 2.5 there, 1.0"
    ):
        load_weights([published], Blueprint(config), make_mesh(config.mesh))
    with pytest.raises(
        UserError, match=r"model.llm.blocks.\*.heads: 4 there, 8 here\n.*router.scale: 2.5 there, 1.0"
    ):
        load_weights([imported], Blueprint(config), make_mesh(config.mesh))


def test_export_writes_into_new_folders_only(omni, tmp_path):
    _, imported = omni
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        export_weights(imported, tmp_path)
    with pytest.raises(UserError, match="holds no checkpoints"):
        export_weights(tmp_path, tmp_path / "out")
    encoder = str(write_published("fastconformer", tmp_path / "encoder"))
    with pytest.raises(UserError, match="no weights of an LLM"):
        import_weights([encoder], tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["encoder", "note.txt"]


def test_commands(omni, tmp_path, capsys):
    published, _ = omni
    main(["import", str(published), "--out", str(tmp_path / "in")])
    main(["export", str(tmp_path / "in"), "--out", str(tmp_path / "out"), "--format", "llm"])
    assert "in: ME*-M, dim 32; FastConformer of dim 32" in capsys.readouterr().out
    assert open_checkpoint(tmp_path / "out").covers("decoder.norm.weight")
