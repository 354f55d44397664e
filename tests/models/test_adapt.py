"""Frozen parameters stay, the others train: patterns, LoRA, learning rates, merging, checkpoints.

LoRA's gradients on meshes are compared with the dense model's in tests/test_meshes.py.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.checkpoints.checksum import named_arrays
from jaxthd.config import (
    AdaptConfig,
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from jaxthd.describe import main as describe_main
from jaxthd.errors import UserError
from jaxthd.models.adapt import add_lora, dotted, merge_lora, split, trained
from jaxthd.models.blocks import MLP, Attention, Mamba2, MoE
from jaxthd.models.layers import Linear
from jaxthd.models.speech_lm import Adapter
from jaxthd.models.stacks import from_stages, to_stages
from jaxthd.packing.batch import concatenate_rows
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.parallel.params import Buffer, Init
from jaxthd.parallel.schedule import make_schedule
from jaxthd.planning.compiled_step import abstract_batch
from jaxthd.planning.parameters import state_bytes
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.optimizer import clipped, make_optimizer
from jaxthd.steps.scoring import make_scoring_step
from jaxthd.steps.state import abstract_state, canonical_shardings, checkpoint_layout, device_layout
from jaxthd.steps.training import loss_and_gradient, make_train_step
from tests.helpers import assert_same, batch_of, filled_state
from tests.weights import random_state

MODEL = ModelConfig(
    encoder=EncoderConfig(num_mels=16, layers=2, dim=16, heads=2, ffn_dim=16, subsampling_channels=4),
    llm=LLMConfig(
        pattern="ME*-",
        dim=16,
        blocks={
            "*": Attention(heads=2, kv_heads=1, head_dim=8),
            "-": MLP(inner=32),
            "M": Mamba2(heads=4, head_dim=8, state=8),
            "E": MoE(experts=4, inner=8, shared_inner=16),
        },
    ),
    adapter_dim=8,
)
LORA = AdaptConfig(freeze=("encoder.*",), lora_rank=2, lora_alpha=3.0)
TRAIN = TrainConfig(warmup_steps=0, learning_rate=1e-2, router_bias_rate=1e-2, clip_norm=0.5)


def run(
    adapt: AdaptConfig, mesh: MeshConfig | None = None, pattern: str = "ME*-", dtype: Any = "float32"
) -> Config:
    model = replace(MODEL, llm=replace(MODEL.llm, pattern=pattern))
    compute = ComputeConfig(dtype=dtype)
    return Config(mesh=mesh or MeshConfig(), model=model, compute=compute, adapt=adapt, train=TRAIN)


def names_that_train(adapt: AdaptConfig) -> set[str]:
    flat = nnx.traversals.flatten_mapping(Blueprint(run(adapt)).trained)
    return {dotted(path) for path, is_trained in flat.items() if is_trained}


def test_patterns_say_what_trains():
    everything = names_that_train(AdaptConfig())
    assert {"embedding", "head", "decoder.norm.weight", "decoder.layers.moe.mixer.up"} < everything
    encoder = {name for name in everything if name.startswith("encoder.")}
    assert len(encoder) > 40
    assert names_that_train(AdaptConfig(freeze=("encoder.*",))) == everything - encoder
    some = names_that_train(AdaptConfig(freeze=("encoder.*", "!*.norm_out.*", "head")))
    norms = {"encoder.blocks.norm_out.weight", "encoder.blocks.norm_out.bias"}
    assert some == everything - encoder - {"head"} | norms


def test_the_head_of_a_tied_embedding_is_the_embedding():
    """Patterns name it as either; a pattern with "!" too."""
    tied = replace(MODEL, llm=replace(MODEL.llm, tied_embedding=True))

    def frozen(*patterns: str) -> set[str]:
        config = replace(run(AdaptConfig(freeze=patterns)), model=tied)
        flat = nnx.traversals.flatten_mapping(Blueprint(config).trained)
        return {dotted(path) for path, is_trained in flat.items() if not is_trained}

    assert frozen("head") == frozen("embedding") == frozen("embedding", "head") == {"embedding"}
    assert frozen("head", "!embedding") == frozen("embedding", "!head") == set()


def test_a_part_with_lora_trains_nothing_else():
    everything = names_that_train(AdaptConfig())
    others = {name for name in everything if name.startswith(("encoder.", "adapter."))}
    lora = {f"decoder.layers.attention.mixer.{p}.lora.{m}" for p in ("q", "v") for m in ("a", "b")}
    adapt = AdaptConfig(lora_rank=4, lora_targets=("decoder.*.q", "decoder.*.v"))
    assert names_that_train(adapt) == others | lora
    assert names_that_train(replace(adapt, freeze=("*", "!head"))) == lora | {"head"}
    both = names_that_train(replace(adapt, lora_targets=("*.q", "adapter.out")))
    assert both == {
        f"{linear}.lora.{m}"
        for linear in ("decoder.layers.attention.mixer.q", "encoder.blocks.attention.q", "adapter.out")
        for m in ("a", "b")
    }


def test_all_projections_but_routers_get_lora():
    found = {name.rpartition(".lora")[0] for name in names_that_train(LORA) if ".lora." in name}
    layers = {"mamba": "z x b c dt out", "attention": "q k v out", "mlp": "up down"}
    wanted = {f"decoder.layers.{k}.mixer.{p}" for k, ps in layers.items() for p in ps.split()}
    assert found == wanted | {f"decoder.layers.moe.mixer.shared.{p}" for p in ("up", "down")}


def test_lora_starts_as_nothing_with_pefts_spread():
    linear = Linear(400, 30, Init(jax.random.key(0)))
    x_ND = jax.random.normal(jax.random.key(1), (5, 400))
    before = linear(x_ND)
    linear.add_lora(50, 2.0, jax.random.key(2))
    assert linear.lora is not None
    assert linear.lora.a.shape == (400, 50)
    assert linear.lora.b.shape == (50, 30)
    assert np.std(linear.lora.a[...]) == pytest.approx(1 / math.sqrt(3 * 400), rel=0.02)
    np.testing.assert_array_equal(linear(x_ND), before)
    linear.lora.b[...] = jax.random.normal(jax.random.key(3), (50, 30))
    low_rank = 2.0 * np.asarray(x_ND) @ np.asarray(linear.lora.a[...]) @ np.asarray(linear.lora.b[...])
    np.testing.assert_allclose(linear(x_ND) - before, low_rank, atol=1e-4)


def test_a_target_starts_as_without_the_others():
    adapters = []
    for targets in (("*",), ("out",)):
        adapters.append(Adapter(MODEL.audio_encoder.dim, MODEL, Init(jax.random.key(0))))
        add_lora(adapters[-1], replace(LORA, lora_targets=targets), jax.random.key(1))
    both, one = adapters
    assert one.up.lora is None
    np.testing.assert_array_equal(both.out.lora.a[...], one.out.lora.a[...])
    assert np.abs(both.out.lora.a[...] - both.up.lora.a[:8]).min() > 0


def test_frozen_parameters_statistics_and_routers_stay_to_the_bit():
    """Two steps on data 2; everything else changes. The first loss uses the stored statistics."""
    config = run(LORA, MeshConfig(data=2), pattern="ME")
    mesh = make_mesh(config.mesh)
    rows = jax.tree.map(lambda *x: np.concatenate(x), batch_of([5, 20, 11], 1), batch_of([17, 3], 1))
    batch = put_batch(rows, mesh)
    state, step = filled_state(Blueprint(config), mesh), make_train_step(Blueprint(config), mesh)
    was = jax.tree.map(np.asarray, state)
    logp = np.asarray(
        make_scoring_step(Blueprint(config), mesh)(state.params, state.buffers, batch).log_probs
    )
    losses = []
    for _ in range(2):
        state, measured = step(state, batch)
        losses.append(float(measured.loss))
    np.testing.assert_allclose(losses[0], -(rows.weights * logp).sum() / rows.weights.sum(), rtol=1e-5)
    assert losses[1] < losses[0]
    assert step._cache_size() == 1
    own = {name for name in names_that_train(LORA) if "attention" not in name and "mlp" not in name}
    before = named_arrays(was.params)
    for name, x in named_arrays(state.params).items():
        assert np.array_equal(x, before[name]) == (name not in own), name
    jax.tree.map(np.testing.assert_array_equal, state.buffers, was.buffers)
    # The optimizer holds two moments of each trained parameter, and a count, each sharded on the mesh.
    sizes = {name: x.shape for name, x in named_arrays(state.params).items()}
    moments = named_arrays(state.opt_state)
    shapes = [x.shape for name, x in moments.items() if not name.endswith("count")]
    assert sorted(shapes) == sorted(2 * [sizes[name] for name in own])
    held = sum(x.addressable_shards[0].data.nbytes for x in moments.values())
    assert held == state_bytes(config)["AdamW moments"]
    assert held < 0.2 * state_bytes(replace(config, adapt=AdaptConfig()))["AdamW moments"]


def test_each_part_moves_at_its_learning_rate():
    """AdamW's first update by hand: -rate (g / (|g| + eps) + decay w); g is clipped by the trained norm
    alone."""
    factors = ("encoder=0.25", "adapter=3", "llm=0.5")
    adapt = replace(LORA, freeze=("encoder.sub*",), lr_factors=factors)
    config = run(adapt)
    with jax.enable_x64(True):
        model = Blueprint(run(adapt, dtype="float64")).model
        params = random_state(model)[1]
        own, _ = split(params, trained(model, adapt))
        rng = np.random.default_rng(1)
        gradients = jax.tree.map(lambda x: rng.normal(size=x.shape), own)
        optimizer = make_optimizer(Blueprint(config))
        most = TRAIN.clip_norm
        updates, _ = jax.jit(lambda g, p: optimizer.update(clipped(g, most), optimizer.init(p), p))(
            gradients, own
        )
    updates, gradients, own = map(named_arrays, (updates, gradients, own))
    clip = TRAIN.clip_norm / np.sqrt(sum(np.square(g).sum() for g in gradients.values()))
    rates = {"encoder": 0.25e-2, "adapter": 3e-2}
    for name, update in updates.items():
        g, leaf = clip * gradients[name], name.rsplit(".", 1)[1]
        decay = TRAIN.weight_decay if leaf in ("a", "b", "w", "depthwise", "position") else 0.0
        by_hand = -rates.get(name.split(".")[0], 0.5e-2) * (g / (np.abs(g) + 1e-8) + decay * own[name])
        np.testing.assert_allclose(update, by_hand, rtol=1e-4, atol=1e-9, err_msg=name)
    assert {name.split(".")[0] for name in updates} == {"encoder", "adapter", "decoder"}


@pytest.mark.parametrize("dora", [False, True])
def test_the_merged_model_computes_the_same(dora: bool):
    """Compares every token's log-probability, in float64; LoRA is in all parts of the model."""
    adapt = AdaptConfig(lora_rank=3, lora_alpha=2.0, lora_targets=("*",), dora=dora)
    config = run(adapt, dtype="float64")
    with jax.enable_x64(True):
        _, params, buffers = random_state(Blueprint(config).model)
        plain, plain_config = merge_lora(params, config)
        assert plain_config == run(replace(adapt, lora_rank=0, dora=False), dtype="float64")
        like = abstract_state(Blueprint(plain_config)).params
        assert jax.tree.map(np.shape, plain) == jax.tree.map(np.shape, like)
        assert merge_lora(plain, plain_config) == (plain, plain_config)
        mesh = make_mesh(config.mesh)
        batch = put_batch(batch_of([5, 20, 11], 1), mesh)
        adapted, merged = (
            np.asarray(make_scoring_step(Blueprint(c), mesh)(p, buffers, batch).log_probs)
            for c, p in ((config, params), (plain_config, plain))
        )
    np.testing.assert_allclose(merged, adapted, atol=1e-11)
    assert np.count_nonzero(adapted) > 30


