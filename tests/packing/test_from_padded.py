"""Padded rows -> packed buffers: real tokens at true offsets, padding known from lengths alone."""

import numpy as np
import pytest

from jaxthd.packing.from_padded import packed_from_padded, shard_packed

NONE = -1000


def padded(seq_lens, seq_lens_padded, input_ids, **more):
    input_ids = np.asarray(input_ids)
    batch = {
        "input_ids": input_ids,
        "labels": np.arange(input_ids[..., :1].size if input_ids.ndim > 2 else input_ids.size),
    }
    batch["labels"] = batch["labels"].reshape(input_ids.shape[:2])
    return {**batch, "seq_lens": np.asarray(seq_lens), "seq_lens_padded": np.asarray(seq_lens_padded), **more}


def example(**more):
    ids = [[1, 2, 3, 99, 4, 5], [6, 7, 8, 9, 10, 11]]
    return padded([[3, 2], [6, NONE]], [[4, 2], [6, NONE]], ids, **more)


def test_the_example():
    out = packed_from_padded(example())
    assert set(out) == {
        "input_ids", "labels", "position_ids", "padding_mask",
        "cu_seqlens", "cu_seqlens_padded", "max_seqlen", "qkv_format",
    }  # fmt: skip
    assert out["cu_seqlens"].tolist() == [0, 3, 5, 11]
    assert out["cu_seqlens_padded"].tolist() == [0, 4, 6, 12]
    assert out["cu_seqlens"].dtype == out["cu_seqlens_padded"].dtype == out["max_seqlen"].dtype == np.int32
    assert out["input_ids"].tolist() == [1, 2, 3, 99, 4, 5, 6, 7, 8, 9, 10, 11]
    assert out["labels"].tolist() == list(range(12))
    assert out["position_ids"].tolist() == [0, 1, 2, 0, 0, 1, 0, 1, 2, 3, 4, 5]
    assert out["padding_mask"].tolist() == [False] * 3 + [True] + [False] * 8
    assert (int(out["max_seqlen"]), out["qkv_format"]) == (6, "thd")


def test_chunks_fill_short_cu_seqlens_with_the_sentinel():
    out = packed_from_padded(example(), num_chunks=2)
    assert out["input_ids"].shape == out["labels"].shape == out["padding_mask"].shape == (2, 6)
    assert out["cu_seqlens"].tolist() == [[0, 3, 5], [0, 6, NONE]]
    assert out["cu_seqlens_padded"].tolist() == [[0, 4, 6], [0, 6, NONE]]
    assert out["max_seqlen"].tolist() == [4, 6]


def test_given_positions_and_embeddings_are_kept():
    positions = np.arange(12).reshape(2, 6) + 100
    embeddings = np.random.default_rng(0).normal(size=(2, 6, 5)).astype(np.float32)
    batch = {**example(position_ids=positions), "input_ids": embeddings}
    out = packed_from_padded(batch)
    assert out["input_ids"].dtype == np.float32
    np.testing.assert_array_equal(out["input_ids"], embeddings.reshape(12, 5))
    np.testing.assert_array_equal(out["position_ids"], positions.ravel())
    shards = [shard_packed(packed_from_padded(batch, num_chunks=2), 1, 0)]
    assert shards[0]["input_ids"].shape == (2, 6, 5)


def test_an_end_of_sequence_id_equal_to_the_pad_id_is_not_padding():
    eos = pad = 2
    out = packed_from_padded(padded([[3, 2]], [[4, 4]], [[7, 8, eos, pad, 9, eos, pad, pad]]))
    assert out["padding_mask"].tolist() == [False, False, False, True, False, False, True, True]


