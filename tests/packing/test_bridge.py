"""Batches of other toolkits hold the same documents here as those of our own packer, whatever their form."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

from jaxthd.config import Config, DataConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.errors import UserError
from jaxthd.models.front_ends import FastConformer
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.bridge import IGNORED, thd_batch, to_batch
from jaxthd.packing.document import Document
from jaxthd.packing.from_padded import packed_from_padded, shard_packed
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.pack import pack_row
from jaxthd.packing.thd_view import ABSENT
from tests.clips import clip_of

PAD = 2
"""Also the id of every document's last token."""
LENGTHS = ((5, 9), (13,), (1, 3, 6), (16,))
"""Of the documents of each row of theirs."""
SLOTS = 20


def settings(context: int = 1, **data: Any) -> Config:
    sizes = {"rows": 4, "capacity": 32, "max_documents": 8}
    return Config(
        mesh=MeshConfig(context=context),
        data=DataConfig(**(sizes | data)),
        model=ModelConfig(encoder=None, llm=LLMConfig(pattern="M*", dim=8, vocab_size=50)),
    )


def documents(lengths: Sequence[Sequence[int]] = LENGTHS) -> list[list[Document]]:
    rng = np.random.default_rng(0)

    def document(n: int) -> Document:
        tokens = np.append(rng.integers(3, 50, n - 1), PAD).astype(np.int32)
        supervised = np.append(rng.random(n - 1) < 0.6, True)
        return Document("", tokens, np.zeros(n, bool), supervised)

    return [[document(n) for n in row] for row in lengths]


def padded(*, shifted: bool, left: bool = False) -> dict[str, np.ndarray]:
    """Rows of theirs, with every key that tells something: a test takes some."""
    rows = documents()
    out = {name: np.zeros((len(rows), SLOTS), int) for name in ("attention_mask", "position_ids")}
    out["input_ids"] = np.full((len(rows), SLOTS), PAD)
    out["labels"] = np.full((len(rows), SLOTS), IGNORED)
    lengths = np.full((len(rows), max(map(len, rows))), ABSENT)
    for r, row in enumerate(rows):
        start = SLOTS - sum(map(len, row)) if left else 0
        for d, document in enumerate(row):
            at = slice(start, start + len(document))
            labels = np.where(document.supervised, document.tokens, IGNORED)
            out["input_ids"][r, at] = document.tokens
            out["labels"][r, at] = np.append(labels[1:], IGNORED) if shifted else labels
            out["attention_mask"][r, at], out["position_ids"][r, at] = d + 1, np.arange(len(document))
            lengths[r, d] = len(document)
            start = at.stop
    tokens = np.where(out["labels"] == IGNORED, 7, out["labels"])
    return {
        **out,
        "loss_mask": (out["labels"] != IGNORED).astype(float),
        "unmasked": tokens,
        "seq_lens": lengths,
        "seq_lens_padded": lengths,
        "padding_mask": out["attention_mask"] == 0,
    }


def contents(batch: Batch, config: Config) -> list[Any]:
    """What the step sees of every document, in the order of a sort: its numbers, its place in the layout."""
    found, layout = [], ContextLayout.of(config)
    for row in range(len(batch.tokens)):
        assert (batch.weights[row][batch.segment_ids[row] == 0] == 0).all()
        for at in layout.document_slots(batch.segment_ids[row]) if batch.segment_ids[row].any() else []:
            assert batch.positions[row, at].tolist() == list(range(len(at)))
            found.append([x[row, at].tolist() for x in (batch.tokens, batch.targets, batch.weights)])
    return sorted(found)


def ours(config: Config) -> list[Any]:
    rows = [
        pack_row(
            row,
            capacity=config.data.capacity,
            audio_capacity=0,
            front_end=FastConformer(num_mels=0),
            max_documents=8,
            context=config.mesh.context,
            round_to=config.data.round_to,
            layout=config.compute.context_layout,
        )[0]
        for row in documents()
    ]
    return contents(concatenate_rows(rows), config)


