"""The segments that a document becomes in a buffer: itself, or its prompt and the answers to that.

A prompt of 5 tokens p and answers of 2 tokens a and 3 tokens b:

    shared       p0 p1 p2 p3 | p4 a0 a1 | p4 b0 b1 b2
    written out  p0 p1 p2 p3 p4 a0 a1 | p0 p1 p2 p3 p4 b0 b1 b2

The prompt's last token predicts the first of every answer. So it stands before each answer, and every target
has a slot of its own.

Legend: n tokens of a segment, N tokens of the document.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Shaped

from jaxthd.packing.document import Document


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
