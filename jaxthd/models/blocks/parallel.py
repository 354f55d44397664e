"""Attention and Mamba2 side by side in one block, as in Falcon-H1 (2025).

Legend: N tokens, D model dim; in decoding n documents of this rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.config.block import AttentionSizes, Block, PassedSizes, ScanSizes, register_block
from jaxthd.config.findings import Finding
from jaxthd.config.values import DERIVED
from jaxthd.files.tensor_names import Below, Table
from jaxthd.models.blocks.attention import Attention, AttentionMixer
from jaxthd.models.blocks.contract import Prefilled
from jaxthd.models.blocks.mamba2 import Mamba2, Mamba2Mixer
from jaxthd.packing.prompts import Now, Prompts
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init

PARTS = ("self_attention", "mamba")


def _of_parts(name: str) -> tuple[str, ...]:
    """The names in a list that both kinds of blocks have, below the part that each belongs to."""
    kinds = zip(PARTS, (Attention, Mamba2), strict=True)
    return tuple(f"{part}.{x}" for part, kind in kinds for x in getattr(kind, name))


@dataclass(frozen=True, kw_only=True)
class Parallel(Block):
    """Attention and Mamba2 that read the same tokens, and whose outputs are added (Falcon-H1)."""

    title = "attention beside Mamba2"
    letter = "H"
    splits_documents = True
    rolls_back = True
    equal_sizes = _of_parts("equal_sizes")
    shared_sizes = _of_parts("shared_sizes")
    read_with_others = _of_parts("read_with_others")
    convolution = "mamba.conv"
    kind: Annotated[Literal["parallel"], DERIVED] = "parallel"
    self_attention: Attention = field(default_factory=Attention)
    mamba: Mamba2 = field(default_factory=Mamba2)
    attention_in: float = 1.0
    """Factor on attention's input (Falcon-H1: attention_in_multiplier)."""
    attention_out: float = 1.0
    """Factor on attention's output (Falcon-H1: attention_out_multiplier)."""
    mamba_in: float = 1.0
    """Factor on Mamba2's input (Falcon-H1: ssm_in_multiplier)."""
    mamba_out: float = 1.0
    """Factor on Mamba2's output (Falcon-H1: ssm_out_multiplier)."""

    @property
    def norms(self) -> Literal["before", "after", "both"]:
        return self.self_attention.norms

    def build(self, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig) -> "ParallelMixer":
        return ParallelMixer(self, llm, init, compute)

    def cost(self, dim: int) -> float:
        return self.self_attention.cost(dim) + self.mamba.cost(dim)

    def faults(self, where: str, dim: int) -> Iterator[Finding]:
        yield from self.self_attention.faults(f"{where}.self_attention", dim)
        yield from self.mamba.faults(f"{where}.mamba", dim)

    @property
    def without_effect(self) -> tuple[str, ...]:
        return tuple(f"{part}.{x}" for part in PARTS for x in getattr(self, part).without_effect)

    def passed(self, tensor: int, activation: int) -> PassedSizes:
        return self.mamba.passed(tensor, activation)

    def attention(self, tensor: int) -> AttentionSizes:
        return self.self_attention.attention(tensor)

    def scan(self, tensor: int) -> ScanSizes:
        return self.mamba.scan(tensor)

    def tensors(self) -> Table:
        return {
            "self_attn.": Below("self_attention.", self.self_attention.tensors()),
            "mamba.": Below("mamba.", self.mamba.tensors()),
        }


class ParallelMixer(nnx.Module):
    """The sum of both mixers' outputs, each with the factors of the block."""

    def __init__(
        self, block: Parallel, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        init = Init.of(init, compute)
        self.self_attention: AttentionMixer = block.self_attention.build(llm, init, compute)
        self.mamba: Mamba2Mixer = block.mamba.build(llm, init, compute)
        self.into = block.attention_in, block.mamba_in
        self.out_of = block.attention_out, block.mamba_out

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        inputs = self._inputs(x_ND)
        return self._sum(self.self_attention(inputs[0], segments), self.mamba(inputs[1], segments))

    def prefill(self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts) -> Prefilled:
        """As a call. The state is that of attention, then that of Mamba2."""
        inputs = self._inputs(x_ND)
        attended = self.self_attention.prefill(inputs[0], segments, prompts)
        scanned = self.mamba.prefill(inputs[1], segments, prompts)
        outputs = self._sum(attended.outputs, scanned.outputs)
        return Prefilled(outputs, attended.fixed, [*attended.state, *scanned.state])

    def step(
        self, x_nD: Float[Array, "n D"], fixed: list[Array], state: list[Array], now: Now
    ) -> tuple[Float[Array, "n D"], list[Array]]:
        inputs = self._inputs(x_nD)
        *of_attention, inputs_of_conv, of_scan = state
        attended, new = self.self_attention.step(inputs[0], fixed, of_attention, now)
        scanned, after = self.mamba.step(inputs[1], [], [inputs_of_conv, of_scan], now)
        return self._sum(attended, scanned), [*new, *after]

    def _inputs(self, x_ND: Array) -> tuple[Array, Array]:
        """Attention's and Mamba2's."""
        return self.into[0] * x_ND, self.into[1] * x_ND

    def _sum(self, attended_ND: Array, scanned_ND: Array) -> Array:
        return self.out_of[0] * attended_ND + self.out_of[1] * scanned_ND


register_block(Parallel)
