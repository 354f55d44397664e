"""Losses that are written for one unpacked answer, on every answer of a packed buffer.

Legend: R rows of a microbatch on this rank, T token slots of a row on this rank, D most segments of a row, L
most tokens of an answer.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.objectives.objective import LOSS, Objective, Tokens

OfAnswer = Callable[[Array, Array, Mapping[str, Array]], Array]
"""(log_probs_L, weights_L, extras) -> a number. All begin with the answer's first supervised token. weights_L
is 1.0 where a token is supervised; where it is 0.0, and behind the answer's end, all numbers are 0."""


def by_answer(
    of_answer: OfAnswer, log_probs_RT: Float[Array, "R T"], tokens: Tokens, longest: int
) -> Float[Array, "R D"]:
    """The function's result for each answer, on whatever context ranks its tokens lie; 0 where a row has no
    such answer. The same on all context ranks; differentiable with respect to log_probs_RT.

    longest: L, from an answer's first supervised token to its last. The result is NaN for a longer answer. It
        sizes arrays: [R, D, L] for the log-probabilities, the weights and each of the extras.
    """
    is_supervised_RT = tokens.weights > 0
    # Negative, because answer_values takes the largest. Exact: buffers are shorter than 2^24 tokens.
    first_RD = -tokens.answer_values(-tokens.positions.astype(tokens.weights.dtype))
    at_RT = tokens.positions - tokens.at_tokens(first_RD).astype(jnp.int32)
    # Positions without a target, and those behind L, fall outside.
    at_RT = jnp.where(is_supervised_RT & (at_RT < longest), at_RT, longest)
    rows_RT = jnp.arange(len(at_RT))[:, None]

    def unpacked(x_RT: Array) -> Array:
        """The values by row, answer and position in it, gathered over the ranks."""
        empty_RDL = jnp.zeros((len(x_RT), tokens.max_documents + 1, longest), x_RT.dtype)
        found_RDL = empty_RDL.at[rows_RT, tokens.segment_ids, at_RT].add(x_RT, mode="drop")[:, 1:]
        return found_RDL if tokens.axis is None else jax.lax.psum(found_RDL, tokens.axis)

    weights_RDL, supervised_RD = unpacked(tokens.weights), tokens.answer_sums(tokens.weights)
    extras_RDL = {name: unpacked(x_RT) for name, x_RT in tokens.extras.items()}
    result_RD = jax.vmap(jax.vmap(of_answer))(unpacked(log_probs_RT), weights_RDL, extras_RDL)
    is_whole_RD = weights_RDL.sum(-1) >= supervised_RD
    # What the function makes of a place without an answer, NaN perhaps, reaches neither result nor gradient.
    return jnp.where(supervised_RD > 0, jnp.where(is_whole_RD, result_RD, jnp.nan), 0)


@dataclass(frozen=True)
class UnpackedObjective(Objective):
    """The mean over answers of a loss that a subclass writes for one unpacked answer.

    longest: see by_answer.
    """

    longest: int = 512

    @abstractmethod
    def loss(
        self, log_probs_L: Float[Array, " L"], weights_L: Float[Array, " L"], extras: Mapping[str, Array]
    ) -> Float[Array, ""]:
        """The loss of one answer. See OfAnswer for the arguments."""

    def counts(self, tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """Supervised answers of this rank."""
        return {LOSS: tokens.share(tokens.supervised_answers().sum(dtype=tokens.weights.dtype))}

    def sums(self, log_probs_RT: Float[Array, "R T"], tokens: Tokens) -> dict[str, Float[Array, ""]]:
        """The user's loss, summed over the answers of this rank."""
        return {LOSS: tokens.share(by_answer(self.loss, log_probs_RT, tokens, self.longest).sum())}
