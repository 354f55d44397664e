"""Connectionist temporal classification (Graves et al., 2006) of many documents at once.

A path gives each frame of a document a label or the blank. Without repetitions and then without blanks it
spells the labels. CTC's log p(labels) is the sum over all such paths, found frame by frame: the state is the
number of labels spelt so far, and whether the last frame was blank.

The loop runs over frame numbers, for all documents together, as long as any of them has frames. In the same
loop each document also runs reversed, last frame and last label first. What its frames before and after a
frame say of a state meet there, and give the state's posterior: the gradient.

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
        left out. repeats: whether label k is label k - 1 again.
    document: of each slot; any other number where the slot has no frame.
    """

    slots: Int32[Array, " M"]
    first: Int32[Array, " G"]
    frames: Int32[Array, " G"]
    labels: Int32[Array, " G"]
    repeats: Bool[Array, "G L"]
    document: Int32[Array, " M"]


@jax.custom_vjp
def ctc_log_probs(
    blank_M: Float[Array, " M"], label_ML: Float[Array, "M L"], documents: Alignable
) -> Float[Array, " G"]:
    """log p(labels) of each document, 0 for one that is left out. Differentiable in blank and label.

    blank, label: log-probabilities, at each slot with a frame, of the blank and of label k of its document.
    """
    return _value_and_posteriors(blank_M, label_ML, documents)[0]


def _forward(blank_M, label_ML, documents):
    logp_G, *posteriors = _value_and_posteriors(blank_M, label_ML, documents)
    return logp_G, (*posteriors, documents.document)


def _backward(residuals, dlogp_G):
    blank_M, label_ML, document_M = residuals
    dlogp_M = dlogp_G.at[document_M].get(mode="clip")
    return dlogp_M * blank_M, dlogp_M[:, None] * label_ML, None


ctc_log_probs.defvjp(_forward, _backward)


class _Carry(NamedTuple):
    """Log-probabilities of the frames so far and a state, given the state's number k.

    blank: after k labels, the last frame blank, [Q, L + 1]. label: the last frame label k, [Q, L].
    blanks, labels: the same at each slot, [2 M, ...]: of the documents, then of the documents reversed.
    """

    blank: Array
    label: Array
    blanks: Array
    labels: Array


def _value_and_posteriors(
    blank_M: Array, label_ML: Array, documents: Alignable
) -> tuple[Array, Array, Array]:
    """(log p, and the posteriors of the blank and of each label at each slot), 0 for documents left out."""
    slots_M, first_G, frames_G, labels_G, repeats_GL, document_M = documents
    m, most = label_ML.shape
    k_L, k_L1 = jnp.arange(most), jnp.arange(most + 1)
    # Label k of a document reversed is its label n - 1 - k; a label is repeated where the one after it was.
    last_G1 = labels_G[:, None] - 1
    column_QL = jnp.concatenate([jnp.broadcast_to(k_L, repeats_GL.shape), jnp.maximum(last_G1 - k_L, 0)])
    mirrored_GL = jnp.clip(last_G1 + 1 - k_L, 0, most - 1)
    repeats_QL = jnp.concatenate([repeats_GL, jnp.take_along_axis(repeats_GL, mirrored_GL, axis=1)])
    frames_Q = jnp.tile(frames_G, 2)
    start_Q = jnp.concatenate([first_G, first_G + frames_G - 1])
    stride_Q = jnp.repeat(jnp.array([1, -1]), len(first_G), total_repeat_length=len(frames_Q))
    half_Q = jnp.where(stride_Q > 0, 0, m)

    def frame(t: Array, carry: _Carry) -> _Carry:
        slot_Q = slots_M.at[start_Q + stride_Q * t].get(mode="clip")
        blank_Q1 = blank_M.at[slot_Q].get(mode="clip")[:, None]
        label_QL = label_ML.at[slot_Q[:, None], column_QL].get(mode="clip")
        before_QL1 = jnp.pad(carry.label, ((0, 0), (1, 0)), constant_values=_NEVER)
        either_QL1 = _log_add(carry.blank, before_QL1)
        # A label that is repeated comes only after a blank.
        enter_QL = jnp.where(repeats_QL, carry.blank[:, :-1], either_QL1[:, :-1])
        blank_QL1, label_QL = blank_Q1 + either_QL1, label_QL + _log_add(carry.label, enter_QL)
        at_Q = jnp.where(t < frames_Q, half_Q + slot_Q, 2 * m)
        blanks = carry.blanks.at[at_Q].set(blank_QL1, mode="drop")
        return _Carry(blank_QL1, label_QL, blanks, carry.labels.at[at_Q].set(label_QL, mode="drop"))

    def never(*dims: int) -> Array:
        return jnp.full(dims, _NEVER, blank_M.dtype)

    q = len(frames_Q)
    start = _Carry(
        never(q, most + 1).at[:, 0].set(0), never(q, most), never(2 * m, most + 1), never(2 * m, most)
    )
    end = jax.lax.fori_loop(0, frames_G.max(initial=0), frame, start)

    end_G = slots_M.at[start_Q[len(first_G) :]].get(mode="clip")
    logp_G = _log_add(end.blanks[end_G, labels_G], end.labels[end_G, jnp.maximum(labels_G - 1, 0)])
    logp_G = jnp.where(frames_G > 0, logp_G, 0)

    def posterior(passed: Array, emitted: Array, last_M1: Array, k: Array) -> Array:
        """passed: log-probabilities of the states, [2 M, states]. last: the mirror image of state 0."""
        mirrored = jnp.take_along_axis(passed[m:], jnp.maximum(last_M1 - k, 0), axis=1)
        logp_M1 = logp_G.at[document_M].get(mode="clip")[:, None]
        return jnp.where(k <= last_M1, jnp.exp(passed[:m] + mirrored - emitted - logp_M1), 0)

    labels_M1 = labels_G.at[document_M].get(mode="clip")[:, None]
    blank = posterior(end.blanks, blank_M[:, None], labels_M1, k_L1).sum(1)
    return logp_G, blank, posterior(end.labels, label_ML, labels_M1 - 1, k_L)


def _log_add(x: Array, y: Array) -> Array:
    """log(exp(x) + exp(y)) of finite numbers."""
    return jnp.maximum(x, y) + jnp.log1p(jnp.exp(-jnp.abs(x - y)))
