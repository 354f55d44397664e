"""The parameter table against sums by hand, and the bytes on a device."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import pytest

from jaxthd.config import (
    ComputeConfig,
    Config,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
)
from jaxthd.describe import describe, main
from jaxthd.files.config_file import load_config
from jaxthd.models.blocks import MLP, Mamba2, MoE
from jaxthd.parallel.mesh import make_mesh
from jaxthd.planning.parameters import Group, parameter_groups, state_bytes
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import abstract_state, init_state

NANO = Path(__file__).parents[1] / "configs" / "nemotron3_nano.py"
SMALL = Config(
    model=ModelConfig(
        encoder=EncoderConfig(num_mels=16, layers=2, dim=16, heads=2, ffn_dim=32, subsampling_channels=8),
        llm=LLMConfig(
            pattern="ME*-ME*-",
            dim=32,
            blocks={"-": MLP(inner=48), "M": Mamba2(heads=2, groups=1), "E": MoE(latent=8)},
        ),
    )
)


@cache
def nano_groups() -> tuple[Group, ...]:
    return tuple(parameter_groups(load_config(NANO)))


def test_nano_has_the_published_size_by_group() -> None:
    """Expected sizes are by hand from the architecture's table: 52 blocks, dim 2688, vocabulary 131072."""
    dim, vocab, inner, shared = 2688, 131072, 64 * 64, 8 * 128
    conv = inner + 2 * shared
    mamba = dim * (2 * inner + 2 * shared + 64) + 4 * conv + conv + 3 * 64 + inner + inner * dim
    by_hand = {
        "embedding": vocab * dim,
        "M Mamba2": 23 * mamba,
        "* attention": 6 * dim * 128 * (32 + 2 + 2 + 32),
        "E routed experts": 23 * 128 * 2 * dim * 1856,
        "E router": 23 * dim * 128,
        "E shared expert": 23 * 2 * dim * 3712,
        "RMSNorms": 53 * dim,
        "head": vocab * dim,
    }
    llm = {g.name: g.parameters for g in nano_groups() if g.part == "LLM"}
    assert llm == by_hand
    assert 31.5e9 < sum(llm.values()) < 31.7e9
    active = sum(g.active for g in nano_groups() if g.part == "LLM")
    routed, six = by_hand["E routed experts"], by_hand["E routed experts"] * 6 // 128
    assert active == sum(by_hand.values()) - routed + six - by_hand["embedding"] + dim
    assert 3.1e9 < active < 3.3e9


def test_multi_token_prediction_is_counted() -> None:
    """By hand: each depth has three norms, the projection, and an attention and an MoE block."""
    config = load_config(NANO)
    llm = replace(config.model.llm, mtp_pattern="*E", mtp_depths=2, mtp_shared=False)
    groups = parameter_groups(replace(config, model=replace(config.model, llm=llm)))
    found = {g.name: (g.copies, g.parameters, g.active) for g in groups if g.name.startswith("MTP")}
    dim, routed = 2688, 128 * 2 * 2688 * 1856
    others = 5 * dim + 2 * dim * dim + dim * 128 * (32 + 2 + 2 + 32) + dim * 128 + 2 * dim * 3712
    assert found == {
        "MTP": (2, 2 * others, 2 * others),
        "MTP routed experts": (2, 2 * routed, 2 * routed * 6 // 128),
    }


def test_nanos_encoder_has_the_size_of_its_name() -> None:
    assert 0.58e9 < sum(g.parameters for g in nano_groups() if g.part == "encoder") < 0.65e9


def test_the_table_of_nano_in_text() -> None:
    text = describe(load_config(NANO))
    lines = text.splitlines()
    assert any(line.split()[:4] == ["LLM", "in", "all", "31,577,937,344"] for line in lines)
    assert any("routed experts" in line and line.endswith("down 128 x 1856 x 2688") for line in lines)
    assert any(line.split() == ["parameters", "119.96", "GiB", "3.75", "GiB"] for line in lines)
    assert "(8, 4, 1, 1): 32 devices" in text
    header, *table = lines[: lines.index("")]
    end = header.index("parameters") + len("parameters")
    assert all(line[end - 1].isdigit() and line[end] == " " for line in table)


@pytest.mark.parametrize(
    "mesh",
    [
        MeshConfig(data=2, context=2, tensor=2),
        pytest.param(MeshConfig(data=2, pipeline=2, fsdp=False), marks=pytest.mark.exhaustive),
        pytest.param(MeshConfig(), marks=pytest.mark.exhaustive),
    ],
)
def test_groups_and_bytes_are_those_of_the_state_that_training_makes(mesh: MeshConfig) -> None:
    """The pattern has every letter and a latent projection; counted on real arrays, on every device."""
    config = replace(SMALL, mesh=mesh)
    state = init_state(Blueprint(config), make_mesh(mesh))
    groups = parameter_groups(config)
    canonical = abstract_state(Blueprint(config)).params
    assert sum(g.parameters for g in groups) == sum(x.size for x in jax.tree.leaves(canonical))
    assert [g.name for g in groups] == [
        "embedding", "M Mamba2", "E routed experts", "E latent projection", "E router", "E shared expert",
        "* attention", "- MLP", "RMSNorms", "head", "attention", "convolution", "feed-forward",
        "LayerNorms", "subsampling", "adapter",
    ]  # fmt: skip
    sizes = state_bytes(config)
    real = {"parameters": state.params, "gradients": state.params, "AdamW moments": state.opt_state}
    real["batch statistics, router biases"] = state.buffers
    for name, tree in real.items():
        for number in range(mesh.devices):
            parts = [x.addressable_shards[number].data for x in jax.tree.leaves(tree)]
            assert sizes[name] == sum(part.nbytes for part in parts), name


def test_float64_doubles_the_bytes() -> None:
    jax.config.update("jax_enable_x64", True)
    try:
        double = state_bytes(replace(SMALL, compute=ComputeConfig(dtype="float64")))
    finally:
        jax.config.update("jax_enable_x64", False)
    assert double["parameters"] == 2 * state_bytes(SMALL)["parameters"]


def test_the_command_takes_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--config", str(NANO), "--mesh.data", "16", "--model.llm.pattern", "ME"])
    text = capsys.readouterr().out
    assert "(16, 4, 1, 1): 64 devices" in text
    assert "on each of 64 devices" in text
    assert "* attention" not in text
