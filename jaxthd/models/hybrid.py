"""The hybrid decoder: blocks of RMSNorm, one mixer, residual, in the order of a pattern string.

Layers of one kind are stacked, in their order, whatever the pattern: a pipeline stage holds a stretch of each
stack, and a repeated unit of the pattern is a scan over stretches.

Legend: N tokens, D model dim; in decoding n documents of this rank.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.models.layers import RMSNorm
from jaxthd.models.mixers import MLP, Attention, Mamba2, MoE, Prefilled, Routing
from jaxthd.packing.prompts import Now, Prompts
from jaxthd.packing.segments import Segments
from jaxthd.parallel.mesh import PIPELINE
from jaxthd.parallel.params import Init, gathered_state, rematerialized, stack
from jaxthd.parallel.stages import KINDS, Stages
from jaxthd.parallel.tensor import Residual

Cache = dict[str, Any]
"""By pattern letter what a stage's layers hold for decoding, stacked over the layers."""


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

    def __init__(self, kind: str, llm: LLMConfig, init: Init, compute: ComputeConfig) -> None:
        self.norm = RMSNorm(llm.dim, llm.norm_eps, init)
        self.residual = Residual.of(init.mesh, compute.sequence_sharded)
        self.mixer: MLP | Attention | Mamba2 | MoE
        match kind:
            case "M":
                self.mixer = Mamba2(llm, init, compute)
            case "*":
                self.mixer = Attention(llm, init, compute)
            case "-":
                self.mixer = MLP(llm.dim, llm.ffn_dim, llm, init)
            case "E":
                self.mixer = MoE(llm, init, compute)
            case _:
                raise ValueError(
                    f"unknown letter {kind!r} in model.llm.pattern; "
                    "use M (Mamba2), * (attention), - (MLP), E (MoE)"
                )

    def __call__(
        self, x_nD: Float[Array, "n D"], segments: Segments
    ) -> tuple[Float[Array, "n D"], Routing | None]:
        """The second result is of an MoE block. n: this rank's tokens of the residual stream."""
        h_ND, routing = self.residual.whole(self.norm(x_nD)), None
        if isinstance(self.mixer, MoE):
            y_ND, routing = self.mixer.routed(h_ND, segments)
        else:
            y_ND = self.mixer(h_ND, segments)
        return x_nD + self.residual.total(y_ND), routing

    def prefill(self, x_nD: Array, segments: Segments, prompts: Prompts) -> Prefilled:
        y_ND, fixed, state = self.mixer.prefill(self.residual.whole(self.norm(x_nD)), segments, prompts)
        return x_nD + self.residual.total(y_ND), fixed, state

    def step(self, x_nD: Array, fixed: Any, state: Any, now: Now) -> tuple[Array, Any]:
        y_nD, state = self.mixer.step(self.norm(x_nD), fixed, state, now)
        return x_nD + self.residual.decoding.total(y_nD), state


