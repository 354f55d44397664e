"""Reads XLA's list of what a program for a GPU launches: thunks, some of them inside recorded graphs.

XLA writes two files beside the program (--xla_dump_to): the tree of thunks after its passes, and for each
thunk's number the instruction that it runs.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

GRAPH = "kCommandBuffer"


class Thunk(NamedTuple):
    """kind: XLA's, such as kCustomKernel or kWhile. outer: kinds of those around it, from the outside in."""

    number: int
    kind: str
    outer: tuple[str, ...]


def thunks(sequence: str) -> Iterator[Thunk]:
    """Each entry of XLA's tree (thunk_sequence_after_thunk_passes.txt)."""
    stack: list[tuple[int, str]] = []
    for indent, number, kind in re.findall(r"^( *)(\d+): (k\w+)", sequence, re.MULTILINE):
        while stack and stack[-1][0] >= len(indent):
            stack.pop()
        yield Thunk(int(number), kind, tuple(outer for _, outer in stack))
        stack.append((len(indent), kind))


def recorded(sequence: str, metadata: str) -> frozenset[str]:
    """The names of the instructions that run in recorded graphs. metadata: thunk_metadata.txt."""
    names = {
        int(number): name
        for name, number in re.findall(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)', metadata)
    }
    return frozenset(
        names[thunk.number] for thunk in thunks(sequence) if GRAPH in thunk.outer and thunk.number in names
    )
