"""Log-probabilities of supervised tokens equal log_softmax, at the cost of the supervised positions alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import jaxthd.ops.cross_entropy as module
from jaxthd.ops.cross_entropy import (
    HeadBlocks,
    HeadInputs,
    TokenScores,
    supervised_log_probs,
    supervised_top_k,
)
from tests.helpers import assert_same

N, D, V = 37, 6, 29
ROWS = 8
COUNTS = (0, 1, 7, 8, 9, 24, 36, N)
"""Numbers of supervised positions: none, partly filled and full blocks of 8 rows, all."""


def problem(count: int, dtype=np.float64):
    """(h, head, targets, supervised, cotangent); logits reach several hundreds, where exp alone overflows."""
    rng = np.random.default_rng(count)
    h, head, dlogp = (rng.normal(size=s).astype(dtype) for s in ((N, D), (V, D), (N,)))
    h[::3] *= 50
    targets = rng.integers(0, V, N).astype(np.int32)
    targets[:4] = 0, V - 1, V - 2, 20
    supervised = np.zeros(N, bool)
    supervised[rng.permutation(N)[:count]] = True
    return h, head, targets, supervised, dlogp


@partial(jax.jit, static_argnums=5)
def value_and_gradients(h, head, targets, supervised, dlogp, vocab_block):
    logp, pull = jax.vjp(
        lambda h, head: supervised_log_probs(
            HeadInputs(h, head, targets, supervised), HeadBlocks(ROWS, vocab_block)
        ),
        h,
        head,
    )
    return logp, *pull(dlogp)


@jax.jit
def reference(h, head, targets, supervised, dlogp):
    def dense(h, head):
        logp = jnp.take_along_axis(jax.nn.log_softmax(h @ head.T), targets[:, None], axis=1)[:, 0]
        return jnp.where(supervised, logp, 0)

    logp, pull = jax.vjp(dense, h, head)
    return logp, *pull(dlogp)


@pytest.mark.parametrize("vocab_block", [10, V, V + 1, 1])
def test_equals_log_softmax(vocab_block):
    """29 entries in blocks of 10 (the last block overlaps), of 29, of more than 29, and of one."""
    with jax.enable_x64(True):
        for count in COUNTS:
            got = value_and_gradients(*problem(count), vocab_block)
            for part, want in zip(got, reference(*problem(count)), strict=True):
                assert_same(part, want, 1e-10)
            supervised = problem(count)[3]
            assert not np.asarray(got[0])[~supervised].any()
            assert not np.asarray(got[1])[~supervised].any()


def test_logits_over_a_temperature_and_their_gradients():
    """Against log_softmax of divided logits, also of the likeliest entries."""
    temperature = 0.7
    with jax.enable_x64(True):
        h, head, targets, supervised, dlogp = problem(24)
        h[::3] /= 50
        targets[:9] = np.argmax(h @ head.T, axis=1)[:9]
        given, blocks = [jnp.asarray(targets), jnp.asarray(supervised)], HeadBlocks(ROWS, 10, (), temperature)

        @jax.jit
        def both(h, head):
            logp, pull = jax.vjp(
                lambda h, head: supervised_log_probs(HeadInputs(h, head, *given), blocks), h, head
            )
            want, want_pull = jax.vjp(
                lambda h, head: reference(h / temperature, head, *given, dlogp)[0], h, head
            )
            return (logp, *pull(jnp.asarray(dlogp))), (want, *want_pull(dlogp))

        found, wanted = both(h, head)
        logp = found[0]
        for got, part in zip(found, wanted, strict=True):
            assert_same(got, part, 1e-10)
        inputs = HeadInputs(jnp.asarray(h), jnp.asarray(head), *given)
        top_k = jax.jit(supervised_top_k, static_argnums=(1, 2))(inputs, blocks, 3)
        np.testing.assert_allclose(top_k.log_probs, logp, atol=1e-10)


def test_float32_equals_float64():
    for count in COUNTS:
        got = value_and_gradients(*problem(count, np.float32), 10)
        assert got[0].dtype == np.float32
        with jax.enable_x64(True):
            args = (x.astype(np.float64) if x.dtype == np.float32 else x for x in problem(count, np.float32))
            want = reference(*args)
        for part, whole in zip(got, want, strict=True):
            assert_same(part, whole, 1e-5)


def test_positions_not_supervised_reach_nothing():
    """Not even NaN in those positions, or in their cotangent."""
    for count in COUNTS:
        h, head, targets, supervised, dlogp = problem(count, np.float32)
        h[~supervised], dlogp[~supervised] = np.nan, np.nan
        for part in value_and_gradients(h, head, targets, supervised, dlogp, 10):
            assert np.isfinite(part).all()


def test_executed_blocks_follow_the_supervised_positions(monkeypatch):
    """ceil(supervised / 8) blocks of rows times 3 of the vocabulary, once forward and once backward."""
    executed = []
    original = module._logits

    def counted(*args):
        jax.debug.callback(lambda: executed.append(1))
        return original(*args)

    monkeypatch.setattr(module, "_logits", counted)
    run = jax.jit(lambda *args: value_and_gradients.__wrapped__(*args, 10))
    for count in COUNTS:
        executed.clear()
        jax.block_until_ready(run(*problem(count, np.float32)))
        jax.effects_barrier()
        assert len(executed) == 2 * 3 * -(-count // ROWS)


def with_ties(count: int):
    """As problem, but values are small integers: most logits have several equals, at any distance."""
    h, head, targets, supervised, _ = problem(count)
    return np.sign(h), np.round(head), targets, supervised


def reference_top_k(h, head, targets, supervised, k: int) -> TokenScores:
    """The top k by sorting all entries; among equals the lowest id comes first."""
    logits = h @ head.T
    high = logits.max(-1, keepdims=True)
    logp = logits - high - np.log(np.exp(logits - high).sum(-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    of_target = np.take_along_axis(logp, targets[:, None], axis=-1)[:, 0]
    scores = TokenScores(of_target, order.astype(np.int32), np.take_along_axis(logp, order, axis=-1))
    return jax.tree.map(lambda x: np.where(supervised.reshape(-1, *[1] * (x.ndim - 1)), x, 0), scores)


@pytest.mark.parametrize(("k", "vocab_block"), [(1, 10), (5, 10), (V, 10), (12, V), (3, 1), (0, 10)])
def test_the_likeliest_entries_are_those_of_a_sort(k, vocab_block):
    """k may also exceed a block, or be the whole vocabulary."""

    @jax.jit
    def run(h, head, targets, supervised):
        return supervised_top_k(HeadInputs(h, head, targets, supervised), HeadBlocks(ROWS, vocab_block), k)

    with jax.enable_x64(True):
        for count in COUNTS:
            for given in (problem(count)[:4], with_ties(count)):
                got, want = run(*given), reference_top_k(*given, k)
                np.testing.assert_array_equal(got.top_ids, want.top_ids)
                np.testing.assert_allclose(got.top_log_probs, want.top_log_probs, rtol=1e-10, atol=1e-10)
                np.testing.assert_allclose(got.log_probs, want.log_probs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("k", [4, 27])
def test_ranks_that_share_the_vocabulary_find_the_same_entries(k):
    """2 x 2 ranks have 7 entries each, fewer than k; ties are between ranks and inside them."""
    axes, entries = ("pipeline", "tensor"), 28
    mesh = jax.make_mesh((2, 2), axes, axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def rank(h, head, targets, supervised):
        return supervised_top_k(HeadInputs(h, head, targets, supervised), HeadBlocks(ROWS, 3, axes), k)

    everywhere = PartitionSpec()
    in_specs = (everywhere, PartitionSpec(axes), everywhere, everywhere)
    run = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=in_specs, out_specs=everywhere, check_vma=False))
    with jax.enable_x64(True):
        for h, head, targets, supervised in (problem(24)[:4], with_ties(24), with_ties(N)):
            given = h, head[:entries], np.minimum(targets, entries - 1), supervised
            got, want = run(*given), reference_top_k(*given, k)
            np.testing.assert_array_equal(got.top_ids, want.top_ids)
            np.testing.assert_allclose(got.top_log_probs, want.top_log_probs, rtol=1e-10, atol=1e-10)
            np.testing.assert_allclose(got.log_probs, want.log_probs, rtol=1e-10, atol=1e-10)