class HybridLayers(nnx.Module):
    """Blocks in stages.

    layers: by kind, the blocks of this rank's stages, stacked: for each stage as many as the largest has.
    """

    def __init__(self, llm: LLMConfig, init: Init, stages: Stages, compute: ComputeConfig) -> None:
        axes = (PIPELINE,) if stages.ranks > 1 else ()
        self.layers = nnx.Dict(
            {
                KINDS.get(letter, letter): stack(
                    partial(Block, letter, llm, compute=compute), init, stages.rows(letter), axes=axes
                )
                for letter in sorted(set(stages.letters))
            }
        )
        self.stages = stages
        self.remat = compute.remat_llm

    def stage(
        self, pattern: str, chunk: Array | int, x_nD: Float[Array, "n D"], segments: Segments
    ) -> tuple[Float[Array, "n D"], Routing | None]:
        """The layers `pattern` of this rank's stage number `chunk`; Routing has as many rows as the stage
        that has most MoE layers needs.
        """

        def apply(block: Block, x_nD: Array) -> tuple[Array, Routing | None]:
            return block(x_nD, segments)

        x_nD, found = self._scan(pattern, chunk, apply, x_nD, self.remat)
        return x_nD, found.get("E")

    def prefill(
        self,
        pattern: str,
        chunk: Array | int,
        x_nD: Float[Array, "n D"],
        segments: Segments,
        prompts: Prompts,
    ) -> tuple[Float[Array, "n D"], Cache]:
        """As stage; and what decoding after the prompts goes on from, (fixed, state)."""

        def apply(block: Block, x_nD: Array) -> tuple[Array, Any]:
            x_nD, fixed, state = block.prefill(x_nD, segments, prompts)
            return x_nD, (fixed, state)

        return self._scan(pattern, chunk, apply, x_nD, remat=False)

    def step(
        self,
        pattern: str,
        chunk: Array | int,
        x_nD: Float[Array, "n D"],
        fixed: Cache,
        state: Cache,
        now: Now,
    ) -> tuple[Float[Array, "n D"], Cache]:
        """The next token of every document; and the state after it."""

        def apply(block: Block, x_nD: Array, held: tuple[Any, Any]) -> tuple[Array, Any]:
            return block.step(x_nD, *held, now)

        each = {letter: (fixed[letter], state[letter]) for letter in state}
        return self._scan(pattern, chunk, apply, x_nD, remat=False, each=each)

    def _scan(
        self,
        pattern: str,
        chunk: Array | int,
        apply: Callable[..., tuple[Array, Any]],
        x_nD: Array,
        remat: bool,
        each: Cache | None = None,
    ) -> tuple[Array, Cache]:
        """Applies `apply(block, x, ...)` to every block of a stage. Its second results, and what it takes
        third (each): by letter, stacked over the layers and filled up to Stages.most.
        """
        stacks = {letter: nnx.split(self.layers[KINDS[letter]]) for letter in set(self.stages.letters)}
        held_by = {letter: (each[letter],) if each else () for letter in stacks}

        def apply_to(letter: str, variables: Any, x_nD: Array, held: tuple[Any, ...]) -> tuple[Array, Any]:
            return apply(nnx.merge(stacks[letter][0], gathered_state(variables)), x_nD, *held)

        done: Counter[str] = Counter()
        results: dict[str, list[Any]] = {letter: [] for letter in stacks}
        for unit, repeats in repeated_units(pattern):
            layers = {}
            for letter, count in Counter(unit).items():
                variables = jax.tree.map(partial(self._of_chunk, letter, chunk), stacks[letter][1])
                take = partial(_in_turns, done[letter], repeats, count)
                layers[letter] = jax.tree.map(take, (variables, held_by[letter]))
                done[letter] += count * repeats

            def turn(x_nD: Array, layers: Any, unit: str = unit) -> tuple[Array, Any]:
                found: dict[str, list[Any]] = {letter: [] for letter in layers}
                for letter in unit:
                    row = len(found[letter])
                    variables, held = jax.tree.map(lambda w, row=row: w[row], layers[letter])
                    x_nD, result = apply_to(letter, variables, x_nD, held)
                    found[letter].append(result)
                return x_nD, {k: jax.tree.map(lambda *r: jnp.stack(r), *f) for k, f in found.items()}

            x_nD, found = jax.lax.scan(rematerialized(turn, remat, layers), x_nD, layers)
            for letter, result in found.items():
                results[letter].append(
                    jax.tree.map(partial(jax.lax.collapse, start_dimension=0, stop_dimension=2), result)
                )

        def one_layer(letter: str, x_nD: Array) -> Any:
            variables, held = jax.tree.map(lambda w: w[0], (stacks[letter][1], held_by[letter]))
            return apply_to(letter, variables, x_nD, held)[1]

        filled = {}
        for letter, parts in results.items():
            missing = self.stages.most(letter) - done[letter]
            if missing:
                like = jax.eval_shape(partial(one_layer, letter), x_nD)
                parts.append(jax.tree.map(lambda r, n=missing: jnp.zeros((n, *r.shape), r.dtype), like))
            filled[letter] = jax.tree.map(lambda *r: jnp.concatenate(r) if len(r) > 1 else r[0], *parts)
        return x_nD, filled

    def _of_chunk(self, letter: str, chunk: Array | int, w: Array) -> Array:
        """The rows of a stack that hold this stage's layers."""
        if self.stages.chunks == 1:
            return w
        most = self.stages.most(letter)
        return jax.lax.dynamic_slice_in_dim(w, chunk * most, most)


class HybridDecoder(HybridLayers):
    """All blocks and the final norm."""

    def __init__(
        self, llm: LLMConfig, init: Init, compute: ComputeConfig, stages: Stages | None = None
    ) -> None:
        super().__init__(llm, init, stages or Stages.single(llm.letters), compute)
        self.norm = RMSNorm(llm.dim, llm.norm_eps, init)

    def __call__(
        self, x_nD: Float[Array, "n D"], segments: Segments
    ) -> tuple[Float[Array, "n D"], Routing | None]:
        """All layers, where one rank has them all; not the final norm. And where the tokens went, with a row
        for every MoE layer; None without any.
        """
        return self.stage(self.stages.letters, 0, x_nD, segments)


def _in_turns(first: int, turns: int, layers: int, w: Array) -> Array:
    """[rows, ...] -> [turns, layers of a turn, ...], from row `first` on."""
    return w[first : first + turns * layers].reshape(turns, layers, *w.shape[1:])
