"""cpWER is the fewest errors over all ways to match speakers, tried one by one."""

from itertools import permutations

import numpy as np
import pytest

from jaxthd.evaluation.speakers import speaker_errors, turns_by_speaker
from jaxthd.inference.wer import errors_of, make_normaliser

BASIC = make_normaliser("basic")


def conversation(rng: np.random.Generator, speakers: int, form: str) -> str:
    """Turns of up to six words, in a random order; some speakers may say nothing at all."""
    turns = rng.integers(0, max(speakers, 1), rng.integers(1, 9))
    return " ".join(
        f"{form.format(who)} {' '.join(rng.choice(list('abcd'), rng.integers(0, 6)))}" for who in turns
    )


def by_trying_all(reference: str, hypothesis: str) -> int:
    """The definition: concatenated words, every permutation, silence for those without a counterpart."""
    said, heard = (list(map(BASIC, turns_by_speaker(text).values())) for text in (reference, hypothesis))
    count = max(len(said), len(heard))
    said, heard = (side + [""] * (count - len(side)) for side in (said, heard))
    return min(sum(e.wrong for e in errors_of(said, order)) for order in permutations(heard))


@pytest.mark.parametrize("form", ["<spk:{}>", "[S{:02d}]"])
def test_speakers_are_matched_as_well_as_can_be(form: str):
    rng = np.random.default_rng(0)
    gains = 0
    for _ in range(60):
        said, heard = (conversation(rng, int(rng.integers(1, 6)), form) for _ in "rh")
        errors = speaker_errors(said, heard, BASIC)
        assert errors is not None
        assert errors.wrong == by_trying_all(said, heard)
        assert errors.total == sum(len(BASIC(text).split()) for text in turns_by_speaker(said).values())
        in_order = [*zip(turns_by_speaker(said).values(), turns_by_speaker(heard).values(), strict=False)]
        gains += errors.wrong < sum(e.wrong for e in errors_of(*map(list, zip(*in_order, strict=True))))
    assert gains > 5


def test_names_of_speakers_do_not_count_and_a_text_without_one_is_one_speaker_s():
    """(errors, words) are meeteval's (0.4.3, cp_word_error_rate); 300 random conversations had the same."""
    said = "<spk:0> good morning <spk:1> morning <spk:0> how are"
    for heard, wrong in (
        ("<spk:7> morning <spk:3> good morning how is", 1),
        ("good morning morning how are", 2),
    ):
        errors = speaker_errors(said, heard, BASIC)
        assert errors is not None
        assert (errors.wrong, errors.total) == (wrong, 5)
    assert speaker_errors("good morning", "<spk:0> good morning", BASIC) is None
    turns = turns_by_speaker("well <spk:0> a <spk:1> b <spk:0> c")
    assert {who: text.split() for who, text in turns.items()} == {
        "<spk:0>": ["well", "a", "c"],
        "<spk:1>": ["b"],
    }
