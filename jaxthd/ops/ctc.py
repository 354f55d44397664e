"""Connectionist temporal classification (Graves et al., 2006) of many documents at once.

A path gives each frame of a document a label or the blank. Without repetitions and then without blanks it
spells the labels. CTC's log p(labels) is the sum over all such paths, found frame by frame: the state is the
number of labels spelt so far, and whether the last frame was blank.

All probabilities are relative to those of the blank. So the path of blanks alone has probability 1, and a
sum over thousands of frames stays small enough for float32.

The loop runs over frame numbers, for all documents together, as long as any of them has frames. In the same
loop each document also runs reversed, last frame and last label first. What its frames before and after a
frame say of a label meet there, and give the label's posterior: the gradient.

Legend: M slots, some of which hold a frame; G documents, L most labels of one, Q = 2 G: the documents, then
the documents reversed.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int32

_NEVER = -1e30
"""Log-probability of what cannot be. Finite: differences of infinities are NaN."""


class Alignable(NamedTuple):
    """Documents with an alignment: as many frames as labels, and one more for each repeated label.

    slots: those with frames, document after document, each document's in order; M where there are no more.
    first: each document's first index into `slots`. frames, labels: their numbers; 0 for a document that is
        skipped. repeats: whether label k is label k - 1 again.
    document: of each slot; G where the slot has no frame, or that of a document that is skipped.
    """

    slots: Int32[Array, " M"]
    first: Int32[Array, " G"]
    frames: Int32[Array, " G"]
    labels: Int32[Array, " G"]
    repeats: Bool[Array, "G L"]
    document: Int32[Array, " M"]


def ctc_log_probs(
    blank_M: Float[Array, " M"], label_ML: Float[Array, "M L"], documents: Alignable
) -> Float[Array, " G"]:
    """log p(labels) of each document, 0 for one that is skipped. Differentiable in blank and label.

    blank, label: log-probabilities, at each slot with a frame, of the blank and of label k of its document.
    """
    blanks_G = jax.ops.segment_sum(blank_M, documents.document, len(documents.first))
    return blanks_G + _log_odds(label_ML - blank_M[:, None], documents)


@jax.custom_vjp
def _log_odds(odds_ML: Array, documents: Alignable) -> Array:
    """The log of the sum over all paths of p(path) / p(path of blanks alone), [G]; 0 for skipped documents.

    odds: log p(label) / p(blank).
    """
    return _value_and_posteriors(odds_ML, documents)[0]


def _forward(odds_ML, documents):
    value_G, posteriors_ML = _value_and_posteriors(odds_ML, documents)
    return value_G, (posteriors_ML, documents.document)


def _backward(residuals, dvalue_G):
    posteriors_ML, document_M = residuals
    return dvalue_G.at[document_M].get(mode="fill", fill_value=0)[:, None] * posteriors_ML, None


_log_odds.defvjp(_forward, _backward)


class _Carry(NamedTuple):
    """The log of the sum over the paths of the frames so far, by state, relative to blanks alone.

    blank: after k labels, the last frame blank, [Q, L + 1]. label: the last frame label k, [Q, L].
    labels: `label` at each slot, [2 M, L]: of the documents, then of the documents reversed.
    """

    blank: Array
    label: Array
    labels: Array


def _value_and_posteriors(odds_ML: Array, documents: Alignable) -> tuple[Array, Array]:
    """(_log_odds, the posterior of each label at each slot, [M, L])."""
    slots_M, first_G, frames_G, labels_G, repeats_GL, document_M = documents
    (m, most), g = odds_ML.shape, len(first_G)
    k_L, last_G1 = jnp.arange(most), labels_G[:, None] - 1
    # Label k of a document reversed is its label n - 1 - k; a label is repeated where the one after it was.
    column_QL = jnp.concatenate([jnp.broadcast_to(k_L, (g, most)), jnp.maximum(last_G1 - k_L, 0)])
    mirrored_GL = jnp.clip(last_G1 + 1 - k_L, 0, most - 1)
    repeats_QL = jnp.concatenate([repeats_GL, jnp.take_along_axis(repeats_GL, mirrored_GL, axis=1)])
    frames_Q = jnp.tile(frames_G, 2)
    start_Q = jnp.concatenate([first_G, first_G + frames_G - 1])
    is_reversed_Q = jnp.arange(2 * g) >= g
    stride_Q, half_Q = jnp.where(is_reversed_Q, -1, 1), jnp.where(is_reversed_Q, m, 0)

    def frame(t: Array, carry: _Carry) -> _Carry:
        """Takes the t-th frame of each document; the state stays where there is none."""
        slot_Q = slots_M.at[start_Q + stride_Q * t].get(mode="clip")
        odds_QL = odds_ML.at[slot_Q[:, None], column_QL].get(mode="clip")
        before_QL1 = jnp.pad(carry.label, ((0, 0), (1, 0)), constant_values=_NEVER)
        blank_QL1 = _log_add(carry.blank, before_QL1)
        # A label that is repeated comes only after a blank.
        enter_QL = jnp.where(repeats_QL, carry.blank[:, :-1], blank_QL1[:, :-1])
        label_QL = odds_QL + _log_add(carry.label, enter_QL)
        is_frame_Q1 = (t < frames_Q)[:, None]
        blank_QL1 = jnp.where(is_frame_Q1, blank_QL1, carry.blank)
        at_Q = jnp.where(is_frame_Q1[:, 0], half_Q + slot_Q, 2 * m)
        labels = carry.labels.at[at_Q].set(label_QL, mode="drop")
        return _Carry(blank_QL1, jnp.where(is_frame_Q1, label_QL, carry.label), labels)

    def never(*dims: int) -> Array:
        """An array of what cannot be."""
        return jnp.full(dims, _NEVER, odds_ML.dtype)

    start = _Carry(never(2 * g, most + 1).at[:, 0].set(0), never(2 * g, most), never(2 * m, most))
    end = jax.lax.fori_loop(0, frames_G.max(initial=0), frame, start)

    last_G1 = jnp.maximum(last_G1, 0)
    after_G1 = jnp.take_along_axis(end.blank[:g], labels_G[:, None], axis=1)
    value_G1 = _log_add(after_G1, jnp.take_along_axis(end.label[:g], last_G1, axis=1))
    value_G = jnp.where(frames_G > 0, value_G1[:, 0], 0)

    last_M1 = labels_G.at[document_M].get(mode="fill", fill_value=0)[:, None] - 1
    value_M1 = value_G.at[document_M].get(mode="fill", fill_value=0)[:, None]
    after_ML = jnp.take_along_axis(end.labels[m:], jnp.maximum(last_M1 - k_L, 0), axis=1)
    posteriors_ML = jnp.exp(end.labels[:m] + after_ML - odds_ML - value_M1)
    return value_G, jnp.where(k_L <= last_M1, posteriors_ML, 0)


def _log_add(x: Array, y: Array) -> Array:
    """log(exp(x) + exp(y)) of finite numbers."""
    return jnp.maximum(x, y) + jnp.log1p(jnp.exp(-jnp.abs(x - y)))
