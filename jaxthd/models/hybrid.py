"""The hybrid decoder: blocks of RMSNorm, a mixer and a residual sum, in the order of a pattern string.

Layers of one kind are stacked in their order, whatever the pattern. A pipeline stage holds consecutive rows
of each stack. Where the pattern repeats a unit, a scan over the repeats applies the unit's layers.

Legend: N tokens, n tokens of the residual stream on this rank, D model dim.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from jaxthd.config import ComputeConfig, LLMConfig
from jaxthd.models import lora_tokens
from jaxthd.models.blocks import Prefilled, RoutedMixer, Routing
from jaxthd.models.layers import RMSNorm
from jaxthd.packing.prompts import Now, Prompts
from jaxthd.packing.segments import Segments
from jaxthd.parallel.mesh import PIPELINE
from jaxthd.parallel.params import Init, gathered_state, stack
from jaxthd.parallel.remat import Remat, rematerialized
from jaxthd.parallel.stages import Stages
from jaxthd.parallel.tensor import Residual

Cache = dict[str, Any]
"""The caches of a stage's layers for decoding, stacked over the layers, by pattern letter."""


def repeated_units(pattern: str) -> list[tuple[str, int]]:
    """Writes the pattern as (unit, repeats) pairs, in order, with the fewest letters in all units together.

    A unit is traced and compiled once. "MEMEM*EMEMEM*EM" -> ("MEMEM*E", 2), ("M", 1).
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
    """x + mixer(RMSNorm(x)), with other norms where the block says so (jaxthd.Block.norms). letter: of the
    block, as in model.llm.pattern."""

    def __init__(
        self, letter: str, llm: LLMConfig, init: Init | nnx.Rngs, compute: ComputeConfig = ComputeConfig()
    ) -> None:
        init = Init.of(init, compute)
        block = llm.blocks[letter]

        def norm(*, there: bool) -> RMSNorm | None:
            """A norm where there is one."""
            return RMSNorm(llm.dim, llm.norm_eps, init, zero_centred=llm.norm_zero_centred) if there else None

        self.norm = norm(there=block.norms != "after")
        self.norm_after = norm(there=block.norms != "before")
        self.residual = Residual.of(init.mesh, compute.sequence_sharded)
        self.scale = block.residual_scale * llm.residual_multiplier
        self.mixer = block.build(llm, init, compute)

    def _normed(self, x_nD: Array) -> Array:
        """The mixer's input."""
        return x_nD if self.norm is None else self.norm(x_nD)

    def _sum(self, x_nD: Array, y_nD: Array) -> Array:
        """The residual with the mixer's output."""
        y_nD = y_nD if self.norm_after is None else self.norm_after(y_nD)
        return x_nD + (y_nD if self.scale == 1 else self.scale * y_nD)

    def __call__(
        self, x_nD: Float[Array, "n D"], segments: Segments
    ) -> tuple[Float[Array, "n D"], Routing | None]:
        """Also returns the Routing if the mixer routes tokens, else None."""
        h_ND, routing = self.residual.whole(self._normed(x_nD)), None
        with lora_tokens.adapting(segments.adapted):
            if isinstance(self.mixer, RoutedMixer):
                y_ND, routing = self.mixer.routed(h_ND, segments)
            else:
                y_ND = self.mixer(h_ND, segments)
        return self._sum(x_nD, self.residual.total(y_ND)), routing

    def prefill(self, x_nD: Float[Array, "n D"], segments: Segments, prompts: Prompts) -> Prefilled:
        """The block over prompts: its outputs, and what its mixer keeps for decoding."""
        h_ND = self.residual.whole(self._normed(x_nD))
        with lora_tokens.adapting(segments.adapted):
            y_ND, fixed, state = self.mixer.prefill(h_ND, segments, prompts)
        return Prefilled(self._sum(x_nD, self.residual.total(y_ND)), fixed, state)

    def step(
        self, x_nD: Float[Array, "n D"], fixed: list[Array], state: list[Array], now: Now
    ) -> tuple[Float[Array, "n D"], list[Array]]:
        """The block over a step's tokens of each document: its outputs, and the mixer's new state."""
        with lora_tokens.adapting(now.adapted):
            y_nD, state = self.mixer.step(self._normed(x_nD), fixed, state, now)
        return self._sum(x_nD, self.residual.decoding.total(y_nD)), state