@pytest.mark.parametrize("num_chunks", [1, 2, 4])
def test_every_document_lies_at_its_offset_and_no_slot_is_lost(num_chunks):
    rng = np.random.default_rng(3)
    for _ in range(20):
        rows, slots, packs = 4, 24, 5
        real, spans = np.full((2, rows, packs), NONE)
        documents = [[] for _ in range(num_chunks)]
        ids = rng.permutation(rows * slots).reshape(rows, slots)
        for row in range(rows):
            start = 0
            for pack in range(rng.integers(0, packs + 1)):
                span = int(rng.integers(0, 7))
                if start + span > slots:
                    break
                spans[row, pack], real[row, pack] = span, rng.integers(0, span + 1)
                documents[row * num_chunks // rows].append(ids[row, start : start + real[row, pack]])
                start += span
        out = packed_from_padded(padded(real, spans, ids), num_chunks)
        for chunk in range(num_chunks):
            part = {k: v[chunk] if num_chunks > 1 else v for k, v in out.items() if k != "qkv_format"}
            np.testing.assert_array_equal(
                np.sort(part["input_ids"]), np.sort(ids.reshape(num_chunks, -1)[chunk])
            )
            is_padding = np.ones(len(part["input_ids"]), bool)
            for i, document in enumerate(documents[chunk]):
                at = slice(part["cu_seqlens_padded"][i], part["cu_seqlens_padded"][i] + len(document))
                np.testing.assert_array_equal(part["input_ids"][at], document)
                np.testing.assert_array_equal(part["position_ids"][at], np.arange(len(document)))
                assert part["cu_seqlens"][i + 1] - part["cu_seqlens"][i] == len(document)
                is_padding[at] = False
            np.testing.assert_array_equal(part["padding_mask"], is_padding)
            assert (part["cu_seqlens"][len(documents[chunk]) + 1 :] == NONE).all()


def test_shards_of_the_example():
    packed = packed_from_padded(padded([[4], [4]], [[4], [4]], [[1, 2, 3, 4], [5, 6, 7, 8]]), num_chunks=2)
    assert shard_packed(packed, 2, 0)["input_ids"].tolist() == [[1, 4], [5, 8]]
    assert shard_packed(packed, 2, 1)["input_ids"].tolist() == [[2, 3], [6, 7]]
    assert shard_packed(packed, 2, 1)["cu_seqlens_padded"].tolist() == [[0, 4], [0, 4]]


@pytest.mark.parametrize("context", [1, None])
def test_context_1_or_none_changes_nothing(context):
    packed = packed_from_padded(example())
    assert shard_packed(packed, context, 0) is packed


def test_shards_hold_every_slot_once_padding_behind_the_documents_included():
    packed = packed_from_padded(
        padded([[5, NONE], [3, 4]], [[8, NONE], [4, 8]], np.arange(32).reshape(2, 16))
    )
    assert packed["cu_seqlens_padded"].tolist() == [0, 8, 12, 20]
    shards = [shard_packed(packed, 2, rank) for rank in range(2)]
    for key in ("input_ids", "labels"):
        np.testing.assert_array_equal(np.sort(np.concatenate([s[key] for s in shards])), np.sort(packed[key]))
    assert shards[0]["input_ids"][:6].tolist() == [0, 1, 6, 7, 16, 19]
    assert [int((~s["padding_mask"]).sum()) for s in shards] == [2 + 1 + 2, 3 + 2 + 2]


def test_what_is_missing_or_contradictory_is_named():
    for key in ("input_ids", "labels", "seq_lens", "seq_lens_padded"):
        batch = example()
        del batch[key]
        with pytest.raises(KeyError, match=f"'{key}' is missing"):
            packed_from_padded(batch)
    with pytest.raises(ValueError, match="'bshd' is unknown"):
        packed_from_padded(example(), qkv_format="bshd")
    with pytest.raises(ValueError, match="num_chunks = 3"):
        packed_from_padded(example(), num_chunks=3)
    with pytest.raises(ValueError, match=r"row 0, document 1: seq_lens 3 and seq_lens_padded 2"):
        packed_from_padded({**example(), "seq_lens": np.array([[3, 3], [6, NONE]])})
    with pytest.raises(ValueError, match=r"row 1, document 1"):
        packed_from_padded({**example(), "seq_lens": np.array([[3, 2], [6, 0]])})
    with pytest.raises(ValueError, match="row 1: seq_lens_padded sum to 7, but a row has 6 slots"):
        packed_from_padded({**example(), "seq_lens_padded": np.array([[4, 2], [7, NONE]])})
    with pytest.raises(ValueError, match="labels has shape"):
        packed_from_padded({**example(), "labels": np.zeros((2, 5), int)})
    with pytest.raises(ValueError, match=r"must be \[2, packs\]"):
        packed_from_padded({**example(), "seq_lens": np.zeros((3, 2), int)})
    with pytest.raises(ValueError, match="document 1 takes 2 tokens"):
        shard_packed(packed_from_padded(example()), 2, 0)
