"""The costs of the context layouts for a data set and a mesh, from the documents' lengths alone.

The whole-buffer layout needs no padding and exchanges only the states of Mamba2 and of the gated delta rule,
and all of attention's keys and values. The layout "whole" exchanges only what split documents need, and may
leave some slots of a rank empty.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, get_args

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jaxthd.config import Config
from jaxthd.config.block import Block
from jaxthd.ops.scan.state_passing import GATHER_UP_TO
from jaxthd.packing.assignment import Shares
from jaxthd.packing.layout import LayoutKind
from jaxthd.packing.split_documents import split_widths
from jaxthd.planning.lengths import Lengths, slots_of
from jaxthd.planning.simulate import Outcome, balance, simulate
from jaxthd.validate import DeviceFacts, Finding, mesh
from jaxthd.validate.rules import found_by

MULTIPLY_ADDS_PER_BYTE = 500
"""Multiply-adds in the time to receive a byte: an H100 at half its bfloat16 peak, NVLink at 450 GB/s."""
LAYOUT_COSTS = (
    "layout|padding|attention, busiest / mean|step|state bytes|attention bytes"
    "|slots|attention|exchange|together"
)


LAYOUTS: tuple[LayoutKind, ...] = get_args(LayoutKind)


class LayoutCost(NamedTuple):
    """The costs of a step under the layout of `config`.

    padding: share of token slots. imbalance: attention work of the busiest context rank over the mean,
    averaged over buffers. skipped: share of documents that fit no buffer. state_bytes, attention_bytes: bytes
    that a rank receives in a step in one layer that passes states, and in one of attention: of the kinds of
    blocks, the one with the most.
    The other fields are costs of the forward pass on the busiest rank, in multiply-adds for each of its real
    tokens. slots: the decoder's matrices, on padding too. attention: scores and weighted values. exchange:
    the bytes of all these layers, at MULTIPLY_ADDS_PER_BYTE each.
    """

    config: Config
    padding: float
    imbalance: float
    skipped: float
    state_bytes: float
    attention_bytes: float
    slots: float
    attention: float
    exchange: float

    @property
    def layout(self) -> LayoutKind:
        """The layout whose costs these are."""
        return self.config.compute.layout

    @property
    def step_imbalance(self) -> float:
        """Work of the busiest context rank over the mean, slots and attention together. Encoder chunks go to
        ranks in the same way under all layouts."""
        return (self.slots + self.attention) / (self.slots + self.attention / self.imbalance)

    @property
    def total(self) -> float:
        """Work and exchange of the busiest rank, in multiply-adds a real token."""
        return self.slots + self.attention + self.exchange

    @property
    def cells(self) -> list[str]:
        """Cells for the columns LAYOUT_COSTS."""
        terms = self.slots, self.attention, self.exchange, self.total
        return [
            self.layout,
            f"{self.padding:.1%}",
            f"{self.imbalance:.2f}",
            f"{self.step_imbalance:.3f}",
            f"{self.state_bytes:,.0f}",
            f"{self.attention_bytes:,.0f}",
            *(f"{x / 1e6:,.3f}" for x in terms),
        ]


def compare_layouts(stream: Lengths, config: Config, work: tuple[float, float]) -> list[LayoutCost]:
    """The costs of the layouts that fill a buffer: those that skip the fewest documents first, and of these
    the cheapest.

    stream: documents in an order of training. work: see jaxthd.planning.search.flops_per_slot.
    The capacity is rounded up to a size that the layout can divide.
    """
    configs = [laid_out(config, layout) for layout in possible_layouts(config)]
    outcomes = (simulate(stream, each, work) for each in configs)
    found = (_layout_cost(stream, outcome, work) for outcome in outcomes if outcome.buffers)
    return sorted(found, key=lambda cost: (round(cost.skipped, 4), cost.total))


def possible_layouts(config: Config) -> list[LayoutKind]:
    """ "buffer", and the other layouts that jaxthd.validate lets this model have on this mesh."""
    known = _errors(laid_out(config, "buffer"))
    return [layout for layout in LAYOUTS if layout == "buffer" or _errors(laid_out(config, layout)) <= known]


def _errors(config: Config) -> set[Finding]:
    """Errors of the rules about the mesh, those of the layout among them."""
    device = DeviceFacts("cpu", config.mesh.devices, "cpu")
    return {finding for finding in found_by(mesh.RULES, config, device) if not finding.is_warning}


def laid_out(config: Config, layout: LayoutKind) -> Config:
    """The config under this layout."""
    step = math.lcm(config.data.round_to, 2 * config.mesh.context)
    capacity = -(-config.data.capacity // step) * step
    return replace(
        config,
        data=replace(config.data, capacity=capacity),
        compute=replace(config.compute, context_layout=layout),
    )


def _layout_cost(stream: Lengths, outcome: Outcome, work: tuple[float, float]) -> LayoutCost:
    config = outcome.config
    mesh, llm, data = config.mesh, config.model.llm, config.data
    imbalance = balance(stream, outcome)[1]
    tokens = stream.tokens[list(chain(*outcome.buffers))].astype(float)
    keys_seen = _keys_seen(tokens, np.inf)
    letters = Counter(llm.letters + llm.mtp_pattern * config.depths_trained)
    real_tokens = data.rows / mesh.data * data.capacity / mesh.context * (1 - outcome.padding)
    received = exchanged = attention = keys_and_values = 0.0
    for letter, layers in letters.items():
        block = llm.blocks[letter]
        if block.passed(mesh.tensor, 4):
            passed = _mean_passed_bytes(block, outcome)
            received, exchanged = max(received, passed), exchanged + layers * passed
        if sizes := block.attention(mesh.tensor):
            of_keys = _mean_attention_bytes(block, stream, outcome)
            keys_and_values, exchanged = max(keys_and_values, of_keys), exchanged + layers * of_keys
            # Keys in a window are counted without the imbalance of what lies outside it.
            keys = _keys_seen(tokens, sizes.window) if sizes.window else keys_seen * imbalance
            attention += layers * keys * sizes.heads * (sizes.key_dim + sizes.value_dim)
    return LayoutCost(
        config,
        padding=outcome.padding,
        imbalance=imbalance,
        skipped=outcome.skipped,
        state_bytes=received,
        attention_bytes=keys_and_values,
        slots=work[0] / mesh.tensor / (1 - outcome.padding),
        attention=attention,
        exchange=exchanged / 2 / real_tokens * MULTIPLY_ADDS_PER_BYTE,
    )


def _keys_seen(tokens: Float[np.ndarray, " documents"], window: int | float) -> float:
    """Keys that a token sees, averaged over the tokens of documents of these lengths."""
    within = np.minimum(tokens, window)
    return float((within * (within + 1) / 2 + (tokens - within) * within).sum() / tokens.sum())


def _mean_passed_bytes(block: Block, outcome: Outcome) -> float:
    """passed_bytes; under the layout "whole", the mean over the buffers."""
    if not outcome.placements:
        return passed_bytes(outcome.config, block)
    splits = Counter(len(placement.split) for placement in outcome.placements)
    each = [passed_bytes(outcome.config, block, number) * count for number, count in splits.items()]
    return sum(each) / len(outcome.placements)


def _mean_attention_bytes(block: Block, stream: Lengths, outcome: Outcome) -> float:
    """attention_bytes; under the layout "whole", the mean over the buffers."""
    config, shares = outcome.config, Shares.of(outcome.config)
    if shares is None or not outcome.placements:
        return attention_bytes(config, block, config.data.capacity // config.mesh.context)
    slots, widths = slots_of(stream, config), [0, *split_widths(shares.share)]
    found = 0.0
    for buffer, placement in zip(outcome.buffers, outcome.placements, strict=True):
        taken = sum(2 * shares.chunk(int(slots[document])) for document in buffer[: len(placement.split)])
        found += attention_bytes(config, block, next(width for width in widths if taken <= width))
    return found / len(outcome.buffers)


def gathers_keys(config: Config) -> bool:
    """Whether the decoder's attention gathers keys and values: among pipeline stages there is no ring."""
    return config.compute.context_exchange == "all_gather" or config.mesh.pipeline > 1


