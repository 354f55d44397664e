"""CTC of packed documents equals optax's of each document alone, in value and gradient."""

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxthd.ops.ctc import Alignable, ctc_log_probs
from tests.helpers import assert_same

VOCAB, SLOTS, DOCUMENTS, LABELS, MOST_FRAMES = 7, 48, 10, 6, 20


class Spec(NamedTuple):
    frames: int
    labels: tuple[int, ...]


CASES: dict[str, list[Spec]] = {
    "ragged": [Spec(5, (1, 2)), Spec(3, (4,)), Spec(20, (3, 1, 5, 6, 2, 1)), Spec(9, (6, 5, 6))],
    "repeated labels": [Spec(9, (1, 1, 3, 3, 4)), Spec(3, (2, 2)), Spec(4, (2, 2)), Spec(11, (1,) * 6)],
    "one frame, one label": [Spec(1, (3,)), Spec(1, (1,)), Spec(7, (2,)), Spec(2, (2, 1))],
    "no alignment": [Spec(2, (2, 2)), Spec(4, (1, 2)), Spec(1, (1, 2)), Spec(6, ()), Spec(0, (3,))],
    "no document": [],
}


def can_be_aligned(spec: Spec) -> bool:
    return 0 < len(spec.labels) <= spec.frames - sum(a == b for a, b in pairwise(spec.labels))


def padded(each: Sequence[Sequence[int]], size: int, fill: int) -> jax.Array:
    rows = [[*x, *[fill] * (size - len(x))] for x in each]
    return jnp.asarray(np.array(rows, np.int32))


def layout(specs: Sequence[Spec], seed: int = 0) -> tuple[Alignable, jax.Array, jax.Array]:
    """(documents whose frames lie anywhere, their labels, their slots [G, MOST_FRAMES], -1 where none)."""
    specs = [*specs, *[Spec(0, ())] * (DOCUMENTS - len(specs))]
    covered = [can_be_aligned(s) for s in specs]
    frames = [s.frames for s in specs]
    slots = np.random.default_rng(seed).permutation(SLOTS)[: sum(frames)]
    by_document = np.split(slots, np.cumsum(frames)[:-1])
    document = np.full(SLOTS, DOCUMENTS)
    for number, own in enumerate(by_document):
        document[own] = number if covered[number] else DOCUMENTS
    labels_GL = padded([s.labels for s in specs], LABELS, 0)
    repeats_GL = jnp.pad(labels_GL[:, 1:] == labels_GL[:, :-1], ((0, 0), (1, 0)))

    def ints(x: Sequence[int]) -> jax.Array:
        return jnp.asarray(np.array(x, np.int32))

    documents = Alignable(
        slots=padded([slots.tolist()], SLOTS, SLOTS)[0],
        first=ints(np.cumsum([0, *frames[:-1]])),
        frames=ints(np.where(covered, frames, 0)),
        labels=ints(np.where(covered, [len(s.labels) for s in specs], 0)),
        repeats=repeats_GL,
        document=ints(document),
    )
    return documents, labels_GL, padded(by_document, MOST_FRAMES, -1)


@functools.cache
def packed():
    def total(logits_MV, weights_G, documents, labels_GL):
        logp_MV = jax.nn.log_softmax(logits_MV)
        labels_ML = labels_GL.at[documents.document].get(mode="clip")
        label_ML = jnp.take_along_axis(logp_MV, labels_ML, axis=1)
        logp_G = ctc_log_probs(logp_MV[:, 0], label_ML, documents)
        return (weights_G * logp_G).sum(), logp_G

    return jax.jit(jax.grad(total, has_aux=True))


@functools.cache
def alone():
    def total(logits_MV, weights_G, slots_GF, labels_GL, lengths_G):
        behind_GL = jnp.arange(LABELS) >= lengths_G[:, None]
        padding = 1.0 * (slots_GF < 0), 1.0 * behind_GL
        loss_G = optax.ctc_loss(logits_MV[slots_GF], padding[0], labels_GL, padding[1], log_epsilon=-1e30)
        logp_G = jnp.where(lengths_G > 0, -loss_G, 0)
        return (weights_G * logp_G).sum(), logp_G

    return jax.jit(jax.grad(total, has_aux=True))


@pytest.mark.parametrize("scale", [1, 200])
@pytest.mark.parametrize("case", CASES)
def test_packed_equals_each_document_alone(case: str, scale: float):
    """scale: of the logits; with 200 most paths have no probability that a float could hold."""
    with jax.enable_x64(True):
        documents, labels_GL, slots_GF = layout(CASES[case])
        rng = np.random.default_rng(1)
        logits_MV, weights_G = scale * rng.normal(size=(SLOTS, VOCAB)), rng.normal(size=DOCUMENTS)
        got = packed()(logits_MV, weights_G, documents, labels_GL)
        want = alone()(logits_MV, weights_G, slots_GF, labels_GL, documents.labels)
        assert_same(got, want, 1e-12)
        some = any(map(can_be_aligned, CASES[case]))
        assert got[0].any() == got[1].any() == some


def test_float32_suffices_for_thirty_seconds():
    """375 frames, each of which adds a logarithm. 2,000 frames lose another digit."""
    frames, labels = 375, 60
    slots, none = jnp.arange(frames, dtype=jnp.int32), jnp.zeros(frames, jnp.int32)
    numbers = (jnp.array([x], jnp.int32) for x in (0, frames, labels))
    of_one = Alignable(slots, *numbers, jnp.zeros((1, labels), bool), none)

    def total(logits_ML):
        logp_ML = jax.nn.log_softmax(logits_ML)
        return ctc_log_probs(logp_ML[:, 0], logp_ML[:, 1:], of_one).sum()

    def found(dtype: str):
        with jax.enable_x64(dtype == "float64"):
            logits_ML = np.random.default_rng(0).normal(size=(frames, labels + 1)).astype(dtype)
            return jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(total))(logits_ML))

    assert_same(found("float32"), found("float64"), 1e-4)
