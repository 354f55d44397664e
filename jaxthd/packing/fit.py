"""Decides whether documents fit a buffer, and where its audio ranks hold their pieces of audio."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxthd.config import Config, FrontEnd
from jaxthd.packing.assignment import Placement, Shares, Size
from jaxthd.packing.document import AudioPiece, Document, segment_lengths


class Fit(NamedTuple):
    """A document's demand of a buffer, and the reason why it can never be packed, if there is one.

    slots: token slots, including those that round_to adds. segments: its segments in a buffer.
    piece_frames: frames of the audio arrays that each of its pieces takes, in whole units.
    too_large: why it exceeds the buffer on any mesh; "" if it does not.
    unassignable: why it cannot be assigned to the ranks of this mesh; "" if it can.
    work: of its attention, in query-key pairs.
    """

    slots: int
    segments: int
    piece_frames: tuple[int, ...]
    too_large: str
    unassignable: str
    work: int = 0

    @property
    def reject_reason(self) -> str:
        """Why the document can never be packed; "" if it can."""
        return self.too_large or self.unassignable

    @property
    def size(self) -> Size:
        """A document's demand of the context ranks."""
        return Size(self.slots, self.work, self.segments, sum(self.piece_frames))


@dataclass(frozen=True)
class BufferLimits:
    """The most that one buffer holds, and the size of its audio arrays. The fields are PackDocuments'.

    capacity, audio_capacity, max_documents and share_prompts say which documents share a buffer, whatever the
    mesh. Each answer of a document with several counts as a document, and so does a shared prompt. The
    audio arrays are as long as the mesh needs: each rank has an even share of audio_capacity, in whole
    units of the front end, and room for what may not be divided. So all documents of a buffer fit. Documents
    with longer pieces than the front end's longest are refused under every mesh. shares: of the context
    ranks, where documents stay whole on one of them (the layout "whole"); else None. Documents that ranks
    cannot hold so divide the buffer.
    """

    capacity: int
    audio_capacity: int
    max_documents: int
    audio_ranks: int = 1
    round_to: int = 1
    front_end: FrontEnd | None = None
    share_prompts: bool = True
    shares: Shares | None = None

    @classmethod
    def of(cls, config: Config) -> "BufferLimits":
        """Limits of a config, on its mesh."""
        data, encoder = config.data, config.model.encoder
        return cls(
            data.capacity,
            data.audio_capacity if encoder else 0,
            data.max_documents,
            config.mesh.audio_ranks,
            data.round_to,
            encoder,
            config.posttraining.share_prompts,
            Shares.of(config),
        )

    @property
    def unit(self) -> tuple[int, int]:
        """(frames, outputs) of a unit of the audio arrays."""
        return self.front_end.unit if self.front_end else (1, 1)

    @property
    def rank_frames(self) -> int:
        """Frames that one audio rank holds; whole units."""
        frames, front_end, ranks = self.unit[0], self.front_end, self.audio_ranks
        whole = -(-self.audio_capacity // frames)
        share = -(-whole // ranks)
        if front_end is not None and ranks > 1 and front_end.divisible == "pieces":
            # Pieces go to the emptiest rank, which has no more than the mean.
            longest = whole if front_end.longest is None else front_end.units(front_end.longest)
            share = min(share + longest - 1, whole)
        elif front_end is not None and front_end.divisible == "recordings":
            share = whole
        return share * frames

    @property
    def array_frames(self) -> int:
        """Frames that the audio arrays have room for, over all ranks."""
        return self.rank_frames * self.audio_ranks

    @property
    def array_outputs(self) -> int:
        """Outputs of these frames."""
        return self.array_frames // self.unit[0] * self.unit[1]

    @property
    def seconds(self) -> float:
        """Seconds of audio that the arrays have room for."""
        return self.front_end.seconds(self.array_frames) if self.front_end else 0.0

    def piece_frames(self, document: Document) -> tuple[int, ...]:
        """Frames of the audio arrays that each piece of a document takes."""
        return tuple(piece.units(self.unit) * self.unit[0] for piece in document.pieces)

    def slots(self, document: Document) -> int:
        """Token slots that a document takes: each of its segments is rounded up."""
        return sum(-(-length // self.round_to) * self.round_to for length in self._lengths(document))

    def segments(self, document: Document) -> int:
        """Segments that a document becomes."""
        return len(self._lengths(document))

    def work(self, document: Document) -> int:
        """Query-key pairs of its attention."""
        lengths = self._lengths(document)
        shared = len(lengths) > max(len(document.answers), 1)
        before = lengths[0] if shared else 0
        return sum(n * (n + 1) // 2 for n in lengths) + before * sum(lengths[shared:]) * shared

    def _lengths(self, document: Document) -> list[int]:
        return segment_lengths(document.prompt_length, document.answers, self.share_prompts)

    def fit(self, document: Document) -> Fit:
        """Judges one document by itself."""
        slots, segments, frames = self.slots(document), self.segments(document), self.piece_frames(document)
        too_large = ""
        if slots > self.capacity:
            too_large = f"its {slots} token slots exceed the capacity of {self.capacity}"
        elif segments > self.max_documents:
            too_large = (
                f"its {len(document.answers)} answers make {segments} segments, which exceed the "
                f"max_documents of {self.max_documents}"
            )
        elif frames and not self.audio_capacity:
            too_large = "it holds a recording, and audio_capacity is 0"
        elif sum(frames) > self.audio_capacity:
            too_large = f"its {sum(frames)} audio frames exceed the audio_capacity of {self.audio_capacity}"
        elif self._is_too_long(max(frames, default=0)):
            assert self.front_end is not None
            too_large = (
                f"its pieces of {list(frames)} audio frames exceed the front end's longest of "
                f"{self.front_end.longest_taken} ({self.front_end.longest_setting or self.front_end.title})"
            )
        fit = Fit(slots, segments, frames, too_large, "", self.work(document))
        if fit.reject_reason or self.shares is None or self.shares.fits(fit.size):
            return fit
        several = f" of {segments} segments" if segments > 1 else ""
        why, change = "documents of several segments are not split over ranks", "raise capacity"
        if segments == 1 and self.shares.most_split:
            why = "it is too long to be split over them"
        elif segments == 1:
            why, change = "context_splits is 0", "raise capacity or context_splits"
        return fit._replace(
            unassignable=f"its {slots} token slots{several} exceed a context rank's share of "
            f"{self.shares.share}, and {why}; {change}, lower context, or choose another context_layout than "
            '"whole"'
        )

    def _is_too_long(self, frames: int) -> bool:
        """Whether a piece of so many frames of the audio arrays is longer than the front end's longest."""
        longest = self.front_end.longest_taken if self.front_end else None
        return longest is not None and longest < frames

    def can_share(self, fits: Sequence[Fit]) -> bool:
        """Whether documents with these Fits can be assigned to the context ranks of one row."""
        return self.shares is None or self.shares.assign([fit.size for fit in fits]) is not None

    def require_room(self, documents: Sequence[Document]) -> None:
        """Raises ValueError if the documents do not fit one row. The message says what to increase."""
        segments = sum(map(self.segments, documents))
        if segments > self.max_documents:
            several = f" of {segments} segments" if segments > len(documents) else ""
            raise ValueError(
                f"{len(documents)} documents{several} in a row, at most {self.max_documents} (max_documents)"
            )
        slots = sum(map(self.slots, documents))
        if slots > self.capacity:
            raise ValueError(f"documents take {slots} token slots, the buffer has {self.capacity} (capacity)")
        frames = sum(sum(self.piece_frames(document)) for document in documents)
        if frames > self.array_frames:
            raise ValueError(
                f"documents take {frames} audio frames, the buffer has {self.array_frames} (audio_capacity "
                f"{self.audio_capacity}); raise audio_capacity, or pack fewer documents a row"
            )

    def piece_starts(self, documents: Sequence[Document]) -> list[list[int]]:
        """The frame of the row at which every piece of every document begins (place_pieces)."""
        frames = [frames for document in documents for frames in self.piece_frames(document)]
        pieces = [piece for document in documents for piece in document.pieces]
        divisible = self.front_end.divisible if self.front_end else "frames"
        groups = _recordings(pieces) if divisible == "recordings" else [[i] for i in range(len(frames))]
        starts = place_pieces(
            frames, groups, self.audio_ranks, self.rank_frames, is_divisible=divisible == "frames"
        )
        for start, length in zip(starts, frames, strict=True):
            is_split = length > self.rank_frames - start % self.rank_frames
            if is_split and self._is_too_long(length):
                assert self.front_end is not None
                raise ValueError(
                    f"a piece of {length} audio frames is split over {self.audio_ranks} audio ranks of "
                    f"{self.rank_frames} each; expected at most {self.front_end.longest_taken}, the longest "
                    f"of {self.front_end.title}: divide the recording"
                )
        following = iter(starts)
        return [[next(following) for _ in document.pieces] for document in documents]

    def place(self, documents: Sequence[Document]) -> Placement:
        """Places a row's documents on the context ranks, under the layout "whole".

        Raises ValueError if no placement is found; the message says which setting to increase.
        """
        assert self.shares is not None
        sizes = [self.fit(document).size for document in documents]
        placed = self.shares.assign(sizes)
        if placed is None:
            raise ValueError(
                f"documents of {[size.slots for size in sizes]} token slots were not placed on "
                f"{self.shares.ranks} context ranks of {self.shares.share} slots with "
                f"{self.shares.most_split} of them split; raise context_splits or capacity, or pack "
                "fewer a row"
            )
        return placed


def _recordings(pieces: Sequence[AudioPiece]) -> list[list[int]]:
    """The numbers of the pieces of each recording."""
    groups: list[list[int]] = []
    for i, piece in enumerate(pieces):
        groups += [[]] if piece.begins else []
        groups[-1].append(i)
    return groups


def place_pieces(
    frames: Sequence[int],
    groups: Sequence[Sequence[int]],
    ranks: int,
    rank_frames: int,
    *,
    is_divisible: bool = True,
) -> list[int]:
    """The frame, of those of all audio ranks, at which each piece begins.

    frames: of each piece, in whole units; all ranks together hold them. groups: numbers of pieces that lie
    one after the other on one rank. rank_frames: frames that a rank holds, in whole units. Rank r holds the
    frames from r * rank_frames on.
    No group is divided over ranks if assign_pieces finds such an assignment. Otherwise pieces lie one after
    the other, and each boundary between two ranks divides at most one. Raises ValueError where they may not
    be divided.
    """
    sizes = [sum(frames[i] for i in group) for group in groups]
    whole = assign_pieces(sizes, ranks, rank_frames)
    if whole is None and not is_divisible:
        raise ValueError(
            f"pieces of {sizes} audio frames were not placed on {ranks} audio ranks of {rank_frames}; "
            "expected that they fit: raise audio_capacity, or pack fewer documents a row"
        )
    free, starts = [rank * rank_frames for rank in range(ranks)], [0] * len(frames)
    for number, group in enumerate(groups):
        rank = 0 if whole is None else whole[number]
        for i in group:
            starts[i] = free[rank]
            free[rank] += frames[i]
    return starts


def assign_pieces(frames: Sequence[int], ranks: int, capacity_per_rank: int) -> list[int] | None:
    """Assigns whole pieces to ranks, evenly by frames. Returns each piece's rank, or None.

    frames: of each piece, in whole units. capacity_per_rank: frames that a rank holds.
    The longest piece goes first, to the least loaded rank. If that overflows, the longest goes first to the
    fullest rank that has room for it.
    Whether it succeeds does not depend on the order of `frames`.
    """
    longest_first = sorted(range(len(frames)), key=lambda i: -frames[i])
    for even in (True, False):
        load, out = [0] * ranks, [0] * len(frames)
        for i in longest_first:
            fitting = [r for r in range(ranks) if load[r] + frames[i] <= capacity_per_rank]
            if not fitting:
                break
            out[i] = min(fitting, key=lambda r: load[r] if even else -load[r])
            load[out[i]] += frames[i]
        else:
            return out
    return None