class _Layers(NamedTuple):
    """Layers of one kind, stacked.

    variables: their parameters and buffers. cache: what they keep for decoding; None outside decoding.
    numbers: theirs among the layers of their kind in the model; None without dropout.
    """

    variables: Any
    cache: Any
    numbers: Array | None = None


StackedLayers = dict[str, _Layers]
"""Layers of a repeated unit, by pattern letter: arrays [repeats, layers of this kind in the unit, ...]."""

ApplyBlock = Callable[[Block, Array, Any], tuple[Array, Any]]
"""(block, x, the block's cache or None) -> (x, the block's second result)."""


class HybridLayers(nnx.Module):
    """Blocks in stages.

    layers: the blocks of this rank's stages, stacked by kind. Each stage is padded to the largest one's size.
    """

    def __init__(self, llm: LLMConfig, init: Init, stages: Stages, compute: ComputeConfig) -> None:
        axes = (PIPELINE,) if stages.ranks > 1 else ()
        self.layers = nnx.Dict(
            {
                name: stack(
                    partial(Block, letter, llm, compute=compute), init, stages.rows(letter), axes=axes
                )
                for letter, name in stages.used_stacks
            }
        )
        self.stages = stages
        self.remat, self.keeps_views = compute.remat, True
        self.unroll = compute.unroll_layers

    def stage(
        self, pattern: str, chunk: Array | int, x_nD: Float[Array, "n D"], segments: Segments
    ) -> tuple[Float[Array, "n D"], Routing | None]:
        """Applies the layers of this rank's stage number `chunk`, whose pattern is given.

        The Routing has a row for each layer that routes tokens. It is padded to the rows of the stage with
        the most such layers, and None if no layer routes. At most one kind of layer in a pattern may route.
        """

        return self.run(pattern, self.layers_of(pattern, chunk), None, x_nD, segments)

    def run(
        self,
        pattern: str,
        layers: list[StackedLayers],
        trained: list[dict[str, Any]] | None,
        x_nD: Float[Array, "n D"],
        segments: Segments,
    ) -> tuple[Float[Array, "n D"], Routing | None]:
        """As `stage`, of layers that layers_of has taken. trained: rows_of the parameters to differentiate,
        which stand in the place of the layers' own; None where a parameter is not among them.
        """

        def apply(block: Block, x_nD: Array, _: None) -> tuple[Array, Routing | None]:
            """One block over packed tokens."""
            return block(x_nD, segments)

        if trained is not None:
            layers = [_with_trained(*unit) for unit in zip(layers, trained, strict=True)]
        x_nD, found = self._apply_layers(pattern, layers, apply, x_nD, remat=self.remat)
        routed = [routing for routing in found.values() if routing is not None]
        assert len(routed) <= 1
        return x_nD, routed[0] if routed else None

    def layers_of(self, pattern: str, chunk: Array | int, cache: Cache | None = None) -> list[StackedLayers]:
        """The layers of this rank's stage number `chunk`, for each repeated unit of its pattern. cache: only
        this stage's.
        """
        stacks = {}
        for letter, name in self.stages.used_stacks:
            variables = nnx.state(self.layers[name])
            numbers = None if lora_tokens.current() is None else self._numbers(letter, chunk)
            stack_of = _Layers(self._of_chunk(letter, chunk, variables), cache and cache[letter], numbers)
            stacks[letter] = stack_of
        return _by_unit(pattern, stacks)

    def rows_of(self, pattern: str, chunk: Array | int, of_kinds: dict[str, Any]) -> list[dict[str, Any]]:
        """Trees of stacked arrays, by the layers' names in self.layers."""
        used = self.stages.used_stacks
        stacks = {letter: self._of_chunk(letter, chunk, of_kinds[name]) for letter, name in used}
        return _by_unit(pattern, stacks)

    def prefill(
        self,
        pattern: str,
        chunk: Array | int,
        x_nD: Float[Array, "n D"],
        segments: Segments,
        prompts: Prompts,
    ) -> tuple[Float[Array, "n D"], Cache]:
        """As `stage`, but also returns the cache that decoding continues from: (fixed, state) by letter."""

        def apply(block: Block, x_nD: Array, _: None) -> tuple[Array, Any]:
            """One block over prompts, with its cache."""
            x_nD, fixed, state = block.prefill(x_nD, segments, prompts)
            return x_nD, (fixed, state)

        return self._apply_layers(pattern, self.layers_of(pattern, chunk), apply, x_nD, remat="none")

    def step(
        self,
        pattern: str,
        chunk: Array | int,
        x_nD: Float[Array, "n D"],
        fixed: Cache,
        state: Cache,
        now: Now,
    ) -> tuple[Float[Array, "n D"], Cache]:
        """Applies the layers to a step's tokens of every document. Also returns the state after them."""

        def apply(block: Block, x_nD: Array, cache: tuple[Any, Any]) -> tuple[Array, Any]:
            """One block over the newest tokens."""
            return block.step(x_nD, *cache, now)

        cache = {letter: (fixed[letter], state[letter]) for letter in state}
        layers = self.layers_of(pattern, chunk, cache)
        return self._apply_layers(pattern, layers, apply, x_nD, remat="none", cache=cache)

    def _apply_layers(
        self,
        pattern: str,
        layers: list[StackedLayers],
        apply: ApplyBlock,
        x_nD: Array,
        *,
        remat: Remat,
        cache: Cache | None = None,
    ) -> tuple[Array, Cache]:
        """Applies `apply` to every block of a stage, in the pattern's order.

        Both cache and the layers' results are stacked by letter and padded to Stages.most.
        """
        kinds = {letter: self.layers[name] for letter, name in self.stages.used_stacks}
        graphs = {letter: nnx.graphdef(kind) for letter, kind in kinds.items()}
        results: dict[str, list[Any]] = {letter: [] for letter in kinds}
        for (unit, _), of_unit in zip(repeated_units(pattern), layers, strict=True):
            # What is recomputed of a layer by itself is not recomputed with its unit.
            by_layer: Remat = remat if remat in ("selective", "layers") else "none"
            step: Any = partial(_apply_unit, unit, graphs, apply, by_layer)
            body = (
                step
                if by_layer != "none"
                else rematerialized(step, remat, of_unit, keeps_views=self.keeps_views)
            )
            x_nD, found = jax.lax.scan(body, x_nD, of_unit, unroll=self.unroll)
            for letter, result in found.items():
                results[letter].append(jax.tree.map(lambda r: jax.lax.collapse(r, 0, 2), result))
        for letter, kind in kinds.items():
            if missing := self.stages.most(letter) - pattern.count(letter):
                run = partial(_apply_row, 0, graphs[letter], apply)
                stacked = _Layers(nnx.state(kind), cache and cache[letter])
                results[letter].append(_zeros(missing, jax.eval_shape(run, x_nD, stacked)[1]))
        return x_nD, {letter: _concatenated(of_letter) for letter, of_letter in results.items()}

    def _numbers(self, letter: str, chunk: Array | int) -> Array:
        """The numbers of this stage's layers among those of their kind in the model."""
        table_pcm = self.stages.layers(letter).reshape(self.stages.ranks, self.stages.chunks, -1)
        rank = jax.lax.axis_index(PIPELINE) if self.stages.ranks > 1 else 0
        return jnp.asarray(table_pcm, jnp.int32)[rank, chunk]

    def _of_chunk(self, letter: str, chunk: Array | int, stacked: Any) -> Any:
        """The rows of a stack that hold this stage's layers."""
        if self.stages.chunks == 1:
            return stacked
        most = self.stages.most(letter)

        def rows(w: Array) -> Array:
            """The layers of this chunk, from those of the rank."""
            return jax.lax.dynamic_slice_in_dim(w, chunk * most, most)

        return jax.tree.map(rows, stacked)


