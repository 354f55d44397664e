"""The whole speech model, packed or padded, on any mesh, computes what is defined for each document alone.

The encoder is included, with batch statistics; documents are ragged, with and without audio. Loss, every
gradient, the new statistics and the experts' routing are compared, in float64 except in one test.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxthd.config import MeshConfig
from jaxthd.packing.batch import Batch
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.prompts import find_prompts
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.optimizer import clipped, make_optimizer
from jaxthd.steps.state import TrainState, state_shardings
from jaxthd.steps.training import Gradient, make_train_step
from jaxthd.steps.validation import make_validation_step
from tests.alone import Parts, parts, states_of
from tests.errors import worst_error
from tests.helpers import assert_same, spans, top_k_margins
from tests.speech_model import CASES, MODEL, documents, evaluate, pack, program, run_config, state

MESHES = [(2, 2, "ring", "buffer")]
"""(data, context, exchange, layout): both axes."""
OTHER_MESHES = [
    (1, 4, "ring", "buffer"),
    (1, 4, "all_gather", "buffer"),
    (1, 4, "ring", "whole"),
]
SEEDS = range(8)
"""Seeds of the documents, for the comparison of float32 with float64."""


@functools.cache
def one_device(case: str, seed: int = 3) -> Gradient:
    return evaluate(pack(documents(case, seed), context=1))


def assert_equal(got: Gradient, want: Gradient, tolerance: float = 1e-10) -> None:
    for part, reference in zip(got, want, strict=True):
        assert_same(part, reference, tolerance)


@pytest.mark.parametrize(
    ("data", "context", "exchange", "layout"),
    [*MESHES, *(pytest.param(*mesh, marks=pytest.mark.exhaustive) for mesh in OTHER_MESHES)],
)
def test_the_mesh_changes_nothing(data, context, exchange, layout):
    for case in CASES:
        got = evaluate(pack(documents(case), context, layout), data, context, exchange, layout=layout)
        assert_equal(got, one_device(case))


@functools.cache
def top_k_margins_by_seed() -> list[float]:
    """The smallest top-k margin of a token in any MoE layer, over all cases, for each seed of documents.

    Also checks that a model without a mesh has the same loss.
    """
    least = []
    # Before, since margins would be noted of a program traced inside.
    losses = {(case, seed): one_device(case, seed).loss for seed in SEEDS for case in CASES}
    with top_k_margins() as margins, jax.enable_x64(True):
        graph = Blueprint(run_config(1, 1, "ring", "float64")).graph
        run = jax.jit(lambda *args: nnx.merge(graph, *args[:-1]).log_probs(args[-1], axes=(), train=True)[0])
        for seed in SEEDS:
            for case in CASES:
                batch = pack(documents(case, seed), context=1)
                logp = np.asarray(run(*state("float64"), jax.tree.map(jnp.asarray, batch)))
                loss = -(batch.weights * logp).sum() / max(batch.weights.sum(), 1)
                np.testing.assert_allclose(loss, losses[case, seed], rtol=1e-12)
            jax.effects_barrier()
            assert len(margins) == MODEL.llm.pattern.count("E") * len(CASES)
            least.append(min(margins))
            margins.clear()
    return least


@pytest.mark.exhaustive
def test_float32_on_a_mesh_is_off_by_rounding_only():
    """Compared with float64, over seeds and cases: four devices are typically off as much as one, and neither
    is ever off by more than 5e-5.

    The worst tensor of a case is often a bias whose gradient nearly cancels. Its error says little: for one
    seed and case it was 1.3e-5 on one device and 3.0e-5 on four, for others the other way round. Seeds are
    skipped if their top-k margin would let rounding flip a choice of experts.
    """
    margins = top_k_margins_by_seed()
    chosen = [seed for seed, margin in zip(SEEDS, margins, strict=True) if margin > 1e-4]
    assert len(chosen) >= len(SEEDS) / 2
    alone, on_mesh = {}, {}
    for seed, case in itertools.product(chosen, CASES):
        want = one_device(case, seed)
        rows = documents(case, seed)
        one, four = evaluate(pack(rows, 1), dtype="float32"), evaluate(pack(rows, 2), 2, 2, dtype="float32")
        for got in (one, four):
            assert_same(got._replace(gradients=None), want._replace(gradients=None), 1e-6)
        alone[seed, case] = worst_error(one.gradients, want.gradients)
        on_mesh[seed, case] = worst_error(four.gradients, want.gradients)
    (own, _), (error, tensor) = max(alone.values()), max(on_mesh.values())
    assert own <= 5e-5
    assert error <= 5e-5, (tensor, on_mesh)
    typical, typical_own = (np.median([e for e, _ in found.values()]) for found in (on_mesh, alone))
    assert typical <= 1.5 * typical_own, (alone, on_mesh)


@pytest.mark.parametrize(
    ("data", "context", "exchange"),
    [(1, 1, "ring"), (2, 2, "ring")],
)
def test_packed_equals_padded(data, context, exchange):
    """The same documents in two packed rows and in four padded ones; batch statistics too skip padding."""
    one, two, three, four = (row[0] for row in documents("padded"))
    packed = evaluate(pack([[one, four], [two, three], [], []], context), data, context, exchange)
    assert_equal(packed, one_device("padded"))


def score_packed(model: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """(sum over supervised positions, log-probabilities [R, T]), with stored batch statistics."""
    logp_RT = model.log_probs(batch, axes=(), train=False)[0]
    return (batch.weights * logp_RT).sum(), logp_RT


def score_parts(model: Any, one: Parts) -> tuple[jax.Array, jax.Array]:
    """As score_packed for one document: the softmax is over all logits; position i is scored if token i + 1
    is supervised."""
    _, h_TD = states_of(model, one)
    logp_TV = jax.nn.log_softmax(h_TD @ model.head[...].T)
    next_T, score_next_T = jnp.append(one.tokens[1:], 0), jnp.append(one.supervised[1:], False)
    logp_T = jnp.where(score_next_T, jnp.take_along_axis(logp_TV, next_T[:, None], axis=1)[:, 0], 0)
    return logp_T.sum(), logp_T


@functools.cache
def scorer(score: Callable[[Any, Any], Any]) -> Callable[[Any], tuple[np.ndarray, Any]]:
    """Jits score on one device in float64: argument -> (log-probabilities, gradients of their sum)."""
    with jax.enable_x64(True):
        graph = Blueprint(run_config(1, 1, "ring", "float64")).graph

    def of_params(params: Any, buffers: Any, given: Any) -> Any:
        return score(nnx.merge(graph, params, buffers), given)

    run = jax.jit(jax.grad(of_params, has_aux=True))

    def call(given: Any) -> tuple[np.ndarray, Any]:
        with jax.enable_x64(True):
            gradients, logp = run(*state("float64"), jax.tree.map(jnp.asarray, given))
            return np.asarray(logp), jax.tree.map(np.asarray, gradients)

    return call


@functools.cache
def each_document_alone(case: str) -> list[list[tuple[np.ndarray, Any]]]:
    """By row and document: (log-probabilities of its tokens, gradients of their sum)."""
    return [[scorer(score_parts)(parts(one)) for one in row] for row in documents(case)]


@pytest.mark.parametrize("case", ["ragged", "documents of one token", "one document fills the buffer"])
def test_packed_equals_each_document_alone(case):
    """With stored statistics; compares every token's log-probability and the gradients of all parameters."""
    for row, alone in zip(documents(case), each_document_alone(case), strict=True):
        logp, gradients = scorer(score_packed)(pack([row], context=1))
        for span, one, (want, _) in zip(spans([len(d) for d in row]), row, alone, strict=True):
            assert_same(logp[0, span], want[: len(one)], 1e-10)
        assert_same(gradients, jax.tree.map(lambda *g: sum(g), *(g for _, g in alone)), 1e-10)


