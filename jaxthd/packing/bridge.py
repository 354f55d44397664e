"""Batches of other toolkits as batches that train here, and the way back.

Key names are those of transformers (input_ids, labels, attention_mask, position_ids), Megatron-LM (loss_mask)
and NeMo Automodel (seq_lens, cu_seqlens and others, see from_padded.py).

Legend: B rows of theirs, S slots of such a row, H embedding dim; R rows of ours, T token slots of such a row,
D documents, n tokens of a document.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.packing.assignment import Shares, Size
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.from_padded import packed_from_padded
from jaxthd.packing.layout import ContextLayout, order_documents
from jaxthd.packing.pack import TokenArrays, laid_out
from jaxthd.packing.thd_view import ABSENT, cumulative, stack_filled

IGNORED = -100
"""The label of a position that is not trained, in transformers, NeMo and others."""
LENGTHS = ("seq_lens", "seq_lens_padded", "cu_seqlens", "cu_seqlens_padded")
OF_TOKENS = ("input_ids", "labels", "attention_mask", "loss_mask", "position_ids", "padding_mask")


class _Found(NamedTuple):
    """A document in a batch of theirs. row: that it was in. inputs: ids [n], or embeddings [n, H]."""

    row: int
    inputs: np.ndarray
    targets: Int[np.ndarray, " n"]
    weights: Float32[np.ndarray, " n"]


def to_batch(
    batch: Mapping[str, Any],
    config: Config,
    *,
    shifted: bool,
    padding_token_id: int | None = None,
    ignored_label: int = IGNORED,
    absent: int = ABSENT,
) -> Batch:
    """A host batch of config.data.rows rows of config.data.capacity slots, laid out for the config's mesh.

    batch: arrays of one row [S] or of B rows [B, S]; keys that are not named here are ignored.
        input_ids: ids, or token embeddings [B, S, H].
        labels: the target of each position if `shifted` (Automodel, Megatron-LM), or the token at each
            position (transformers). Where absent, and not shifted: input_ids.
        loss_mask: weights of the labels, at least 0. Labels that are `ignored_label` have weight 0.
        Documents are told apart by the first of these that is there: cu_seqlens with cu_seqlens_padded, as
        packed_from_padded returns them; seq_lens with seq_lens_padded, as it takes them; attention_mask, 0 in
        padding, with another number for each document of a row, or 1; padding_mask, the inverse of such a
        mask; padding_token_id. Where none of the lengths is given, a document also ends where position_ids do
        not go on by 1. Without position_ids each row is one document: they are added.
    padding_token_id: tokens of this id at either end of a row are padding, where they are not trained.
    Documents that share a row go on sharing it if all rows fit; else they are packed anew.
    Raises UserError where keys are missing or contradict each other, for ids outside the vocabulary, and for
    documents that do not fit config.data.
    """
    given = _given(batch)
    ids_BS = _document_ids(given, absent)
    targets_BS, weights_BS = _labels(given, ignored_label, shifted=shifted)
    if not any(name in given for name in (*LENGTHS, "attention_mask", "padding_mask")):
        ids_BS = np.where(_not_padding(given, weights_BS, padding_token_id), ids_BS, 0)
    if not any(name in given for name in LENGTHS) and "position_ids" in given:
        ids_BS = _split_by_positions(ids_BS, given["position_ids"])
    real_BS = ids_BS > 0
    _require_known(given, np.where(weights_BS > 0, targets_BS, 0), real_BS, config)
    found = []
    for row, ids_S in enumerate(ids_BS):
        for number in np.unique(ids_S[ids_S > 0]):
            at = np.flatnonzero(ids_S == number)
            targets, weights = targets_BS[row, at], weights_BS[row, at]
            if not shifted:
                targets, weights = np.append(targets[1:], 0), np.append(weights[1:], 0)
            trained = weights > 0
            targets, weights = np.where(trained, targets, 0), np.where(trained, weights, 0)
            found.append(_Found(row, given["input_ids"][row, at], targets, weights.astype(np.float32)))
    return _packed(found, config)


def thd_batch(
    batch: Batch,
    *,
    context: int = 1,
    tensor: int = 1,
    layout: ContextLayout = ContextLayout(),  # noqa: B008 (frozen)
    ignored_label: int = IGNORED,
) -> dict[str, Any]:
    """A host batch as packed_from_padded returns one, a chunk a row: for kernels and loops elsewhere.

    Every document is padded to a multiple of 2 * context (context 1: not at all), and the last one grows
    until the buffer is a multiple of 2 * context * tensor. So shard_packed divides it over `context` ranks,
    and each part divides by 2 * tensor. Rows are as long as the longest needs. labels are shifted.
    layout: the one that the batch has (ContextLayout.of(config)).
    Raises ValueError for a batch with recordings, whose embeddings an encoder makes, and for segments that
    continue others, which these kernels cannot.
    """
    if batch.has_audio or (batch.prefixes is not None and np.any(batch.prefixes)):
        raise ValueError(
            "the batch holds recordings or answers that share a prompt; expected tokens alone: pack with "
            "audio_capacity=0, and with share_prompts=False"
        )
    unit, inputs = 2 * context if context > 1 else 1, batch.tokens
    if batch.embeddings is not None:
        inputs = batch.embeddings
    slots = [
        layout.document_slots(ids, splits=batch.splits_of(row)) if ids.any() else []
        for row, ids in enumerate(batch.segment_ids)
    ]
    real = [np.array([len(at) for at in of_row], int) for of_row in slots]
    padded = [-(-lengths // unit) * unit for lengths in real]
    for lengths in padded:
        lengths[-1:] += -lengths.sum() % (2 * context * tensor)
    tokens = max(int(lengths.sum()) for lengths in padded)
    labels = np.where(batch.weights > 0, batch.targets, ignored_label)
    arrays = {"input_ids": inputs, "labels": labels, "position_ids": batch.positions}
    out = {name: np.zeros((len(x), tokens, *x.shape[2:]), x.dtype) for name, x in arrays.items()}
    out["labels"][:] = ignored_label
    for row, of_row in enumerate(slots):
        for start, at in zip(cumulative(padded[row]), of_row, strict=False):
            for name, x in arrays.items():
                out[name][row, start : start + len(at)] = x[row, at]
    for name, of_rows in (("seq_lens", real), ("seq_lens_padded", padded)):
        out[name] = stack_filled([lengths.astype(np.int32) for lengths in of_rows])
    return packed_from_padded(out, len(slots))


def _given(batch: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays that to_batch reads, with a dim of rows. Raises UserError for shapes that differ."""
    if "input_ids" not in batch:
        raise UserError(f"the batch has no input_ids, only {sorted(batch)}; expected ids or embeddings there")
    found = {name: np.asarray(batch[name]) for name in (*OF_TOKENS, *LENGTHS) if batch.get(name) is not None}
    is_embedded = np.issubdtype(found["input_ids"].dtype, np.floating)
    if found["input_ids"].ndim == 1 + is_embedded:
        found = {name: x[None] for name, x in found.items()}
    shape = found["input_ids"].shape
    if len(shape) != 2 + is_embedded:
        raise UserError(
            f"input_ids have the shape {shape} and dtype {found['input_ids'].dtype}; expected integers "
            "[B, S] or floats [B, S, H]"
        )
    for name in OF_TOKENS[1:]:
        if name in found and found[name].shape != shape[:2]:
            raise UserError(f"{name} has the shape {found[name].shape}, expected {shape[:2]} as input_ids")
    if "labels" not in found and is_embedded:
        raise UserError("embeddings were given without labels; expected labels [B, S], the ids to predict")
    return found


