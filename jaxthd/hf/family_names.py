"""Names of published families where ours are expected: which of ours a pattern of theirs stands for.

Patterns of adapt and compute.fp8 match our names alone, because one array of ours holds all layers of a kind,
and a tensor on disk may hold several of ours: what is theirs cannot always be said exactly. So a pattern that
matches none of ours is refused, and the message has the patterns of ours that are found here.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from jaxthd.config import ModelConfig
from jaxthd.errors import UserError
from jaxthd.files.tensor_names import Shape, Tensor, tensors
from jaxthd.hf.family import ENCODER
from jaxthd.hf.registry import FAMILIES


class OurNames(NamedTuple):
    """Our arrays that a family's name stands for.

    title: the family's. is_part: whether the name is of some of the layers or experts that the arrays hold,
    which cannot be chosen by themselves.
    """

    title: str
    arrays: frozenset[str]
    is_part: bool


def our_names(pattern: str, model: ModelConfig, shapes: Mapping[str, Shape]) -> list[OurNames]:
    """Our arrays for a pattern of names, in each family that can hold the model or a part of it and has some.

    pattern: whole names of tensors or modules on disk, or their ends, as peft's target_modules has them
    ("q_proj", "model.layers.*.self_attn.q_proj"). Where no family can hold the decoder, its last part is
    looked up among the usual names of its blocks. shapes: of our arrays, by name.
    """
    tables = list(_tables(model, shapes))
    found = [_meant(title, table, pattern) for title, table in tables]
    if not any(x.name == "embedding" for _, table in tables for y in table for x in y.slices):
        last = pattern.removesuffix(".weight").rpartition(".")[2]
        found.append(_meant("most families", list(_usual(model, shapes)) if last != "*" else [], last))
    return list({x.arrays: x for x in found[::-1] if x.arrays}.values())[::-1]


def _meant(title: str, table: Sequence[Tensor], pattern: str) -> OurNames:
    """Our arrays for the tensors of a family that the pattern names."""
    named = [tensor for tensor in table if _is_named(tensor.name, pattern)]
    slices = {(part.name, part.at) for tensor in named for part in tensor.slices}
    arrays = frozenset(name for name, _ in slices)
    every = {(x.name, x.at) for tensor in table for x in tensor.slices if x.name in arrays}
    return OurNames(title, arrays, slices != every)


def _tables(model: ModelConfig, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, list[Tensor]]]:
    """(title, tensors) of each family that can hold the model, or a part of it."""
    for family in FAMILIES:
        if model.encoder is None and any(family.holds(name) for name in ("encoder.", "adapter.")):
            continue
        try:
            fields = family.fields(model)
        except UserError:
            continue
        # A recogniser's encoder is below "encoder.", in the published model that it is a part of.
        inside = "encoder." if family.covers == ENCODER else ""
        found = family.tensors(model, fields, shapes)
        yield family.title, [tensor._replace(name=inside + tensor.name) for tensor in found]


def _usual(model: ModelConfig, shapes: Mapping[str, Shape]) -> Iterator[Tensor]:
    """The decoder's tensors by the names that its blocks' usually have, without those of layers."""
    llm = model.llm
    for letter, stack in llm.stacks:
        for number in range(llm.letters.count(letter)):
            ours = f"decoder.layers.{stack}.mixer."
            yield from tensors(llm.blocks[letter].tensors(), shapes, ours=ours, at=(number,))


def _is_named(name: str, pattern: str) -> bool:
    """Whether the pattern matches a tensor's name or that of its module, or an end of one of them."""
    module = name.rpartition(".")[0]
    return any(fnmatchcase(x, y) for x in (name, module) for y in (pattern, f"*.{pattern}"))


def patterns_of(chosen: Collection[str], names: Sequence[str]) -> list[str]:
    """The fewest patterns that match the chosen names, and none of the others: names, and prefixes with ".*".

    chosen: some of `names`.
    """
    others = [name for name in names if name not in chosen]

    def below(prefix: str) -> Iterator[str]:
        """Yields the patterns of chosen names that begin with the prefix."""
        inside = [name for name in chosen if name.startswith(prefix)]
        if prefix and not any(name.startswith(prefix) for name in others):
            yield inside[0] if len(inside) == 1 else f"{prefix}*"
            return
        for step in sorted({name[len(prefix) :].partition(".")[0] for name in inside}):
            yield from [f"{prefix}{step}"] if f"{prefix}{step}" in inside else below(f"{prefix}{step}.")

    return list(below(""))