def test_the_loss_is_one_sum_over_one_count():
    """Sum and count are over the tokens of all documents, each computed alone. Tested are validation on 2 x 2
    devices and, without audio (hence without batch statistics), training's loss and gradients. Nothing is
    averaged by rank, row or document."""
    config = run_config(2, 2, "ring", "float64")
    mesh = make_mesh(config.mesh)
    for case in ("unlike numbers of supervised tokens", "text only"):
        batch = pack(documents(case), context=2)
        total = sum(logp.sum() for row in each_document_alone(case) for logp, _ in row)
        with jax.enable_x64(True):
            validation = make_validation_step(Blueprint(config), mesh, stop_ids=(0,), new_tokens=0)
            ends, _ = find_prompts(batch, ContextLayout(ranks=2), max_documents=16)
            scores, _ = validation(*state("float64"), put_batch(batch, mesh), ends)
            nll, count = float(scores.loss), float(scores.tokens)
        assert count == batch.weights.sum()
        np.testing.assert_allclose(nll, -total, rtol=1e-10)
    loss, gradients, *_ = one_device("text only")
    np.testing.assert_allclose(loss, -total / count, rtol=1e-10)
    alone = [g for row in each_document_alone("text only") for _, g in row]
    assert_same(gradients, jax.tree.map(lambda *g: -sum(g) / count, *alone), 1e-10)


