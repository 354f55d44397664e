"""Compares the estimate with the state that training makes, and with what a step sends."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxthd.config import (
    AdaptConfig,
    Block,
    BlockSizes,
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
from jaxthd.estimate import main, programs_table
from jaxthd.models.adapt import without_lora
from jaxthd.models.blocks import MLP, Attention, Mamba2, MoE
from jaxthd.models.stacks import to_stages
from jaxthd.parallel.mesh import bytes_of, make_mesh
from jaxthd.planning.compiled_grpo import measure_grpo
from jaxthd.planning.compiled_step import abstract_inputs, as_wide, compilable, measure
from jaxthd.planning.parameters import state_bytes
from jaxthd.planning.program import UNOPTIMIZED
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.reference import is_base
from jaxthd.steps.scoring import make_scoring_step
from jaxthd.steps.state import abstract_state, state_shardings

NANO = Path(__file__).parents[1] / "configs" / "nemotron3_nano.py"
BLOCKS: dict[str, Block] = {
    "*": Attention(kv_heads=4, head_dim=8),
    "-": MLP(inner=64),
    "M": Mamba2(heads=4, head_dim=8, state=8),
    "E": MoE(inner=32, shared_inner=32),
}
SMALL = Config(
    data=DataConfig(rows=4, capacity=1024, audio_capacity=0),
    model=ModelConfig(
        encoder=EncoderConfig(num_mels=8, layers=1, dim=8, heads=1, ffn_dim=8, subsampling_channels=8),
        llm=LLMConfig(
            pattern="*-*-*-",
            vocab_size=96,
            dim=32,
            blocks={letter: BLOCKS[letter] for letter in "*-"},
        ),
    ),
    compute=ComputeConfig(block_sizes=BlockSizes(attention=32, loss=32)),
)


def small(pattern: str, mesh: MeshConfig, microbatches: int = 1) -> Config:
    blocks = {letter: block for letter, block in BLOCKS.items() if letter in pattern}
    model = replace(SMALL.model, llm=replace(SMALL.model.llm, pattern=pattern, blocks=blocks))
    return replace(SMALL, mesh=mesh, model=model, train=TrainConfig(microbatches=microbatches))


@pytest.mark.parametrize(
    "config",
    [
        small("M*M*", MeshConfig(data=2, context=2, tensor=2)),
        pytest.param(
            small("*-E*-E", MeshConfig(data=2, pipeline=2), microbatches=2), marks=pytest.mark.exhaustive
        ),
    ],
    ids=["all layers on every rank", "pipeline and experts"],
)
def test_the_state_of_the_compiled_step_is_exact(config: Config) -> None:
    """As counted from shapes, in bytes."""
    state = state_bytes(config)
    assert measure(config).state == sum(state.values()) - state["gradients"] + 3 * 4


@pytest.mark.exhaustive
def test_half_as_wide_numbers_are_half_of_what_is_sent_and_need_less() -> None:
    """bfloat16, of which a CPU's compiler would make float32. Keys and values, and the residual stream."""
    config = small("M*M*", MeshConfig(data=2, context=2, tensor=2))
    wide = measure(config)
    half = measure(replace(config, compute=replace(config.compute, dtype="bfloat16")))
    assert half.received["tensor",] / wide.received["tensor",] == pytest.approx(1 / 2, rel=0.02)
    assert 1 / 2 < half.received["context",] / wide.received["context",] < 3 / 4
    assert half.temporary < wide.temporary
    assert half.state == wide.state


def test_the_text_of_nano_says_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    pipeline = "--mesh.pipeline 2 --mesh.data 4 --train.microbatches 2 --compute.context_exchange all_gather"
    main(["--config", str(NANO), *pipeline.split(), "--no-compile"])
    first, *others = capsys.readouterr().out.splitlines()
    lines = [line.split() for line in others]
    assert ["State", "of", "a", "device"] in lines
    (state,) = (line[-2:] for line in lines if line[:2] == ["in", "all,"])
    (batch,) = (line[-2:] for line in lines if line[:1] == ["batch"] and len(line) == 3)
    assert (state[1], batch[1]) == ("GiB", "MiB")
    said = re.fullmatch(
        r"Needs over ([\d.]+) GiB a device: that is state and batch \(--no-compile .*\)", first
    )
    assert said
    assert float(said[1]) == pytest.approx(float(state[0]) + float(batch[0]) / 1024, abs=0.011)
    assert ["Bubble:", "33.3%", "of", "the", "step."] in lines


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


