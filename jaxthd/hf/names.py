"""A family's name table: which slices of our arrays make up each tensor of a checkpoint on disk.

Import and export read the same table, so one is the inverse of the other: elements are moved, never changed.
Our arrays are named by their dotted path in the model, such as "decoder.layers.mamba.mixer.z.w". Their shapes
come from the abstract model, and the tensors' shapes follow from them.
"""

import math
from collections.abc import Callable, Mapping
from copy import copy
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

Shape = tuple[int, ...]


class ArraySlice(NamedTuple):
    """Consecutive rows of a tensor on disk, and the slice array[at] of ours that holds them.

    name: our array. at: index into its leading dims (layer, expert). shape: of array[at].
    rows: number of rows on disk. view, order: array[at] = rows.reshape(view).transpose(order).reshape(shape).
    block: before that, each run of len(block) rows is put into this order; (): they are in order.
    """

    name: str
    at: Shape
    shape: Shape
    rows: int
    view: Shape
    order: Shape
    block: Shape = ()


class Tensor(NamedTuple):
    """A tensor on disk. No slices: a counter that jaxthd does not keep, written as 0.

    groups: the tensor's rows are so many equal groups, each with its share of every slice's rows.
    interleaved: the slices take the columns (the last dim) in turn, instead of runs of rows; each holds its
    own as they are. is_copy: another tensor holds the same array; this one is written, and not read.
    """

    name: str
    shape: Shape
    slices: tuple[ArraySlice, ...]
    groups: int = 1
    interleaved: bool = False
    is_copy: bool = False

    def split(self, theirs: Shaped[np.ndarray, "..."]) -> list[Shaped[np.ndarray, "..."]]:
        """Our slices, made of the tensor."""
        if self.interleaved:
            return [theirs[..., i :: len(self.slices)] for i in range(len(self.slices))]
        found, start = [], 0
        by_group = theirs.reshape(self.groups, -1, *theirs.shape[1:]) if theirs.ndim else theirs
        for part in self.slices:
            stop = start + part.rows // self.groups
            rows = by_group[:, start:stop].reshape(part.rows, *theirs.shape[1:]) if theirs.ndim else theirs
            rows = _reordered(rows, part.block)
            found.append(rows.reshape(part.view).transpose(part.order).reshape(part.shape))
            start = stop
        return found

    def join(self, ours: list[Shaped[np.ndarray, "..."]]) -> Shaped[np.ndarray, "..."]:
        """The tensor, made of our slices."""
        if self.interleaved:
            return np.stack(ours, axis=-1).reshape(self.shape)
        rows = []
        for part, x in zip(self.slices, ours, strict=True):
            transposed = tuple(part.view[i] for i in part.order)
            x = x.reshape(transposed).transpose(np.argsort(part.order).tolist())
            x = x.reshape(part.rows, *self.shape[1:]) if self.shape else x.reshape(())
            x = _reordered(x, tuple(np.argsort(part.block).tolist()))
            rows.append(x.reshape(self.groups, -1, *self.shape[1:]) if self.shape else x)
        whole = np.concatenate(rows, axis=1) if len(rows) > 1 else rows[0]
        return np.ascontiguousarray(whole.reshape(self.shape))


def _reordered(rows: Shaped[np.ndarray, "..."], block: Shape) -> Shaped[np.ndarray, "..."]:
    """The rows, each run of len(block) of them in the order of `block`."""
    if not block:
        return rows
    return rows.reshape(-1, len(block), *rows.shape[1:])[:, list(block)].reshape(rows.shape)


