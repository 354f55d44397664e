"""Experts that lie on disk as one tensor of all of a layer's, beside those that lie each by itself."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Literal

from jaxthd.files.tensor_names import ArraySlice, Tensor

ExpertForm = Literal["each", "rows", "columns"]
"""Forms in which the experts of a layer are stored. "each": by itself; "rows": (expert, gate's outputs and
up's, inputs), as in transformers' memory; "columns": (expert, inputs, gate's outputs and up's)."""
PACKED: dict[ExpertForm, tuple[str, str]] = {
    "rows": ("gate_up_proj", "down_proj"),
    "columns": ("gate_and_up_projs", "down_projs"),
}
"""The names of a layer's two tensors below "experts."."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)_proj\.weight")


def packed(found: Iterable[Tensor], form_of: Callable[[str], ExpertForm]) -> Iterator[Tensor]:
    """The tensors with the experts of each layer in its form.

    found: each expert by itself. form_of: (the names of a layer's experts up to ".experts") -> their form.
    """
    for layer, group in groupby(found, lambda tensor: (m := _EXPERT.match(tensor.name)) and m[1]):
        if layer is None or (form := form_of(layer)) == "each":
            yield from group
            continue
        parts: dict[str, list[Tensor]] = {"gate": [], "up": [], "down": []}
        for tensor in group:
            match = _EXPERT.match(tensor.name)
            assert match is not None
            parts[match[3]].append(tensor)
        inward, down = PACKED[form]
        whole = {part: _whole(of_part, form) for part, of_part in parts.items() if of_part}
        yield _joined(f"{layer}.{inward}", [x for part, x in whole.items() if part != "down"], form)
        yield _joined(f"{layer}.{down}", [whole["down"]], form)


def _whole(experts: list[Tensor], form: ExpertForm) -> ArraySlice:
    """A matrix of all experts of a layer as one slice of our array."""
    (first,) = experts[0].slices
    shape = (len(experts), *first.shape)
    order = (0, 2, 1) if form == "rows" else (0, 1, 2)
    return ArraySlice(first.name, first.at[:-1], shape, tuple(shape[i] for i in order), order)


def _joined(name: str, parts: list[ArraySlice], form: ExpertForm) -> Tensor:
    """A tensor of slices whose rows, or columns, follow each other in each expert."""
    experts, rows, columns = parts[0].view
    if form == "rows":
        return Tensor(name, (experts, rows * len(parts), columns), tuple(parts), groups=experts)
    return Tensor(name, (experts, rows, columns * len(parts)), tuple(parts), groups=experts * rows)
