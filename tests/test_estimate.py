"""Compares the estimate with the state that training makes, and closed forms with compiled steps."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import pytest

from jaxthd.config import (
    AdaptConfig,
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    PostTrainingConfig,
    RolloutConfig,
    TrainConfig,
)
from jaxthd.describe import describe
from jaxthd.estimate import estimate, main, programs_table
from jaxthd.models.stacks import to_stages
from jaxthd.parallel.mesh import make_mesh
from jaxthd.planning.compiled_grpo import measure_grpo
from jaxthd.planning.compiled_step import measure
from jaxthd.planning.memory import temporary_memory
from jaxthd.planning.parameters import state_bytes
from jaxthd.planning.traffic import step_traffic
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import abstract_state, state_shardings
from scripts.measure_reference import cost, kinds

NANO = Path(__file__).parents[1] / "configs" / "nemotron3_nano.py"
SMALL = Config(
    data=DataConfig(rows=4, capacity=1024, audio_capacity=0),
    model=ModelConfig(
        encoder=EncoderConfig(num_mels=8, layers=1, dim=8, heads=1, ffn_dim=8, subsampling_channels=8),
        llm=LLMConfig(
            pattern="*-*-*-",
            vocab_size=96,
            dim=32,
            kv_heads=4,
            head_dim=8,
            ffn_dim=64,
            mamba_heads=4,
            mamba_head_dim=8,
            mamba_state=8,
            expert_dim=32,
            shared_expert_dim=32,
        ),
    ),
    compute=ComputeConfig(attention_block=32, loss_block=32),
)


def small(pattern: str, mesh: MeshConfig, microbatches: int = 1) -> Config:
    model = replace(SMALL.model, llm=replace(SMALL.model.llm, pattern=pattern))
    return replace(SMALL, mesh=mesh, model=model, train=TrainConfig(microbatches=microbatches))


def with_mtp(config: Config, pattern: str) -> Config:
    """Adds two depths of multi-token prediction."""
    return replace(
        config, model=replace(config.model, llm=replace(config.model.llm, mtp_pattern=pattern, mtp_depths=2))
    )


def with_ctc(config: Config) -> Config:
    data = replace(config.data, audio_capacity=4096, max_documents=8)
    return replace(config, data=data, train=replace(config.train, ctc_loss=0.3, ctc_max_labels=16))


def with_answers(config: Config) -> Config:
    """DPO on pairs that share their prompts."""
    data = replace(config.data, max_documents=12)
    post, train = PostTrainingConfig(reference="cached"), replace(config.train, objective="dpo")
    return replace(config, data=data, posttraining=post, train=train)


@pytest.mark.parametrize(
    "config",
    [
        small("M*M*", MeshConfig(data=2, context=2, tensor=2)),
        pytest.param(
            with_answers(small("M*M*", MeshConfig(data=2, context=2, tensor=2))), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            small("*-E*-E", MeshConfig(data=2, pipeline=2), microbatches=2), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            small("*-*-", MeshConfig(context=2, pipeline=2), microbatches=2), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            with_mtp(small("*-*-", MeshConfig(context=2, pipeline=2, tensor=2, fsdp=False)), "*E"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            replace(
                small("*-*-", MeshConfig(data=2, context=2, tensor=2)),
                adapt=AdaptConfig(freeze=("encoder.*",), lora_rank=4),
            ),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            with_ctc(small("*-*-", MeshConfig(context=2, pipeline=2, tensor=2), microbatches=2)),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(small("L-L-", MeshConfig(data=2, context=2, tensor=2)), marks=pytest.mark.exhaustive),
        pytest.param(
            replace(
                small("L-L-", MeshConfig(data=2, context=2, tensor=2)),
                compute=replace(SMALL.compute, context_exchange="all_gather"),
            ),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(small("*-*-", MeshConfig(context=4, tensor=2)), marks=pytest.mark.exhaustive),
    ],
    ids=[
        "all layers on every rank",
        "shared prompts",
        "pipeline and experts",
        "uniform program",
        "MTP",
        "LoRA",
        "CTC",
        "latent attention",
        "latents are gathered",
        "a loop over context ranks",
    ],
)
def test_closed_forms_are_near_the_compiled_step(config: Config) -> None:
    """State must be exact and bytes within 2% (the rest is scalars; with multi-token prediction 4%, since the
    compiler sends its keys and values once less than the closed form says). Temporary memory must be within a
    third: in the closed form no activation of a unit overwrites another.
    """
    measured = measure(config)
    state = state_bytes(config)
    assert measured.state == sum(state.values()) - state["gradients"] + 3 * 4
    assert temporary_memory(config).most == pytest.approx(measured.temporary, rel=1 / 3)
    received = {axes: size for axes, size in measured.received.items() if size > 3000}
    traffic = step_traffic(config)
    within = 0.04 if config.depths_trained else 0.02
    assert {axes: traffic[axes] for axes in received} == pytest.approx(received, rel=within)
    assert sum(traffic.values()) == pytest.approx(sum(measured.received.values()), rel=0.02)


def with_llm(config: Config, **settings: Any) -> Config:
    return replace(config, model=replace(config.model, llm=replace(config.model.llm, **settings)))


@pytest.mark.parametrize(
    ("unit", "remat", "within"),
    [
        pytest.param("*-", True, 0.05, marks=pytest.mark.exhaustive),
        pytest.param("M-", False, 0.05, marks=pytest.mark.exhaustive),
        pytest.param("*E", True, 0.15, marks=pytest.mark.exhaustive),
        ("*-", False, 0.1),
        pytest.param("M-", True, 0.05, marks=pytest.mark.exhaustive),
        pytest.param("L-", False, 0.1, marks=pytest.mark.exhaustive),
        pytest.param("L-", True, 0.05, marks=pytest.mark.exhaustive),
        pytest.param("W-", False, 0.1, marks=pytest.mark.exhaustive),
        pytest.param("W- clamped", False, 0.1, marks=pytest.mark.exhaustive),
    ],
)
def test_four_units_more_need_what_the_closed_form_says(unit: str, remat: bool, within: float) -> None:
    """Everything else that a step needs is the same in both, and cancels."""
    unit, _, form = unit.partition(" ")
    four, eight = (small(unit * repeats, MeshConfig()) for repeats in (4, 8))
    if form:
        four, eight = (with_llm(c, ffn_form="clamped_swiglu", ffn_bias=True) for c in (four, eight))
    four, eight = (replace(c, compute=replace(c.compute, remat_llm=remat)) for c in (four, eight))
    measured = measure(eight).temporary - measure(four).temporary
    in_closed_form = temporary_memory(eight).most - temporary_memory(four).most
    assert in_closed_form == pytest.approx(measured, rel=within)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("pattern", "mesh"),
    [("----", MeshConfig()), ("--", MeshConfig(data=2, tensor=2)), ("*M-", MeshConfig(data=2))],
)
def test_muons_update_needs_what_the_closed_form_says(pattern: str, mesh: MeshConfig) -> None:
    """Of a model with more weights than activations; several matrices of a stack on a rank, or one."""
    config = small(pattern, mesh)
    llm = replace(config.model.llm, dim=256, ffn_dim=1024, head_dim=32)
    config = replace(
        config,
        data=replace(config.data, capacity=32),
        model=replace(config.model, encoder=None, llm=llm),
        train=replace(config.train, optimizer="muon"),
    )
    memory = temporary_memory(config)
    assert max(memory.phases, key=memory.phases.__getitem__) == "Muon"
    assert memory.most == pytest.approx(measure(config).temporary, rel=0.2)


def test_the_bias_of_the_encoder_s_kernels_is_counted() -> None:
    """Forward, backward and its gradient: 3 x 4 bytes for each frame, head and distance."""

    def block(attention: Literal["blocks", "pallas"], seconds: float) -> Any:
        data = replace(SMALL.data, rows=1, audio_capacity=8 * 1024)
        encoder = replace(SMALL.model.encoder, heads=2, chunk_seconds=seconds)
        compute = replace(SMALL.compute, encoder_attention=attention)
        model = replace(SMALL.model, encoder=encoder)
        config = replace(SMALL, data=data, model=model, compute=compute)
        return temporary_memory(config).phases["one block of the encoder"]

    passes, distances = 2, 768 - 384  # clips of 375 and 188 frames, in whole pieces of 64 distances
    assert block("pallas", 30.0) - block("pallas", 15.0) == passes * 1024 * 3 * 4 * 2 * distances
    assert block("blocks", 30.0) == block("blocks", 15.0)


def test_recomputation_and_sharding_lower_what_the_closed_form_says() -> None:
    config = small("M*M*M*M*", MeshConfig())
    most = temporary_memory(config).most
    assert temporary_memory(replace(config, compute=replace(config.compute, remat_llm=False))).most > most
    for mesh in (MeshConfig(context=2), MeshConfig(tensor=2), MeshConfig(data=2)):
        assert temporary_memory(replace(config, mesh=mesh)).most < most


def test_the_text_of_nano_says_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = "--mesh.pipeline 2 --mesh.data 4 --train.microbatches 2 --compute.context_exchange all_gather"
    main(["--config", str(NANO), *pipeline.split(), "--no-compile"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    header = next(line for line in lines if line[:4] == ["State", "of", "a", "device"])
    assert header[4:] == ["closed", "form", "in", "float32"]
    parameters = next(line for line in lines if line[:1] == ["parameters"])
    assert parameters[1:3] == parameters[3:]
    assert any(line[:3] == ["data", "+", "context"] for line in lines)
    assert ["Bubble:", "33.3%", "of", "the", "step;"] in [line[:5] for line in lines]


FROZEN = ("encoder.*", "adapter.*")


def with_reference(config: Config, **settings: Any) -> Config:
    post = PostTrainingConfig(**settings)
    compute = replace(config.compute, dtype="bfloat16")
    return replace(config, posttraining=post, compute=compute, train=replace(config.train, objective="dpo"))


@pytest.mark.parametrize(
    ("settings", "adapt", "share"),
    [
        ({}, AdaptConfig(), 0.5),  # bfloat16 beside float32
        ({}, AdaptConfig(lora_rank=2, freeze=FROZEN), 0.0),
        pytest.param(
            {"reference": "copy"},
            AdaptConfig(lora_rank=2, freeze=FROZEN),
            0.1,
            marks=pytest.mark.exhaustive,
        ),
        pytest.param({"reference": "cached"}, AdaptConfig(), 0.0, marks=pytest.mark.exhaustive),
    ],
)
def test_the_reference_is_counted(settings: dict[str, str], adapt: AdaptConfig, share: float) -> None:
    """As it lies in the state, by its shardings; about this share of the parameters."""
    mesh = MeshConfig(data=2, pipeline=2, tensor=2)
    config = replace(with_reference(small("M*-M*-", mesh), **settings), adapt=adapt)
    blueprint = Blueprint(config)
    state = jax.eval_shape(lambda x: to_stages(x, blueprint.stages), abstract_state(blueprint)).reference
    on = state_shardings(blueprint, make_mesh(mesh)).reference
    sizes = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)) * x.dtype.itemsize, state, on)
    found = state_bytes(config)
    reference = found.get("reference policy", 0)
    assert reference == sum(jax.tree.leaves(sizes))
    assert reference / found["parameters"] == pytest.approx(share, abs=0.1)
    assert ("reference policy" in describe(config)) == bool(reference)


@pytest.mark.exhaustive
def test_with_lora_the_reference_needs_no_array() -> None:
    """By compiled programs: its scores take nothing but parameters that the state holds for the policy."""
    config = small("*-M-", MeshConfig(data=2))
    found = {name: cost(each) for name, each in kinds(config).items()}
    base, copy = found["LoRA 16, base weights"], found["all parameters train, copy"]
    assert base.reference == 0 < found["LoRA 16, copy of its matrices"].reference < copy.reference
    params = state_bytes(config)["parameters"]
    assert base.arguments == copy.arguments <= params  # the encoder is not used
    assert copy.reference == params
    assert found["all parameters train, cached"].reference == 0


@pytest.mark.exhaustive
def test_an_estimate_of_rollouts_measures_their_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """More places hold more; the update's state is exact."""
    config = small("M*-", MeshConfig(data=2))
    llm = replace(config.model.llm, vocab_size=264)
    config = replace(
        config,
        data=replace(config.data, capacity=128, max_documents=8, rows=2),
        model=replace(config.model, encoder=None, llm=llm),
        rollout=RolloutConfig(group_size=4, answers_at_once=8, max_new_tokens=8),
        train=replace(config.train, objective="grpo"),
    )
    few = measure_grpo(config)
    own = replace(config.rollout, answers_at_once=32, mesh=MeshConfig(tensor=2))
    more = measure_grpo(replace(config, rollout=own))
    state = state_bytes(config)
    assert few.update.state == sum(state.values()) - state["gradients"] + 3 * 4
    held, others = ({x.name: x.held for x in each.programs} for each in (few, more))
    assert len(held) == 5
    assert others["rollouts: tokens are decoded"] > held["rollouts: tokens are decoded"]
    assert held["gradient of a batch"] == pytest.approx(state["gradients"], rel=0.1)
    assert "log-probabilities of the policy and of the reference" in programs_table(few.programs)


def test_what_is_measured_stands_beside_the_closed_form() -> None:
    config = small("*-*-*-", MeshConfig(data=2))
    measured = measure(config)
    text = estimate(config, measured)
    row = next(line for line in text.splitlines() if line.startswith("in all, exact"))
    assert row.endswith("+0.0%")
    assert len(estimate(config).splitlines()) == len(text.splitlines())