def _document_ids(given: Mapping[str, np.ndarray], absent: int) -> Int[np.ndarray, "B S"]:
    """0 in padding, else the number of the document in its row; before position_ids are looked at."""
    shape = given["input_ids"].shape[:2]
    if "cu_seqlens" in given:
        reals, starts = [], []
        padded = given.get("cu_seqlens_padded", given["cu_seqlens"])
        for cu, cu_padded in zip(given["cu_seqlens"], padded, strict=True):
            reals.append(np.diff(cu[cu != absent]))
            starts.append(cu_padded[cu_padded != absent][:-1])
    elif "seq_lens" in given:
        spans = given.get("seq_lens_padded", given["seq_lens"])
        reals = [lengths[lengths != absent] for lengths in given["seq_lens"]]
        starts = [cumulative(lengths[lengths != absent])[:-1] for lengths in spans]
    elif "attention_mask" in given:
        return given["attention_mask"].astype(int)
    elif "padding_mask" in given:
        return (~given["padding_mask"].astype(bool)).astype(int)
    else:
        return np.ones(shape, int)
    ids = np.zeros(shape, int)
    for row, (lengths, offsets) in enumerate(zip(reals, starts, strict=True)):
        ends = offsets + lengths
        if len(lengths) != len(offsets) or (lengths < 0).any() or ends.max(initial=0) > shape[1]:
            raise UserError(
                f"row {row}: documents of {lengths.tolist()} tokens at {offsets.tolist()}; expected them one "
                f"after the other in the row's {shape[1]} slots"
            )
        for number, (start, end) in enumerate(zip(offsets, ends, strict=True), 1):
            ids[row, start:end] = number
    return ids


