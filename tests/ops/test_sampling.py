"""Tokens are sampled from the softmax after top-k and top-p, alike however the vocabulary is sharded."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxthd.ops.sampling import Sampling, draw, kept, likeliest
from jaxthd.parallel.mesh import PIPELINE, TENSOR

AXES = (PIPELINE, TENSOR)
CUTS = [(1, 1), (1, 2), (2, 2)]
"""(pipeline, tensor) ranks."""


@functools.cache
def on_ranks(split: tuple[int, int]) -> Any:
    """A jitted (logits [n, V], keys [n, 2], number, sampling) -> (kept, drawn), over that many ranks."""
    axis_types = (AxisType.Auto,) * 2
    mesh = jax.make_mesh(split, AXES, axis_types=axis_types, devices=jax.devices()[: split[0] * split[1]])
    everywhere, by_rank = PartitionSpec(), PartitionSpec(None, AXES)

    def rank(logits: Any, keys: Any, number: Any, sampling: Sampling) -> tuple[Any, Any]:
        below = logits - jax.lax.pmax(logits.max(-1), AXES)[:, None]
        scaled = (below / sampling.temperature).astype(jnp.float32)
        return kept(scaled, sampling, AXES), draw(logits, keys, number, sampling, AXES).tokens

    return jax.jit(
        jax.shard_map(
            rank,
            mesh=mesh,
            in_specs=(by_rank, everywhere, everywhere, everywhere),
            out_specs=(by_rank, everywhere),
            check_vma=False,
        )
    )


def sampling(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Sampling:
    return Sampling(np.float32(temperature), np.int32(top_k), np.float32(top_p))


def random_keys(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2**32, size=(n, 2), dtype=np.uint32)


def allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The allowed tokens of one document [V], in float64, by the rule of transformers: sorted; the first k;
    then the fewest whose sum reaches p. Tokens equal to the last one are kept too.
    """
    scaled = logits.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    left = scaled >= scaled[order[min(top_k or len(scaled), len(scaled)) - 1]]
    if top_p == 1:
        return left
    p = np.where(left, np.exp(scaled - scaled.max()), 0)
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    last = order[np.flatnonzero(before < top_p)[-1]]
    return left & (p >= p[last])


def ragged_logits() -> np.ndarray:
    """Flat, peaked, with ties, negative, with entries that cannot be drawn; V = 40."""
    rng = np.random.default_rng(1)
    rows = [rng.normal(0, s, 40) for s in (0.1, 1, 3, 30)]
    rows += [rng.integers(-2, 3, 40).astype(float) for _ in range(4)]
    rows += [np.zeros(40), -1e4 + rng.normal(0, 1, 40), np.where(np.arange(40) == 17, 50.0, 0.0)]
    return np.array(rows, np.float32)


@pytest.mark.parametrize("split", CUTS)
def test_top_k_and_top_p_leave_what_sorting_leaves(split: tuple[int, int]):
    logits = ragged_logits()
    keys = random_keys(len(logits))
    counts = set()
    for temperature in (0.3, 1.0, 2.5):
        for top_k in (0, 1, 3, 17, 40, 99):
            for top_p in (1e-6, 0.4, 0.93, 0.9999, 1.0):
                left, drawn = on_ranks(split)(logits, keys, 0, sampling(temperature, top_k, top_p))
                want = np.array([allowed(row, temperature, top_k, top_p) for row in logits])
                np.testing.assert_array_equal(left, want, err_msg=f"{temperature} {top_k} {top_p}")
                assert want[np.arange(len(want)), drawn].all()
                counts |= set(want.sum(-1).tolist())
    assert len(counts) > 10


def test_draws_have_the_probabilities_of_the_restricted_softmax():
    """Chi-square test over 40,000 documents, against every token's probability written out."""
    logits = np.array([0.0, 1.0, -1.0, 2.5, 0.5, -8.0, 1.5, 1.2], np.float32)
    n = 40_000
    for settings in ((1.0, 0, 1.0), (0.6, 0, 1.0), (2.0, 5, 1.0), (1.0, 0, 0.8), (1.5, 6, 0.7)):
        _, drawn = on_ranks((1, 2))(np.tile(logits, (n, 1)), random_keys(n), 3, sampling(*settings))
        p = np.where(allowed(logits, *settings), np.exp(logits.astype(float) / settings[0]), 0)
        p /= p.sum()
        counts = np.bincount(np.asarray(drawn), minlength=len(p))
        possible = p > 0
        assert counts[~possible].sum() == 0
        expected = n * p[possible]
        chi_square = ((counts[possible] - expected) ** 2 / expected).sum()
        # With at most 7 degrees of freedom, 24.3 is exceeded once in a thousand.
        assert chi_square < 24.3, (settings, counts, expected)


def test_draws_do_not_depend_on_how_the_vocabulary_is_split():
    logits = np.repeat(ragged_logits(), 20, axis=0)
    keys = random_keys(len(logits))
    for settings in (sampling(), sampling(0.7, 9, 0.9)):
        drawn = [np.asarray(on_ranks(split)(logits, keys, 5, settings)[1]) for split in CUTS]
        assert len(set(drawn[0].tolist())) > 20
        for other in drawn[1:]:
            np.testing.assert_array_equal(other, drawn[0])


def test_draws_are_of_the_document_and_the_tokens_number_wherever_it_lies():
    logits, keys = np.tile(ragged_logits()[1], (64, 1)), random_keys(64)

    def drawn(keys: np.ndarray, number: int = 0) -> np.ndarray:
        return np.asarray(on_ranks((1, 1))(logits, keys, number, sampling())[1])

    np.testing.assert_array_equal(drawn(keys[::-1]), drawn(keys)[::-1])
    assert (drawn(keys) != drawn(keys, 1)).mean() > 0.5
    assert (drawn(keys) != drawn(random_keys(64, 1))).mean() > 0.5


@pytest.mark.parametrize("split", CUTS)
def test_without_temperature_it_is_the_likeliest_the_first_of_equals(split: tuple[int, int]):
    logits = ragged_logits()
    _, drawn = on_ranks(split)(logits, random_keys(len(logits)), 0, sampling(0.0, 3, 0.5))
    np.testing.assert_array_equal(drawn, np.argmax(logits, axis=-1))
    _, coldest = on_ranks(split)(logits, random_keys(len(logits)), 0, sampling(1e-30))
    assert (np.take_along_axis(logits, np.asarray(coldest)[:, None], 1)[:, 0] == logits.max(-1)).all()


def test_one_device_needs_no_mesh():
    logits = ragged_logits()
    np.testing.assert_array_equal(likeliest(jnp.asarray(logits), ()), np.argmax(logits, axis=-1))
    keys = random_keys(len(logits))
    settings = sampling(0.8, 7, 0.9)
    alone = draw(jnp.asarray(logits), jnp.asarray(keys), 2, settings, ()).tokens
    np.testing.assert_array_equal(alone, on_ranks((1, 1))(logits, keys, 2, settings)[1])