def attention_bytes(config: Config, block: Block, slots: int) -> float:
    """Bytes that a rank receives in one layer of attention in a step, forward and backward, for all its rows.

    slots: of each rank's row whose keys and values are exchanged. With a ring these go around twice, and
    their gradients once and home. The forward pass that compute.remat repeats is not counted.
    """
    mesh, rows, sizes = config.mesh, config.data.rows / config.mesh.data, block.attention(config.mesh.tensor)
    assert sizes is not None
    numbers = sizes.kv_heads * (sizes.key_dim + sizes.value_dim)
    if gathers_keys(config) and config.compute.layout != "whole":
        numbers = sizes.gathered
    activation = jnp.dtype(config.compute.dtype).itemsize
    wide, others = max(activation, 4), mesh.context - 1
    if gathers_keys(config):
        return rows * slots * numbers * others * 2 * activation
    home = wide if others else 0
    return rows * slots * numbers * (others * (2 * activation + wide) + home)


def passed_bytes(config: Config, block: Block, split: int | None = None) -> float:
    """Bytes that a rank receives in one layer that passes states, in a step, forward and backward, for all
    its rows. The forward pass that compute.remat repeats is not counted.

    split: split documents of each row, under the layout "whole"; None: as many as there may be.

    Under the layout "buffer" a rank has two context chunks, each with a state and decay. They are gathered
    from all ranks; with many ranks they are passed in log2 steps, two shifts and a sum. The convolution's
    halos come from both neighbours. Under "whole" each split document has two context chunks; their states,
    and the halos of as many documents as there may be, are all gathered. The backward pass sends as much in
    the other direction.
    """
    mesh, rows, most = config.mesh, config.data.rows / config.mesh.data, config.compute.context_splits
    sizes = block.passed(mesh.tensor, jnp.dtype(config.compute.dtype).itemsize)
    assert sizes is not None
    state, halo = sizes
    if config.compute.layout == "buffer":
        halos = min(mesh.context - 1, 2) * halo
        return rows * 2 * (_maps_received(mesh.context) * state + halos)
    split = most if split is None else split
    return rows * 2 * 2 * (mesh.context - 1) * (split * state + most * halo) if split else 0.0


