"""The contract of a block's module, a mixer: the part of a decoder layer between its norm and its residual
sum.

Its settings and what else the program asks of it are a Block (jaxthd/config/block.py).

Legend: N tokens of this rank, D model dim, E experts; in decoding n documents of this rank.
"""

import math
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import LLMConfig
from jaxthd.packing.prompts import Now, Prompts
from jaxthd.packing.segments import Segments


class Prefilled(NamedTuple):
    """A mixer's outputs, and what it keeps for decoding.

    fixed: stays as it is while tokens are decoded. state: changes with every token; its shapes do not.
    Where the layers hold these is said in models/decoding.py.
    """

    outputs: Float[Array, "N D"]
    fixed: list[Array]
    state: list[Array]


class Routing(NamedTuple):
    """Where an MoE layer's tokens went, over all data and context ranks.

    load: tokens sent to each expert; a token counts once for each of its experts.
    tokens: tokens that were routed.
    aux: this rank's share of the auxiliary loss times tokens, differentiable. The loss is 1 for an even load
        and more for an uneven one (Fedus et al., Switch Transformer, 2021, over normalised sigmoid scores).
    """

    load: Float[Array, "*layers E"]
    tokens: Float[Array, "*layers"]
    aux: Float[Array, "*layers"]


@runtime_checkable
class Mixer(Protocol):
    """An nnx.Module. Dims are read from its parameters, which may be one rank's shards of them.

    It may name projections of its own that get no LoRA and no FP8 (`no_lora`), or no FP8 alone (`no_fp8`);
    and those whose matrix decoding multiplies into another one, for all tokens alike (`absorbed`).
    """

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        """A token's output depends only on its own document, up to that token.

        With mesh.tensor > 1 the result is this rank's part of a sum.
        """
        ...

    def prefill(self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts) -> Prefilled:
        """As a call, and what decoding after the prompts goes on from."""
        ...

    def step(
        self, x_ND: Float[Array, "N D"], fixed: list[Array], state: list[Array], now: Now
    ) -> tuple[Float[Array, "N D"], list[Array]]:
        """One more token of every document of this rank: its outputs, and the state after it.

        With Block.rolls_back: L tokens of every document (Now), and the state after each of them, from which
        the next step takes the one that it goes on from (Prompts.state, Now.latest).
        """
        ...


@runtime_checkable
class RoutedMixer(Mixer, Protocol):
    """A mixer that sends tokens to experts. Its module `router` has the matrices by which it does, which are
    used in float32; its buffer `correction_bias`, if Block.evens_load, is moved after every step."""

    def routed(self, x_ND: Float[Array, "N D"], segments: Segments) -> tuple[Float[Array, "N D"], Routing]:
        """As a call, and where the tokens went."""
        ...


class Stateless(nnx.Module):
    """A mixer of each token by itself: nothing is kept for decoding."""

    def prefill(self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts) -> Prefilled:
        return Prefilled(self(x_ND, segments), [], [])


def residual_std(fan_in: int, llm: LLMConfig) -> float:
    """Projections back into the residual stream start smaller, against growth with depth."""
    return 1 / math.sqrt(fan_in * len(llm.letters))


def step_bias(step: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the bias from which softplus makes this time step, which is above 0."""
    return step + jnp.log(-jnp.expm1(-step))
