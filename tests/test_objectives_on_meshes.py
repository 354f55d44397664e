"""DPO, KTO and GRPO train the speech model on every mesh as if each answer stood alone with its prompt: loss,
metrics and the gradients of all parameters, in float64.

The answers are those of tests/test_shared_prompts.py: ragged, with audio, several a row, beside documents of
one sequence and a row of padding. Alone, nothing is packed: an objective's gradient with respect to the
log-probabilities, from rows that are written by hand, goes back through each answer's own computation.
"""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxthd.config import Config, MeshConfig
from jaxthd.models.adapt import split
from jaxthd.models.front_ends import FastConformer
from jaxthd.models.stacks import from_stages, to_stages
from jaxthd.objectives import LOSS, OBJECTIVES, Objective, Tokens, make_objective, register_objective
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import loss_and_gradient
from tests.alone import parts
from tests.answers import alone, with_most_split
from tests.helpers import assert_same
from tests.meshes.gradients import canonical_state
from tests.meshes.models import MODEL
from tests.objectives import packed as by_hand
from tests.speech_model import MELS
from tests.test_exactness import score_parts
from tests.test_shared_prompts import AUDIO, CAPACITY, SEGMENTS, documents
from tests.test_shared_prompts import config_of as of_all_mixers

ONE_DEVICE = MeshConfig()
EXTRAS = ("preference", "advantage", "reference", "old", "recorded", "drawn")
VARIANTS = {
    "dpo": ("dpo", ("label_smoothing=0.1", "sft_weight=0.5")),
    "kto": ("kto", ("beta=0.4",)),
    "grpo": ("grpo", ("correction=truncate", "clip_high=0.3")),
    "gspo": ("grpo", ("mean=answers", "ratio=answer", "kl=k2")),
}


LLM = replace(MODEL.llm, pattern="M*M*M*M*")
"""An objective sees log-probabilities alone. On 2 or 4 stages these are alike, which makes programs small."""


def config_of(mesh: MeshConfig, variant: int = 0) -> Config:
    config = of_all_mixers(mesh, variant)
    return replace(config, model=replace(config.model, llm=LLM))


@dataclass(frozen=True)
class Together(Objective):
    """The sum of several objectives' losses, so that one program runs them all."""

    is_policy: ClassVar[bool] = True

    @property
    def extras(self) -> tuple[str, ...]:
        return EXTRAS

    @property
    def parts(self) -> dict[str, Objective]:
        return {name: make_objective(*variant) for name, variant in VARIANTS.items()}

    def totals(self, tokens: Tokens) -> dict[str, Any]:
        found = {"tokens": tokens.weights.sum()}
        for name, part in self.parts.items():
            found |= {f"{name} count {key}": x for key, x in part.counts(tokens).items()}
            found |= {f"{name} total {key}": x for key, x in part.totals(tokens).items()}
        return found

    def counts(self, tokens: Tokens) -> dict[str, Any]:
        return {LOSS: tokens.weights.sum()}

    def sums(self, log_probs_RT: Any, tokens: Tokens) -> dict[str, Any]:
        """Every quotient times the number of tokens, by which the step divides."""
        totals, found = tokens.totals, {LOSS: 0}
        for name, part in self.parts.items():
            of_part, mark = {}, f"{name} total "
            for key, x in totals.items():
                of_part |= {key.removeprefix(mark): x} if key.startswith(mark) else {}
            for key, x in part.sums(log_probs_RT, replace(tokens, totals=of_part)).items():
                count = totals.get(f"{name} count {key}", totals[f"{name} count {LOSS}"])
                found[f"{name} {key}"] = x / count * totals["tokens"]
            found[LOSS] += found[f"{name} {LOSS}"]
        return found

    def extremes(self, log_probs_RT: Any, tokens: Tokens) -> dict[str, Any]:
        found = self.parts["grpo"].extremes(log_probs_RT, tokens)
        return {f"grpo {name}": x for name, x in found.items()}


def with_numbers(document: Document, rng: np.random.Generator) -> Document:
    """The document with the numbers of EXTRAS for each token; of the answers to a prompt the first is chosen,
    the second rejected."""
    n, sizes = len(document), document.answers or (len(document),)
    of_answers = [1.0, -1.0, 0.0][: len(sizes)] if document.answers else [0.0]
    constant = {"preference": of_answers, "advantage": rng.normal(size=len(sizes))}
    found = {name: np.full(n, np.nan) for name in constant}
    for name, values in constant.items():
        found[name][n - sum(sizes) :] = np.repeat(values, sizes)
    found |= {name: -4 + 0.4 * rng.normal(size=n) for name in EXTRAS[2:]}
    return replace(document, extras={name: x.astype(np.float32) for name, x in found.items()})


@functools.cache
def rows() -> list[list[Document]]:
    """With numbers for each token."""
    rng = np.random.default_rng(1)
    return [[with_numbers(document, rng) for document in row] for row in documents()]


