"""What scripts/bench_packing.py compares: the same documents on every side, on a ladder that pads least."""

from collections import Counter
from itertools import combinations

import numpy as np
import pytest

from jaxthd.config import Config, LLMConfig, ModelConfig
from jaxthd.packing.batch import Batch
from scripts import bench_packing as bench
from tests.packing.test_pack import MELS, random_documents

DOCUMENTS = random_documents(0, 67, chunk_frames=150)


def fits(length: int, rungs: tuple[int, ...]) -> int:
    return min(rung for rung in rungs if rung >= length)


def test_all_sides_hold_every_document_and_supervise_the_same_pairs():
    def content(batches: list[Batch]) -> tuple[Counter, float]:
        fields = zip(
            *(
                np.concatenate([x[b.segment_ids > 0] for b, x in zip(batches, xs, strict=True)]).tolist()
                for xs in zip(*((b.tokens, b.targets, b.weights, b.positions) for b in batches), strict=True)
            ),
            strict=True,
        )
        return Counter(fields), sum(float(np.square(b.mels).sum()) for b in batches)

    sides = bench.batches_of(DOCUMENTS, 128, MELS)
    assert list(sides) == ["packed", "random", "sorted"]
    packed, audio = content(sides["packed"])
    assert packed.total() == sum(map(len, DOCUMENTS))
    for name in ("random", "sorted"):
        tokens, seconds = content(sides[name])
        assert tokens == packed
        assert seconds == pytest.approx(audio)
    assert len({bench.shapes(b) for b in sides["packed"]}) == 1


def test_padded_batches_hold_as_many_documents_as_a_packed_buffer_does():
    sides = bench.batches_of(DOCUMENTS, 128, MELS)
    rows = round(len(DOCUMENTS) / len(sides["packed"]))
    assert {len(b.tokens) for name in ("random", "sorted") for b in sides[name]} == {rows}
    assert abs(len(sides["random"]) - len(sides["packed"])) <= 1
    assert len({bench.shapes(b) for b in [*sides["random"], *sides["sorted"]]}) <= bench.RUNGS


def test_packed_buffers_are_full():
    """The end of the data set wastes none: what the packed side wastes, it wastes in training too."""
    text = bench.text_documents(bench.TEXT_DOCUMENTS)
    for documents, wanted in ((DOCUMENTS, 300), (text, bench.TEXT_LONGEST)):
        packed = bench.packed_batches(documents, wanted, MELS)
        assert sum(map(len, documents)) / sum(b.tokens.size for b in packed) > 0.94


def test_a_padded_batch_takes_the_lowest_rung_that_holds_its_longest():
    in_order, by_length = bench.padded_batches(DOCUMENTS, 5, MELS)
    rungs = tuple(sorted({b.tokens.shape[1] for b in [*in_order, *by_length]}))
    for batches, documents in ((in_order, DOCUMENTS), (by_length, sorted(DOCUMENTS, key=len))):
        lengths = [len(d) for d in documents]
        for i, batch in enumerate(batches):
            assert batch.tokens.shape[1] == fits(max(lengths[5 * i : 5 * i + 5]), rungs)
            found = (batch.segment_ids > 0).sum(axis=1)
            assert found[found > 0].tolist() == lengths[5 * i : 5 * i + 5]
    slots = [sum(b.tokens.size for b in batches) for batches in (in_order, by_length)]
    assert slots[1] < slots[0]


@pytest.mark.parametrize("rungs", [1, 2, 3, 9])
def test_no_ladder_pads_less(rungs):
    rng = np.random.default_rng(rungs)
    needed = [
        (int(n), float(w)) for n, w in zip(rng.integers(1, 200, 12), rng.uniform(1, 2, 12), strict=True)
    ]
    tops = sorted({-(-n // 16) * 16 for n, _ in needed})

    def cost(ladder: tuple[int, ...]) -> float:
        return sum(weight * fits(n, ladder) for n, weight in needed)

    found = bench.ladder(needed, rungs, 16)
    assert len(found) <= rungs
    assert set(found) <= set(tops)
    below = [c for k in range(min(rungs, len(tops))) for c in combinations(tops[:-1], k)]
    assert cost(found) == pytest.approx(min(cost((*c, tops[-1])) for c in below))


def test_the_mix_is_long_tailed_and_the_same_every_time():
    one, two = bench.text_documents(70), bench.text_documents(70)
    assert [d.tokens.tolist() for d in one] == [d.tokens.tolist() for d in two]
    lengths = np.array([len(d) for d in one])
    assert 0.9 * bench.TEXT_LONGEST < lengths.max() <= bench.TEXT_LONGEST
    assert np.median(lengths) == pytest.approx(200, rel=0.05)
    assert all(d.supervised.mean() == pytest.approx(2 / 3, abs=0.34) for d in one)
    in_order, _ = bench.padded_batches(one, 10, 1)
    assert 3.8 < sum(b.tokens.size for b in in_order) / lengths.sum() < 5


def test_texts_are_measured_without_arrays_of_audio():
    """One program serves all batches of one shape."""
    llm = LLMConfig(pattern="-", dim=16, ffn_dim=32)
    text = bench.text_documents(6, 40)
    sides = bench.batches_of(text, 64, MELS)
    sides = {"packed": sides["packed"][:1] * 2, "random": sides["packed"][:1]}
    assert not sides["packed"][0].has_audio
    found = bench.measure(sides, Config(model=ModelConfig(None, llm)), 1)
    assert (found["packed"].programs, found["packed"].steps, found["random"].steps) == (1, 2, 1)
    assert found["packed"].real_tokens == 2 * found["random"].real_tokens > 0
    assert found["packed"].frames == found["packed"].real_frames == 0
    assert found["packed"].seconds > 0 < found["packed"].memory


@pytest.mark.parametrize(("seconds", "holds"), [(1.0, True), (1.05, True), (1.2, False)])
def test_the_claim_is_nine_tenths_of_the_ideal(seconds, holds, capsys):
    def side(slots: int, seconds: float) -> bench.Side:
        return bench.Side(10, 1, slots, 1000, 0, 0, 10**6, seconds)

    sides = {"packed": side(1000, seconds), "random": side(4000, 4.0), "sorted": side(1500, 1.4)}
    (claim,) = bench.report("text: some", sides, 3.0)
    assert claim.holds == holds
    assert f"{4 / seconds:.2f}" in capsys.readouterr().out
    (claim,) = bench.report("text: some", sides, 4.5)
    assert not claim.holds, "a ratio asked for on top"
