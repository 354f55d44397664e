"""The function of an MLP or an expert between its projections.

Legend: N tokens, F inner dim.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.ops.activations import relu_squared, silu_gated

FFNKind = Literal["relu2", "swiglu", "clamped_swiglu"]


class FFNForm(NamedTuple):
    """The `form` of an MLP or of experts, with the alpha and the limit of "clamped_swiglu". in_fp8: of
    experts, whether their products are ("experts" in compute.fp8)."""

    kind: FFNKind
    alpha: float
    limit: float
    in_fp8: bool = False

    def inner(self, up_NF: Float[Array, "N F"], gate_NF: Float[Array, "N F"] | None) -> Float[Array, "N F"]:
        """Input of the last projection. gate: None for "relu2", which has none."""
        if gate_NF is None:
            return relu_squared(up_NF)
        if self.kind == "swiglu":
            return silu_gated(up_NF, gate_NF)
        gate_NF, up_NF = jnp.minimum(gate_NF, self.limit), jnp.clip(up_NF, -self.limit, self.limit)
        return (up_NF + 1) * (gate_NF * jax.nn.sigmoid(self.alpha * gate_NF))
