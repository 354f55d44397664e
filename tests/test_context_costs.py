"""Memory, traffic and work of context parallelism, at sizes a test can afford."""

from dataclasses import replace

import numpy as np
import pytest

from jaxthd.config import BlockSizes, ComputeConfig
from jaxthd.config.listing import value_at
from tests import context_costs as bench
from tests.meshes.models import HYBRIDS
from tests.meshes.models import MODEL as MESHES

MODEL = replace(bench.TINY, llm=replace(bench.TINY.llm, pattern="M*"))
COMPUTE = ComputeConfig(block_sizes=BlockSizes(attention=32, scan=32))


@pytest.mark.exhaustive
def test_temporary_memory_grows_with_the_tokens_and_is_shared_by_the_context_ranks():
    short, long = (bench.temporary_memory(1, tokens, MODEL, COMPUTE) for tokens in (2048, 4096))
    assert long <= 2.2 * short
    assert bench.temporary_memory(4, 4096, MODEL, COMPUTE) <= 0.3 * long


def test_layers_that_pass_states_exchange_the_same_bytes_at_every_length():
    formula = bench.passed_bytes("M", MODEL.llm, 4)
    assert [bench.layer_bytes("M", 4, tokens, MODEL.llm, COMPUTE) for tokens in (512, 2048)] == [formula] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_of_hybrids_exchange_the_same_bytes_at_every_length(name, record_property):
    """Bytes that attention exchanges beside the state are not counted."""
    llm = HYBRIDS[name](MESHES.llm)
    (kind,) = (letter for letter, block in llm.blocks.items() if block.passed(1, 4))
    beside = value_at(llm, "blocks.H.self_attention") if kind == "H" else None
    attention = replace(llm, blocks={**llm.blocks, "*": beside}) if beside else llm
    formula = bench.passed_bytes(kind, llm, 8)
    for tokens in (1024, 65536):
        received = bench.layer_bytes(kind, 8, tokens, llm, COMPUTE)
        received -= bench.layer_bytes("*", 8, tokens, attention, COMPUTE) if beside else 0
        record_property(f"bytes, {tokens:,} tokens", f"{received:,}")
        assert received == formula


def test_attention_sends_keys_and_values_around_once_and_their_gradients_home():
    context, tokens = 4, 512
    sizes = MODEL.llm.blocks["*"].attention(1)
    kv = 2 * sizes.kv_heads * sizes.key_dim * 4 * tokens // context
    # Of the ring, the backward pass sends keys and values again, but for the first time.
    for exchange, times in (("ring", 3 * (context - 1) - 1), ("all_gather", 2 * (context - 1))):
        compute = replace(COMPUTE, context_exchange=exchange)
        assert bench.layer_bytes("*", context, tokens, MODEL.llm, compute) == times * kv


@pytest.mark.parametrize("context", [2, 4])
@pytest.mark.parametrize("block", [32, 24], ids=["block divides a chunk", "block straddles chunks"])
def test_attention_executes_the_least_blocks_that_the_mask_allows(context, block):
    lengths = np.random.default_rng(1).lognormal(3, 1.2, 60).astype(int).clip(1, 500).tolist()
    for documents in bench.buffers(lengths, 512, 2):
        batch = bench.layout_row(documents, 512, context, ordered=True)
        executed = bench.executed_blocks(batch, context, block)
        np.testing.assert_array_equal(executed, bench.least_blocks(batch, context, block))


@pytest.mark.parametrize("per_token", [2, 6])
def test_64_experts_cost_little_more_than_8(per_token):
    few, many = (bench.expert_flops(e, per_token, tokens=4096, block=32, dim=64, inner=64) for e in (8, 64))
    assert few <= many <= 1.3 * few
