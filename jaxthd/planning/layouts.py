"""Which context layout costs less for a data set and a mesh, and why: from the documents' lengths alone.

The whole-buffer layout pads nothing and passes Mamba2's states, but long documents load ranks unevenly. The
per-document layout loads them evenly, pads every document, and moves Mamba2's activations. Attention
exchanges the same keys and values under both.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from jaxthd.config import Config, LLMConfig
from jaxthd.ops.scan.ssd import GATHER_UP_TO
from jaxthd.planning.lengths import Lengths
from jaxthd.planning.simulate import balance, simulate

MULTIPLY_ADDS_PER_BYTE = 500
"""What a device computes while it receives a byte: an H100 at half its bfloat16 peak, NVLink at 450 GB/s."""
LAYOUT_COSTS = "layout|padding|attention, worst / mean|Mamba2 bytes|slots|attention|exchange|together"


class LayoutCost(NamedTuple):
    """What a step costs under the layout of `config`.

    padding: share of token slots. imbalance: attention work of the worst context rank / mean, on average.
    mamba_bytes: that a rank receives in one Mamba2 layer in a step, forward and backward.
    slots, attention, exchange: of the worst rank, in multiply-adds for each of its real tokens, forward: the
    decoder's matrices, padding included; scores and weighted values; the bytes of all Mamba2 layers, of
    MULTIPLY_ADDS_PER_BYTE each.
    """

    config: Config
    padding: float
    imbalance: float
    mamba_bytes: float
    slots: float
    attention: float
    exchange: float

    @property
    def layout(self) -> str:
        return self.config.compute.context_layout

    @property
    def total(self) -> float:
        return self.slots + self.attention + self.exchange

    @property
    def cells(self) -> list[str]:
        """In the columns LAYOUT_COSTS."""
        terms = self.slots, self.attention, self.exchange, self.total
        return [
            self.layout,
            f"{self.padding:.1%}",
            f"{self.imbalance:.2f}",
            f"{self.mamba_bytes:,.0f}",
            *(f"{x / 1e6:,.3f}" for x in terms),
        ]


def compare_layouts(stream: Lengths, config: Config, work: tuple[float, float]) -> list[LayoutCost]:
    """Both layouts, the cheaper first. stream: documents in an order of training. work: see slot_work.

    The per-document layout rounds documents to the least multiple of data.round_to that it can cut; the
    capacity is rounded up to what the layout can cut.
    """
    mesh, unit, costs = config.mesh, 2 * config.mesh.context, []
    for layout in ("buffer", "document"):
        round_to = config.data.round_to
        if layout == "document":
            round_to = math.lcm(round_to, unit)
        elif config.compute.context_layout == "document":
            round_to = 1  # what is configured is for the other layout
        step = math.lcm(round_to, unit)
        capacity = -(-config.data.capacity // step) * step
        laid_out = replace(
            config,
            data=replace(config.data, round_to=round_to, capacity=capacity),
            compute=replace(config.compute, context_layout=layout),
        )
        outcome = simulate(stream, laid_out, work)
        imbalance = balance(stream, outcome)[1]
        tokens = stream.tokens[list(chain(*outcome.buffers))].astype(float)
        keys_seen = (tokens * (tokens + 1)).sum() / 2 / tokens.sum()
        llm, rows, received = config.model.llm, config.data.rows / mesh.data, mamba_bytes(laid_out)
        letters = llm.letters + llm.mtp_pattern * config.depths_trained
        real_tokens = rows * capacity / mesh.context * (1 - outcome.padding)
        costs.append(
            LayoutCost(
                laid_out,
                padding=outcome.padding,
                imbalance=imbalance,
                mamba_bytes=received,
                slots=work[0] / mesh.tensor / (1 - outcome.padding),
                attention=letters.count("*")
                * keys_seen
                * imbalance
                * 2
                * llm.q_heads
                * llm.head_dim
                / mesh.tensor,
                exchange=letters.count("M") * received / 2 / real_tokens * MULTIPLY_ADDS_PER_BYTE,
            )
        )
    return sorted(costs, key=lambda cost: cost.total)


def mamba_bytes(config: Config) -> float:
    """Bytes that a rank receives in one Mamba2 layer in a step, forward and backward, over all its rows.

    Without the forward pass that remat_llm repeats.
    """
    mesh, llm, rows = config.mesh, config.model.llm, config.data.rows / config.mesh.data
    heads, groups = llm.mamba_heads // mesh.tensor, max(llm.mamba_groups // mesh.tensor, 1)
    llm = replace(llm, mamba_heads=heads, mamba_groups=groups)
    activation = {"bfloat16": 2, "float32": 4, "float64": 8}[config.compute.dtype]
    if config.compute.context_layout == "buffer":
        return rows * state_bytes(llm, mesh.context, activation)
    return exchange_bytes(llm, mesh.context, rows * config.data.capacity / mesh.context, activation)


def state_bytes(llm: LLMConfig, context: int, activation: int) -> int:
    """Under the whole-buffer layout, of one row: states and the convolution's halos.

    Two stretches a rank, a float32 state and decay each: gathered from all ranks, or in log2 steps, two
    shifts and a sum. The convolution's halo of `activation` bytes a number comes from both neighbours.
    Backward sends as much again, the other way.
    """
    heads, inner = llm.mamba_heads, llm.mamba_heads * llm.mamba_head_dim
    pairs = 2 * (context - 1) if context <= GATHER_UP_TO else 2 * (math.ceil(math.log2(context)) + 2)
    channels = inner + 2 * llm.mamba_groups * llm.mamba_state
    halos = min(context - 1, 2) * (llm.mamba_conv - 1) * channels * activation
    return 2 * (pairs * (heads + inner * llm.mamba_state) * 4 + halos)


def exchange_bytes(llm: LLMConfig, context: int, tokens: float, activation: int) -> float:
    """Under the per-document layout, with `tokens` on each rank: x, B, C and dt go, y comes back, all but the
    share that stays. Groups whose heads lie on several ranks go to each of them; dt is in float32."""
    inner = llm.mamba_heads * llm.mamba_head_dim
    channels = inner + 2 * math.lcm(llm.mamba_groups, context) * llm.mamba_state
    sent = (channels + inner) * activation + llm.mamba_heads * max(activation, 4)
    return 2 * sent * tokens * (context - 1) / context


def layout_recommendation(costs: Sequence[LayoutCost]) -> str:
    """One sentence: the cheaper layout, by how much, and what decides. costs: see compare_layouts."""
    best, other = costs
    reasons = {
        "slots": f"padding of {best.padding:.1%} against {other.padding:.1%}",
        "attention": f"attention work of {best.imbalance:.2f} of the mean, against {other.imbalance:.2f}",
        "exchange": f"{best.mamba_bytes:,.0f} bytes in a Mamba2 layer against {other.mamba_bytes:,.0f}",
    }
    decides = max(reasons, key=lambda term: getattr(other, term) - getattr(best, term))
    rounding = f" --data.round-to {best.config.data.round_to}" if best.layout == "document" else ""
    return (
        f"Recommended: --compute.context-layout {best.layout}{rounding}; the other costs "
        f"{other.total / best.total - 1:.1%} more; what decides is {reasons[decides]}"
    )
