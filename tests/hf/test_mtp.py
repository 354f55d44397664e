"""Checkpoints with multi-token prediction: what their tensors mean, and that they come back."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxthd.checkpoints.weights import load_weights, named_weights
from jaxthd.config import Config, LLMConfig, ModelConfig
from jaxthd.convert import export_weights, import_weights
from jaxthd.errors import UserError
from jaxthd.files.run_folder import read_config
from jaxthd.hf.checkpoint import model_config, open_checkpoint
from jaxthd.hf.export import export
from jaxthd.hf.nemotron_h import NEMOTRON_H
from jaxthd.models.blocks import Attention, MoE
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from tests.helpers import assert_same, spans
from tests.hf.published import BASE, COMPUTE, assert_identical, change_published, tensors, write_published
from tests.mtp_reference import mtp_logits, softmax

LENGTHS = (5, 1, 16, 2, 3)
TEXT = replace(BASE, encoder=None)
"""What the checkpoints do not hold is drawn: that takes longer than all else."""


def mtp_tensors(llm: LLMConfig, modules: int = 1) -> dict[str, np.ndarray]:
    """Of "*E", by the names and shapes of released checkpoints (vLLM's NemotronHMultiTokenPredictor)."""
    attention, moe = llm.blocks["*"], llm.blocks["E"]
    assert isinstance(attention, Attention)
    assert isinstance(moe, MoE)
    dim = llm.dim
    heads, shared = (n * attention.head_dim for n in (attention.heads, attention.kv_heads))
    shapes: dict[str, tuple[int, ...]] = {}
    for module in range(modules):
        first, second = (f"mtp.layers.{2 * module + n}" for n in range(2))
        shapes |= {
            f"{first}.enorm.weight": (dim,),
            f"{first}.hnorm.weight": (dim,),
            f"{first}.eh_proj.weight": (dim, 2 * dim),
            f"{first}.norm.weight": (dim,),
            f"{first}.mixer.q_proj.weight": (heads, dim),
            f"{first}.mixer.k_proj.weight": (shared, dim),
            f"{first}.mixer.v_proj.weight": (shared, dim),
            f"{first}.mixer.o_proj.weight": (dim, heads),
            f"{second}.norm.weight": (dim,),
            f"{second}.mixer.gate.weight": (moe.experts, dim),
            f"{second}.mixer.gate.e_score_correction_bias": (moe.experts,),
            f"{second}.mixer.shared_experts.up_proj.weight": (moe.shared_inner, dim),
            f"{second}.mixer.shared_experts.down_proj.weight": (dim, moe.shared_inner),
            f"{second}.final_layernorm.weight": (dim,),
        }
        for expert in range(moe.experts):
            shapes |= {
                f"{second}.mixer.experts.{expert}.up_proj.weight": (moe.inner, dim),
                f"{second}.mixer.experts.{expert}.down_proj.weight": (dim, moe.inner),
            }
    rng = np.random.default_rng(0)
    return {
        name: (rng.normal(size=s) / s[-1] ** 0.5 + ("norm" in name)).astype(np.float32)
        for name, s in shapes.items()
    }


def write(folder: Path, modules: int = 1, **fields: Any) -> Path:
    """The library's checkpoint, with multi-token prediction added by hand; its tensors in the same file."""

    def change(settings: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        settings |= {"num_nextn_predict_layers": modules, "mtp_hybrid_override_pattern": "*E"} | fields
        tensors |= mtp_tensors(NEMOTRON_H.read(settings, BASE.llm), modules)

    return change_published(write_published("nemotron_h", folder), change)


def test_predictions_are_those_of_the_tensors(tmp_path):
    """Two depths with the one set of weights, of documents packed in one buffer; against each alone, written
    out, from the tensors on disk and what the head takes."""
    folder = write(tmp_path / "llm")
    read = model_config(folder, model=replace(BASE, llm=replace(BASE.llm, mtp_depths=2)))
    assert (read.llm.mtp_pattern, read.llm.mtp_depths, read.llm.mtp_shared) == ("*E", 2, True)
    config = Config(model=read, compute=replace(COMPUTE, dtype="float64"))
    rng = np.random.default_rng(1)
    documents = []
    for number, n in enumerate(LENGTHS):
        tokens, some = rng.integers(1, read.llm.vocab_size, n).astype(np.int32), np.ones(n, bool)
        documents.append(Document(str(number), tokens, ~some, some))
    sizes = {"capacity": 32, "audio_capacity": 0, "max_documents": 8, "order_seed": None}
    batch, _ = pack_row(documents, **sizes, depths=2)
    with jax.enable_x64(True):
        weights = load_weights([folder], Blueprint(config), make_mesh(config.mesh))
        graph = Blueprint(config).graph

        def predicted(params: Any, buffers: Any, batch: Any) -> Any:
            model = nnx.merge(graph, params, buffers)
            (x_ND, *future), _ = model.embed_with_future(batch, axes=(), train=False)
            h_ND, _ = model.decoder(x_ND, model.segments(batch, ()))
            return model.log_probs_with_future(h_ND, future, batch, ())[1].log_probs, model.hidden(h_ND), x_ND

        found = jax.jit(predicted)(*weights, jax.tree.map(jnp.asarray, batch))
        logp_KN, h_ND, x_ND = map(np.asarray, found)
        stored = {n: x.astype(np.float64) for n, x in tensors(folder).items()}
        head = stored["lm_head.weight"]
        for one, span in zip(documents, spans(LENGTHS), strict=True):
            logits = mtp_logits(stored, read.llm, 2, h_ND[span], x_ND[span], head)
            for depth, logits_TV in enumerate(logits):
                want = np.zeros(len(one))
                targets = one.tokens[depth + 2 :]
                logp_TV = np.log(softmax(logits_TV, np))
                want[: len(targets)] = logp_TV[np.arange(len(targets)), targets]
                assert_same(logp_KN[depth, span], want, 1e-10)


def imported(folder: Path, model: ModelConfig) -> dict[str, np.ndarray]:
    config = Config(model=model)
    weights = load_weights([folder], Blueprint(config), make_mesh(config.mesh))
    return jax.tree.map(np.asarray, named_weights(weights))


def given_back(published: Path, tmp_path: Path) -> Any:
    """Imports and exports the LLM, whose tensors must come back; returns the settings of the export."""
    encoder = write_published("fastconformer", tmp_path / "encoder")
    import_weights([str(published), str(encoder)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "out", form="llm")
    assert_identical(tensors(tmp_path / "out"), tensors(published))
    return json.loads((tmp_path / "out" / "config.json").read_text())


def test_it_comes_back_bit_identical(tmp_path):
    """Of depths with weights of their own one after the other. A run may start from it with the depths or
    without."""
    folder = write(tmp_path / "llm", 2)
    settings = given_back(folder, tmp_path)
    assert settings["num_nextn_predict_layers"] == 2
    assert settings["mtp_hybrid_override_pattern"] == "*E"
    assert settings["mtp_layers_block_type"] == ["full_attention", "moe"]
    assert model_config(tmp_path / "out") == model_config(folder)
    model = read_config(tmp_path / "imported").model
    whole = imported(tmp_path / "imported", model)
    without = imported(tmp_path / "imported", replace(model, llm=replace(model.llm, mtp_pattern="")))
    assert whole.keys() - without.keys() == {name for name in whole if name.startswith("mtp.")}
    for name, x in without.items():
        np.testing.assert_array_equal(x, whole[name])


def test_settings_without_tensors_mean_none(tmp_path):
    """As the transformers library leaves a checkpoint that it saved again."""
    folder = write(tmp_path / "llm", 0, num_nextn_predict_layers=1)
    model = model_config(folder, model=TEXT)
    assert model.llm.mtp_pattern == ""
    assert "num_nextn_predict_layers" not in NEMOTRON_H.write(model.llm)
    assert not any(name.startswith("mtp.") for name in imported(folder, model))


def test_a_model_may_do_without_it(tmp_path, capsys):
    """Left out, and said."""
    folder = write(tmp_path / "llm")
    read = model_config(folder, model=TEXT)
    model = replace(read, llm=replace(read.llm, mtp_pattern=""))
    arrays = imported(folder, model)
    assert not any(name.startswith("mtp.") for name in arrays)
    assert "not read, being no part of the model: mtp (" in capsys.readouterr().out


def test_it_is_drawn_where_the_checkpoint_has_none(tmp_path, capsys):
    folder = write_published("nemotron_h", tmp_path / "llm")
    read = model_config(folder, model=TEXT)
    llm = replace(read.llm, mtp_pattern="*E", mtp_depths=2, mtp_shared=False)
    arrays = imported(folder, replace(read, llm=llm))
    drawn = [name for name in arrays if name.startswith("mtp.")]
    assert arrays["mtp.depths.eh_proj.w"].shape == (2, 2 * llm.dim, llm.dim)
    assert f"mtp ({len(drawn)} arrays)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mtp.layers.2.norm.weight": np.zeros(32, np.float32)}, "unknown: mtp.layers.2.norm.weight"),
        ({"mtp.layers.0.eh_proj.weight": np.zeros((32, 32), np.float32)}, r"another shape: mtp.*\[32, 32\]"),
        ({"mtp.layers.0.hnorm.weight": None}, "missing: mtp.layers.0.hnorm.weight"),
    ],
)
def test_damaged_tensors_are_named(change, message, tmp_path):
    folder = write(tmp_path / "llm")

    def damage(settings: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors |= {name: x for name, x in change.items() if x is not None}
        for name in change.keys() - {name for name, x in change.items() if x is not None}:
            del tensors[name]

    change_published(folder, damage)
    with pytest.raises(UserError, match=message):
        imported(folder, model_config(folder, model=TEXT))


def test_other_weights_are_refused(tmp_path):
    """Two sets of weights where the model shares one; a pattern that is not the checkpoint's."""
    folder = write(tmp_path / "llm", 2)
    read = model_config(folder, model=TEXT)
    assert (read.llm.mtp_depths, read.llm.mtp_shared) == (2, False)
    for change in ({"mtp_shared": True}, {"mtp_pattern": "*"}, {"mtp_depths": 1}):
        with pytest.raises(UserError, match=r"model\.llm\.mtp_.*there"):
            imported(folder, replace(read, llm=replace(read.llm, **change)))


def deepseek_tensors(settings: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Adds them by DeepSeek-V3's names: one more layer, with copies of the embedding and the head."""
    last, dim = settings["num_hidden_layers"] - 1, settings["hidden_size"]
    more = {
        "eh_proj.weight": np.arange(2 * dim * dim, dtype=np.float32).reshape(dim, 2 * dim),
        "embed_tokens.weight": tensors["model.embed_tokens.weight"],
        "shared_head.head.weight": tensors["lm_head.weight"],
    }
    more |= {
        f"{name}.weight": np.float32(n) + np.arange(dim, dtype=np.float32)
        for n, name in enumerate(("enorm", "hnorm", "shared_head.norm"))
    }
    layer = f"model.layers.{last}."
    more |= {n.removeprefix(layer): x + 1 for n, x in tensors.items() if n.startswith(layer)}
    settings["num_nextn_predict_layers"] = 1
    tensors |= {f"model.layers.{last + 1}.{name}": x for name, x in more.items()}


def qwen_tensors(settings: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Adds them by the names of Qwen3-Next and Qwen3.5; settings need not tell of it."""
    dim, kinds = settings["hidden_size"], settings["layer_types"]
    layer = f"model.layers.{kinds.index('full_attention')}."
    more = {"mtp.fc.weight": np.arange(2 * dim * dim, dtype=np.float32).reshape(dim, 2 * dim)}
    more |= {
        f"mtp.{name}.weight": np.float32(n) + np.arange(dim, dtype=np.float32)
        for n, name in enumerate(("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"))
    }
    more |= {n.replace(layer, "mtp.layers.0."): x + 1 for n, x in tensors.items() if n.startswith(layer)}
    tensors |= more


@pytest.mark.parametrize(
    ("name", "made", "pattern"),
    [
        ("deepseek_v3", deepseek_tensors, "LE"),
        ("qwen3_next", qwen_tensors, "*E"),
        ("qwen3_5", qwen_tensors, "*-"),
    ],
)
def test_that_of_other_families_comes_back_bit_identical(name, made, pattern, tmp_path, capsys):
    """A model may do without it, and a checkpoint without its tensors has none."""
    folder = write_published(name, tmp_path / "llm")
    assert model_config(folder, model=TEXT).llm.mtp_pattern == ""
    read = model_config(change_published(folder, made), model=TEXT)
    assert (read.llm.mtp_pattern, read.llm.mtp_modules) == (pattern, 1)
    whole = imported(folder, read)
    norms = [whole[f"mtp.depths.{norm}.weight"][0, 0] for norm in ("enorm", "hnorm", "final_layernorm")]
    assert norms == [0, 1, 2]
    assert whole["mtp.depths.eh_proj.w"][0, 1, 0] == 1, "transposed"
    given_back(folder, tmp_path)
    assert model_config(tmp_path / "out", model=TEXT) == read
    capsys.readouterr()
    without = imported(folder, replace(read, llm=replace(read.llm, mtp_pattern="")))
    assert whole.keys() - without.keys() == {each for each in whole if each.startswith("mtp.")}
    assert "not read, being no part of the model: " in capsys.readouterr().out
    own = model_config(folder, model=replace(TEXT, llm=replace(TEXT.llm, mtp_shared=False)))
    family = open_checkpoint(folder).family
    assert family.configure(family.fields(own), TEXT).llm == read.llm, (
        "a set of weights of its own is one too"
    )


def test_an_export_like_a_checkpoint_keeps_what_the_model_does_without(tmp_path):
    """Its layer of multi-token prediction is copied, and said in config.json, so it is read back."""
    folder = change_published(write_published("deepseek_v3", tmp_path / "llm"), deepseek_tensors)
    model = replace(TEXT, llm=replace(model_config(folder, model=TEXT).llm, mtp_pattern=""))
    shapes = {name: x.shape for name, x in imported(folder, model).items()}
    family = open_checkpoint(folder).family
    export(
        model, shapes, lambda part: np.zeros(part.shape, np.float32), family, tmp_path / "out", like=folder
    )
    assert tensors(tmp_path / "out").keys() == tensors(folder).keys()
    assert model_config(tmp_path / "out", model=TEXT).llm.mtp_pattern == "LE"
