"""A document: one utterance or conversation, the unit that packing moves and no mixer may look across.

In a buffer it is one segment, or its prompt and the answers to that. A prompt of 5 tokens p and answers of 2
tokens a and 3 tokens b:

    shared       p0 p1 p2 p3 | p4 a0 a1 | p4 b0 b1 b2
    written out  p0 p1 p2 p3 p4 a0 a1 | p0 p1 p2 p3 p4 b0 b1 b2

The prompt's last token predicts the first of every answer. So it stands before each answer, and every target
has a slot of its own.

Legend: n tokens of the document or the segment, N tokens of the document, F frames of a piece of audio, W
numbers of a frame.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int, Int32, Shaped

from jaxthd.config.front_end import Piece, units_taken


class AudioPiece(NamedTuple):
    """A piece of a recording, as a front end makes it (jaxthd/config/front_end.py).

    features: float32 [F, W]. first, tokens: which of the outputs of these frames are audio tokens, `tokens`
    of them from the one with number `first` on. begins: whether it is the first piece of its recording.
    owned, padding: as in Piece. labels: of the whole recording, at its first piece (FrontEnd.labeller).
    """

    features: Float32[np.ndarray, "F W"]
    first: int
    tokens: int
    begins: bool = True
    owned: int | None = None
    padding: int = 0
    labels: tuple[int, ...] = ()

    @property
    def own_frames(self) -> int:
        """Frames of the recording that no other piece owns."""
        return len(self.features) - self.padding if self.owned is None else self.owned

    def units(self, unit: tuple[int, int]) -> int:
        """Units of the audio arrays that it takes. unit: the front end's (frames, outputs)."""
        return units_taken(len(self.features), self.first + self.tokens, unit)

    def owned_features(self, unit: tuple[int, int]) -> Float32[np.ndarray, "F W"]:
        """The frames that no other piece owns. unit: the front end's (frames, outputs)."""
        start = self.first * unit[0] // unit[1]
        return self.features[start : start + self.own_frames]


def audio_pieces(pieces: Sequence[Piece], runs: Sequence[Float32[np.ndarray, "_ _"]]) -> list[AudioPiece]:
    """The pieces of one recording. runs: its features. Both are a front end's. Raises ValueError where they
    disagree."""
    found = [
        AudioPiece(
            runs[x.run][x.start : x.start + x.frames], x.first, x.tokens, not number, x.owned, x.padding
        )
        for number, x in enumerate(pieces)
    ]
    for made, x in zip(found, pieces, strict=True):
        if len(made.features) != x.frames:
            raise ValueError(
                f"the front end's run {x.run} of features has {len(runs[x.run])} frames, and a piece reads "
                f"{x.frames} from {x.start} on; expected `pieces` and `features` to agree"
            )
    return found


