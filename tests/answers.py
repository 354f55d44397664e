"""Ragged documents with several answers to one prompt, and what each answer is if it stands alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxthd.packing.assignment import Shares
from jaxthd.packing.document import Document
from jaxthd.packing.fit import BufferLimits
from tests.clips import clip_of

AUDIO = 3
"""The placeholder of a recording."""


def document_with_answers(
    rng: np.random.Generator,
    key: str,
    *,
    answers: int = 2,
    mels: int = 16,
    most: int = 9,
    vocabulary: int = 260,
    extras: tuple[str, ...] = (),
) -> Document:
    """A prompt of 1 to `most` text tokens with up to two recordings among them, perhaps at its end, then
    `answers` answers of 1 to `most` tokens. Only answers are supervised, all but some 10% of their tokens.
    """
    prompt = rng.integers(4, vocabulary, rng.integers(1, most + 1)).tolist()
    clips = []
    for _ in range(rng.integers(0, 3)):
        prompt.insert(int(rng.integers(0, len(prompt) + 1)), AUDIO)
        lengths = rng.integers(1, 33, rng.integers(1, 3))
        clips.append([rng.normal(size=(n, mels)).astype(np.float32) for n in lengths])
    lengths = rng.integers(1, most + 1, answers)
    text = rng.integers(4, vocabulary, lengths.sum())
    supervised = [False] * len(prompt) + (rng.random(len(text)) < 0.9).tolist()
    spliced = Document.splice(
        key, [*prompt, *text.tolist()], supervised, [clip_of(clip) for clip in clips], AUDIO
    )
    numbers = {name: rng.normal(size=len(spliced)).astype(np.float32) for name in extras}
    return Document(**vars(spliced) | {"extras": numbers, "answers": tuple(lengths.tolist())})


def with_most_split(
    documents: Sequence[Document], context: int, capacity: int, *, share_prompts: bool = True
) -> dict[str, Any]:
    """pack_row's arguments for the layout "whole": as many documents of the row are split as can be."""
    if context == 1:
        return {"layout": "whole"}
    shares = Shares(context, capacity, 3)
    limits = BufferLimits(capacity, 10**6, 10**6, share_prompts=share_prompts, shares=shares)
    sizes = [limits.fit(document).size for document in documents]
    placements = shares.rows(sizes, range(len(sizes)), [], range(3, -1, -1))
    placed = next((x for x in placements if len(x.order) == len(sizes)), None) if sizes else None
    return {"layout": "whole", "shares": shares, "placement": placed}


def alone(document: Document) -> list[Document]:
    """Each answer as a document of its own, with the whole prompt before it: "KEY/0", "KEY/1", ..."""
    prompt, found, start = document.prompt_length, [], document.prompt_length
    for number, length in enumerate(document.answers):
        at = np.r_[0:prompt, start : start + length]
        start += length
        found.append(
            Document(
                key=f"{document.key}/{number}",
                tokens=document.tokens[at],
                is_audio=document.is_audio[at],
                supervised=document.supervised[at],
                pieces=document.pieces,
                extras={name: x[at] for name, x in document.extras.items()},
            )
        )
    return found or [document]
