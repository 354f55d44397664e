"""Prompts are found where documents' last answers begin, in any layout."""

from dataclasses import replace

import numpy as np
import pytest

from jaxthd.models.front_ends import FastConformer
from jaxthd.packing.batch import concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.pack import pack_row
from jaxthd.packing.prompts import find_prompts, whole_prompts


def document(key: str, supervised: str) -> Document:
    """A document of text whose token i is 10 + i; "x" marks the supervised ones."""
    n = len(supervised)
    marks = np.array([c == "x" for c in supervised])
    return Document(key, np.arange(10, 10 + n, dtype=np.int32), np.zeros(n, bool), marks)


@pytest.mark.parametrize("context", [1, 2, 4])
def test_the_prompt_is_all_before_the_last_answer(context: int):
    rows = [
        [document("one turn", "....xxx"), document("two", "..xx...xx"), document("no answer", "...")],
        [document("supervised throughout", "xxxx"), document("ends unsupervised", ".xx..")],
        [],
    ]
    packed = [
        pack_row(
            row,
            capacity=32,
            audio_capacity=0,
            front_end=FastConformer(num_mels=8),
            max_documents=5,
            context=context,
            round_to=4,
            order_seed=None,
        )[0]
        for row in rows
    ]
    batch = concatenate_rows(packed)
    ends, answers = find_prompts(batch, ContextLayout("buffer", context, 4), max_documents=5)
    places = ends.first.shape[1]
    assert places % context == 0
    assert places >= 5
    # A document's first token has nobody to predict it: of "xxxx" it is the prompt.
    want = {(0, 0): (0, 3), (0, 1): (8, 14), (1, 0): (0, 0), (1, 1): (4, 4)}
    for place in np.ndindex(ends.first.shape):
        first, last = want.get(place, (-1, -1))
        assert (ends.first[place], ends.last[place]) == (first, last)
    whole = whole_prompts(batch, ContextLayout("buffer", context, 4), max_documents=5)
    spans = {(0, 0): (0, 6), (0, 1): (8, 16), (0, 2): (20, 22), (1, 0): (0, 3), (1, 1): (4, 8)}
    for place in np.ndindex(ends.first.shape):
        assert (whole.first[place], whole.last[place]) == spans.get(place, (-1, -1))
    held = {place: answers[place[0] * places + place[1]] for place in np.ndindex(ends.first.shape)}
    assert held.pop((0, 0)) == [14, 15, 16]
    assert held.pop((0, 1)) == [17, 18]
    assert held.pop((1, 0)) == [11, 12, 13]
    assert held.pop((1, 1)) == [11, 12]
    assert not any(held.values())


def test_answers_that_share_a_prompt_are_no_prompts():
    pair = replace(document("pair", "....xx"), answers=(1, 1))
    sizes = {"capacity": 16, "audio_capacity": 0, "max_documents": 4, "answers": True}
    with pytest.raises(ValueError, match="share_prompts=False"):
        find_prompts(pack_row([pair], **sizes)[0], ContextLayout(), 4)
    batch, _ = pack_row([document("one", "..xx")], **sizes)
    assert find_prompts(batch, ContextLayout(), 4)[1][0] == [12, 13]