def _maps_received(context: int) -> int:
    """Maps of context chunks that a rank receives in a forward pass, for a row."""
    return 2 * (context - 1) if context <= GATHER_UP_TO else 2 * (math.ceil(math.log2(context)) + 2)


def layout_recommendation(costs: Sequence[LayoutCost]) -> str:
    """A sentence with the best layout, the difference and the main reason. costs: compare_layouts."""
    best, *others = costs
    recommended = f"Recommended: --compute.context-layout {best.layout}"
    if not others:
        return f"{recommended}; no other layout fills a buffer"
    other = others[0]
    if round(best.skipped, 4) < round(other.skipped, 4):
        skips = f"skips {other.skipped:.1%} of the documents, not {best.skipped:.1%}"
        return f"{recommended}; {other.layout} {skips}"
    reasons = {
        "slots": f"padding of {best.padding:.1%} against {other.padding:.1%}",
        "attention": f"attention work of {best.imbalance:.2f} of the mean, against {other.imbalance:.2f}",
        "exchange": f"{best.state_bytes:,.0f} bytes of states in a layer and {best.attention_bytes:,.0f} in "
        f"one of attention, against {other.state_bytes:,.0f} and {other.attention_bytes:,.0f}",
    }
    decides = max(reasons, key=lambda term: getattr(other, term) - getattr(best, term))
    return (
        f"{recommended}; {other.layout} costs {other.total / best.total - 1:.1%} more, mainly for "
        f"{reasons[decides]}"
    )
