"""Pipeline stages: how the decoder's layers are divided over ranks.

A stage is a pattern: a string with a letter for each layer. Layers with the same letter are in one stack of
arrays. On disk and on one rank a stack is *canonical*: it holds all such layers, in order. In a pipeline a
rank's shard of the stack holds the layers of the rank's stages. Each stage is padded to the number of layers
of the largest stage, so that all ranks have the same shape. models/stacks.py converts between the two forms.
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

from jaxthd.config import MeshConfig
from jaxthd.parallel.mesh import PIPELINE

_LAYERS = (("decoder", "layers"), ("", "layers"))
"""Names before those of the decoder's stacks, in trees of the model and of the decoder alone."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Stages:
    """The patterns of all stages, in order. Stage s is pipeline chunk s // ranks of rank s % ranks.

    stacks: (letter, name of the stack of its layers in the tree of modules), of each letter.
    """

    patterns: tuple[str, ...]
    ranks: int
    stacks: tuple[tuple[str, str], ...]

    @classmethod
    def of(
        cls, pattern: str, mesh: MeshConfig, cost: Callable[[str], float], stacks: tuple[tuple[str, str], ...]
    ) -> "Stages":
        """Divides a pattern into stages at its marks (|); without marks, by the layers' cost.

        cost: the cost of a layer with a given letter, in any unit.
        Raises ValueError when the marks make a number of stages that the mesh does not have, or when there
        are more stages than layers.
        """
        count, letters = mesh.pipeline * mesh.stages_per_rank, pattern.replace("|", "")
        if count == 1:
            return cls((letters,), 1, stacks)
        marked = tuple(pattern.split("|"))
        if len(marked) > 1:
            if len(marked) != count or not all(marked):
                raise ValueError(
                    f"model.llm.pattern is divided into {len(marked)} stages, mesh.pipeline {mesh.pipeline} "
                    f"and mesh.stages_per_rank {mesh.stages_per_rank} make {count}"
                )
            return cls(marked, mesh.pipeline, stacks)
        if len(letters) < count:
            raise ValueError(f"{len(letters)} layers cannot be divided into {count} stages")
        return cls(divide(letters, [cost(letter) for letter in letters], count), mesh.pipeline, stacks)

    @property
    def letters(self) -> str:
        """The letters of all layers, in order."""
        return "".join(self.patterns)

    @property
    def used_stacks(self) -> list[tuple[str, str]]:
        """(letter, name) of the stacks that these stages have layers of, by letter."""
        return [(letter, name) for letter, name in self.stacks if letter in self.letters]

    def letter_of(self, path: tuple[Any, ...]) -> str | None:
        """The letter of the stack of layers that an array belongs to; None for one of no stack that a
        pipeline divides. path: jax's, in a tree with the names of the module tree.
        """
        names = [str(getattr(key, "key", "")) for key in path]
        # Not the layers of an encoder, nor those of multi-token prediction, which all ranks hold whole.
        stacks = [x for pair, x in zip(pairwise(["", *names]), names[1:], strict=False) if pair in _LAYERS]
        return next((letter for letter, name in self.stacks if name in stacks), None)

    @property
    def chunks(self) -> int:
        """The number of stages of a rank."""
        return len(self.patterns) // self.ranks

    @property
    def are_equal(self) -> bool:
        """Whether all ranks run one program."""
        return len(set(self.patterns)) == 1

    def most(self, letter: str) -> int:
        """The number of layers with this letter in the stage that has the most of them."""
        return max(pattern.count(letter) for pattern in self.patterns)

    def rows(self, letter: str) -> int:
        """The number of rows of this letter's stack, over all ranks."""
        return self.most(letter) * len(self.patterns)

    def layers(self, letter: str) -> Int[np.ndarray, " rows"]:
        """The canonical layer that each row of the stack holds, rank-major; -1 in rows of padding."""
        rows = np.full((len(self.patterns), self.most(letter)), -1)
        done = 0
        for stage, pattern in enumerate(self.patterns):
            count = pattern.count(letter)
            rows[stage, :count] = np.arange(done, done + count)
            done += count
        return rows.reshape(self.chunks, self.ranks, -1).swapaxes(0, 1).reshape(-1)

    def switch(self, run: Callable[..., Result], chunk: Array | int, *args: Any) -> Result:
        """Calls run(pattern, *args) with the pattern of this rank's stage number `chunk`, inside shard_map.

        If the stages differ, ranks run different programs at the same time. Then no collective in `run` may
        name ranks of other stages (ppermute names all ranks).
        """
        kinds = sorted(set(self.patterns))
        if len(kinds) == 1:
            return run(kinds[0], *args)
        kind_s = jnp.array([kinds.index(pattern) for pattern in self.patterns])
        stage = chunk * self.ranks + jax.lax.axis_index(PIPELINE)
        branches = [lambda *args, kind=kind: run(kind, *args) for kind in kinds]
        return jax.lax.switch(kind_s[stage], branches, *args)


def divide(letters: str, costs: Sequence[float], count: int) -> tuple[str, ...]:
    """Divides the layers into `count` consecutive stages so that the most expensive stage is as cheap as
    possible. Among such divisions it takes one whose stage costs have the least sum of squares.
    """
    ends = np.concatenate([[0.0], np.cumsum(costs)])

    @cache
    def best(end: int, stages: int) -> tuple[float, float, tuple[int, ...]]:
        """(highest cost, sum of squares, ends of the stages) for the first `end` layers."""
        if stages == 1:
            return ends[end], ends[end] ** 2, (end,)
        found = []
        for start in range(stages - 1, end):
            highest, squares, before = best(start, stages - 1)
            cost = float(ends[end] - ends[start])
            found.append((round(max(highest, cost), 6), squares + cost**2, (*before, end)))
        return min(found)

    bounds = (0, *best(len(letters), count)[2])
    return tuple(letters[a:b] for a, b in pairwise(bounds))
