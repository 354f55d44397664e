"""The view of a packed batch gives the lengths and offsets that kernels elsewhere expect."""

import numpy as np
import pytest

from jaxthd.packing.batch import concatenate_rows
from jaxthd.packing.from_padded import packed_from_padded
from jaxthd.packing.pack import pack_row
from jaxthd.packing.thd_view import ABSENT, thd_view
from tests.packing.test_pack import SIZES, in_document_order, random_documents


def ids_of(*lengths: int, slots: int = 32) -> np.ndarray:
    """Segment ids of a row of documents back to back."""
    ids = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    return np.pad(ids, (0, slots - len(ids))).astype(np.int32)


@pytest.mark.parametrize(
    ("lengths", "round_to", "total_multiple", "padded"),
    [
        ((11, 5), 1, 1, [0, 11, 16]),
        ((11, 5), 4, 1, [0, 12, 20]),  # 2 * context, context 2
        ((11, 5), 1, 3, [0, 11, 18]),  # tensor 3
        ((5, 5), 4, 24, [0, 8, 24]),  # 2 * context * tensor, context 2, tensor 6
        ((8, 4), 4, 4, [0, 8, 12]),
        ((3,), 1, 1, [0, 3]),
    ],
)
def test_lengths_and_offsets_of_one_row(lengths, round_to, total_multiple, padded):
    """The examples of NeMo's collate functions."""
    view = thd_view(ids_of(*lengths), round_to=round_to, total_multiple=total_multiple)
    assert view.cu_seqlens.tolist() == [0, *np.cumsum(lengths)]
    assert view.cu_seqlens_padded.tolist() == padded
    assert view.max_seqlen == np.diff(padded).max()
    assert view.cu_seqlens.dtype == view.cu_seqlens_padded.dtype == view.max_seqlen.dtype == np.int32
    assert view.qkv_format == "thd"


@pytest.mark.parametrize("context", [1, 2])
def test_offsets_are_where_the_documents_lie_before_the_context_layout(context):
    settings = {"context": context, "audio_ranks": context, "round_to": 4}
    packed = [pack_row(random_documents(n, n), **SIZES, **settings) for n in (6, 3, 0)]
    view = thd_view(concatenate_rows([row for row, _ in packed]), round_to=4)
    assert view.cu_seqlens.shape == view.cu_seqlens_padded.shape == (3, 7)
    for row, (batch, report) in enumerate(packed):
        documents = len(report.keys)
        cu, starts = view.cu_seqlens[row], view.cu_seqlens_padded[row]
        assert (cu[documents + 1 :] == ABSENT).all()
        assert (starts[documents + 1 :] == ABSENT).all()
        expected = np.zeros(SIZES["capacity"], int)
        for s in range(documents):
            expected[starts[s] : starts[s] + cu[s + 1] - cu[s]] = s + 1
        np.testing.assert_array_equal(in_document_order(batch, context).segment_ids, expected)
        assert cu[documents] == report.real_tokens
        assert view.max_seqlen[row] == max(np.diff(starts[: documents + 1]), default=0)


def test_the_view_is_what_the_converter_says_of_the_same_documents():
    lengths, padded = [[3, 2], [6, ABSENT]], [[4, 4], [8, ABSENT]]
    ids = np.array([[1, 1, 1, 0, 2, 2, 0, 0], [3, 3, 3, 3, 3, 3, 0, 0]])
    ids_of_rows = np.array([ids[0], ids[1] // 3])
    rows = {
        "input_ids": ids,
        "labels": ids,
        "seq_lens": np.array(lengths),
        "seq_lens_padded": np.array(padded),
    }
    for chunks, segment_ids in ((1, ids.ravel()), (2, ids_of_rows)):
        converted = packed_from_padded(rows, chunks)
        for key, value in thd_view(segment_ids, round_to=4)._asdict().items():
            np.testing.assert_array_equal(converted[key], value)


def test_what_does_not_fit_the_row_is_refused():
    with pytest.raises(ValueError, match="take 36 slots"):
        thd_view(ids_of(13, 14), round_to=4, total_multiple=12)