def _by_unit(pattern: str, stacks: dict[str, Any]) -> list[dict[str, Any]]:
    """Trees of a stage's stacked layers by letter, divided by the repeated units of its pattern."""
    done: Counter[str] = Counter()
    found = []
    for unit, repeats in repeated_units(pattern):
        counts = Counter(unit)
        found.append(
            {
                letter: _repeats(stacks[letter], done[letter], repeats, count)
                for letter, count in counts.items()
            }
        )
        done.update({letter: repeats * count for letter, count in counts.items()})
    return found


def _with_trained(layers: StackedLayers, trained: dict[str, Any]) -> StackedLayers:
    """The layers with these parameters, where they are not None."""

    def replaced(of_kind: _Layers, given: Any) -> _Layers:
        """The layers of a kind with the variables that are given."""
        flat = dict(nnx.to_flat_state(of_kind.variables))
        for path, value in nnx.traversals.flatten_mapping(given).items():
            if value is not None:
                flat[path] = flat[path].replace(value)
        return of_kind._replace(variables=nnx.from_flat_state(flat))

    return {letter: replaced(of_kind, trained[letter]) for letter, of_kind in layers.items()}


def _repeats(layers: Any, first: int, repeats: int, count: int) -> Any:
    """[rows, ...] -> [repeats, count, ...], starting at row `first`."""

    def taken(w: Array) -> Array:
        """The layers of these repeats, from all layers of the kind: [repeats, count, ...]."""
        return w[first : first + repeats * count].reshape(repeats, count, *w.shape[1:])

    return jax.tree.map(taken, layers)