def _labels(
    given: Mapping[str, np.ndarray], ignored_label: int, *, shifted: bool
) -> tuple[Int[np.ndarray, "B S"], np.ndarray]:
    """(labels, weights) [B, S], as they were given."""
    if shifted and "labels" not in given:
        raise UserError("the batch has no labels, which shifted=True reads; expected the target of each slot")
    labels = given.get("labels", given["input_ids"]).astype(int)
    weights = np.where(labels == ignored_label, 0.0, given.get("loss_mask", np.ones(())).astype(float))
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise UserError("loss_mask holds numbers below 0, or none; expected weights of at least 0")
    return labels, weights


def _not_padding(
    given: Mapping[str, np.ndarray], weights_BS: np.ndarray, padding_token_id: int | None
) -> Bool[np.ndarray, "B S"]:
    """False at both ends of a row where the token is the padding's and is not trained."""
    if padding_token_id is None or given["input_ids"].ndim == 3:
        return np.ones(weights_BS.shape, bool)
    # Without labels nothing says what is trained: then all of these are padding.
    trained = weights_BS > 0 if "labels" in given or "loss_mask" in given else np.zeros((), bool)
    real = (given["input_ids"] != padding_token_id) | trained
    return np.maximum.accumulate(real, 1) & np.maximum.accumulate(real[:, ::-1], 1)[:, ::-1]


def _split_by_positions(ids_BS: np.ndarray, positions_BS: np.ndarray) -> Int[np.ndarray, "B S"]:
    """Numbers the documents anew: one also begins where the position is not the one before plus 1."""
    begins = np.ones(ids_BS.shape, bool)
    begins[:, 1:] = (np.diff(positions_BS) != 1) | (np.diff(ids_BS) != 0)
    return np.where(ids_BS > 0, np.cumsum(begins & (ids_BS > 0), 1), 0)


def _require_known(
    given: Mapping[str, np.ndarray], targets_BS: np.ndarray, real_BS: np.ndarray, config: Config
) -> None:
    """Raises UserError for ids outside the vocabulary, and for embeddings of another size."""
    llm, inputs = config.model.llm, given["input_ids"]
    if inputs.ndim == 3 and inputs.shape[2] != llm.dim:
        raise UserError(
            f"embeddings have {inputs.shape[2]} dims; expected {llm.dim}: change the model's llm.dim"
        )
    if inputs.ndim == 3 and config.depths_trained:
        raise UserError(
            "embeddings and train.mtp_loss: future tokens have no embeddings; expected mtp_loss 0"
        )
    for name, ids in (("labels", targets_BS), *([("input_ids", inputs)] if inputs.ndim == 2 else [])):
        wrong = real_BS & ((ids < 0) | (ids >= llm.vocab_size))
        if wrong.any():
            row, slot = map(int, np.argwhere(wrong)[0])
            raise UserError(
                f"{name} hold {int(ids[row, slot])} at row {row}, slot {slot}; expected 0 to "
                f"{llm.vocab_size - 1}: mark what is not trained by ignored_label, or enlarge the vocabulary"
            )


