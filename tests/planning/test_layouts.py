"""The comparison of context layouts: its figures are the packer's, and its verdict follows from them."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from jaxthd.config import Config, DataConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.models.blocks import Attention, Mamba2
from jaxthd.packing.assignment import Shares
from jaxthd.packing.document import Document
from jaxthd.packing.layout import LayoutKind
from jaxthd.packing.pack import pack_row
from jaxthd.planning.layouts import (
    MULTIPLY_ADDS_PER_BYTE,
    attention_bytes,
    compare_layouts,
    laid_out,
    layout_recommendation,
    passed_bytes,
    possible_layouts,
)
from jaxthd.planning.lengths import Lengths
from jaxthd.planning.simulate import simulate
from jaxthd.validate import DeviceFacts, findings

WORK = (1000.0, 0.0)
ATTENTION, MAMBA = Attention(heads=4, head_dim=32), Mamba2(groups=1)


def config(pattern: str, context: int = 4, **data: int) -> Config:
    sizes = {"capacity": 480, "audio_capacity": 0, "max_documents": 480, "rows": 2} | data
    blocks = {x: block for x, block in {"*": ATTENTION, "M": MAMBA}.items() if x in pattern}
    llm = LLMConfig(pattern=pattern, blocks=blocks)
    return Config(MeshConfig(context=context), DataConfig(**sizes), ModelConfig(llm=llm))


def text_of(tokens: list[int]) -> Lengths:
    lengths = np.array(tokens)
    return Lengths(lengths, 0 * lengths, 0.0 * lengths, [[]] * len(tokens))


def test_padding_and_imbalance_are_those_of_the_rows_packed():
    lengths = np.random.default_rng(0).integers(1, 200, 60).tolist()
    stream, found = text_of(lengths), compare_layouts(text_of(lengths), config("M*-"), WORK)
    assert {cost.layout for cost in found} == {"buffer", "whole"}
    for cost in found:
        imbalances, real, pairs = [], 0, 0
        outcome = simulate(stream, cost.config, WORK)
        placements = outcome.placements or [None] * len(outcome.buffers)
        for buffer, placement in zip(outcome.buffers, placements, strict=True):
            documents = [
                Document(str(i), np.zeros(lengths[i], np.int32), *np.zeros((2, lengths[i]), bool))
                for i in buffer
            ]
            sizes = {"audio_capacity": 0, "max_documents": 480, "context": 4}
            sizes |= {"shares": Shares.of(cost.config), "placement": placement}
            batch, report = pack_row(documents, capacity=480, layout=cost.layout, **sizes)
            imbalances.append(report.imbalance)
            real += report.real_tokens
            pairs += (batch.positions + 1)[batch.segment_ids > 0].sum()
        assert cost.padding == pytest.approx(1 - real / (480 * len(outcome.buffers)))
        assert cost.imbalance == pytest.approx(np.mean(imbalances))
        assert cost.attention == pytest.approx(2 * 4 * 32 * pairs / real * cost.imbalance)
        if cost.layout != "whole":
            assert cost.state_bytes == passed_bytes(cost.config, MAMBA)
        real_tokens_of_a_rank = 2 * real / len(outcome.buffers) / 4
        if cost.layout == "whole":
            split = sum(bool(placement.split) for placement in outcome.placements)
            assert split
            widest = attention_bytes(cost.config, ATTENTION, 120) * split / len(outcome.placements)
            assert 0 < cost.attention_bytes <= widest
        else:
            # 2 rows of 120 slots, 2 x 2 x 32 numbers each: twice around, their gradients once and home.
            assert cost.attention_bytes == 2 * 120 * 2 * 2 * 32 * 4 * (3 * 3 + 1)
        forward = (cost.state_bytes + cost.attention_bytes) / 2 * MULTIPLY_ADDS_PER_BYTE
        assert cost.exchange == pytest.approx(forward / real_tokens_of_a_rank)
        assert cost.slots == pytest.approx(WORK[0] / (1 - cost.padding))


@pytest.mark.parametrize(
    ("pattern", "lengths", "work", "best", "decides"),
    [
        ("M*-", [160], 0.0, "buffer", "bytes of states in a layer and"),
        ("M*", [60], 0.0, "whole", " 0 bytes of states in a layer and 0 in one of attention, against"),
    ],
)
def test_the_verdict_names_what_decides(
    pattern: str, lengths: list[int], work: float, best: str, decides: str
):
    costs = compare_layouts(text_of(lengths * 600), config(pattern), (work, 0.0))
    assert costs[0].layout == best
    assert costs[0].total < costs[1].total
    sentence = layout_recommendation(costs)
    assert f"--compute.context-layout {best}" in sentence
    assert decides in sentence


def test_a_layout_that_skips_documents_is_not_recommended_and_one_without_buffers_left_out():
    """None may be split, and a context rank's share is 120 slots."""
    plain = config("M*-")
    never = replace(plain, compute=replace(plain.compute, context_splits=0))
    costs = compare_layouts(text_of([9, 30, 100, 60, 200] * 50), never, WORK)
    assert {cost.layout: cost.skipped for cost in costs} == pytest.approx(
        {"buffer": 0.0, "whole": 0.2}, abs=0.01
    )
    assert costs[-1].layout == "whole"
    assert "of the documents, not 0.0%" in layout_recommendation(costs)
    costs = compare_layouts(text_of([200] * 50), never, WORK)
    assert {cost.layout for cost in costs} == {"buffer"}
    assert "no other layout fills a buffer" in layout_recommendation(costs[:1])


def test_what_is_compared_does_not_depend_on_the_layout_configured():
    stream = text_of([9, 30, 100] * 50)
    plain = config("M*-")
    set_up = replace(plain, compute=replace(plain.compute, context_layout="whole"))
    for a, b in zip(compare_layouts(stream, plain, WORK), compare_layouts(stream, set_up, WORK), strict=True):
        assert a == b


def test_states_do_not_grow_with_the_tokens():
    short, long = config("M"), config("M", capacity=960)
    assert passed_bytes(short, MAMBA) == passed_bytes(long, MAMBA) > 0
    # 16 ranks pass states in 4 steps, with two shifts and a sum: fewer than the 15 that an all-gather brings.
    few, many = (passed_bytes(replace(short, mesh=MeshConfig(context=n)), MAMBA) for n in (8, 16))
    assert 2 * few > many


def test_among_stages_keys_are_gathered() -> None:
    staged = replace(config("*"), mesh=MeshConfig(context=4, pipeline=2))
    gathering = replace(staged, compute=replace(staged.compute, context_exchange="all_gather"))
    assert attention_bytes(staged, ATTENTION, 120) == attention_bytes(gathering, ATTENTION, 120)
    assert attention_bytes(staged, ATTENTION, 120) == 2 * 120 * 2 * 2 * 32 * 4 * 2 * 3


@pytest.mark.parametrize("pattern", ["M*", "D*"])
def test_layouts_that_the_validator_refuses_are_not_offered(pattern: str) -> None:
    plain = config(pattern)
    given = replace(plain, model=ModelConfig(None, plain.model.llm.with_settings(pattern[0], conv=6)))
    assert possible_layouts(given) == ["buffer"]
    for layout in get_args(LayoutKind):
        found = findings(laid_out(given, layout), DeviceFacts("cpu", 4, "cpu"))
        assert any("context_layout" in x.found + x.change for x in found) == (layout == "whole")
