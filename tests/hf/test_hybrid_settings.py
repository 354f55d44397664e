"""Settings of Bamba, Granite 4, Falcon-H1, LFM2 and OLMo Hybrid: read, written back, refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.config import LLMConfig
from jaxthd.config.listing import value_at
from jaxthd.convert import export_weights, import_weights
from jaxthd.errors import UserError
from jaxthd.hf.bamba import BAMBA, GRANITE_HYBRID
from jaxthd.hf.decoder import Decoder
from jaxthd.hf.falcon_h1 import FALCON_H1
from jaxthd.hf.lfm2 import LFM2
from jaxthd.hf.olmo_hybrid import OLMO_HYBRID
from tests.hf.published import assert_identical, change_published, tensors, write_published

SIZES: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "rms_norm_eps": 1e-5,
    "mamba_n_heads": 8,
}
TYPES = ["mamba", "attention", "mamba", "mamba"]
FACTORS = {
    "mlp_multipliers": [0.5, 2.0],
    "ssm_multipliers": [0.5, 2.0, 0.25, 4.0, 1.0],
    "key_multiplier": 0.7,
}
FIELDS: dict[str, tuple[Decoder, dict[str, Any]]] = {
    "bamba": (BAMBA, SIZES | {"attn_layer_indices": [1]}),
    "granite": (GRANITE_HYBRID, SIZES | {"layer_types": TYPES, "attention_multiplier": 0.0078125}),
    "granite_dense": (
        GRANITE_HYBRID,
        SIZES
        | {"layers_block_type": ["attention"] * 4, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "falcon": (FALCON_H1, SIZES | FACTORS | {"mamba_d_ssm": 48, "mamba_rms_norm": True}),
    "lfm2": (LFM2, SIZES | {"full_attn_idxs": [2], "norm_eps": 1e-5}),
    "olmo": (OLMO_HYBRID, SIZES | {"rope_parameters": {"rope_theta": None}}),
}


def read(name: str, **changed: Any) -> LLMConfig:
    decoder, fields = FIELDS[name]
    return decoder.read(fields | changed, LLMConfig())


@pytest.mark.parametrize("name", FIELDS)
def test_settings_are_read_and_written_back(name: str) -> None:
    llm, decoder = read(name), FIELDS[name][0]
    assert decoder.read(decoder.write(llm), LLMConfig()) == llm


@pytest.mark.parametrize(
    ("name", "changed", "settings"),
    [
        ("bamba", {}, {"pattern": "M-*-M-M-", "blocks.*.rope.fraction": 0.5, "blocks.M.head_dim": 16}),
        ("bamba", {"partial_rotary_factor": 1.0}, {"blocks.*.rope.fraction": 0.5}),
        ("bamba", {"rope_parameters": {"partial_rotary_factor": 1.0}}, {"blocks.*.rope.fraction": 1.0}),
        ("bamba", {"attn_layer_indices": None, "mamba_d_head": 16}, {"pattern": "M-" * 4}),
        ("granite", {}, {"pattern": "ME*EMEME", "blocks.*.rope.theta": 0.0, "blocks.E.shared_inner": 1024}),
        ("granite", {"shared_intermediate_size": None}, {"blocks.E.experts": 8}),
        ("granite_dense", {}, {"pattern": "*-" * 4, "blocks.*.rope.theta": 1e4, "blocks.-.inner": 1024}),
        ("falcon", {}, {"blocks.H.mamba.norm": "before_gate", "blocks.H.mamba.head_dim": 6}),
        ("falcon", {"mamba_norm_before_gate": False}, {"blocks.H.mamba.norm": "after_gate"}),
        ("falcon", {"mamba_rms_norm": None}, {"blocks.H.mamba.norm": "none"}),
        ("falcon", {"mamba_d_ssm": None}, {"blocks.H.mamba.head_dim": 16}),
        ("lfm2", {}, {"pattern": "C-C-*-C-", "blocks.-.inner": 256, "blocks.*.rope.theta": 1e6}),
        ("lfm2", {"block_auto_adjust_ff_dim": False}, {"blocks.-.inner": 96, "tied_embedding": True}),
        ("lfm2", {"block_ffn_dim_multiplier": None, "block_ff_dim": 9}, {"blocks.-.inner": 6}),
        ("olmo", {}, {"pattern": "D-D-D-*F", "blocks.D.key_dim": 12, "blocks.D.value_dim": 24}),
        ("olmo", {}, {"blocks.D.key_heads": 4, "blocks.D.norm_eps": 1e-5, "blocks.F.norm_after": True}),
        ("olmo", {"num_hidden_layers": 2}, {"pattern": "D-*F", "blocks.D.negative_eigenvalues": True}),
        ("olmo", {"rope_parameters": {"rope_theta": 5e5}}, {"blocks.*.rope.theta": 5e5}),
        ("olmo", {"head_dim": 10}, {"blocks.*.rope.theta": 0.0, "blocks.*.head_dim": 10}),
        ("olmo", {"rope_parameters": None}, {"blocks.*.rope.theta": 1e4}),
        ("olmo", {"linear_allow_neg_eigval": False}, {"blocks.D.negative_eigenvalues": False}),
        (
            "lfm2",
            {"tie_embedding": False, "full_attn_idxs": None},
            {"tied_embedding": False, "letters": "*-" * 4},
        ),
    ],
)
def test_what_settings_mean(name: str, changed: dict[str, Any], settings: dict[str, Any]) -> None:
    """The library's defaults, its older names, and what it computes whatever a field says."""
    llm = read(name, **changed)
    assert {path: value_at(llm, path) for path in settings} == settings


