"""Tables of tensor names: which slices of our arrays make up each tensor of a checkpoint on disk.

A family's table is all that import, export and the comparison with the files read, so one is the inverse of
the other: elements are moved, never changed. Our arrays are named by their dotted path in the model, such as
"decoder.layers.mamba.mixer.z.w". Their shapes come from the abstract model, and the tensors' shapes follow.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

Shape = tuple[int, ...]


class ArraySlice(NamedTuple):
    """The slice array[at] of one of our arrays, and how a tensor on disk holds its elements.

    name: our array. at: index into its leading dims (layer, expert). shape: of array[at].
    view, order: array[at] = elements.reshape(view).transpose(order).
    block: before that, each run of len(block) rows of the view is put into this order; (): they are in order.
    """

    name: str
    at: Shape
    shape: Shape
    view: Shape
    order: Shape
    block: Shape = ()

    def from_disk(self, elements: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """Our slice, made of its elements in the order on disk."""
        if self.block:
            elements = elements.reshape(-1, len(self.block), self.view[-1])[:, list(self.block)]
        return elements.reshape(self.view).transpose(self.order).reshape(self.shape)

    def to_disk(self, x: Shaped[np.ndarray, "..."]) -> Shaped[np.ndarray, "..."]:
        """The elements in the order on disk, made of our slice."""
        inverse = np.argsort(self.order).tolist()
        x = x.reshape([self.view[i] for i in self.order]).transpose(inverse)
        if self.block:
            x = x.reshape(-1, len(self.block), self.view[-1])[:, np.argsort(self.block)]
        return x


class Tensor(NamedTuple):
    """A tensor on disk. No slices: a counter that jaxthd does not keep, written as 0.

    groups: the tensor is so many equal runs of elements, each with its share of every slice in turn.
    is_copy: another tensor holds the same array; this one is written, and not read.
    """

    name: str
    shape: Shape
    slices: tuple[ArraySlice, ...]
    groups: int = 1
    is_copy: bool = False

    def split(self, theirs: Shaped[np.ndarray, "..."]) -> list[Shaped[np.ndarray, "..."]]:
        """Our slices, made of the tensor."""
        ends = np.cumsum([math.prod(part.shape) // self.groups for part in self.slices])
        pieces = np.split(theirs.reshape(self.groups, -1), ends[:-1], axis=1)
        return [part.from_disk(piece) for part, piece in zip(self.slices, pieces, strict=True)]

    def join(self, ours: list[Shaped[np.ndarray, "..."]]) -> Shaped[np.ndarray, "..."]:
        """The tensor, made of our slices."""
        pieces = [part.to_disk(x).reshape(self.groups, -1) for part, x in zip(self.slices, ours, strict=True)]
        whole = np.concatenate(pieces, axis=1) if len(pieces) > 1 else pieces[0]
        return np.ascontiguousarray(whole.reshape(self.shape))


class Arrays(NamedTuple):
    """An entry of a table: a tensor on disk that holds several arrays of ours, or one in another form.

    names: the arrays, whose rows follow each other. view, order: as in ArraySlice; (): as ours.
    tail: the tensor's dims behind the first, where they are not the view's; 0 stands for the view's second.
    groups: the tensor's rows are so many equal groups, each with its share of every array's rows.
    block: as in ArraySlice. in_turn: the arrays take the tensor's columns in turn, as gate and up do.
    packed: the arrays' first dim is the tensor's too; their rows follow each other in each of its entries.
    """

    names: tuple[str, ...]
    view: Shape = ()
    order: Shape = ()
    tail: Shape = ()
    groups: int = 1
    block: Shape = ()
    in_turn: bool = False
    packed: bool = False


class Copy(NamedTuple):
    """An entry of a table: a copy of an array that another tensor holds. name: its whole name of ours."""

    name: str


class Below(NamedTuple):
    """An entry of a table: the table of all that lies below a prefix of both names.

    over: an array there; the table repeats over its first dim, whose index stands for {} in their prefix.
    """

    ours: str
    table: "Table"
    over: str = ""


Table = Mapping[str, str | Arrays | Copy | Below | None]
"""Names on disk -> what they hold. A string names an array of ours that has the same form on disk; or a
module: a Linear (its weight is transposed) or a norm, with the bias if it has one. None: a counter that we do
not keep. Entries of arrays that the model does not have are left out.
"""


def rows(*names: str) -> Arrays:
    """The rows of several arrays of ours, one array's after the other's."""
    return Arrays(names)


def matrix(*names: str, tail: Shape = (), groups: int = 1, block: Shape = ()) -> Arrays:
    """[out, in] on disk, of our matrices [in, out]. tail, groups, block: as in Arrays."""
    return Arrays(names, order=(1, 0), tail=tail, groups=groups, block=block)


def packed(*names: str) -> Arrays:
    """[experts, out, in] on disk, of our matrices [experts, in, out], whose rows follow each other in each
    expert."""
    return Arrays(names, order=(0, 2, 1), packed=True)


def in_turn(*names: str) -> Arrays:
    """The columns of our arrays, which have one shape, in turn."""
    return Arrays(names, in_turn=True)


def tensors(
    table: Table, shapes: Mapping[str, Shape], theirs: str = "", ours: str = "", at: Shape = ()
) -> Iterator[Tensor]:
    """The tensors of a table. shapes: of our arrays, by name.

    theirs, ours: prefixes of all names in the table. at: index into leading dims of the arrays there.
    """
    for name, entry in table.items():
        match entry:
            case None:
                yield Tensor(theirs + name, (), ())
            case Copy(whole):
                shape = shapes[whole]
                same = ArraySlice(whole, (), shape, shape, tuple(range(len(shape))))
                yield Tensor(theirs + name, shape, (same,), is_copy=True)
            case Below(prefix, below, ""):
                yield from tensors(below, shapes, theirs + name, ours + prefix, at)
            case Below(prefix, below, over):
                for number in range(shapes[f"{ours}{prefix}{over}"][len(at)]):
                    numbered = theirs + name.format(number)
                    yield from tensors(below, shapes, numbered, ours + prefix, (*at, number))
            case Arrays(names=(first, *_)):
                if ours + first in shapes:
                    yield _tensor(theirs + name, entry, shapes, ours, at)
            case str() if ours + entry in shapes:
                yield _tensor(theirs + name, rows(entry), shapes, ours, at)
            case str():
                module: Table = {
                    f"{name}.weight": matrix(f"{entry}.w")
                    if f"{ours}{entry}.w" in shapes
                    else rows(f"{entry}.weight"),
                    f"{name}.bias": rows(f"{entry}.bias"),
                }
                yield from tensors(module, shapes, theirs, ours, at)


def _tensor(name: str, entry: Arrays, shapes: Mapping[str, Shape], ours: str, at: Shape) -> Tensor:
    slices = []
    for each in entry.names:
        shape = shapes[ours + each][len(at) :]
        order = entry.order or tuple(range(len(shape)))
        view = entry.view or tuple(shape[i] for i in np.argsort(order))
        slices.append(ArraySlice(ours + each, at, shape, view, order, entry.block))
    view, count = slices[0].view, len(slices)
    if entry.in_turn:
        shape = (*view[:-1], view[-1] * count)
        return Tensor(name, shape, tuple(slices), groups=math.prod(view))
    if entry.packed:
        shape = (view[0], sum(part.view[1] for part in slices), *view[2:])
        return Tensor(name, shape, tuple(slices), groups=view[0])
    tail = tuple(n or view[1] for n in entry.tail) or view[1:]
    return Tensor(name, (sum(part.view[0] for part in slices), *tail), tuple(slices), entry.groups)
