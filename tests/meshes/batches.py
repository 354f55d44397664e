"""The batches of the runs: the same ragged documents, each packed as the run's mesh and layout want it."""

import functools
from collections.abc import Sequence
from functools import partial

import numpy as np

from jaxthd.config import Config
from jaxthd.models.front_ends import FastConformer
from jaxthd.packing.assignment import Placement, Shares, Size
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.pack import pack_row
from tests.clips import clip_of
from tests.meshes.models import MELS, VOCAB
from tests.meshes.runs import FILLED, MICROBATCHES, MOST_DOCUMENTS

ROWS, CAPACITY, AUDIO = 32, 64, 512
LONGEST_UNIT = 16
"""The rows have room for documents whose lengths are rounded up to multiples of it."""


@functools.cache
def documents(seed: int = 0, *, fills: bool = False) -> list[list[Document]]:
    """Ragged documents of each row; some have audio, half of their text is supervised. The last microbatch is
    empty. fills: each other row is one document that fills the buffer."""
    if fills:
        return [[one_of(row, f"{number}")] if row else [] for number, row in enumerate(documents(seed))]
    rng = np.random.default_rng(seed)
    rows: list[list[Document]] = []
    for row in range(ROWS - ROWS // MICROBATCHES):
        rows.append([])
        room = CAPACITY
        while room > 8:
            text, clip = int(rng.integers(1, 20)), int(rng.integers(0, 60)) if rng.random() < 0.5 else 0
            slots = -(-clip // 8)
            rounded = -(-(text + slots) // LONGEST_UNIT) * LONGEST_UNIT
            if rounded > room:
                break
            room -= rounded
            tokens = rng.integers(1, VOCAB - 1, text).tolist()
            supervised = (rng.random(text) < 0.5).tolist()
            mels = [[rng.normal(size=(clip, MELS)).astype(np.float32)]] if clip else []
            if clip:
                tokens, supervised = [VOCAB - 1, *tokens], [False, *supervised]
            rows[-1].append(
                Document.splice(
                    f"{row}.{len(rows[-1])}", tokens, supervised, [clip_of(clip) for clip in mels], VOCAB - 1
                )
            )
    return rows + [[] for _ in range(ROWS - len(rows))]


def one_of(documents: Sequence[Document], key: str) -> Document:
    """The documents one after the other, and as many tokens more as the buffer has room for."""
    more = CAPACITY - sum(map(len, documents))

    def joined(name: str, fill: int) -> np.ndarray:
        arrays = [getattr(document, name) for document in documents]
        return np.concatenate([*arrays, np.full(more, fill, arrays[0].dtype)])

    chunks = tuple(piece for document in documents for piece in document.pieces)
    return Document(key, joined("tokens", 1), joined("is_audio", 0), joined("supervised", 1), chunks)


def batch_for(config: Config, capacity: int = CAPACITY, order: int = 0) -> Batch:
    """Orders the rows so that each microbatch, over all data ranks, holds the same rows on every mesh.

    order: any number but 0 also permutes the rows inside the microbatches.
    """
    fills, most_split = config.data == FILLED, config.compute.context_splits
    mesh, layout, rows = config.mesh, config.compute.layout, documents(fills=fills)
    microbatches = np.arange(ROWS).reshape(MICROBATCHES, -1)
    if order:
        microbatches = np.random.default_rng(order).permuted(microbatches, axis=1)
    numbers = microbatches.reshape(MICROBATCHES, mesh.data, -1).swapaxes(0, 1).ravel()
    shares = None
    if ContextLayout.of(config).keeps_documents:
        given = most_split <= 3
        capacity *= 1 if fills else 4 if given else 2
        shares = Shares(mesh.context, capacity, min(most_split, 3))
        place = partial(splitting_placement, split=most_split) if given else even_placement
    packed = [
        pack_row(
            rows[i],
            capacity=capacity,
            audio_capacity=AUDIO,
            front_end=FastConformer(num_mels=MELS),
            max_documents=MOST_DOCUMENTS,
            context=mesh.context,
            audio_ranks=mesh.audio_ranks,
            layout=layout,
            depths=config.depths_trained,
            shares=shares,
            placement=place(rows[i], shares) if shares else None,
        )[0]
        for i in numbers
    ]
    return concatenate_rows(packed)


def even_placement(documents: Sequence[Document], shares: Shares) -> Placement | None:
    """One that divides attention evenly, which splits documents in most rows."""
    sizes = [Size(n, n * (n + 1) // 2) for n in map(len, documents)]
    rows = shares.rows(sizes, range(len(sizes)), [], range(shares.most_split + 1)) if sizes else ()
    placed = shares.best(sizes, rows)
    return placed if placed and len(placed.order) == len(sizes) else None


def splitting_placement(documents: Sequence[Document], shares: Shares, split: int) -> Placement | None:
    """One that splits so many documents, or as many as there are."""
    sizes = [Size(n, n * (n + 1) // 2) for n in map(len, documents)]
    numbers = range(min(split, len(sizes)), -1, -1)
    rows = shares.rows(sizes, range(len(sizes)), [], numbers) if sizes else ()
    return next((placed for placed in rows if len(placed.order) == len(sizes)), None)