FORMS = {
    "transformers, flattened": (False, False, ("input_ids", "labels", "attention_mask", "position_ids")),
    "left-padded": (False, True, ("input_ids", "labels", "attention_mask", "position_ids")),
    "numbers of documents in the mask": (True, False, ("input_ids", "labels", "attention_mask")),
    "lengths": (True, False, ("input_ids", "labels", "seq_lens", "seq_lens_padded")),
    "lengths alone": (False, False, ("input_ids", "labels", "seq_lens")),
    "padding mask": (True, False, ("input_ids", "labels", "padding_mask", "position_ids")),
    "a pad id that ends documents": (False, False, ("input_ids", "labels", "position_ids")),
    "a pad id, on the left": (False, True, ("input_ids", "labels", "position_ids")),
}


@pytest.mark.parametrize(("shifted", "left", "names"), FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("context", [1, 2])
def test_every_form_holds_the_documents_of_our_packer(
    shifted: bool, left: bool, names: Sequence[str], context: int
) -> None:
    config, given = settings(context), padded(shifted=shifted, left=left)
    if "padding_mask" in names or names[-1] == "seq_lens" or "attention_mask" in names:
        given["attention_mask"] = np.where(
            "position_ids" in names, given["attention_mask"] > 0, given["attention_mask"]
        )
    batch = to_batch({n: given[n] for n in names}, config, shifted=shifted, padding_token_id=PAD)
    assert batch.tokens.shape == (4, 32)
    assert not batch.has_audio
    assert contents(batch, config) == ours(config)
    masked = {n: given[n] for n in names} | {"labels": given["unmasked"], "loss_mask": given["loss_mask"]}
    again = to_batch(masked, config, shifted=shifted, padding_token_id=PAD)
    assert contents(again, config) == ours(config)


def test_what_the_converter_returns_in_chunks_or_not() -> None:
    given, config = padded(shifted=True), settings(2, rows=4, capacity=80)
    for chunks in (1, 2, 4):
        packed = packed_from_padded(given, chunks)
        batch = to_batch(packed, config, shifted=True)
        assert contents(batch, config) == ours(settings(2, capacity=80))
        in_rows = [sorted(np.bincount(ids)[1:].tolist()) for ids in batch.segment_ids]
        expected = [sorted(chain(*LENGTHS[i : i + 4 // chunks])) for i in range(0, 4, 4 // chunks)]
        assert in_rows == expected + [[]] * (4 - chunks), "a chunk stays a row"


def test_rows_that_do_not_fit_are_packed_anew() -> None:
    given, config = padded(shifted=True), settings(rows=2)
    batch = to_batch(given, config, shifted=True)
    assert batch.tokens.shape == (2, 32)
    assert contents(batch, config) == ours(settings())
    with pytest.raises(UserError, match=r"7 documents of 53 tokens do not fit data\.rows=1"):
        to_batch(given, settings(rows=1), shifted=True)
    with pytest.raises(UserError, match=r"data\.max_documents=1"):
        to_batch(given, settings(max_documents=1), shifted=True)


def test_a_row_without_positions_is_one_document_and_weights_are_kept() -> None:
    ids = np.arange(3, 13).reshape(2, 5)
    mask = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]]
    weights = np.array([[1, 0.5, 2, 1, 1], [1, 0, 1, 1, 0.25]])
    batch = to_batch(
        {"input_ids": ids, "attention_mask": mask, "loss_mask": weights}, settings(rows=2), shifted=False
    )
    assert batch.positions[:, :6].tolist() == [[0, 1, 2, 0, 0, 0], [0, 1, 2, 3, 4, 0]]
    assert batch.weights[:, :6].tolist() == [[0.5, 2, 0, 0, 0, 0], [0, 1, 1, 0.25, 0, 0]]
    assert batch.targets[:, :6].tolist() == [[4, 5, 0, 0, 0, 0], [0, 10, 11, 12, 0, 0]]
    (one,) = to_batch({"input_ids": ids[0]}, settings(rows=1), shifted=False).tokens
    assert one[:6].tolist() == [3, 4, 5, 6, 7, 0]
    # The label behind the last token of a row is a target too.
    whole = to_batch({"input_ids": ids, "labels": ids + 1}, settings(rows=2), shifted=True)
    assert whole.weights.sum() == 10


def test_embeddings_go_where_their_tokens_would() -> None:
    given, table = padded(shifted=True), np.random.default_rng(1).normal(size=(50, 8)).astype(np.float32)
    embedded = given | {"input_ids": table[given["input_ids"]]}
    for context in (1, 2):
        config = settings(context)
        of_ids, of_embeddings = (to_batch(x, config, shifted=True) for x in (given, embedded))
        expected = np.where(of_ids.segment_ids[..., None] > 0, table[of_ids.tokens], 0)
        np.testing.assert_array_equal(of_embeddings.embeddings, expected)
        np.testing.assert_array_equal(of_embeddings.targets, of_ids.targets)
        there = thd_batch(of_embeddings, layout=ContextLayout.of(config))
        np.testing.assert_array_equal(to_batch(there, config, shifted=True).embeddings, expected)


@pytest.mark.parametrize(("context", "tensor"), [(1, 1), (1, 3), (2, 1), (2, 6), (4, 2)])
@pytest.mark.parametrize("own", [1, 2])
def test_the_view_pads_the_buffer_by_itself(context: int, tensor: int, own: int) -> None:
    """Every rank elsewhere gets as many tokens, a multiple of 2 * tensor; the documents are all there."""
    config = settings(own)
    batch = to_batch(padded(shifted=True), config, shifted=True)
    there = thd_batch(batch, context=context, tensor=tensor, layout=ContextLayout.of(config))
    tokens = there["input_ids"].shape[1]
    assert tokens % (2 * context * tensor) == 0
    assert there["qkv_format"] == "thd"
    shards = [shard_packed(there, context, rank) for rank in range(context)]
    assert {shard["input_ids"].shape for shard in shards} == {(4, tokens // context)}
    for row, ids in enumerate(batch.segment_ids):
        cu, offsets = (there[name][row] for name in ("cu_seqlens", "cu_seqlens_padded"))
        cu, offsets = cu[cu != ABSENT], offsets[offsets != ABSENT]
        assert np.diff(cu).tolist() == np.bincount(ids)[1:].tolist()
        assert not offsets[-1] % (2 * context * tensor)
        assert context == 1 or not (np.diff(offsets) % (2 * context)).any()
        assert there["max_seqlen"][row] == np.diff(offsets).max()
        assert (there["labels"][row][there["padding_mask"][row]] == IGNORED).all()
    assert contents(to_batch(there, config, shifted=True), config) == ours(config)


def test_the_view_of_one_row_has_no_dim_of_rows_and_audio_is_refused() -> None:
    config = settings(rows=1, capacity=64)
    there = thd_batch(to_batch(padded(shifted=True), config, shifted=True), context=2)
    assert there["input_ids"].shape == (there["cu_seqlens_padded"][-1],)
    mels = np.ones((8, 1), np.float32)
    spoken = Document.splice("", [1, 4], [False, True], [clip_of([mels])], placeholder=1)
    sizes = {"capacity": 8, "audio_capacity": 8, "front_end": FastConformer(num_mels=1), "max_documents": 1}
    with pytest.raises(ValueError, match="holds recordings"):
        thd_batch(pack_row([spoken], **sizes)[0])


def test_what_is_missing_or_contradictory_is_said() -> None:
    given, config = padded(shifted=True), settings()

    def refused(match: str, *, shifted: bool = True, **changes: Any) -> None:
        changed = {name: x for name, x in (given | changes).items() if x is not None}
        with pytest.raises(UserError, match=match):
            to_batch(changed, config, shifted=shifted)

    refused("no input_ids", input_ids=None)
    refused("no labels", labels=None)
    refused("without labels", labels=None, input_ids=np.zeros((4, SLOTS, 8)), shifted=False)
    refused(r"labels has the shape \(4, 3\)", labels=np.zeros((4, 3), int))
    refused("shape", input_ids=np.zeros((4, SLOTS, 1, 1), int))
    refused("loss_mask", loss_mask=np.full((4, SLOTS), -1.0))
    refused("row 0: documents of", seq_lens=np.full((4, 3), 9), seq_lens_padded=np.full((4, 3), 9))
    refused("input_ids hold 50 at row 0, slot 0", input_ids=np.full((4, SLOTS), 50))
    refused("labels hold -1 at row", labels=np.full((4, SLOTS), -1))
    refused("embeddings have 9 dims", input_ids=np.zeros((4, SLOTS, 9)))
    future = replace(config.model.llm, mtp_depths=1, mtp_pattern="*")
    config = replace(config, model=replace(config.model, llm=future))
    refused("mtp_loss", input_ids=np.zeros((4, SLOTS, 8)))