def _apply_unit(
    unit: str,
    graphs: dict[str, nnx.GraphDef],
    apply: ApplyBlock,
    remat: Remat,
    x_nD: Array,
    layers: dict[str, _Layers],
) -> tuple[Array, Cache]:
    """Applies the layers of one repeat of a unit, in order. Layers and results are stacked by letter.

    remat: of each layer by itself.
    """
    found: dict[str, list[Any]] = {letter: [] for letter in layers}
    for letter in unit:
        run: Any = partial(_apply_row, len(found[letter]), graphs[letter], apply)
        run = rematerialized(run, remat, layers) if remat != "none" else run
        x_nD, result = run(x_nD, layers[letter])
        found[letter].append(result)
    return x_nD, {k: jax.tree.map(lambda *r: jnp.stack(r), *results) for k, results in found.items()}


def _apply_row(
    row: int, graph: nnx.GraphDef, apply: ApplyBlock, x_nD: Array, layers: _Layers
) -> tuple[Array, Any]:
    """Applies one layer of a stack. Its FSDP-sharded weights are gathered here, for this layer only."""
    variables, cache, number = jax.tree.map(lambda w: w[row], layers)
    with lora_tokens.of_layer(number):
        return apply(nnx.merge(graph, gathered_state(variables, x_nD.dtype)), x_nD, cache)


def _zeros(rows: int, like: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros((rows, *x.shape), x.dtype), like)


def _concatenated(results: list[Any]) -> Any:
    return jax.tree.map(lambda *r: jnp.concatenate(r) if len(r) > 1 else r[0], *results)


class HybridDecoder(HybridLayers):
    """All blocks and the final norm. stages: those of a pipeline; None for a single stage."""

    def __init__(
        self,
        llm: LLMConfig,
        init: Init | nnx.Rngs,
        compute: ComputeConfig = ComputeConfig(),
        stages: Stages | None = None,
    ) -> None:
        llm.require_blocks()
        init = Init.of(init, compute)
        super().__init__(llm, init, stages or Stages((llm.letters,), 1, llm.stacks), compute)
        if len(self.stages.patterns) > 1:
            self.keeps_views = False
        self.norm = RMSNorm(
            llm.dim,
            llm.norm_eps,
            init,
            zero_centred=llm.norm_zero_centred,
            factor=1 / llm.logits_scaling,
        )

    def __call__(
        self, x_nD: Float[Array, "n D"], segments: Segments
    ) -> tuple[Float[Array, "n D"], Routing | None]:
        """Applies all layers, but not the final norm (self.norm). One rank must hold all layers.

        Also returns the Routing, with a row for every layer that routes tokens; None without such layers.
        """
        return self.stage(self.stages.letters, 0, x_nD, segments)
