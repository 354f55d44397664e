"""Pipeline stages: which layers a rank holds, and where they lie in memory.

Layers of a kind are stacked. On disk and on one rank the stacks are *canonical*: all layers, in order. In a
pipeline a rank's part of a stack holds its stages' layers, each stage filled up to as many as any has, so
that one shape serves all ranks; `to_stages` and `from_stages` go from one to the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Int

from jaxthd.config import LLMConfig, MeshConfig
from jaxthd.parallel.mesh import PIPELINE

Result = TypeVar("Result")

KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Pattern letters, and what the stack of such layers is called."""


@dataclass(frozen=True)
class Stages:
    """patterns: of the stages, in order. Stage s is chunk s // ranks of rank s % ranks."""

    patterns: tuple[str, ...]
    ranks: int

    @classmethod
    def single(cls, letters: str) -> "Stages":
        return cls((letters,), 1)

    @classmethod
    def of(cls, llm: LLMConfig, mesh: MeshConfig) -> "Stages":
        """As the pattern's marks say, else divided by cost.

        Raises ValueError when the marks make another number of stages, or there are more stages than layers.
        """
        count = mesh.pipeline * mesh.stages_per_rank
        if count == 1:
            return cls.single(llm.letters)
        marked = tuple(llm.pattern.split("|"))
        if len(marked) > 1:
            if len(marked) != count or not all(marked):
                raise ValueError(
                    f"model.llm.pattern is divided into {len(marked)} stages, mesh.pipeline {mesh.pipeline} "
                    f"and mesh.stages_per_rank {mesh.stages_per_rank} make {count}"
                )
            return cls(marked, mesh.pipeline)
        if len(llm.letters) < count:
            raise ValueError(f"{len(llm.letters)} layers cannot be divided into {count} stages")
        return cls(divide(llm.letters, [layer_cost(k, llm) for k in llm.letters], count), mesh.pipeline)

    @property
    def letters(self) -> str:
        return "".join(self.patterns)

    @property
    def chunks(self) -> int:
        """Stages of a rank."""
        return len(self.patterns) // self.ranks

    @property
    def are_equal(self) -> bool:
        """Whether all ranks run one program."""
        return len(set(self.patterns)) == 1

    def most(self, letter: str) -> int:
        """Layers of a kind in the stage that has most of them."""
        return max(pattern.count(letter) for pattern in self.patterns)

    def rows(self, letter: str) -> int:
        """Rows of the stack over all ranks."""
        return self.most(letter) * len(self.patterns)

    def layers(self, letter: str) -> Int[np.ndarray, " rows"]:
        """The canonical layer that each row of the stack holds, rank-major; -1 in rows that fill up."""
        rows = np.full((len(self.patterns), self.most(letter)), -1)
        done = 0
        for stage, pattern in enumerate(self.patterns):
            count = pattern.count(letter)
            rows[stage, :count] = np.arange(done, done + count)
            done += count
        return rows.reshape(self.chunks, self.ranks, -1).swapaxes(0, 1).reshape(-1)

    def switch(self, run: Callable[..., Result], chunk: Array | int, *args: Any) -> Result:
        """run(pattern, *args) for this rank's stage number `chunk`, inside shard_map.

        Where stages differ, ranks run different programs at the same time: then no collective in `run` may
        name ranks of other stages (ppermute names all).
        """
        kinds = sorted(set(self.patterns))
        if len(kinds) == 1:
            return run(kinds[0], *args)
        kind_s = jnp.array([kinds.index(pattern) for pattern in self.patterns])
        stage = chunk * self.ranks + jax.lax.axis_index(PIPELINE)
        branches = [lambda *args, kind=kind: run(kind, *args) for kind in kinds]
        return jax.lax.switch(kind_s[stage], branches, *args)


SCAN_CHUNK = 128
"""Tokens of a scan chunk, as layer_cost counts: stages do not depend on compute.scan_chunk."""


def layer_cost(letter: str, llm: LLMConfig) -> float:
    """Multiply-adds a token in a layer's matrices and in the scan; attention as of 1,024 keys a token."""
    match letter:
        case "M":
            inner, shared = llm.mamba_heads * llm.mamba_head_dim, llm.mamba_groups * llm.mamba_state
            scan = inner * (2 * llm.mamba_state + SCAN_CHUNK) + shared * SCAN_CHUNK
            return float(llm.dim * (3 * inner + 2 * shared + llm.mamba_heads) + scan)
        case "*":
            heads = 2 * llm.q_heads + 2 * llm.kv_heads
            return float(llm.head_dim * (llm.dim * heads + 2 * 1024 * llm.q_heads))
        case "-":
            return 2.0 * llm.dim * llm.ffn_dim
        case "E":
            width = llm.latent_dim or llm.dim
            latent = 2 * llm.dim * llm.latent_dim
            routed = 2 * llm.experts_per_token * width * llm.expert_dim
            return float(llm.dim * llm.experts + latent + routed + 2 * llm.dim * llm.shared_expert_dim)
    raise ValueError(f"unknown letter {letter!r} in model.llm.pattern; use M, *, - or E")


def divide(letters: str, costs: Sequence[float], count: int) -> tuple[str, ...]:
    """Cuts the layers into `count` consecutive stages whose dearest is as cheap as can be; of those the ones
    whose squares sum to the least.
    """
    ends = np.concatenate([[0.0], np.cumsum(costs)])

    @cache
    def best(end: int, stages: int) -> tuple[float, float, tuple[int, ...]]:
        """(dearest, sum of squares, ends of the stages) for the first `end` layers."""
        if stages == 1:
            return ends[end], ends[end] ** 2, (end,)
        found = []
        for start in range(stages - 1, end):
            dearest, squares, before = best(start, stages - 1)
            cost = float(ends[end] - ends[start])
            found.append((round(max(dearest, cost), 6), squares + cost**2, (*before, end)))
        return min(found)

    cuts = (0, *best(len(letters), count)[2])
    return tuple(letters[a:b] for a, b in pairwise(cuts))


def to_stages(tree: Any, stages: Stages) -> Any:
    """Canonical stacks -> stacks as the pipeline's ranks hold them; every tree that holds layers by kind."""

    def rows(letter: str, x: Any) -> Array:
        layers = stages.layers(letter)
        filled = (layers >= 0).reshape(-1, *(1,) * (x.ndim - 1))
        return jnp.where(filled, jnp.take(x, jnp.maximum(layers, 0), axis=0), 0)

    return _of_layers(rows, tree, stages)


def from_stages(tree: Any, stages: Stages) -> Any:
    """The inverse of to_stages."""

    def canonical(letter: str, x: Any) -> Array:
        layers = stages.layers(letter)
        rows = np.flatnonzero(layers >= 0)
        return jnp.take(x, rows[np.argsort(layers[rows])], axis=0)

    return _of_layers(canonical, tree, stages)


def _of_layers(change: Callable[[str, Any], Array], tree: Any, stages: Stages) -> Any:
    if len(stages.patterns) == 1:
        return tree
    letters = {name: letter for letter, name in KINDS.items()}

    def leaf(path: tuple[Any, ...], x: Any) -> Any:
        names = [str(getattr(key, "key", "")) for key in path]
        if "layers" not in names or "mtp" in names:  # which all ranks hold whole
            return x
        return change(letters[names[names.index("layers") + 1]], x)

    return jax.tree_util.tree_map_with_path(leaf, tree)
