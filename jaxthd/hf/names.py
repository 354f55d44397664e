"""A family's name table: which stretches of our arrays each tensor of a checkpoint on disk is made of.

Import and export read the same table, so that one is the other's inverse: an element is moved, never changed.
Our arrays are named by their dotted path in the model, such as "decoder.layers.mamba.mixer.z.w"; their shapes
come from the abstract model, and the tensors' shapes follow from them.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

Shape = tuple[int, ...]


class Part(NamedTuple):
    """Consecutive rows of a tensor on disk, and where they lie in our array.

    at: place in our array's leading dims (layer, expert). view: the rows' elements with dims as `order` takes
    them: ours are rows.reshape(view).transpose(order).reshape(shape).
    """

    name: str
    at: Shape
    shape: Shape
    rows: int
    view: Shape
    order: Shape


class Tensor(NamedTuple):
    """name, shape: on disk. No parts: a counter that we do not keep, 0 on export."""

    name: str
    shape: Shape
    parts: tuple[Part, ...]

    def split(self, theirs: Shaped[np.ndarray, "..."]) -> list[Shaped[np.ndarray, "..."]]:
        """What goes to each part's place."""
        found, start = [], 0
        for part in self.parts:
            rows = theirs[start : start + part.rows] if theirs.ndim else theirs
            found.append(rows.reshape(part.view).transpose(part.order).reshape(part.shape))
            start += part.rows
        return found

    def join(self, ours: list[Shaped[np.ndarray, "..."]]) -> Shaped[np.ndarray, "..."]:
        """The inverse of split."""
        rows = []
        for part, x in zip(self.parts, ours, strict=True):
            turned = tuple(part.view[i] for i in part.order)
            x = x.reshape(turned).transpose(np.argsort(part.order).tolist())
            rows.append(x.reshape(part.rows, *self.shape[1:]) if self.shape else x.reshape(()))
        return np.ascontiguousarray(np.concatenate(rows) if len(rows) > 1 else rows[0])


class Names:
    """Writes a name table. shapes: of our arrays by name; theirs, ours: what names begin with; at: Part.at.

    Arrays that the model does not have (biases, a latent projection) may be named all the same: `has` tells.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.tensors: list[Tensor] = []
        self._shapes, self._theirs, self._ours, self._at = shapes, "", "", Shape()

    def within(self, theirs: str, ours: str, *at: int) -> "Names":
        """The same table, seen from below both names. at: places in leading dims of the arrays there."""
        below = Names(self._shapes)
        below.tensors = self.tensors
        below._theirs, below._ours = self._theirs + theirs, self._ours + ours
        below._at = (*self._at, *at)
        return below

    def has(self, ours: str) -> bool:
        return self._ours + ours in self._shapes

    def same(self, theirs: str, *ours: str) -> None:
        """Arrays of our shape, one after the other along the first dim."""
        shapes = [self._shape(name) for name in ours]
        parts = [
            self._part(name, shape, shape[0], shape, tuple(range(len(shape))))
            for name, shape in zip(ours, shapes, strict=True)
        ]
        self._add(theirs, shapes[0][1:], parts)

    def turned(self, theirs: str, *ours: str, tail: Callable[[int], Shape] = lambda dim: (dim,)) -> None:
        """Matrices [dim, out] of ours, on disk [out, *tail(dim)], one after the other along out."""
        shapes = [self._shape(name) for name in ours]
        parts = [
            self._part(name, shape, shape[1], shape[::-1], (1, 0))
            for name, shape in zip(ours, shapes, strict=True)
        ]
        self._add(theirs, tail(shapes[0][0]), parts)

    def linear(self, theirs: str, ours: str, tail: Callable[[int], Shape] = lambda dim: (dim,)) -> None:
        """A Linear, with its bias if it has one."""
        self.turned(f"{theirs}.weight", f"{ours}.w", tail=tail)
        if self.has(f"{ours}.bias"):
            self.same(f"{theirs}.bias", f"{ours}.bias")

    def viewed(self, theirs: str, ours: str, view: Shape, order: Shape) -> None:
        """A matrix of ours whose dims are made of smaller ones: view and order as in Part."""
        shape = self._shape(ours)
        self._add(theirs, (math.prod(view[1:]),), [self._part(ours, shape, view[0], view, order)])

    def counter(self, theirs: str) -> None:
        self.tensors.append(Tensor(self._theirs + theirs, (), ()))

    def _shape(self, ours: str) -> Shape:
        return self._shapes[self._ours + ours][len(self._at) :]

    def _part(self, ours: str, shape: Shape, rows: int, view: Shape, order: Shape) -> Part:
        return Part(self._ours + ours, self._at, shape, rows, view, order)

    def _add(self, theirs: str, tail: Shape, parts: list[Part]) -> None:
        shape = (sum(part.rows for part in parts), *tail)
        self.tensors.append(Tensor(self._theirs + theirs, shape, tuple(parts)))