@dataclass(frozen=True)
class Document:
    """Tokens in order, with a slot for each audio token.

    tokens: int32 [n]; an audio slot holds the tokenizer's audio placeholder id.
    is_audio: bool [n]; True where the embedding comes from the encoder.
    supervised: bool [n]; True where this token is to be predicted (from the position before it).
    pieces: the audio in order. The sum of their tokens equals is_audio.sum().
    key: names the document in reports and seeds its random draws.
    extras: the objective's own numbers for each token (objectives/objective.py), by name: float32 [n].
    answers: tokens of each of the answers to one prompt, in order. They are the document's last tokens, and
        each continues the prompt, which is all before them, as if it were the only one. (): the tokens are
        one sequence.
    """

    key: str
    tokens: Int32[np.ndarray, " n"]
    is_audio: Bool[np.ndarray, " n"]
    supervised: Bool[np.ndarray, " n"]
    pieces: tuple[AudioPiece, ...] = ()
    extras: Mapping[str, Float32[np.ndarray, " n"]] = field(default_factory=dict)
    answers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        slots = sum(piece.tokens for piece in self.pieces)
        if not len(self.tokens):
            raise ValueError(f"document {self.key!r} has no token; leave it out")
        if not len(self.tokens) == len(self.is_audio) == len(self.supervised):
            raise ValueError(
                f"document {self.key!r}: tokens, is_audio and supervised have lengths {len(self.tokens)}, "
                f"{len(self.is_audio)}, {len(self.supervised)}; they must be equal"
            )
        if slots != int(self.is_audio.sum()):
            raise ValueError(
                f"document {self.key!r}: {int(self.is_audio.sum())} audio token slots but its pieces make "
                f"{slots} audio tokens; build documents with Document.splice"
            )
        if bool((self.supervised & self.is_audio).any()):
            raise ValueError(
                f"document {self.key!r}: an audio slot is marked supervised; only text is predicted"
            )
        wrong = [
            f"{name} {np.shape(x)}" for name, x in self.extras.items() if np.shape(x) != self.tokens.shape
        ]
        if wrong:
            raise ValueError(
                f"document {self.key!r}: extras have the shapes {', '.join(wrong)}; expected a number for "
                f"each of the {len(self.tokens)} tokens"
            )

        if self.answers:
            self._check_answers()

    def _check_answers(self) -> None:
        if min(self.answers) < 1 or self.prompt_length < 1:
            raise ValueError(
                f"document {self.key!r} has {len(self)} tokens and answers of {list(self.answers)}; expected "
                "at least one token in each answer, and in the prompt before them"
            )
        if bool(self.supervised[: self.prompt_length].any() or self.is_audio[self.prompt_length :].any()):
            raise ValueError(
                f"document {self.key!r}: its prompt is supervised, or an answer holds audio; of a document "
                "with several answers only these are supervised, and they are text"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first of the answers; all tokens of a document that is one sequence."""
        return len(self) - sum(self.answers)

    def with_answers(
        self, answers: Sequence[Any], extras: Mapping[str, Sequence[Any]] | None = None
    ) -> "Document":
        """This document as the prompt of several answers, whose tokens are supervised.

        answers: token ids of each, a sequence or an array. extras: by name, numbers for the tokens of each
            answer; the prompt's are 0.
        """
        added = np.concatenate([np.asarray(answer, np.int32) for answer in answers])
        none = np.zeros(len(self), np.float32)
        return Document(
            key=self.key,
            tokens=np.concatenate([self.tokens, added]),
            is_audio=np.concatenate([self.is_audio, np.zeros(len(added), bool)]),
            supervised=np.concatenate([np.zeros(len(self), bool), np.ones(len(added), bool)]),
            pieces=self.pieces,
            extras={
                name: np.concatenate([none, *(np.asarray(x, np.float32) for x in of_answers)])
                for name, of_answers in (extras or {}).items()
            },
            answers=tuple(map(len, answers)),
        )

    @classmethod
    def splice(
        cls,
        key: str,
        tokens: Sequence[int],
        supervised: Sequence[bool],
        clips: Sequence[Sequence[AudioPiece]],
        placeholder: int,
        marks: Sequence[Sequence[tuple[int, Sequence[int]]]] = (),
    ) -> "Document":
        """Replaces each placeholder token by the audio slots of its clip.

        tokens, supervised: text with one placeholder per clip, before audio is spliced in.
        clips: one entry per placeholder, the pieces of a recording.
        marks: of each clip the tokens that stand between its audio slots, (the slots before them, the tokens)
            in order; (): none.
        Raises ValueError when the number of placeholders is not the number of clips, and when tokens and
        supervised are not as many.
        """
        if len(tokens) != len(supervised):
            raise ValueError(
                f"document {key!r}: {len(tokens)} tokens and {len(supervised)} marks of what is supervised; "
                "expected as many: mark each token"
            )
        text = np.asarray(tokens, np.int32)
        is_placeholder = text == placeholder
        found = int(is_placeholder.sum())
        if found != len(clips):
            raise ValueError(
                f"document {key!r}: {found} audio placeholders but {len(clips)} audio clips; "
                "give exactly one placeholder per clip"
            )
        runs = [np.full(sum(piece.tokens for piece in clip), placeholder, np.int32) for clip in clips]
        for number, of_clip in enumerate(marks):
            ids = [token for _, tokens in of_clip for token in tokens]
            before = [slots for slots, tokens in of_clip for _ in tokens]
            runs[number] = np.insert(runs[number], before, ids)
        slots = np.ones(len(text), int)
        slots[is_placeholder] = list(map(len, runs))
        tokens_n, of_clip_n = np.repeat(text, slots), np.repeat(is_placeholder, slots)
        tokens_n[of_clip_n] = np.concatenate([np.empty(0, np.int32), *runs])
        return cls(
            key=key,
            tokens=tokens_n,
            is_audio=tokens_n == placeholder,
            supervised=np.repeat(np.asarray(supervised, bool), slots) & ~of_clip_n,
            pieces=tuple(piece for clip in clips for piece in clip),
        )


class DocumentSegment(NamedTuple):
    """A segment of a document. indices: the tokens of the document that it holds, in order.

    is_continuation: whether it continues the document's first segment, which is then the shared prompt.
    """

    indices: Int[np.ndarray, " n"]
    is_continuation: bool = False


def document_segments(document: Document, share_prompts: bool) -> list[DocumentSegment]:
    """The segments of a document, in the order in which they lie in a buffer.

    share_prompts: whether answers share the slots of their prompt; otherwise each has a copy. A prompt of one
    token has nothing to share.
    """
    if not document.answers:
        return [DocumentSegment(np.arange(len(document)))]
    prompt = np.arange(document.prompt_length)
    ends = document.prompt_length + np.cumsum(document.answers)
    shares = share_prompts and len(prompt) > 1
    before = prompt[-1:] if shares else prompt
    answers = [
        DocumentSegment(np.concatenate([before, np.arange(end - length, end)]), shares)
        for length, end in zip(document.answers, ends, strict=True)
    ]
    return [DocumentSegment(prompt[:-1]), *answers] if shares else answers


def segment_lengths(prompt: int, answers: Sequence[int], share_prompts: bool) -> list[int]:
    """Tokens of each of document_segments. prompt, answers: Document.prompt_length and Document.answers."""
    if not answers:
        return [prompt]
    if share_prompts and prompt > 1:
        return [prompt - 1, *(1 + length for length in answers)]
    return [prompt + length for length in answers]


def of_tokens(
    document: Document, share_prompts: bool, of_slots: Shaped[np.ndarray, " slots"]
) -> Shaped[np.ndarray, " N"]:
    """Numbers of the document's tokens, from numbers at the positions that predict them: what packing does
    with Document.extras, undone.

    of_slots: the numbers at the document's slots in a buffer, without padding, in the order of its segments.
    0 for the document's first token, which nothing predicts, and for the last token of a shared prompt.
    """
    found, start = np.zeros(len(document), of_slots.dtype), 0
    for indices, _ in document_segments(document, share_prompts):
        end = start + len(indices)
        found[indices[1:]] = of_slots[start : end - 1]
        start = end
    return found
