"""The gated delta rule: packed equals each document alone, token by token, on every context size; the
inverse of unit lower triangular matrices that it takes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.ops.delta.rule import DeltaInputs, gated_delta_rule
from jaxthd.ops.delta.unit_triangular import inverse_of_unit_lower
from jaxthd.ops.scan import state_passing
from jaxthd.packing.segments import segments_of
from tests.helpers import CAPACITY, CASES, assert_same, on_context, row_arrays, spans

H, G, K, V = 4, 2, 5, 3
RATES = np.array([1e-4, 0.1, 1.0, 50.0])
"""Mean decays of the heads a token."""


KINDS = ("of a head", "of a feature")
"""Kinds of decays."""


def inputs_of(rng: np.random.Generator, kind: str = KINDS[0], tokens: int = CAPACITY) -> DeltaInputs:
    """Keys are unit vectors, some of them equal to the one before, which makes the systems hardest."""
    q, k = rng.normal(size=(2, tokens, G, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    k[1::3] = k[::3][: len(k[1::3])]
    decay = -RATES * rng.exponential(size=(tokens, H))
    if kind == KINDS[1]:
        decay = -rng.permuted(np.tile(RATES, (tokens, K, 1)), axis=1).mT * rng.exponential(
            size=(tokens, H, K)
        )
    return DeltaInputs(q, k, rng.normal(size=(tokens, H, V)), decay, rng.uniform(size=(tokens, H)))


@jax.jit
def recurrence(inputs, reset_L):
    """(y, the state after each token), one token at a time; S = 0 where reset."""

    def step(state_HKV, given):
        (q, k, v, decay, rate), reset = given
        q, k = (jnp.repeat(x, H // G, axis=0) for x in (q, k))
        state_HKV = jnp.where(reset, 0, jnp.exp(decay)).reshape(H, -1, 1) * state_HKV
        written_HV = rate[:, None] * (v - (state_HKV * k[..., None]).sum(1))
        state_HKV = state_HKV + k[..., None] * written_HV[:, None]
        return state_HKV, ((state_HKV * q[..., None]).sum(1), state_HKV)

    return jax.lax.scan(step, jnp.zeros((H, K, V), inputs.v.dtype), (inputs, reset_L))[1]


def each_document_alone(inputs, lengths, dy):
    """Outputs, gradients and states of the recurrence, from a state of zeros at each document's start."""
    reset = np.isin(np.arange(len(dy)), [span.start for span in spans(lengths)])
    y, pull, states = jax.vjp(lambda i: recurrence(i, reset), jax.tree.map(jnp.asarray, inputs), has_aux=True)
    return y, pull(jnp.asarray(dy))[0], states


