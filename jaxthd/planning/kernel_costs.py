"""What each kernel of a compiled program costs: operations, bytes, a bound on its time.

A kernel is an instruction that runs as one launch: a fusion, a matrix product, a library's call, a copy. Its
bound is the largest of matrix operations over the peak, of operations on elements over their rate, and of
bytes over the memory's bandwidth; and at least what a launch costs. Intermediate values of a fusion take no
bytes; an array of which a slice is read or replaced counts with the slice. A collective's bound is what the
device receives over its links. Caches, occupancy beyond the number of output tiles, and kernels that run
beside one another are not modelled.
"""

import math
import re
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from jaxthd.planning.hlo import Computation, Instruction, Operand, Program, Shape


class Device(NamedTuple):
    """Rates and costs of a device.

    peak: operations a second of dense matrix products, by the operands' dtype, "" for others. elements:
    operations a second on elements, in float32. bandwidth: bytes a second. links: bytes a second that it
    receives from other devices. cores, tile: a product with fewer than `cores` tiles of `tile` output
    elements leaves cores idle. The rest are seconds. kernel: least time of a kernel in a recorded graph.
    launch: least time of one that the host launches. graph: launch of a graph. trip: of a loop inside a
    graph. read: of a loop whose end the host must read from the device.
    """

    name: str
    peak: dict[str, float]
    elements: float
    bandwidth: float
    links: float
    cores: int
    tile: int
    kernel: float
    launch: float
    graph: float
    trip: float
    read: float


H100 = Device(
    "H100",
    {"bf16": 989e12, "f16": 989e12, "f8": 1979e12, "s8": 1979e12, "f64": 67e12, "": 494e12},
    33.4e12,
    3.35e12,
    450e9,
    132,
    64 * 64,
    kernel=1.5e-6,
    launch=4e-6,
    graph=8e-6,
    trip=3e-6,
    read=20e-6,
)
"""Rates from NVIDIA's data sheet of the SXM part (float32 in TF32, dense; links: NVLink in one direction; an
operation on elements is one instruction of 132 x 128 lanes at 1.98 GHz). Launch costs are assumptions: no GPU
has measured them here."""

FREE = frozenset(
    (
        "parameter",
        "constant",
        "get-tuple-element",
        "tuple",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "opt-barrier",
        "add-dependency",
        "domain",
        "async-done",
        "async-update",
        "copy-done",
        "all-reduce-done",
        "all-gather-done",
        "collective-permute-done",
    )
)
"""Instructions that launch nothing."""
CONTROL = frozenset(("while", "conditional", "call", "async-start"))
"""Instructions that run other computations."""
_COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)
_SLICES = ("dynamic-slice", "slice", "gather")
_IN_PLACE = ("dynamic-update-slice", "scatter")
_VIEWS = ("bitcast", "copy", "convert", "transpose", "reshape")
_SLOW = (
    "exponential",
    "log",
    "rsqrt",
    "sqrt",
    "tanh",
    "logistic",
    "divide",
    "power",
    "sine",
    "cosine",
    "erf",
)
SLOW = 8
"""Operations on elements that such a function takes: a core has an eighth as many units for them."""
_MOVES = (
    *_VIEWS,
    *_SLICES,
    *_IN_PLACE,
    "broadcast",
    "iota",
    "pad",
    "concatenate",
    "reverse",
    "dot",
    "custom-call",
)
"""Operations that compute nothing for each element, or are counted elsewhere."""


class Cost(NamedTuple):
    """Of one kernel, or of several. seconds: the bound without launches, roofline alone."""

    flops: float
    bytes: float
    seconds: float


class Product(NamedTuple):
    """A matrix product. dtype: of its left operand. elements: of its result."""

    dtype: str
    flops: float
    elements: int


