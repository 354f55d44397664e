"""The hybrid decoder: blocks of RMSNorm, one mixer, residual, in the order of a pattern string.

Legend: N tokens, D model dim; in decoding n documents of this rank.
"""

from functools import partial
from typing import Any

from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ModelConfig
from jaxthd.models.layers import RMSNorm
from jaxthd.models.mixers import MLP, Attention, Mamba2, MoE, Prefilled
from jaxthd.packing.prompts import Now, Prompts
from jaxthd.packing.segments import Segments
from jaxthd.parallel.params import Init, scan_stack, stack

Cache = tuple[list[Any], list[Any]]
"""What the blocks of a unit hold for decoding: (fixed, state) of each; arrays, stacked over the repeats."""


def repeated_units(pattern: str) -> list[tuple[str, int]]:
    """Writes the pattern as (unit, repeats) pairs, in order, with the fewest letters in all units.

    One copy of each unit is traced and compiled. "MEMEM*EMEMEM*EM" -> ("MEMEM*E", 2), ("M", 1).
    """
    best: list[tuple[int, list[tuple[str, int]]]] = [(0, [])]
    for end in range(1, len(pattern) + 1):
        options = []
        for size in range(1, end + 1):
            unit, repeats = pattern[end - size : end], 1
            while pattern[end - (repeats + 1) * size : end - repeats * size] == unit:
                repeats += 1
            for n in range(repeats, 0, -1):
                cost, units = best[end - n * size]
                options.append((cost + size, [*units, (unit, n)]))
        best.append(min(options, key=lambda option: (option[0], len(option[1]))))
    return best[-1][1]


class Block(nnx.Module):
    """x + mixer(RMSNorm(x))."""

    def __init__(self, kind: str, config: ModelConfig, init: Init) -> None:
        self.norm = RMSNorm(config.llm.dim, config.llm.norm_eps, init)
        self.mixer: MLP | Attention | Mamba2 | MoE
        match kind:
            case "M":
                self.mixer = Mamba2(config, init)
            case "*":
                self.mixer = Attention(config, init)
            case "-":
                self.mixer = MLP(config.llm.dim, config.llm.ffn_dim, config, init)
            case "E":
                self.mixer = MoE(config, init)
            case _:
                raise ValueError(
                    f"unknown letter {kind!r} in model.llm.pattern; "
                    "use M (Mamba2), * (attention), - (MLP), E (MoE)"
                )

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        return x_ND + self.mixer(self.norm(x_ND), segments)

    def prefill(self, x_ND: Array, segments: Segments, prompts: Prompts) -> Prefilled:
        y_ND, fixed, state = self.mixer.prefill(self.norm(x_ND), segments, prompts)
        return x_ND + y_ND, fixed, state

    def step(self, x_nD: Array, fixed: Any, state: Any, now: Now) -> tuple[Array, Any]:
        y_nD, state = self.mixer.step(self.norm(x_nD), fixed, state, now)
        return x_nD + y_nD, state


class Unit(nnx.Module):
    """The blocks of one unit of the pattern, one after the other."""

    def __init__(self, kinds: str, config: ModelConfig, init: Init) -> None:
        self.blocks = nnx.List([Block(kind, config, init) for kind in kinds])

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        for block in self.blocks:
            x_ND = block(x_ND, segments)
        return x_ND

    def prefill(self, x_ND: Array, segments: Segments, prompts: Prompts) -> tuple[Array, Cache]:
        cache = []
        for block in self.blocks:
            x_ND, *held = block.prefill(x_ND, segments, prompts)
            cache.append(held)
        fixed, state = zip(*cache, strict=True)
        return x_ND, (list(fixed), list(state))

    def step(self, x_nD: Array, cache: Cache, now: Now) -> tuple[Array, list[Any]]:
        states = []
        for block, fixed, state in zip(self.blocks, *cache, strict=True):
            x_nD, state = block.step(x_nD, fixed, state, now)
            states.append(state)
        return x_nD, states


class HybridDecoder(nnx.Module):
    """All blocks and the final norm. Repeated units are stacked and scanned."""

    def __init__(self, config: ModelConfig, init: Init) -> None:
        self.units = nnx.List(
            [
                stack(partial(Unit, unit, config), init, repeats)
                for unit, repeats in repeated_units(config.llm.pattern)
            ]
        )
        self.norm = RMSNorm(config.llm.dim, config.llm.norm_eps, init)
        self.remat = config.remat_llm

    def __call__(self, x_ND: Float[Array, "N D"], segments: Segments) -> Float[Array, "N D"]:
        def apply(layer: Unit, x_ND: Array) -> tuple[Array, None]:
            return layer(x_ND, segments), None

        for unit in self.units:
            x_ND, _ = scan_stack(unit, apply, x_ND, remat=self.remat)
        return self.norm(x_ND)

    def prefill(
        self, x_ND: Float[Array, "N D"], segments: Segments, prompts: Prompts
    ) -> tuple[Float[Array, "N D"], list[Cache]]:
        """As a call; and what decoding after the prompts goes on from."""

        def apply(layer: Unit, x_ND: Array) -> tuple[Array, Cache]:
            return layer.prefill(x_ND, segments, prompts)

        caches = []
        for unit in self.units:
            x_ND, cache = scan_stack(unit, apply, x_ND, remat=False)
            caches.append(cache)
        return self.norm(x_ND), caches

    def step(
        self, x_nD: Float[Array, "n D"], caches: list[Cache], now: Now
    ) -> tuple[Float[Array, "n D"], list[Cache]]:
        """The next token of every document."""

        def apply(layer: Unit, x_nD: Array, fixed: Any, state: Any) -> tuple[Array, Any]:
            return layer.step(x_nD, (fixed, state), now)

        after = []
        for unit, (fixed, state) in zip(self.units, caches, strict=True):
            x_nD, state = scan_stack(unit, apply, x_nD, remat=False, each=(fixed, state))
            after.append((fixed, state))
        return self.norm(x_nD), after