def _packed(found: Sequence[_Found], config: Config) -> Batch:
    """The documents in rows of the config."""
    inputs = found[0].inputs if found else np.zeros(0, np.int32)
    return concatenate_rows([_row(documents, inputs[:0], config) for documents in _assigned(found, config)])


def _row(documents: Sequence[_Found], none: np.ndarray, config: Config) -> Batch:
    """One row, laid out. none: the inputs of no token, int [0] or float [0, H]."""
    layout, capacity = ContextLayout.of(config), config.data.capacity
    lengths = [len(document.targets) for document in documents]
    slots = [layout.slots(length) for length in lengths]
    order, starts, splits = list(range(len(documents))), None, None
    if (shares := Shares.of(config)) is not None:
        placement = shares.assign(_sizes(slots))
        assert placement is not None  # _assigned saw to it
        order = placement.order
        starts, splits = shares.starts(placement, [slots[d] for d in order])
    elif layout.kind == "buffer" and len(documents) > 1:
        order, _ = order_documents(lengths, capacity, layout.ranks, 0, slots)
    row, start = TokenArrays.empty(capacity), 0
    embeddings_TH = np.zeros((capacity, *none.shape[1:]), none.dtype)
    for number, d in enumerate(order, 1):
        start = start if starts is None else starts[number - 1]
        at, document = slice(start, start + lengths[d]), documents[d]
        (row.tokens if none.ndim == 1 else embeddings_TH)[at] = document.inputs
        row.targets[at], row.weights[at] = document.targets, document.weights
        row.segment_ids[at], row.positions[at] = number, np.arange(lengths[d])
        start += slots[d]
    perm = layout.permutation(row.segment_ids, splits)
    batch = laid_out(row, perm, config.depths_trained)
    batch = batch._replace(splits=None if splits is None else splits[None])
    return batch if none.ndim == 1 else batch._replace(embeddings=embeddings_TH[perm][None])


def _sizes(slots: Sequence[int]) -> list[Size]:
    return [Size(n, n * (n + 1) // 2) for n in slots]


def _assigned(found: Sequence[_Found], config: Config) -> list[list[_Found]]:
    """The documents of each row: as they were given if they fit so, else the longest first, each in the first
    row with room. Raises UserError where they do not fit.
    """
    data, layout, shares = config.data, ContextLayout.of(config), Shares.of(config)

    def fits(documents: Sequence[_Found]) -> bool:
        """Whether one row can hold these documents."""
        slots = [layout.slots(len(document.targets)) for document in documents]
        if sum(slots) > data.capacity or len(documents) > data.max_documents:
            return False
        return shares is None or shares.assign(_sizes(slots)) is not None

    given = [[x for x in found if x.row == row] for row in sorted({x.row for x in found})]
    if len(given) <= data.rows and all(map(fits, given)):
        return given + [[] for _ in range(data.rows - len(given))]
    rows: list[list[_Found]] = [[] for _ in range(data.rows)]
    for document in sorted(found, key=lambda x: -len(x.targets)):
        room = next((row for row in rows if fits([*row, document])), None)
        if room is None:
            tokens = sum(len(x.targets) for x in found)
            raise UserError(
                f"{len(found)} documents of {tokens} tokens do not fit data.rows={data.rows} rows of "
                f"data.capacity={data.capacity} slots and data.max_documents={data.max_documents}; raise "
                "one of these, or give smaller batches"
            )
        room.append(document)
    return rows