class Costs:
    """The costs of a program's kernels on a device."""

    def __init__(self, program: Program, device: Device) -> None:
        self.program, self.device = program, device
        self._fused_products = cache(self._products_in)
        self._fused_bytes = cache(self._bytes_in)
        self._fused_elements = cache(self._elements_in)

    def kind(self, x: Instruction, inside: Computation) -> str:
        """One of product, fusion, library, pallas, copy, collective."""
        base = x.op.removesuffix("-start")
        if base in _COLLECTIVES:
            return "collective"
        if self.products(x, inside):
            return "product"
        if x.op == "custom-call":
            return "pallas" if "xla.gpu.triton" in x.rest or "mosaic" in x.rest else "library"
        return "copy" if base == "copy" else "fusion"

    def of(self, x: Instruction, inside: Computation) -> Cost:
        """The cost of one launch of a kernel of the computation `inside`."""
        if x.op.removesuffix("-start") in _COLLECTIVES:
            received = _received(x, inside)
            return Cost(0.0, received, received / self.device.links)
        moved, products = self.bytes(x, inside), self.products(x, inside)
        bounds = (
            sum(map(self._seconds, products)),
            self.elements(x, inside) / self.device.elements,
            moved / self.device.bandwidth,
        )
        return Cost(sum(product.flops for product in products), moved, max(bounds))

    def _seconds(self, product: Product) -> float:
        peak = self.device.peak
        rate = peak.get(product.dtype[:2] if product.dtype.startswith("f8") else product.dtype, peak[""])
        tiles = math.ceil(product.elements / self.device.tile)
        return product.flops / (rate * min(1.0, tiles / self.device.cores))

    def products(self, x: Instruction, inside: Computation) -> list[Product]:
        """The matrix products of an instruction and of all that is fused into it."""
        if x.op == "fusion":
            return [product for called in x.attribute("calls") for product in self._fused_products(called)]
        if x.op == "dot":
            return [_product(x, inside, x.numbers("lhs_contracting_dims"))]
        if x.op == "custom-call" and (
            found := re.search(r'"lhs_contracting_dimensions":\[([^]]*)\]', x.rest)
        ):
            return [_product(x, inside, tuple(int(n) for n in re.findall(r"\d+", found[1])))]
        return []

    def _products_in(self, computation: str) -> list[Product]:
        inside = self.program.computations[computation]
        return [product for x in inside.values() for product in self.products(x, inside)]

    def elements(self, x: Instruction, inside: Computation) -> float:
        """Operations on elements; of a reduction one for each element that it reads."""
        if x.op == "fusion":
            return float(sum(map(self._fused_elements, x.attribute("calls"))))
        if x.op == "reduce":
            return float(sum(shape.elements for shape in shapes_of(x.operands[0], inside)))
        if x.op in FREE or x.op in CONTROL or x.op in _MOVES:
            return 0.0
        each = SLOW if x.op in _SLOW else 1
        return float(each * max((shape.elements for shape in x.shapes), default=0))

    def _elements_in(self, computation: str) -> float:
        inside = self.program.computations[computation]
        return sum(self.elements(x, inside) for x in inside.values())

    def bytes(self, x: Instruction, inside: Computation) -> float:
        """Bytes that a kernel reads and writes."""
        if x.op == "fusion":
            return sum(map(self._fused_bytes, x.attribute("calls")))
        if x.op in ("dynamic-slice", "slice"):
            return 2 * _size(x.shapes)
        if x.op == "dynamic-update-slice":
            return 2 * _size(shapes_of(x.operands[1], inside))
        if x.op in ("gather", "scatter"):
            indices, *rows = (_size(shapes_of(o, inside)) for o in x.operands[1:])
            return indices + 2 * (sum(rows) if rows else _size(x.shapes))
        read = sum(_size(shapes_of(o, inside)) for o in x.operands)
        # A library's product has its workspace as a second result.
        written = x.results[0] if x.op == "custom-call" and self.products(x, inside) else x.shapes
        return read + (0.0 if x.op.endswith("-start") else _size(written))

    def _bytes_in(self, computation: str) -> float:
        inside = self.program.computations[computation]
        users: dict[str, list[Instruction]] = {}
        for x in inside.values():
            for operand in x.operands:
                users.setdefault(operand.name, []).append(x)
        read = sum(_read(x, users) for x in inside.values() if x.op == "parameter")
        return read + sum(_written(x, inside) for x in inside.values() if x.is_root)


def shapes_of(operand: Operand, inside: Computation) -> tuple[Shape, ...]:
    """The shapes of an operand, or of the element of it that is meant."""
    if operand.name not in inside:
        return ()
    source = inside[operand.name]
    if operand.element is None or operand.element >= len(source.results):
        return source.shapes
    return source.results[operand.element]


def _received(x: Instruction, inside: Computation) -> float:
    """Bytes that a device receives from the others of its group in a collective."""
    given = sum(_size(shapes_of(o, inside)) for o in x.operands)
    base, ranks = x.op.removesuffix("-start"), _ranks(x)
    if base == "all-gather":
        return given * (ranks - 1)
    share = (ranks - 1) / ranks
    return given * {"all-reduce": 2 * share, "reduce-scatter": share, "all-to-all": share}.get(base, 1.0)


def _ranks(x: Instruction) -> int:
    """Devices of a group: replica_groups=[1,8]<=[8], {{0,1},{2,3}}, or mesh['data'=8,'tensor'=2] {'data'}."""
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]", x.rest):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", x.rest):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", found[2]))
    if found := re.search(r"replica_groups=\{\{([\d,]*)\}", x.rest):
        return found[1].count(",") + 1
    if "replica_groups" not in x.rest:  # a permutation
        return 1
    raise ValueError(f"{x.name} has groups of devices of an unknown form: {x.rest}")


def _size(shapes: Iterable[Shape]) -> float:
    return sum(shape.bytes for shape in shapes)


def _product(x: Instruction, inside: Computation, contracted: Iterable[int]) -> Product:
    (left, *_), result = shapes_of(x.operands[0], inside), x.results[0][0]
    inner = math.prod(left.dims[i] for i in contracted)
    return Product(left.dtype, 2.0 * result.elements * inner, result.elements)


def _read(x: Instruction, users: dict[str, list[Instruction]]) -> float:
    """Bytes that a fusion reads of a value: all, or the slices that it takes."""
    total = 0.0
    for user in users.get(x.name, []):
        is_first = user.operands[0].name == x.name
        if user.op in _SLICES and is_first:
            total += _size(user.shapes)
        elif user.op in _IN_PLACE and is_first:
            pass  # the rest of it stays where it is
        elif user.op in _VIEWS and not user.is_root:
            total += _read(user, users)
        else:
            return _size(x.shapes)
    return min(total, _size(x.shapes))


def _written(x: Instruction, inside: Computation) -> float:
    """Bytes that a fusion writes for its result."""
    if x.op == "tuple":
        return sum(_written(inside[o.name], inside) for o in x.operands)
    written = x
    while written.op in _VIEWS and written.operands[0].name in inside:
        written = inside[written.operands[0].name]
    if written.op in _IN_PLACE:
        return _size(shapes_of(written.operands[1 if written.op.startswith("dyn") else -1], inside))
    return _size(x.shapes)