class Names:
    """Writes a name table, into `tensors`. `theirs` names tensors on disk, `ours` our arrays.

    A table may be seen from below a prefix of both (`within`). Names of arrays that the model may do without
    (biases, a latent projection) can be asked for with `has`.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        """shapes: of our arrays, by name."""
        self.tensors: list[Tensor] = []
        self._shapes, self._theirs, self._ours, self._at = shapes, "", "", Shape()
        self._renamed: Callable[[str], str] = str
        self._has_lora = False

    def within(self, theirs: str, ours: str, *at: int) -> "Names":
        """The same table, seen from below both prefixes. at: index into leading dims of the arrays there."""
        below = copy(self)
        below._theirs, below._ours = self._theirs + theirs, self._ours + ours
        below._at = (*self._at, *at)
        return below

    def renamed(self, rename: Callable[[str], str]) -> "Names":
        """The same table; a tensor written here has the name that `rename` makes of its whole name."""
        other = copy(self)
        other._renamed = rename
        return other

    def with_lora(self) -> "Names":
        """The same table; projections written here have their low-rank matrices beside them, as peft writes
        them."""
        other = copy(self)
        other._has_lora = True
        return other

    def has(self, ours: str) -> bool:
        return self._ours + ours in self._shapes

    def same(self, theirs: str, *ours: str) -> None:
        """A tensor of our shape, or of several arrays of ours, concatenated along the first dim."""
        shapes = [self._shape(name) for name in ours]
        slices = [
            self._slice(name, shape, shape[0], shape, tuple(range(len(shape))))
            for name, shape in zip(ours, shapes, strict=True)
        ]
        self._add(theirs, shapes[0][1:], slices)

    def transposed(
        self,
        theirs: str,
        *ours: str,
        tail: Callable[[int], Shape] = lambda dim: (dim,),
        block: Shape = (),
        groups: int = 1,
    ) -> None:
        """A tensor [out, *tail(dim)] of our matrices [dim, out], concatenated along out; with groups (of
        heads), each group's part of all matrices after the other's.

        block: as in ArraySlice.
        """
        shapes = [self._shape(name) for name in ours]
        slices = [
            self._slice(name, shape, shape[1], shape[::-1], (1, 0))._replace(block=block)
            for name, shape in zip(ours, shapes, strict=True)
        ]
        self._add(theirs, tail(shapes[0][0]), slices, groups)

    def linear(self, theirs: str, ours: str, tail: Callable[[int], Shape] = lambda dim: (dim,)) -> None:
        """A Linear, with its bias if it has one."""
        if self._has_lora and self.has(f"{ours}.lora.a"):
            self.transposed(f"{theirs}.lora_A.default.weight", f"{ours}.lora.a")
            self.transposed(f"{theirs}.lora_B.default.weight", f"{ours}.lora.b")
            theirs = f"{theirs}.base_layer"
        self.transposed(f"{theirs}.weight", f"{ours}.w", tail=tail)
        if self.has(f"{ours}.bias"):
            self.same(f"{theirs}.bias", f"{ours}.bias")

    def reshaped(self, theirs: str, ours: str, view: Shape, order: Shape) -> None:
        """A matrix whose dims are made of smaller ones: view and order as in ArraySlice."""
        shape = self._shape(ours)
        self._add(theirs, (math.prod(view[1:]),), [self._slice(ours, shape, view[0], view, order)])

    def interleaved(self, theirs: str, *ours: str) -> None:
        """A tensor whose columns are those of our arrays of one shape in turn, such as gate and up."""
        shapes = [self._shape(name) for name in ours]
        slices = [
            self._slice(name, shape, shape[0], shape, tuple(range(len(shape))))
            for name, shape in zip(ours, shapes, strict=True)
        ]
        *above, columns = shapes[0]
        shape = (*above, columns * len(ours))
        self.tensors.append(Tensor(self._theirs + theirs, shape, tuple(slices), interleaved=True))

    def copy_of(self, theirs: str, whole: str) -> None:
        """A copy of an array that another tensor holds. whole: its whole name in the model."""
        shape = self._shapes[whole]
        part = ArraySlice(whole, (), shape, shape[0], shape, tuple(range(len(shape))))
        self.tensors.append(Tensor(self._renamed(self._theirs + theirs), shape, (part,), is_copy=True))

    def counter(self, theirs: str) -> None:
        """A tensor that jaxthd does not keep."""
        self.tensors.append(Tensor(self._renamed(self._theirs + theirs), (), ()))

    def _shape(self, ours: str) -> Shape:
        return self._shapes[self._ours + ours][len(self._at) :]

    def _slice(self, ours: str, shape: Shape, rows: int, view: Shape, order: Shape) -> ArraySlice:
        return ArraySlice(self._ours + ours, self._at, shape, rows, view, order)

    def _add(self, theirs: str, tail: Shape, slices: list[ArraySlice], groups: int = 1) -> None:
        shape = (sum(part.rows for part in slices), *tail)
        self.tensors.append(Tensor(self._renamed(self._theirs + theirs), shape, tuple(slices), groups))