@pytest.mark.parametrize(
    ("kind", "context", "gather_up_to", "chunk"),
    [
        (KINDS[0], 1, 8, 6),
        (KINDS[0], 1, 8, 64),
        (KINDS[0], 4, 8, 6),
        (KINDS[0], 4, 1, 6),
        (KINDS[1], 1, 8, 6),
        (KINDS[1], 4, 8, 6),
        *(pytest.param(KINDS[1], *x, marks=pytest.mark.exhaustive) for x in ((1, 8, 64), (4, 1, 6))),
        *(
            pytest.param(kind, *ranks, 1, marks=pytest.mark.exhaustive)
            for kind in KINDS
            for ranks in ((1, 8), (4, 8), (4, 1))
        ),
    ],
)
def test_it_equals_the_recurrence_of_each_document_alone(kind, context, gather_up_to, chunk, monkeypatch):
    """(4, 1) passes states in log2 steps."""
    monkeypatch.setattr(state_passing, "GATHER_UP_TO", gather_up_to)
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        run = on_context(
            lambda _, x, segments: gated_delta_rule(x, segments, chunk=chunk)[0], context, block=8
        )
        for lengths in CASES.values():
            inputs, dy, real = inputs_of(rng, kind), rng.normal(size=(CAPACITY, H, V)), sum(lengths)
            dy[real:] = 0
            y, _, dinputs = run(None, inputs, *row_arrays(lengths), dy)
            want_y, want_dinputs, _ = each_document_alone(inputs, lengths, dy)
            assert y.dtype == np.float64
            assert_same(y[:real], want_y[:real], 1e-10)
            assert_same(tuple(dinputs), tuple(want_dinputs), 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_states_after_tokens_are_the_recurrences(kind):
    rng, lengths = np.random.default_rng(2), [13, 1, 21, 9, 11]
    with jax.enable_x64(True):
        inputs = inputs_of(rng, kind)
        at = jnp.asarray([0, 12, 13, 20, -1, 34, 43, 54], jnp.int32)
        _, states = jax.jit(lambda i, s: gated_delta_rule(i, s, at, chunk=6))(
            inputs, segments_of(lengths, CAPACITY)
        )
        want = each_document_alone(inputs, lengths, np.zeros((CAPACITY, H, V)))[2][at]
        assert_same(states, np.where((at >= 0)[:, None, None, None], want, 0), 1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_in_float32_decays_of_any_size_stay_finite(kind):
    rng = np.random.default_rng(3)
    inputs = DeltaInputs(*(np.float32(x) for x in inputs_of(rng, kind)))
    lengths, dy = [40, 24], rng.normal(size=(CAPACITY, H, V)).astype(np.float32)

    @jax.jit
    def run(inputs, segments):
        y, pull = jax.vjp(lambda i: gated_delta_rule(i, segments, chunk=16)[0], inputs)
        return y, pull(dy)[0]

    y, dinputs = run(inputs, segments_of(lengths, CAPACITY))
    with jax.enable_x64(True):
        want_y, want_dinputs, _ = each_document_alone(
            DeltaInputs(*(np.float64(x) for x in inputs)), lengths, np.float64(dy)
        )
    assert_same(y, want_y, 1e-5)
    assert_same(tuple(dinputs), tuple(want_dinputs), 1e-5)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_decays_of_features_by_exp_of_minus_30_a_token_are_the_recurrences(dtype):
    """In a scan chunk of 64: factors from its start would be exp of +-1920. A feature beside them decays by
    e^-1e-4 alone, others by turns."""
    rng, lengths = np.random.default_rng(4), [64]
    inputs, dy = inputs_of(rng), rng.normal(size=(CAPACITY, H, V))
    decay = np.full((CAPACITY, H, K), -30.0)
    decay[:, :, 1], decay[::2, :, 2], decay[:, :, 3] = -1e-4, 0.0, -30 * rng.uniform(size=(CAPACITY, H))
    inputs = DeltaInputs(*(x.astype(dtype) for x in inputs._replace(decay=decay)))
    with jax.enable_x64(True):
        exact = DeltaInputs(*(np.float64(x) for x in inputs))
        want_y, want_dinputs, _ = each_document_alone(exact, lengths, np.float64(dy.astype(dtype)))
    with jax.enable_x64(dtype == np.float64):
        segments = segments_of(lengths, CAPACITY)
        y, pull = jax.vjp(jax.jit(lambda i: gated_delta_rule(i, segments, chunk=64)[0]), inputs)
        (dinputs,) = pull(dy.astype(dtype))
    tolerance = 1e-10 if dtype == np.float64 else 1e-5
    assert_same(y, want_y, tolerance)
    assert_same(tuple(dinputs), tuple(want_dinputs), tolerance)
    assert all(np.isfinite(x).all() for x in dinputs)


@pytest.mark.parametrize("size", [1, 6, 16])
def test_the_inverse_equals_the_general_one_gradients_included(size):
    """What is on and above the diagonal has no effect."""
    rng = np.random.default_rng(size)
    lower, dinverse = rng.normal(size=(2, 3, size, size))

    want = np.linalg.inv(np.tril(lower, -1) + np.eye(size))
    dlower = np.tril(-want.swapaxes(1, 2) @ dinverse @ want.swapaxes(1, 2), -1)
    with jax.enable_x64(True):
        found, pull = jax.vjp(inverse_of_unit_lower, jnp.asarray(lower))
        assert_same((found, *pull(jnp.asarray(dinverse))), (want, dlower), 1e-10)


def test_in_float32_equal_keys_lose_no_digits_of_the_inverse():
    """Keys that are all alike and rates of 1: the inverse is 1 on the diagonal, -1 below it, 0 elsewhere; the
    powers of the matrix reach 1e18.
    """
    inverse = inverse_of_unit_lower(jnp.ones((64, 64), jnp.float32))
    np.testing.assert_array_equal(inverse, np.eye(64) - np.eye(64, k=-1))


def test_the_program_of_the_inverse_calls_no_solver():
    """A solver of jaxlib's can wait for ever on two cores."""
    text = jax.jit(jax.grad(lambda x: inverse_of_unit_lower(x).sum())).lower(jnp.eye(8)).as_text()
    assert "dot_general" in text
    assert "custom_call" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_no_sum_is_over_arrays_of_seven_dims(kind):
    """There jaxlib 0.10.2 ends with a segmentation fault on a CPU, now and then: gradients of decays of
    features did."""
    inputs = DeltaInputs(*(np.float32(x) for x in inputs_of(np.random.default_rng(0), kind)))
    segments = segments_of([40, 24], CAPACITY)
    found = jax.jit(jax.grad(lambda i: gated_delta_rule(i, segments, chunk=16)[0].sum())).lower(inputs)
    sums = [line for line in found.as_text().splitlines() if "stablehlo.reduce(" in line]
    shapes = re.findall(r"tensor<((?:\d+x)+)f32>", "".join(sums))
    assert max(shape.count("x") for shape in shapes) in (5, 6)