def pack(mesh: MeshConfig, layout: Any, share_prompts: bool) -> Batch:
    capacity = CAPACITY * (1 if share_prompts else 4) * {"buffer": 1, "whole": 4}[layout]
    sizes: dict[str, Any] = {
        "capacity": capacity,
        "audio_capacity": AUDIO,
        "front_end": FastConformer(num_mels=MELS),
    }
    sizes |= {"max_documents": SEGMENTS, "context": mesh.context, "audio_ranks": mesh.audio_ranks}
    sizes |= {"extras": EXTRAS}
    packed = []
    for row in rows():
        more = {"layout": layout}
        if layout == "whole":
            more = with_most_split(row, mesh.context, capacity, share_prompts=share_prompts)
        packed.append(pack_row(row, **sizes, **more, answers=True, share_prompts=share_prompts)[0])
    return concatenate_rows(packed)


@functools.cache
def scorer() -> Callable[[Any, np.ndarray], tuple[np.ndarray, Any]]:
    """(document, weights [T]) -> (log-probabilities [T], gradients of their weighted sum); jitted."""
    with jax.enable_x64(True):
        graph = Blueprint(config_of(ONE_DEVICE)).graph

    def weighted(params: Any, buffers: Any, one: Any, weights_T: Any) -> tuple[jax.Array, jax.Array]:
        _, logp_T = score_parts(nnx.merge(graph, params, buffers), one)
        return (weights_T * logp_T).sum(), logp_T

    run = jax.jit(jax.grad(weighted, has_aux=True))

    def call(one: Any, weights_T: np.ndarray) -> tuple[np.ndarray, Any]:
        with jax.enable_x64(True):
            state = canonical_state("float64", llm=LLM)
            gradients, logp_T = run(*state, *jax.tree.map(jnp.asarray, (one, weights_T)))
            return np.asarray(logp_T), jax.tree.map(np.asarray, gradients)

    return call


@functools.cache
def each_answer_alone() -> tuple[dict[str, float], Any]:
    """(metrics and losses, gradients)."""
    ones = [[alone(document) for document in row] for row in rows()]
    at = [np.flatnonzero(one.supervised[1:]) for row in ones for some in row for one in some]
    padded = [parts(one) for row in ones for some in row for one in some]
    zeros = np.zeros(len(padded[0].tokens))
    log_probs = [scorer()(one, zeros)[0] for one in padded]

    numbered: Iterator[int] = iter(range(len(at)))

    def answer(one: Document) -> by_hand.Answer:
        i = next(numbered)
        extras = {name: one.extras[name][1:][at[i]].astype(float).tolist() for name in EXTRAS}
        return by_hand.Answer({"policy": log_probs[i][at[i]].tolist(), **extras})

    prompted = [[by_hand.Prompted(2, list(map(answer, some))) for some in row] for row in ones]
    batch = by_hand.packed(prompted, 256, shared=False, seed=None)
    found = by_hand.run([make_objective(*variant) for variant in VARIANTS.values()], batch)
    metrics = {
        f"{name} {key}": float(x)
        for name, of in zip(VARIANTS, found, strict=True)
        for key, x in of.quotients.items()
        if name != "gspo" or key not in ("ratio_max", "inverse_ratio_max", "logprob_difference")
    }
    by_answer = batch.of_answers(sum(of.gradient for of in found))
    total = None
    for one, where, gradient in zip(padded, at, by_answer, strict=True):
        weights_T = zeros.copy()
        weights_T[where] = gradient
        own = scorer()(one, weights_T)[1]
        total = own if total is None else jax.tree.map(np.add, total, own)
    return metrics, total


RUNS = [
    (ONE_DEVICE, 0, True, "buffer"),
    (MeshConfig(1, 2, 2, 2), 0, True, "buffer"),
    (MeshConfig(2, 2, 2, 1), 1, True, "buffer"),
    (MeshConfig(2, 2, 1, 2), 0, False, "buffer"),
    (MeshConfig(1, 2, 2, 2), 0, True, "whole"),
    (MeshConfig(2, 2, 1, 1), 0, False, "whole"),
]
"""(mesh, variant of tests/meshes/runs.py, whether prompts are shared, context layout)."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "variant", "share_prompts", "layout"), RUNS, ids=str)
def test_objectives_train_answers_as_if_each_stood_alone(
    mesh: MeshConfig, variant: int, share_prompts: bool, layout: Any
) -> None:
    """In two microbatches, of which one rank's may be only padding."""
    config = config_of(mesh, variant)
    compute = replace(config.compute, context_layout=layout)
    config = replace(config, compute=compute, train=replace(config.train, objective="together"))
    register_objective("together", Together)
    try:
        batch = pack(mesh, layout, share_prompts)
        with jax.enable_x64(True):
            blueprint, devices = Blueprint(config), make_mesh(mesh)
            params, buffers = to_stages(canonical_state("float64", llm=LLM), blueprint.stages)
            run = jax.jit(loss_and_gradient(blueprint, devices))
            found = run(params, buffers, put_batch(batch, devices))
            gradients = from_stages(jax.device_get(found.gradients), blueprint.stages)
            metrics = jax.device_get(found.objective | found.extremes.numbers)
    finally:
        del OBJECTIVES["together"]
    wanted, gradient = each_answer_alone()
    assert metrics.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_allclose(metrics[name], x, rtol=1e-10, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(found.loss, sum(wanted[f"{name} {LOSS}"] for name in VARIANTS), rtol=1e-10)
    assert_same(gradients, split(gradient, blueprint.trained)[0], 1e-10)
