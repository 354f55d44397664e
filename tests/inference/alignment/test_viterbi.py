"""The alignment is the likeliest of all paths that spell the labels, and torchaudio's
(tests/references/forced_align.py)."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from jaxthd.inference.alignment.viterbi import align, frames_needed

BLANK = -1
FOUND = np.load(Path(__file__).parents[2] / "references" / "forced_align.npz")


@pytest.mark.parametrize(
    ("labels", "frames"), [([3], 1), ([3], 4), ([3, 5], 6), ([3, 3], 5), ([3, 3, 5], 7), ([5, 3, 5], 7)]
)
def test_it_is_the_likeliest_of_all_paths(labels: list[int], frames: int) -> None:
    rng, ids = np.random.default_rng(frames), np.array(labels)
    kinds = sorted(set(labels))
    for _ in range(5):
        logp_FC = np.log(rng.dirichlet(np.ones(1 + len(kinds)), frames))
        each = dict(zip([BLANK, *kinds], logp_FC.T, strict=True))
        best = max(
            (
                path
                for path in itertools.product(each, repeat=frames)
                if [k for k, _ in itertools.groupby(path) if k != BLANK] == labels
            ),
            key=lambda path: sum(each[k][f] for f, k in enumerate(path)),
        )
        found = align(each[BLANK], np.stack([each[k] for k in labels], 1), ids)
        path = np.full(frames, BLANK)
        for k, (first, last) in enumerate(zip(found.first, found.last, strict=True)):
            path[first : last + 1] = labels[k]
            mean = np.mean([each[labels[k]][f] for f in range(first, last + 1)])
            assert found.log_probs[k] == pytest.approx(mean)
        assert path.tolist() == list(best)
        assert found.log_prob == pytest.approx(sum(each[k][f] for f, k in enumerate(best)))


def test_frames_are_those_of_torchaudio() -> None:
    """Of as many frames as labels need and of more, repetitions and likely blanks among them."""
    cases = [name.partition(".")[2] for name in FOUND.files if name.startswith("path.")]
    assert len(cases) == 24
    for case in cases:
        labels, log_probs, path = (FOUND[f"{x}.{case}"] for x in ("labels", "log_probs", "path"))
        found = align(log_probs[:, 0], log_probs[:, labels], labels)
        ours = np.zeros(len(path), int)
        for label, first, last in zip(labels, found.first, found.last, strict=True):
            ours[first : last + 1] = label
        assert ours.tolist() == path.tolist(), case


def test_labels_need_frames_and_a_blank_between_two_alike() -> None:
    assert frames_needed(np.array([1, 1, 2, 2, 2])) == 8
    rng = np.random.default_rng(0)
    full = align(rng.normal(size=3), rng.normal(size=(3, 2)), np.array([1, 1]))
    assert (full.first.tolist(), full.last.tolist()) == ([0, 2], [0, 2])
    with pytest.raises(ValueError, match="2 labels need 3 frames, one or more; it has 2"):
        align(np.zeros(2), np.zeros((2, 2)), np.array([1, 1]))
    with pytest.raises(ValueError, match="0 labels need 0 frames, one or more; it has 2"):
        align(np.zeros(2), np.zeros((2, 0)), np.array([], int))