REFERENCES: dict[str, tuple[AdaptConfig, str]] = {
    "copy": (AdaptConfig(), "copy"),
    "LoRA's copy": (AdaptConfig(lora_rank=16, freeze=("*",)), "copy"),
    "LoRA's base": (AdaptConfig(lora_rank=16, freeze=("*",)), "auto"),
    "cached": (AdaptConfig(), "cached"),
}
"""Kinds of reference policy: what trains, and posttraining.reference."""


def reference_cost(config: Config, kind: str) -> tuple[int, int]:
    """Bytes on a device: (arrays of the reference alone, arguments of the program that scores by it, without
    the batch).
    """
    adapt, reference = REFERENCES[kind]
    train = replace(config.train, objective="dpo", mtp_loss=0.0, ctc_loss=0.0)
    posttraining = PostTrainingConfig(reference=reference)  # type: ignore[arg-type]
    config = compilable(as_wide(replace(config, train=train, adapt=adapt, posttraining=posttraining)))
    blueprint, mesh, state, batch = abstract_inputs(config)
    own = state_bytes(config).get("reference policy", 0)
    if reference == "cached":
        return own, 0
    params = state.params
    if is_base(config):
        params, blueprint = without_lora(params), Blueprint(replace(config, adapt=AdaptConfig()))
    step: Any = make_scoring_step(blueprint, mesh)
    memory = step.lower(params, state.buffers, batch).compile(compiler_options=UNOPTIMIZED).memory_analysis()
    shards = [jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(batch)]
    return own, memory.argument_size_in_bytes - sum(map(bytes_of, shards))


@pytest.mark.exhaustive
def test_with_lora_the_reference_needs_no_array() -> None:
    """By compiled programs: its scores take nothing but parameters that the state holds for the policy."""
    config = small("*-M-", MeshConfig(data=2))
    found = {kind: reference_cost(config, kind) for kind in REFERENCES}
    (base, base_arguments), (copy, arguments) = found["LoRA's base"], found["copy"]
    assert base == 0 < found["LoRA's copy"][0] < copy
    params = state_bytes(config)["parameters"]
    assert base_arguments == arguments <= params  # the encoder is not used
    assert copy == params
    assert found["cached"][0] == 0


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


@pytest.mark.exhaustive
def test_the_command_compiles_the_step_and_prices_the_links_of_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight devices, four to a machine."""
    monkeypatch.setattr("jaxthd.estimate.simulate_devices", lambda devices: True)  # the tests have enough
    file = tmp_path / "small.py"
    file.write_text(
        "from tests.test_estimate import small\nfrom jaxthd.config import MeshConfig\n\n\n"
        "def config():\n    return small('M*-', MeshConfig(data=2, context=2, tensor=2))\n"
    )
    main([str(file), "--data.prompt", "", "--model.llm.vocab-size", "264", "--gpus-a-machine", "4"])
    shown = capsys.readouterr()
    first, _, text = shown.out.partition("\n")
    needed = re.match(
        r"Needs ([\d.]+) MiB a device: fits this machine \(8 CPU devices, .* a step, predicted: ", first
    )
    assert needed
    sizes = [
        re.search(rf"^{name} +([\d.]+) (\w+)$", text, re.M) for name in ("state", "temporary: .*", "batch")
    ]
    units = {"KiB": 1 / 1024, "MiB": 1}
    assert float(needed[1]) == pytest.approx(sum(float(x[1]) * units[x[2]] for x in sizes if x), rel=0.01)
    assert "compiling the step for 8 simulated devices, with compute.remat none\n" in shown.err
    assert "temporary: gradients, activations" in text
    assert "\ndata + context " in text
    assert "What fails first" in text
    assert "Compiled in" in text
