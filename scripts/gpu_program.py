"""Reads what XLA writes about a compiled program: its computations, their instructions, what is launched.

The text of a program has the same form for CPUs and GPUs (Compiled.as_text(); the dumps of --xla_dump_to).
The Python calls that made an operation are read where jax adds them. For a GPU XLA writes two more files: the
tree of thunks, which are what is launched, some of them in recorded graphs, and for each thunk's number the
instruction that it runs.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Shape(NamedTuple):
    """dtype: XLA's name, such as bf16. dims: of an array; () of a scalar."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        bits = re.search(r"\d+", self.dtype)
        return self.elements * (int(bits[0]) / 8 if bits else 1.0)


class Operand(NamedTuple):
    """An operand by name. element: which element of a tuple it is; None for all of the value."""

    name: str
    element: int | None


class Frame(NamedTuple):
    """A Python call: the file's path, the function's qualified name, the line."""

    file: str
    function: str
    line: int


class Instruction(NamedTuple):
    """results: the shapes of each element of a tuple; of other values one element. rest: the attributes after
    the operands. frame: the number of its innermost Python call, 0 if there is none. is_root: whether it is
    its computation's result."""

    name: str
    op: str
    results: tuple[tuple[Shape, ...], ...]
    operands: tuple[Operand, ...]
    rest: str
    frame: int
    is_root: bool

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(shape for element in self.results for shape in element)

    @property
    def op_name(self) -> str:
        """jax's name for the operation, such as jit(f)/while/body/dot_general; "" if there is none."""
        found = re.search(r'op_name="([^"]*)"', self.rest)
        return found[1] if found else ""

    def attribute(self, name: str) -> tuple[str, ...]:
        """The names of the computations in an attribute: calls=%x or branch_computations={%x, %y}."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|%?[\w.-]+)", self.rest)
        return tuple(re.findall(r"[\w.-]+", found[1])) if found else ()

    def numbers(self, name: str) -> tuple[int, ...]:
        """The numbers in an attribute such as lhs_contracting_dims={1}."""
        found = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.rest)
        return tuple(int(n) for n in found[1].split(",") if n) if found else ()

    @property
    def known_trips(self) -> int | None:
        """How often a loop runs its body; None where XLA does not know."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.rest)
        return int(found[1]) if found else None


Computation = dict[str, Instruction]
"""A computation's instructions by name, in the order in which they run."""


class Program(NamedTuple):
    """calls: of each frame by its number: the Python call, and the number of the caller's frame (0: none)."""

    computations: Mapping[str, Computation]
    entry: str
    calls: Mapping[int, tuple[Frame, int]]

    def frames(self, instruction: Instruction) -> Iterator[Frame]:
        """The Python calls that made an instruction, the innermost first."""
        number = instruction.frame
        while number in self.calls:
            frame, number = self.calls[number]
            yield frame


_INSTRUCTION = re.compile(
    r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.-]+) = (?P<type>\(.*?\)|\S+) (?P<op>[a-z][\w-]*)\((?P<rest>.*)$"
)


def parse(text: str) -> Program:
    """Raises ValueError where the text has no entry computation."""
    computations: dict[str, Computation] = {}
    tables: dict[str, dict[int, str]] = {}
    entry, current, table = "", None, None
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif table is not None and (found := re.match(r"(\d+) (.*)$", line)):
            table[int(found[1])] = found[2]
        elif found := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line):
            table, current = None, computations.setdefault(found[2], {})
            entry = found[2] if found[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            instruction = _instruction(found)
            current[instruction.name] = instruction
    if not entry:
        raise ValueError("the text has no ENTRY computation; expected an HLO module as XLA prints it")
    return Program(computations, entry, _calls(tables))


def _instruction(found: re.Match[str]) -> Instruction:
    operands, _, rest = found["rest"].partition(")")
    names = re.findall(r"%([\w.-]+)(?:#(\d+))?", operands)
    frame = re.search(r"\bstack_frame_id=(\d+)", rest)
    return Instruction(
        found["name"],
        found["op"],
        tuple(tuple(_shapes(part)) for part in _elements(found["type"])),
        tuple(Operand(name, int(element) if element else None) for name, element in names),
        rest,
        int(frame[1]) if frame else 0,
        bool(found["root"]),
    )


def _elements(text: str) -> list[str]:
    """The elements of a tuple's type; another type is its only element."""
    if not text.startswith("("):
        return [text]
    parts, depth, start = [], 0, 1
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or (depth == 0 and i):
            parts.append(text[start:i])
            start = i + 1
    return parts


def _shapes(text: str) -> Iterator[Shape]:
    for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", text):
        yield Shape(dtype, tuple(int(n) for n in dims.split(",") if n))


def _calls(tables: Mapping[str, Mapping[int, str]]) -> dict[int, tuple[Frame, int]]:
    """XLA writes the number of a frame's caller increased by one; that of a frame without one is 1."""

    def field(text: str, name: str) -> int:
        found = re.search(rf"\b{name}=(\d+)", text)
        return int(found[1]) if found else 0

    files, functions = (
        {n: x.strip('"') for n, x in tables.get(name, {}).items()} for name in ("FileNames", "FunctionNames")
    )
    places = {
        n: Frame(
            files.get(field(x, "file_name_id"), ""),
            functions.get(field(x, "function_name_id"), ""),
            field(x, "line"),
        )
        for n, x in tables.get("FileLocations", {}).items()
    }
    return {
        n: (places[field(x, "file_location_id")], max(0, field(x, "parent_frame_id") - 1))
        for n, x in tables.get("StackFrames", {}).items()
    }


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
