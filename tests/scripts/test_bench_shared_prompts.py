"""The counts of scripts/bench_shared_prompts.py, at sizes a test can afford."""

from dataclasses import replace

import numpy as np

import scripts.bench_shared_prompts as bench
from jaxthd.config import BlockSizes

GROUPS = bench.Groups(prompt=21, answer=5, answers=3, groups=2)


def test_slots_are_those_of_the_packed_buffers():
    """A shared prompt lacks its last token, which begins every answer."""
    for share_prompts, slots in ((True, 2 * (20 + 3 * 6)), (False, 2 * 3 * 26)):
        batch = GROUPS.batch(share_prompts)
        assert (batch.segment_ids > 0).all()
        assert batch.tokens.size == GROUPS.slots(share_prompts) == slots
        assert batch.weights.sum() == 2 * 3 * 5


def test_blocks_hold_a_pair_that_attention_computes():
    """By brute force; both calls on one block size."""
    block = 8
    config = GROUPS.config(bench.SMALL)
    config = replace(config, compute=replace(config.compute, block_sizes=BlockSizes(attention=block)))
    batch = GROUPS.batch(True)
    ids, prefixes = batch.segment_ids[0], batch.prefixes[0]
    tokens = -(-len(ids) // block) * block
    own = np.zeros((tokens, tokens), bool)
    own[: len(ids), : len(ids)] = (ids[:, None] == ids) & np.tril(np.ones((len(ids), len(ids)), bool))
    continued = np.zeros((tokens, tokens), bool)
    continued[: len(ids), : len(ids)] = (prefixes[:, None] == ids) & (prefixes[:, None] > 0)
    found = bench.executed_blocks(config, batch)
    by_block = [x.reshape(tokens // block, block, -1, block).any((1, 3)) for x in (own, continued)]
    assert found[0] == by_block[0].sum()
    # Between the prefixes of two groups lie blocks that are computed too.
    assert by_block[1].sum() <= found[1] <= by_block[1].sum() + tokens // block
