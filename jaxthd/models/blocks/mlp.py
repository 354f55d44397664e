"""The multilayer perceptron of Nemotron-H (2025), and the gated ones of Qwen3 and GPT-OSS (2025).

Legend: N tokens, D model dim; in decoding n documents of this rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.config.block import Block, register_block
from jaxthd.config.findings import Finding
from jaxthd.config.values import DERIVED
from jaxthd.files.tensor_names import Table
from jaxthd.models.blocks.contract import Stateless, residual_std
from jaxthd.models.layers import Linear
from jaxthd.ops.ffn import FFNForm, FFNKind
from jaxthd.packing.prompts import Now
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, over_tensor

TENSORS: Table = {f"{part}_proj": part for part in ("gate", "up", "down")}
"""Usual names of the tensors of a multilayer perceptron."""


@dataclass(frozen=True, kw_only=True)
class FFN(Block):
    """Settings that an MLP and experts have both."""

    splits_documents = True
    rolls_back = True
    equal_sizes: ClassVar[tuple[str, ...]] = ("inner",)
    inner: int = 512
    """Inner dim."""
    form: FFNKind = "relu2"
    """"relu2": down(relu(up x)^2). "swiglu": down(silu(gate x) * up x).
    "clamped_swiglu": down((up + 1) * gate * sigmoid(alpha * gate)) of a gate of at most limit and an up from
    -limit to limit (GPT-OSS)."""
    alpha: float = 1.702
    """alpha of "clamped_swiglu"."""
    limit: float = 7.0
    """limit of "clamped_swiglu"."""
    bias: bool = False
    """Whether the projections have biases (GPT-OSS)."""

    @property
    def is_gated(self) -> bool:
        """Whether there is a gate."""
        return self.form != "relu2"

    @property
    def matrices(self) -> int:
        """Matrices of an MLP or of an expert."""
        return 3 if self.is_gated else 2

    @property
    def function(self) -> FFNForm:
        """The function between the projections."""
        return FFNForm(self.form, self.alpha, self.limit)

    def faults(self, where: str, dim: int) -> Iterator[Finding]:
        if self.form == "clamped_swiglu" and not self.limit:
            yield Finding(
                f'{where}.limit is 0 with {where}.form "clamped_swiglu"',
                "more than 0, because gates are clamped to at most this number",
                f"set {where}.limit to 7.0, which is GPT-OSS's",
            )

    @property
    def without_effect(self) -> tuple[str, ...]:
        return () if self.form == "clamped_swiglu" else ("alpha", "limit")


@dataclass(frozen=True, kw_only=True)
class MLP(FFN):
    """The multilayer perceptron."""

    title = "MLP"
    letter = "-"
    kind: Annotated[Literal["mlp"], DERIVED] = "mlp"
    factors: tuple[float, float] = (1.0, 1.0)
    """Factors on the gate, inside the activation, and on the output (Falcon-H1: mlp_multipliers)."""
    norm_after: bool = False
    """Whether the layer's RMSNorm is not before the block, but of what it adds to the residual (OLMo 2)."""

    @property
    def norms(self) -> Literal["before", "after", "both"]:
        return "after" if self.norm_after else "before"

    def build(self, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig) -> "MLPMixer":
        return MLPMixer(self, llm, init, compute)

    def cost(self, dim: int) -> float:
        return float(self.matrices * dim * self.inner)

    def faults(self, where: str, dim: int) -> Iterator[Finding]:
        yield from super().faults(where, dim)
        if self.factors[0] != 1 and not self.is_gated:
            yield Finding(
                f'{where}.factors is {self.factors} with {where}.form "{self.form}"',
                "1 for the gate, because there is none",
                f"set {where}.factors to {(1.0, self.factors[1])}",
            )

    def tensors(self) -> Table:
        return TENSORS


class MLPMixer(Stateless):
    """The multilayer perceptron, of a block or of the expert that all tokens share."""

    def __init__(
        self, block: FFN, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        init, inner = Init.of(init, compute), block.inner
        columns = over_tensor(inner)
        bias, self.form = block.bias, block.function
        self.factors = block.factors if isinstance(block, MLP) else (1.0, 1.0)
        self.up = Linear(llm.dim, inner, init, bias=bias, sharded_out=columns)
        self.gate = Linear(llm.dim, inner, init, bias=bias, sharded_out=columns) if block.is_gated else None
        self.down = Linear(inner, llm.dim, init, bias=bias, std=residual_std(inner, llm), sharded_in=columns)

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        return self._applied(x_ND)

    def step(
        self, x_nD: Float[Array, "n D"], fixed: list[Array], state: list[Array], now: Now
    ) -> tuple[Float[Array, "n D"], list[Array]]:
        return self._applied(x_nD), state

    def _applied(self, x_ND: Array) -> Array:
        up_NF = self.up(x_ND)
        gate_NF = None if self.gate is None else self.factors[0] * self.gate(x_ND)
        return self.factors[1] * self.down(self.form.inner(up_NF, gate_NF))


register_block(MLP)