@pytest.mark.parametrize(
    ("name", "changed", "said"),
    [
        ("bamba", {"mamba_d_head": 17}, "8 Mamba2 heads of 17 features, and 128 in all"),
        ("bamba", {"mamba_n_heads": 7}, "7 Mamba2 heads of 18 features"),
        ("bamba", {"hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ("granite", {"shared_intermediate_size": 0}, "shared_intermediate_size 0"),
        ("granite", {"layer_types": TYPES[:3]}, "num_hidden_layers 4, and 3 layer_types"),
        ("falcon", {"projectors_bias": True}, "mamba_proj_bias False and projectors_bias True"),
        ("falcon", {"ssm_multipliers": [1.0]}, "expected 5 numbers"),
        ("lfm2", {"layer_types": ["conv"] * 3 + ["mamba"]}, "conv, mamba"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(name, **changed)


@pytest.mark.parametrize(
    ("name", "letter", "settings", "said"),
    [
        ("bamba", "M", {"head_dim": 12}, "96 features together; expected a multiple of model.llm.dim, 64"),
        ("falcon", "H", {"attention_in": 2.0, "mamba_in": 0.5}, ""),
        ("lfm2", "C", {"inner": 32}, "blocks.C.inner: 32"),
        ("olmo", "*", {"norm_after": False}, "blocks.\\*.norm_after: False"),
        ("olmo", "F", {"inner": 5}, "has one intermediate_size for all kinds of blocks"),
    ],
)
def test_what_a_family_cannot_hold_is_refused(name: str, letter: str, settings: Any, said: str) -> None:
    decoder, llm = FIELDS[name][0], read(name).with_settings(letter, **settings)
    if not said:
        assert decoder.read(decoder.write(llm), LLMConfig()) == llm
        return
    with pytest.raises(UserError, match=said):
        decoder.write(llm)


def test_what_the_library_saves_of_olmo_hybrid_is_what_its_authors_publish(tmp_path: Path) -> None:
    """The library has one name for two norms, and cuts all taps of a convolution into three equal parts. An
    export has the published form, with such an original too."""

    def change(_: dict[str, Any], named: dict[str, np.ndarray]) -> None:
        norm = "model.layers.1.post_attention_layernorm.weight"
        named[norm.replace("post_attention_layernorm", "feedforward_layer_norm")] = named.pop(norm)
        for layer in (0, 2):
            taps = [f"model.layers.{layer}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
            cut = np.array_split(np.concatenate([named[name] for name in taps]), (22, 44))
            named |= {name: np.ascontiguousarray(x) for name, x in zip(taps, cut, strict=True)}

    published = write_published("olmo_hybrid", tmp_path / "published")
    saved = change_published(write_published("olmo_hybrid", tmp_path / "saved"), change)
    import_weights([str(saved)], tmp_path / "imported")
    for number, like in enumerate((None, saved, published)):
        (out,) = export_weights(tmp_path / "imported", tmp_path / f"out-{number}", like=like)
        assert_identical(tensors(out), tensors(published))


@pytest.mark.parametrize("name", ["kimi_linear", "olmo_hybrid"])
def test_the_librarys_padding_token_is_not_left_to_a_smaller_vocabulary(name: str, tmp_path: Path) -> None:
    """Its number is beyond the embedding, and the library refuses to make one; an original's number stays."""
    folder = change_published(
        write_published(name, tmp_path / "published"), lambda fields, _: fields.update(pad_token_id=3)
    )
    import_weights([str(folder)], tmp_path / "imported")
    for like, want in ((None, None), (folder, 3)):
        out = tmp_path / f"like {like is not None}"
        export_weights(tmp_path / "imported", out, like=like)
        assert json.loads((out / "config.json").read_text())["pad_token_id"] == want
