"""The likeliest CTC alignment of labels with frames (Graves et al., 2006), on the host.

A path gives each frame a label or the blank. Without repetitions and then without blanks it spells the
labels.

Legend: F frames, L labels, S = 2 L + 1 states: blank, label 0, blank, label 1, ..., blank.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Alignment(NamedTuple):
    """The likeliest path. first, last: frames of each label, both included. log_probs: the mean
    log-probability of each label in its frames. log_prob: of the whole path."""

    first: Int[np.ndarray, " L"]
    last: Int[np.ndarray, " L"]
    log_probs: Float[np.ndarray, " L"]
    log_prob: float


def frames_needed(labels: Int[np.ndarray, " L"]) -> int:
    """The fewest frames that labels can be aligned with: one each, and a blank between two alike."""
    return len(labels) + int((labels[1:] == labels[:-1]).sum())


def align(
    blank_F: Float[np.ndarray, " F"], label_FL: Float[np.ndarray, "F L"], labels: Int[np.ndarray, " L"]
) -> Alignment:
    """The likeliest alignment; of several, the one that stays longest in earlier states.

    blank, label: log-probabilities, at each frame, of the blank and of each of the labels. Raises ValueError
    for no labels, and for fewer frames than they need.
    """
    frames, count = label_FL.shape
    needed = frames_needed(labels)
    if not count or frames < needed:
        raise ValueError(f"{count} labels need {needed} frames, one or more; it has {frames}")
    scores_FS = np.empty((frames, 2 * count + 1))
    scores_FS[:, ::2], scores_FS[:, 1::2] = blank_F[:, None], label_FL
    # A label may follow the one before it without a blank between them, unless they are alike.
    skips_S = np.zeros(2 * count + 1, bool)
    skips_S[3::2] = labels[1:] != labels[:-1]
    best_S = np.full(2 * count + 1, -np.inf)
    best_S[:2] = scores_FS[0, :2]
    steps_FS = np.zeros((frames, 2 * count + 1), np.int8)
    for frame in range(1, frames):
        one_S = np.concatenate([[-np.inf], best_S[:-1]])
        two_S = np.where(skips_S, np.concatenate([[-np.inf, -np.inf], best_S[:-2]]), -np.inf)
        came_3S = np.stack([two_S, one_S, best_S])
        steps_FS[frame] = 2 - came_3S.argmax(0)
        best_S = came_3S.max(0) + scores_FS[frame]
    state = 2 * count if best_S[-1] > best_S[-2] else 2 * count - 1
    log_prob, states = float(best_S[state]), np.empty(frames, int)
    for frame in range(frames - 1, -1, -1):
        states[frame] = state
        state -= steps_FS[frame, state]
    at_L = 2 * np.arange(count) + 1
    first, last = np.searchsorted(states, at_L), np.searchsorted(states, at_L, side="right") - 1
    sums = np.concatenate([[0.0], np.cumsum(scores_FS[np.arange(frames), states])])
    return Alignment(first, last, (sums[last + 1] - sums[first]) / (last + 1 - first), log_prob)
