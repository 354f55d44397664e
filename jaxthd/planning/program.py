"""Compiles programs without optimization and reads how many bytes devices send one another."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import jax
import numpy as np

from jaxthd.config import MeshConfig
from jaxthd.parallel.mesh import AXES

UNOPTIMIZED: dict[str, str | bool] = {
    "xla_backend_optimization_level": "0",
    "xla_llvm_disable_expensive_passes": True,
}
"""Options that halve the compilation time. Memory and collectives are fixed before code generation, so their
figures stay the same."""

Received = dict[tuple[str, ...], np.ndarray]
"""Bytes that each device receives, float64 [devices], by the mesh axes in which a group's ranks differ."""


def compiled(function: Any, *arguments: Any) -> Any:
    """The function compiled for these arguments, with XLA's costly passes off."""
    return jax.jit(function).lower(*arguments).compile(compiler_options=UNOPTIMIZED)


_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?[\w.-]+ = (?P<shape>.+?) "
    r"(?P<op>all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|while|conditional|call)"
    r"(?P<start>-start)?\((?P<rest>.*)"
)


def received_bytes(
    program_text: str,
    mesh: MeshConfig,
    often: Callable[[str], float] | None = None,
    branch: Callable[[int], int] | None = None,
) -> Received:
    """Bytes that devices receive in one run of a program compiled for `mesh`.

    The usual ring algorithms are assumed. In a group of g, a device receives (g - 1) / g of the result in
    all-gather and all-to-all, g - 1 results in reduce-scatter, and twice (g - 1) / g of the result in
    all-reduce. In a permutation the targets receive the result.
    often: takes the name of an operation in the program. Returns how many times a conditional runs one of its
        branches (the one with the most bytes is counted), or a loop its body, if the text does not say.
    branch: takes the number of a conditional's branches. Returns which of them runs, once, where one holds
        collectives; None: see often.
    Raises RuntimeError for a collective in such a conditional or loop if `often` is None.
    """
    bodies, entry = _computations(program_text)

    @cache
    def inside(computation: str) -> Received:
        """Bytes that each device receives in one run of a computation, by axes."""
        total: Received = {}
        for found in filter(None, map(_INSTRUCTION.match, bodies[computation])):
            op, rest = found["op"], found["rest"]
            if op not in ("while", "conditional", "call"):
                size = _result_bytes(found["shape"], op, is_start=bool(found["start"]))
                _add(total, [_received(op, size, rest, mesh)])
            elif any(branches := [inside(name) for name in _called(op, rest)]):
                if op == "conditional" and branch is not None:
                    _add(total, [branches[branch(len(branches))]])
                    continue
                _add(total, branches, 1.0 if op == "call" else _runs(op, rest, computation, often))
        return total

    return inside(entry)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """(the lines of each computation by its name, the name of the entry)."""
    bodies: dict[str, list[str]] = {}
    name = entry = ""
    for line in text.splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line):
            name = found[2]
            bodies[name] = []
            entry = name if found[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _called(op: str, rest: str) -> list[str]:
    """The names of the computations that an instruction runs."""
    if op == "conditional" and (found := re.search(r"branch_computations=\{([^}]*)\}", rest)):
        return re.findall(r"[\w.-]+", found[1])
    names = {"while": "body", "call": "to_apply", "conditional": "(?:true|false)_computation"}
    return re.findall(rf"\b{names[op]}=%?([\w.-]+)", rest)


def _runs(op: str, rest: str, computation: str, often: Callable[[str], float] | None) -> float:
    if op == "while" and (found := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest)):
        return float(found[1])
    if often is None:
        raise RuntimeError(
            f"a {op} of {computation} holds collectives, and the text does not say how often it runs"
        )
    name = re.search(r'op_name="([^"]*)"', rest)
    return often(name[1] if name else "")


def _add(
    total: Received, branches: Iterable[Mapping[tuple[str, ...], np.ndarray]], times: float = 1.0
) -> None:
    """Adds `times` times the largest of the branches, for each tuple of axes and each device."""
    largest: Received = {}
    for branch in branches:
        for axes, received in branch.items():
            largest[axes] = np.maximum(largest.get(axes, 0), received)
    for axes, received in largest.items():
        total[axes] = total.get(axes, 0) + times * received


def _result_bytes(shape: str, op: str, *, is_start: bool) -> float:
    sizes = [_bytes_of(*array) for array in re.findall(r"(\w+)\[([\d,]*)\]", shape)]
    if is_start and op == "all-gather":
        sizes = sizes[len(sizes) // 2 :]  # (operands, results)
    elif is_start and op == "collective-permute":
        sizes = sizes[1:2]  # (operand, result, ...)
    return sum(sizes, 0.0)


def _bytes_of(dtype: str, dims: str) -> float:
    bits = re.search(r"\d+", dtype)
    return math.prod(int(n) for n in dims.split(",") if n) * (int(bits[0]) / 8 if bits else 1.0)


def _received(op: str, size: float, rest: str, mesh: MeshConfig) -> Received:
    """Bytes received in one run of a collective. size: bytes of its result."""
    received = np.zeros(mesh.devices)
    if op == "collective-permute":
        pairs = rest.split("source_target_pairs=")[1].split("}}")[0]
        groups = np.array(re.findall(r"(\d+),(\d+)", pairs), int)
        received[groups[:, 1]] = size
    else:
        groups = _groups(rest, mesh.devices)
        g = groups.shape[1]
        share = {"all-reduce": 2 * (g - 1) / g, "reduce-scatter": g - 1}.get(op, (g - 1) / g)
        received[groups] = size * share
    coordinates = np.array(np.unravel_index(groups, mesh.sizes))
    differ = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    return {tuple(axis for axis, differs in zip(AXES, differ, strict=True) if differs): received}


_IOTA = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"


def _groups(rest: str, devices: int) -> np.ndarray:
    """A collective's replica_groups, in any of the forms that XLA writes: int [groups, members]."""
    if found := re.search(r"replica_groups=\{(\{[\d,{}]+\})\}", rest):
        return np.array([group.split(",") for group in re.findall(r"[\d,]+(?=\})", found[1])], int)
    if found := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={_IOTA}", rest):
        return _iota(found[3], found[4]).reshape(int(found[1]), int(found[2]))
    ids = rf"(?:, device_ids=\({_IOTA}\))?"
    if found := re.search(rf"replica_groups=mesh\[([^\]]*)\]{ids} \{{([^}}:]*)\}}", rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        inner = re.findall(r"'(\w+)'", found[4])
        order = [list(sizes).index(name) for name in (*(n for n in sizes if n not in inner), *inner)]
        numbers = _iota(found[2] or f"{devices}", found[3]).reshape(tuple(sizes.values()))
        return numbers.transpose(order).reshape(-1, math.prod(sizes[name] for name in inner))
    if "replica_groups={}" in rest:
        return np.arange(devices)[None]
    raise RuntimeError(f"unknown replica_groups in {rest!r}: teach _groups to read them")


def _iota(dims: str, order: str | None) -> np.ndarray:
    """Numbers from 0 in the shape `dims`, such as "2,4", transposed to `order`, such as "1,0"."""
    shape = [int(n) for n in dims.split(",")]
    return (
        np.arange(math.prod(shape))
        .reshape(shape)
        .transpose([int(n) for n in (order or "").split(",") if n] or None)
    )