@pytest.mark.exhaustive
def test_a_batch_without_audio_trains():
    """The audio buffers are empty or absent: loss and gradients are the same, and the encoder's statistics do
    not change (with audio all of them do)."""
    absent = evaluate(pack(documents("text only"), 2, audio=0), context=2)
    assert_equal(absent, one_device("text only"))
    loss, gradients, buffers, *_ = absent
    assert loss > 0
    assert not any(g.any() for g in jax.tree.leaves((gradients["encoder"], gradients["adapter"])))
    assert all(g.any() for g in jax.tree.leaves(gradients["decoder"]))
    assert_same(buffers, state("float64")[1], 0)
    with_audio = one_device("ragged").buffers["encoder"]
    before = state("float64")[1]["encoder"]
    assert all((a != b).all() for a, b in zip(*map(jax.tree.leaves, (with_audio, before)), strict=True))


@pytest.mark.exhaustive
def test_training_on_padded_batches_stays_equal_and_finite():
    """Four optimizer steps on padded batches under context 2, by the train step, compared with one device.

    (Elsewhere such batches lost their padding mask, and gradients were NaN after one step.)
    """
    cases = ["padded", "mostly padding", "padded", "text only"]
    config = run_config(1, 2, "ring", "float64")
    mesh = make_mesh(config.mesh)
    params, buffers = state("float64")
    with jax.enable_x64(True):
        optimizer = make_optimizer(Blueprint(config))
        opt_state = jax.jit(optimizer.init)(params)
        start = TrainState(*np.zeros(3, np.int32), params, buffers, opt_state)
        trained = jax.device_put(start, state_shardings(Blueprint(config), mesh))
        train_step = make_train_step(Blueprint(config), mesh)
        most = config.train.clip_norm
        update = jax.jit(lambda g, s, p: _applied(p, *optimizer.update(clipped(g, most), s, p)))
        for number, case in enumerate(cases, 1):
            batch = put_batch(pack(documents(case), 1), make_mesh(MeshConfig()))
            loss, gradients, buffers, routing, *_ = program(1, 1, "ring", "float64")(params, buffers, batch)
            buffers, highest, aux = _evened_out(buffers, routing, config.train.router_bias_rate)
            params, opt_state = update(gradients, opt_state, params)
            trained, metrics = train_step(trained, put_batch(pack(documents(case), 2), mesh))
            norm = np.sqrt(sum(np.sum(np.square(g)) for g in jax.tree.leaves(gradients)))
            measured = (metrics.loss, metrics.grad_norm, metrics.max_expert_load, metrics.aux_loss)
            assert_same(measured, (loss, norm, highest, aux), 1e-10)
            # Looser, since AdamW divides gradients that are truly 0 (biases before BatchNorm), and here
            # rounding of 1e-17, by its epsilon of 1e-8.
            assert_same((trained.params, trained.buffers), (params, buffers), 1e-9)
            assert trained.step == number


@pytest.mark.exhaustive
@pytest.mark.parametrize(("data", "context", "microbatches"), [(2, 2, 2)])
def test_microbatches_change_no_loss_and_no_gradient(data: int, context: int, microbatches: int):
    """Rows have 113 supervised tokens, or 1, or are empty. There is no audio, since the encoder's statistics
    are those of a microbatch; the auxiliary loss is computed for each microbatch too."""
    for case in ("text only", "nothing supervised"):
        rows = [[d for d in row if not d.pieces] for row in documents(case)]
        got = evaluate(pack(rows, context), data, context, microbatches=microbatches)
        assert_equal(*(without_aux(found) for found in (got, evaluate(pack(rows, 1)))))


@pytest.mark.exhaustive
def test_microbatches_pass_on_batch_statistics():
    """Four rows in sequence move the running statistics as four batches of one row each do."""
    mesh = make_mesh(MeshConfig())
    params, buffers = state("float64")
    rows = documents("ragged")
    got = evaluate(pack(rows, 1), microbatches=4).buffers
    with jax.enable_x64(True):
        for row in rows:
            batch = put_batch(pack([row], 1), mesh)
            buffers = program(1, 1, "ring", "float64")(params, buffers, batch).buffers
    assert_same(got, buffers, 1e-10)


def without_aux(found: Gradient) -> Gradient:
    assert found.routing is not None
    return found._replace(routing=found.routing._replace(aux=np.zeros(())))


def _evened_out(buffers: Any, routing: Any, rate: float) -> tuple[Any, float, float]:
    """(buffers with the experts' biases updated, the highest load over its layer's mean, auxiliary loss)."""
    load_LE = np.asarray(routing.load)
    mean_L1 = load_LE.mean(1, keepdims=True)
    moved = jax.tree.map(np.array, buffers)
    moved["decoder"]["layers"]["moe"]["mixer"]["correction_bias"] += rate * np.sign(mean_L1 - load_LE)
    return moved, (load_LE / mean_L1).max(), np.sum(routing.aux) / np.sum(routing.tokens)


def _applied(params: Any, updates: Any, opt_state: Any) -> tuple[Any, Any]:
    return optax.apply_updates(params, updates), opt_state