def test_dora_is_a_direction_times_a_magnitude():
    """By the paper: m (w + s a b) / |w + s a b| by columns; at the start the model without it."""
    rng = np.random.default_rng(0)
    linear = Linear(6, 5, Init(jax.random.key(0)))
    linear.add_lora(2, 1.5, jax.random.key(1), dora=True)
    x_ND, w_DF = jax.numpy.array(rng.normal(size=(4, 6)), np.float32), np.asarray(linear.w[...])
    np.testing.assert_array_equal(linear(x_ND), Linear(6, 5, Init(jax.random.key(0)))(x_ND))
    assert linear.lora is not None
    assert linear.lora.m is not None
    b_rF, m_F = rng.normal(size=(2, 5)), rng.uniform(0.5, 2.0, 5)
    linear.lora.b[...], linear.lora.m[...] = np.float32(b_rF), np.float32(m_F)
    sum_DF = w_DF + 1.5 * np.asarray(linear.lora.a[...]) @ b_rF
    magnitude_F = m_F * np.linalg.norm(w_DF, axis=0)
    want = x_ND @ (magnitude_F * sum_DF / np.linalg.norm(sum_DF, axis=0))
    np.testing.assert_allclose(linear(x_ND), want, rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
def test_dora_is_the_same_on_a_mesh():
    """Loss and gradients in float64: projections sharded by their inputs and by their outputs, a key and
    value head that two ranks share.
    """
    adapt = AdaptConfig(lora_rank=3, lora_targets=("decoder.*",), dora=True)
    results = []
    with jax.enable_x64(True):
        for sizes in (MeshConfig(), MeshConfig(data=2, tensor=2)):
            config = replace(run(adapt, sizes, "*-", "float64"), data=DataConfig(rows=2))
            blueprint, mesh = Blueprint(config), make_mesh(sizes)
            _, params, buffers = random_state(blueprint.model)
            row = batch_of([5, 20, 11], 1)
            batch = put_batch(concatenate_rows([row, batch_of([9, 7], 1)]), mesh)
            found = jax.jit(loss_and_gradient(blueprint, mesh))(params, buffers, batch)
            results.append(jax.tree.map(np.asarray, (found.loss, found.gradients)))
    assert any("m" in name.split(".") for name in named_arrays(results[0][1]))
    assert_same(results[1], results[0], 1e-10)


def test_a_pipelines_stacks_merge_too():
    config = run(LORA, MeshConfig(pipeline=2, stages_per_rank=2))
    params = jax.tree.map(np.float32, random_state(Blueprint(run(LORA)).model)[1])
    stages = Blueprint(config).stages
    staged = from_stages(merge_lora(to_stages(params, stages), config)[0], stages)
    jax.tree.map(np.testing.assert_array_equal, staged, merge_lora(params, run(LORA))[0])


def multiply_adds(function: Callable[..., Any], config: Config) -> int:
    """Multiply-adds of all matrix products of a function of (params, buffers, batch), over all scan steps."""

    def count(jaxpr: Any, times: int) -> int:
        total = 0
        for equation in jaxpr.eqns:
            often = times * (equation.params["length"] if equation.primitive.name == "scan" else 1)
            if equation.primitive.name == "dot_general":
                (contracted, _), _ = equation.params["dimension_numbers"]
                shape, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
                total += often * math.prod(shape[dim] for dim in contracted) * math.prod(out)
            total += sum(count(sub, often) for sub in jaxprs_in_params(equation.params))
        return total

    model = Blueprint(config).model
    state = (nnx.to_pure_dict(nnx.state(model, kind)) for kind in (nnx.Param, Buffer))
    program = jax.make_jaxpr(function(Blueprint(config), make_mesh(config.mesh)))(
        *state, abstract_batch(config)
    )
    return count(program.jaxpr, 1)


def audio_multiply_adds(function: Callable[..., Any], adapt: AdaptConfig, mesh: MeshConfig) -> int:
    """The multiply-adds that audio adds."""
    config = run(adapt, mesh, pattern="--")
    audio, text = (
        replace(config, data=DataConfig(capacity=64, audio_capacity=frames)) for frames in (512, 0)
    )
    return multiply_adds(function, audio) - multiply_adds(function, text)


@pytest.mark.parametrize("mesh", [MeshConfig(), MeshConfig(pipeline=2)], ids=["one device", "pipeline"])
def test_no_backward_pass_goes_through_a_frozen_encoder(mesh: MeshConfig):
    """In every tick of the schedule a step's products over audio are those of the forward pass alone. With a
    trained encoder they are about four times as many: blocks are recomputed, then each product has two
    gradients."""
    backward, forward = (make_schedule(1, mesh.pipeline, 1, backward=b).ticks for b in (True, False))
    scored = audio_multiply_adds(make_scoring_step, AdaptConfig(), mesh) / forward
    frozen = replace(LORA, freeze=("encoder.*", "adapter.*"))
    assert audio_multiply_adds(loss_and_gradient, frozen, mesh) / backward == scored
    assert audio_multiply_adds(loss_and_gradient, AdaptConfig(), mesh) / backward > 3.5 * scored


def test_a_frozen_head_has_no_gradient_to_compute():
    """The difference is one product: the gradients of a block's logits times the hidden states."""
    data = DataConfig(capacity=64, audio_capacity=0)
    whole, frozen = (
        multiply_adds(loss_and_gradient, replace(run(AdaptConfig(freeze=freeze), pattern="-"), data=data))
        for freeze in ((), ("head",))
    )
    assert whole - frozen == ComputeConfig().blocks.loss * MODEL.llm.vocab_size * MODEL.llm.dim


def test_a_checkpoint_holds_what_trains_and_returns_on_any_mesh(tmp_path: Path):
    """Saved on a pipeline, restored on data 2 x tensor 2; a run that trains other parameters is refused."""
    sizes = MeshConfig(2, 1, 2, 1), MeshConfig(data=2, tensor=2)
    piped, other = (run(LORA, mesh, "*-") for mesh in sizes)
    meshes = make_mesh(piped.mesh), make_mesh(other.mesh)
    rng = np.random.default_rng(0)
    noise = jax.tree.map(
        lambda x: rng.integers(0, 9, x.shape).astype(x.dtype), abstract_state(Blueprint(piped))
    )
    state = device_layout(
        jax.device_put(noise, canonical_shardings(Blueprint(piped), meshes[0])), Blueprint(piped), meshes[0]
    )
    with Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(3, checkpoint_layout(state, Blueprint(piped), meshes[0]), {})
    with Checkpoints(tmp_path, 1) as checkpoints:
        found = checkpoints.restore_latest(
            abstract_state(Blueprint(other)), canonical_shardings(Blueprint(other), meshes[1])
        )
        assert found is not None
        jax.tree.map(np.testing.assert_array_equal, found[0], noise)
        moments = found[0].opt_state[1][0].mu
        others = {name for name in names_that_train(LORA) if ".mamba." in name or ".moe." in name}
        assert set(named_arrays(moments)) == names_that_train(LORA) - others
        less = replace(other, adapt=replace(LORA, freeze=("encoder.*", "adapter.*")))
        with pytest.raises(UserError, match="is of another model: 6 arrays differ"):
            checkpoints.restore_latest(
                abstract_state(Blueprint(less)), canonical_shardings(Blueprint(less), meshes[1])
            )


def test_names_are_listed_for_patterns(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tmp_path / "lora.py"
    config.write_text("from jaxthd.config import *\ndef config(): return Config()\n")
    adapt = ["--adapt.freeze", "encoder.blocks.*", "--adapt.lora-rank", "4", "--adapt.lora-targets", "*.q"]
    describe_main(["--config", str(config), "--names", *adapt])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["encoder.blocks.ffn1.up.w", *["4", "x", "128", "x", "512"], "frozen"] in lines
    assert ["encoder.subsampling.first.w", *["9", "x", "64"], "frozen"] in lines
    assert ["decoder.layers.attention.mixer.q.lora.b", *["1", "x", "4", "x", "128"], "trained"] in lines
    assert ["decoder.layers.mlp.mixer.up"] in lines
    describe_main(["--config", str(config), "--adapt.freeze", "encoder.*", "head"])
    rows = {tuple(line.split()[:2]): line.split() for line in capsys.readouterr().out.splitlines()[2:]}
    assert rows["encoder", "in"][5] == rows["LLM", "head"][5] == "none"
    assert rows["adapter", "adapter"][5] == "all"
    assert rows["LLM", "in"][5] not in ("none", "all")
    config.write_text(
        "from jaxthd.config import *\n"
        "def config(): return Config(model=ModelConfig(llm=LLMConfig(tied_embedding=True)))\n"
    )
    describe_main(["--config", str(config), "--names", "--adapt.freeze", "head"])
    assert "embedding or head" in capsys.readouterr().out
