"""Where tokens live over the context axis: DualChunkSwap, of the whole buffer or of a few documents.

What is laid out is cut into 2 * ranks equal context chunks; rank r holds chunk r and chunk 2 * ranks - 1 - r:

    chunk   0  1  2  3  4  5  6  7
    rank    0  1  2  3  3  2  1  0

Under causal attention an early chunk is cheap and a late one dear, so each rank gets one of both. The default
is the whole-buffer layout, which asks nothing of document lengths.

The layout "whole" keeps documents on one rank where they fit. It cuts only a few, and those by themselves:

    rank 0   [ cut documents' chunks | whole documents | padding ]
    rank 1   [ cut documents' chunks | whole documents | padding ]

Cut documents come first, and every rank holds each of them in the same slots: its two chunks of the first
one, side by side, then those of the second. So what may have to be exchanged is a prefix of each rank's
slots. The row in document order is all cut documents, then the whole ones and the padding of rank 0, then
those of rank 1; on each rank, too, tokens lie in document order. `cuts`, the length of each cut document's
chunks, tells all of this; packing/assignment.py chooses it.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Int, Int32

from jaxthd.config import Config

LayoutKind = Literal["buffer", "whole"]
Cuts = Int[np.ndarray, " K"]
"""Slots of a context chunk of each document that is cut, one after the other; 0 for none."""


@dataclass(frozen=True)
class DualChunkSwap:
    """Ownership of 2 * ranks equal chunks by ranks: the arithmetic, for NumPy and for jax.

    Ranks and chunks may be ints or arrays of either, traced ones too. Every rank's first chunk is in the
    first half of the chunks, in the order of the ranks; every rank's second chunk is in the second half, in
    the reverse order. So the chunk before a rank's first one is the first chunk of rank - 1, and the chunk
    before its second one is the second chunk of rank + 1. The last rank holds the two in the middle: its
    second follows its first.
    """

    ranks: int

    def chunks(self, rank: Any) -> tuple[Any, Any]:
        """A rank's first and second chunk."""
        return rank, 2 * self.ranks - 1 - rank

    def before(self, rank: Any, distance: int = 1) -> tuple[Any, Any]:
        """The ranks whose first chunk lies `distance` before this one's first, and whose second before its
        second; outside 0 .. ranks - 1 where that half of the chunks has none.
        """
        return rank - distance, rank + distance

    def moves(self, half: int, distance: int = 1) -> list[tuple[int, int]]:
        """(from, to) for ppermute: every rank receives from before(rank, distance)[half], if there is one."""
        sources = ((self.before(rank, distance)[half], rank) for rank in range(self.ranks))
        return sorted((source, rank) for source, rank in sources if 0 <= source < self.ranks)

    def permutation(self, length: int) -> Int32[np.ndarray, " length"]:
        """A buffer of `length` tokens in rank-major order: permuted[i] = original[perm[i]], int32 [length].

        Rank r's tokens are permuted[r * length / ranks : (r + 1) * length / ranks], so a plain PartitionSpec
        over "context" hands them out. ranks 1 is the identity.
        Raises ValueError when length is not a multiple of 2 * ranks (ranks 1: any length), or ranks is 0.
        """
        if self.ranks < 1:
            raise ValueError(f"context must be at least 1, got {self.ranks}")
        if self.ranks == 1:
            return np.arange(length, dtype=np.int32)
        if length % (2 * self.ranks):
            raise ValueError(
                f"a buffer of {length} tokens cannot be cut into 2 * context = {2 * self.ranks} equal "
                f"chunks; make the capacity a multiple of {2 * self.ranks}"
            )
        tokens = np.arange(length, dtype=np.int32).reshape(2 * self.ranks, -1)
        return tokens[[chunk for rank in range(self.ranks) for chunk in self.chunks(rank)]].ravel()

    def tokens_of_rank(
        self, cu_seqlens: Int[np.ndarray, " documents_plus_1"], rank: int
    ) -> Int32[np.ndarray, " tokens_of_rank"]:
        """The tokens that a rank holds if each document is cut by itself, document by document. This is the
        order of Transformer Engine's THD ring (its `thd_get_partitioned_indices`).

        cu_seqlens: offsets of the documents in the buffer, from 0, padding included.
        Returns int32 [cu_seqlens[-1] / ranks]. cu_seqlens [0, 8, 12], ranks 2: rank 0 holds
        [0, 1, 6, 7, 8, 11], rank 1 [2, 3, 4, 5, 9, 10]. ranks 1 returns every index, whatever the lengths.
        Raises ValueError when a document's length is not a multiple of 2 * ranks, or rank is not below ranks.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank must lie in 0..{self.ranks - 1} (context {self.ranks}), got {rank}")
        lengths = np.diff(cu_seqlens)
        if len(cu_seqlens) == 0 or cu_seqlens[0] != 0 or (lengths < 0).any():
            raise ValueError(f"cu_seqlens must start at 0 and never fall, got {list(map(int, cu_seqlens))}")
        if self.ranks == 1:
            return np.arange(cu_seqlens[-1], dtype=np.int32)
        unit = 2 * self.ranks
        if (lengths % unit).any():
            bad = int(np.flatnonzero(lengths % unit)[0])
            raise ValueError(
                f"document {bad} takes {int(lengths[bad])} tokens, not a multiple of 2 * context = {unit}; "
                "round every document up (thd_view, thd_batch)"
            )
        held = [np.empty(0, np.int32)]
        for start, tokens in zip(cu_seqlens[:-1], lengths // unit, strict=True):
            for chunk in self.chunks(rank):
                held.append(np.arange(start + chunk * tokens, start + (chunk + 1) * tokens, dtype=np.int32))
        return np.concatenate(held)


@dataclass(frozen=True)
class ContextLayout:
    """Layout of a row of a batch over the context axis.

    kind: "buffer" cuts the whole buffer, "whole" the documents that the row's `cuts` names. ranks: of the
        context axis; 1 cuts nothing.
    round_to: each document's slots in the row are rounded up to a multiple of this, under both kinds.
    """

    kind: LayoutKind = "buffer"
    ranks: int = 1
    round_to: int = 1

    @classmethod
    def of(cls, config: Config) -> "ContextLayout":
        return cls(config.compute.layout, config.mesh.context, config.data.round_to)

    @property
    def swap(self) -> DualChunkSwap:
        return DualChunkSwap(self.ranks)

    def slots(self, length: Any) -> Any:
        """The token slots that a document takes, or documents: an int, or an array of ints."""
        return -(-length // self.round_to) * self.round_to

    @property
    def keeps_documents(self) -> bool:
        """Documents stay whole on one rank, but for a few."""
        return self.kind == "whole" and self.ranks > 1

    def permutation(
        self, segment_ids: Int[np.ndarray, " T"], cuts: Cuts | None = None
    ) -> Int32[np.ndarray, " T"]:
        """Document order to rank-major order: permuted[i] = original[perm[i]], int32 [T].

        segment_ids: the row's, in any order. cuts: the row's (Batch.cuts), for the layout "whole"; None: no
        document is cut.
        Raises ValueError when the buffer cannot be cut into 2 * ranks equal chunks, and when cuts take more
        than a rank's slots.
        """
        if self.keeps_documents:
            return self._permutation_of_whole(len(segment_ids), np.zeros(0, int) if cuts is None else cuts)
        return self.swap.permutation(len(segment_ids))

    def _permutation_of_whole(self, length: int, cuts: Cuts) -> Int32[np.ndarray, " T"]:
        share, taken = length // self.ranks, 2 * int(cuts.sum())
        if length % (2 * self.ranks) or taken > share:
            raise ValueError(
                f"context chunks of {cuts.tolist()} slots in a buffer of {length} on {self.ranks} ranks; "
                f"expected a buffer of a multiple of {2 * self.ranks} slots, and chunks of which a rank's "
                f"{share} hold two of each: cut fewer documents, or change the capacity"
            )
        ends = np.cumsum(np.concatenate([[0], 2 * self.ranks * cuts]))
        found = []
        for rank in range(self.ranks):
            first = self.ranks * taken + rank * (share - taken)
            found += [self.swap.tokens_of_rank(ends, rank), np.arange(first, first + share - taken)]
        return np.concatenate(found).astype(np.int32)

    def inverse(
        self, segment_ids: Int[np.ndarray, " T"], cuts: Cuts | None = None
    ) -> Int32[np.ndarray, " T"]:
        """Rank-major order back to document order: original = permuted[inverse]. Otherwise as permutation."""
        return inverse_permutation(self.permutation(segment_ids, cuts))

    def document_slots(
        self,
        segment_ids: Int[np.ndarray, " T"],
        document_ids: Int[np.ndarray, " T"] | None = None,
        cuts: Cuts | None = None,
    ) -> list[Int[np.ndarray, " _"]]:
        """Where the tokens of each document lie in a laid-out row, in their order; of a document with several
        answers, segment by segment.

        segment_ids, document_ids: of the laid-out row; None: every document is one segment. cuts: the row's.
        Raises ValueError as permutation.
        """
        order = self.inverse(segment_ids, cuts)
        ids = (segment_ids if document_ids is None else document_ids)[order]
        return [order[ids == document] for document in range(1, ids.max() + 1)]


def inverse_permutation(perm: Int[np.ndarray, " length"]) -> Int32[np.ndarray, " length"]:
    """The permutation that undoes `perm`: original = permuted[inverse], int32 [length]."""
    inverse = np.empty(len(perm), np.int32)
    inverse[perm] = np.arange(len(perm), dtype=np.int32)
    return inverse
