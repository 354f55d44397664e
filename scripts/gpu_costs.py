"""What a step costs on a GPU, from its compiled program: kernels, operations, bytes, a bound on the time.

A kernel is an instruction that runs as one launch: a fusion, a matrix product, a library's call, a copy. Its
bound is the largest of matrix operations over the peak, of operations on elements over their rate, and of
bytes over the memory's bandwidth; and at least what a launch costs. Intermediate values of a fusion take no
bytes; an array of which a slice is read or replaced counts with the slice. A collective's bound is what the
device receives over its links. Caches, occupancy beyond the number of output tiles, and kernels that run
beside one another are not modelled.

The program is walked as it runs: a loop's body as often as the loop turns, of a conditional the costliest
branch. Loops whose trips XLA does not know turn as often as a batch asks for (`expected_trips`), and what a
program does not tell of Pallas kernels comes from the batch too (`pallas_work`).
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from jaxthd.config import Config
from jaxthd.models.blocks import MoE
from jaxthd.models.front_ends import FastConformer
from jaxthd.ops.attention import pallas
from jaxthd.ops.attention.relative import distances
from jaxthd.ops.scan.pallas import TILE
from jaxthd.packing.batch import Batch
from jaxthd.packing.intervals import KeyIntervals
from jaxthd.packing.segments import Segments, make_segments
from scripts.gpu_program import Computation, Frame, Instruction, Operand, Program, Shape


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

FREE = re.compile(
    "parameter|constant|get-tuple-element|tuple|bitcast|after-all|partition-id|replica-id|opt-barrier|"
    "add-dependency|domain|async-update|(async|copy|all-reduce|all-gather|collective-permute)-done"
)
"""Instructions that launch nothing."""
CONTROL = frozenset(("while", "conditional", "call", "async-start"))
"""Instructions that run other computations."""
COLLECTIVES = re.compile(
    "(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast|"
    "ragged-all-to-all)(-start)?"
)
_SLICES = ("dynamic-slice", "slice", "gather")
_IN_PLACE = ("dynamic-update-slice", "scatter")
_VIEWS = ("bitcast", "copy", "convert", "transpose", "reshape")
_SLOW = re.compile("exponential|log|rsqrt|sqrt|tanh|logistic|divide|power|sine|cosine|erf")
SLOW = 8
"""Operations on elements that such a function takes: a core has an eighth as many units for them."""
_MOVES = (*_VIEWS, *_SLICES, *_IN_PLACE, "broadcast", "iota", "pad", "concatenate", "reverse", "dot")
"""Operations that compute nothing for each element, or are counted elsewhere."""


class Cost(NamedTuple):
    """The cost of one kernel, or of several. seconds: the bound without launches, roofline alone."""

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
        if COLLECTIVES.fullmatch(x.op):
            return "collective"
        if self.products(x, inside):
            return "product"
        if x.op == "custom-call":
            return "pallas" if "xla.gpu.triton" in x.rest or "mosaic" in x.rest else "library"
        return "copy" if x.op in ("copy", "copy-start") else "fusion"

    def of(self, x: Instruction, inside: Computation) -> Cost:
        """The cost of one launch of a kernel of the computation `inside`."""
        if COLLECTIVES.fullmatch(x.op):
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
        if x.op in (*CONTROL, *_MOVES, "custom-call") or FREE.fullmatch(x.op):
            return 0.0
        each = SLOW if _SLOW.fullmatch(x.op) else 1
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


SECTOR = 16
"""Values in bfloat16 that memory reads together."""


class Work(NamedTuple):
    """The work of one launch: matrix operations, and bytes of operands that it does not read."""

    flops: float
    unread: float = 0.0

    def shared(self, launches: int) -> "Work":
        """The work of one of so many equal launches."""
        return Work(self.flops / launches, self.unread / launches)


Works = dict[tuple[str, str], Work]
"""Works by part of the model and kernel."""


def pallas_work(config: Config, batch: Batch) -> Works:
    """The work of Pallas kernels for this batch of one row on one rank: the tiles that documents reach.

    Ranks that share the row are taken to have equal parts of it. The decoder's attention is launched for each
    context rank's keys, and each launch is taken to be the same part of the rank's.
    """
    mesh = config.mesh
    llm, encoder, block = config.model.llm, config.model.encoder, config.compute.blocks.attention

    def segments(ids: Any, positions: Any) -> Segments:
        made: Segments = make_segments(ids, positions, block=block, axis=None)
        return made

    local = segments(batch.segment_ids, batch.positions).keys.local
    sizes = llm.blocks["*"].attention(mesh.tensor)
    assert sizes
    found = _attention("attention", local.lo, local.hi, sizes.heads, sizes.key_dim)
    found = {name: work.shared(mesh.context**2) for name, work in found.items()}
    if isinstance(encoder, FastConformer) and encoder.longest:
        whole = segments(batch.piece_ids, batch.piece_positions).whole
        dim = encoder.dim // encoder.heads
        width = len(distances(encoder.units(encoder.longest or 0)))
        seen = np.minimum(np.asarray(whole.hi - whole.lo) + 2 * SECTOR, width)
        unread = 2.0 * encoder.heads * float((width - seen).sum())
        clips = _attention("encoder attention", whole.lo, whole.hi, encoder.heads, dim, unread)
        found |= {name: work.shared(mesh.audio_ranks) for name, work in clips.items()}
    return found | _scan(config) if "M" in llm.kinds else found


def _attention(part: str, lo: Array, hi: Array, heads: int, dim: int, unread: float = 0.0) -> Works:
    """unread: bytes of a bias where no query sees a key."""

    def pairs(tiles: pallas.Tiles, *, of_keys: bool = False) -> float:
        tiles = pallas.tiles_for(tiles, len(lo), dim)
        found = pallas.Tiled.of(lo, hi, len(lo), tiles)
        ranges = np.asarray(found.of_keys if of_keys else found.of_queries)
        return float(np.diff(ranges).sum()) * heads * tiles.queries * tiles.keys

    kernels: Iterable[tuple[str, float, int]] = (
        ("forward_kernel", pairs(pallas.FORWARD), 2),
        ("query_grad_kernel", pairs(pallas.BACKWARD), 3),
        ("key_grad_kernel", pairs(pallas.BACKWARD, of_keys=True), 4),
    )
    return {(part, name): Work(2.0 * dim * products * count, unread) for name, count, products in kernels}


def _scan(config: Config) -> Works:
    """Two tokens of a scan chunk meet if their tiles do."""
    llm, chunk = config.model.llm, config.compute.blocks.scan
    tile = min(TILE, chunk)
    sizes = llm.blocks["M"].scan(1)
    assert sizes
    heads, inner, state = sizes.heads, sizes.heads * sizes.head_dim, sizes.state
    rows = max(1, config.data.rows // config.mesh.data // config.train.microbatches)
    tokens = rows * config.data.capacity // config.mesh.context
    pairs, of_states = tokens * (chunk + tile) / 2, 2.0 * tokens * inner * state
    of_heads, of_groups = 2 * pairs * inner, 2 * pairs * state
    decays = 2.0 * tokens * heads * tile * tile  # of one bfloat16 term of the log decays
    kernels = {
        "states_kernel": of_states,
        "outputs_kernel": of_states + of_heads + heads * of_groups + 3 * decays,
        "inputs_grad_kernel": of_states + of_heads + heads * of_groups + 3 * decays,
        "scores_grad_kernel": of_heads + sizes.groups * of_groups + 5 * decays,
        "shared_grad_kernel": of_states + sizes.groups * of_groups,
    }
    return {("Mamba2", name): Work(flops) for name, flops in kernels.items()}


PARTS = (
    ("fastconformer/subsampling.py", "", "subsampling"),
    ("fastconformer/attention.py", "", "encoder attention"),
    ("ops/attention/relative.py", "", "encoder attention"),
    ("fastconformer/module.py", "ConvModule", "encoder convolution"),
    ("fastconformer/module.py", "FeedForward", "encoder MLP"),
    ("models/front_ends/", "", "encoder"),
    ("models/blocks/moe.py", "", "experts"),
    ("models/blocks/mamba2.py", "", "Mamba2"),
    ("models/blocks/mlp.py", "", "MLP"),
    ("models/blocks/attention.py", "", "attention"),
    ("models/blocks/", "", "other mixers"),
    ("models/hybrid.py", "", "decoder"),
    ("models/mtp.py", "", "multi-token prediction"),
    ("ops/cross_entropy.py", "", "head"),
    ("models/speech_lm.py", "SpeechLM.target_log_probs", "head"),
    ("models/speech_lm.py", "", "embedding"),
    ("packing/", "", "segments"),
    ("steps/optimizer", "", "update"),
    ("steps/training.py", "make_update", "update"),
    ("optax/", "", "update"),
)
"""(words of the file's path, how the function's name begins, part of the model): the innermost Python call
that stands here gives an operation its part."""
OTHER = "other"
_NOT_OF_A_PLACE = (
    "models/layers.py",
    "parallel/params.py",
    "parallel/remat.py",
    "flax/",
    "jax/_src/",
    "optax/",
    "models/stacks.py",
    "ops/product.py",
)
"""Files whose lines say little: the place of their operations is the line that called them."""

Often = Callable[[str, str], float | None]
"""Trips of a loop, from (part, op_name); None where they are not known."""


class Launched(NamedTuple):
    """A kernel of the program and how often a step launches it.

    by_host: whether the host launches it, and not a recorded graph. cost: of one launch; seconds: of one
    launch, with what it takes to launch it.
    """

    name: str
    kind: str
    part: str
    place: str
    times: float
    by_host: bool
    flops: float
    bytes: float
    roofline: float
    seconds: float


class Loop(NamedTuple):
    """A loop. trips: in a step, all entries together. known: whether XLA knows the trips of an entry.
    assumed: whether nobody does, and one trip is counted."""

    name: str
    part: str
    place: str
    entries: float
    trips: float
    known: bool
    assumed: bool
    by_host: bool
    seconds: float


class StepCosts(NamedTuple):
    """graphs: launches of recorded graphs. seconds: of a step: kernels, graphs, loops, or what devices
    exchange where that takes longer: it can go on beside the kernels. in_turn: if it never does."""

    kernels: list[Launched]
    loops: list[Loop]
    graphs: float
    device: Device

    @property
    def seconds(self) -> float:
        return max(self.in_turn - self.exchange, self.exchange)

    @property
    def in_turn(self) -> float:
        turning = sum(loop.seconds for loop in self.loops)
        return sum(k.times * k.seconds for k in self.kernels) + turning + self.graphs * self.device.graph

    @property
    def exchange(self) -> float:
        """Seconds that collectives take."""
        return sum((k.times * k.seconds for k in self.kernels if k.kind == "collective"), 0.0)


def part_of(frames: Sequence[Frame]) -> str:
    """The part of the model that made an operation, from its Python calls, the innermost first."""
    for frame in frames:
        for words, function, part in PARTS:
            if words in frame.file and frame.function.startswith(function):
                return part
    return OTHER


def place_of(frames: Sequence[Frame]) -> str:
    """The line of source that says what an operation is for, such as ops/conv.py:43 causal_conv."""
    told = next((f for f in frames if not any(words in f.file for words in _NOT_OF_A_PLACE)), None)
    if told is None:
        return "?"
    file = told.file.rpartition("jaxthd/")[2] if "jaxthd/" in told.file else told.file.rpartition("/")[2]
    return f"{file}:{told.line} {told.function.replace('.<locals>', '')}"


def step_costs(
    program: Program, device: Device, often: Often, recorded: Collection[str], works: Works
) -> StepCosts:
    """The costs of a step. recorded: names of instructions that are in recorded graphs. works: what the
    program does not tell of Pallas kernels."""
    walk = _Walk(program, device, often, frozenset(recorded), works)
    walk.computation(program.entry, 1.0, _Place(OTHER, "?", in_graph=False))
    return walk.found()


class _Place(NamedTuple):
    """Where a computation runs: what an operation without a Python call of its own is counted with."""

    part: str
    line: str
    in_graph: bool


class _Walk:
    def __init__(
        self, program: Program, device: Device, often: Often, recorded: frozenset[str], works: Works
    ) -> None:
        self.program, self.device, self.often = program, device, often
        self.recorded, self.works = recorded, works
        self.costs = Costs(program, device)
        self.kernels: list[Launched] = []
        self.loops: list[Loop] = []
        self.graphs = 0.0

    def computation(self, name: str, times: float, outer: _Place) -> None:
        """Counts `times` runs of a computation."""
        inside, graph_is_open = self.program.computations[name], False
        for x in inside.values():
            if FREE.fullmatch(x.op):
                continue
            here = self._place(x, outer)
            if here.in_graph and not outer.in_graph and not graph_is_open:
                self.graphs += times
            graph_is_open = here.in_graph
            if x.op == "while":
                self._loop(x, times, here)
            elif x.op in CONTROL:
                self._branches(x, times, here)
            else:
                self._kernel(x, inside, times, here)

    def _place(self, x: Instruction, outer: _Place) -> _Place:
        in_graph, frames = outer.in_graph or x.name in self.recorded, list(self.program.frames(x))
        if not frames:
            return outer._replace(in_graph=in_graph)
        return _Place(part_of(frames), place_of(frames), in_graph)

    def _kernel(self, x: Instruction, inside: Computation, times: float, here: _Place) -> None:
        cost, device, kind = self.costs.of(x, inside), self.device, self.costs.kind(x, inside)
        if kind == "pallas" and (name := re.search(r'\bname = "(\w+)"', x.rest)):
            work = self.works.get((here.part, name[1]), Work(0.0))
            moved = cost.bytes - work.unread
            seconds = max(moved / device.bandwidth, work.flops / device.peak["bf16"])
            cost = Cost(work.flops, moved, seconds)
        seconds = max(device.kernel if here.in_graph else device.launch, cost.seconds)
        where = here.part, here.line, times, not here.in_graph
        self.kernels.append(Launched(x.name, kind, *where, cost.flops, cost.bytes, cost.seconds, seconds))

    def _branches(self, x: Instruction, times: float, here: _Place) -> None:
        """A call, or the costliest branch of a conditional."""
        names = ("to_apply", "calls", "branch_computations", "true_computation", "false_computation")
        walks = []
        for branch in (branch for name in names for branch in x.attribute(name)):
            walks.append(_Walk(self.program, self.device, self.often, self.recorded, self.works))
            walks[-1].computation(branch, times, here)
        costliest = max(walks, key=lambda walk: walk.found().seconds)
        self.kernels += costliest.kernels
        self.loops += costliest.loops
        self.graphs += costliest.graphs

    def _loop(self, x: Instruction, times: float, here: _Place) -> None:
        known = x.known_trips
        trips = float(known) if known is not None else self.often(here.part, x.op_name)
        n = 1.0 if trips is None else trips
        turn = self.device.trip if here.in_graph else self.device.read if known is None else 0.0
        whose = x.name, here.part, here.line, times, times * n
        self.loops.append(Loop(*whose, known is not None, trips is None, not here.in_graph, times * n * turn))
        for name, runs in (("condition", n + 1), ("body", n)):
            for called in x.attribute(name):
                self.computation(called, times * runs, here)

    def found(self) -> StepCosts:
        return StepCosts(self.kernels, self.loops, self.graphs, self.device)


def by(costs: StepCosts, key: Callable[[Launched], str]) -> Iterator[tuple[str, Launched]]:
    """Sums of kernels with the same key, the costliest first, over a whole step."""
    sums: dict[str, Launched] = {}
    for k in costs.kernels:
        name, n = key(k), k.times
        old = sums.get(name)
        whole = k._replace(
            flops=n * k.flops, bytes=n * k.bytes, roofline=n * k.roofline, seconds=n * k.seconds
        )
        sums[name] = (
            whole
            if old is None
            else old._replace(
                times=old.times + n,
                flops=old.flops + whole.flops,
                bytes=old.bytes + whole.bytes,
                roofline=old.roofline + whole.roofline,
                seconds=old.seconds + whole.seconds,
            )
        )
    yield from sorted(sums.items(), key=lambda item: -item[1].seconds)


def expected_trips(config: Config, batch: Batch) -> dict[str, float]:
    """Trips of an entry of the loops that the data bounds, by part of the model. Experts: of an even load."""
    compute, llm, block = config.compute, config.model.llm, config.compute.blocks.attention

    def segments(ids: Any, positions: Any) -> Segments:
        made: Segments = make_segments(ids, positions, block=block, axis=None)
        return made

    def of_blocks(intervals: KeyIntervals) -> float:
        return float(np.asarray(intervals.blocks).mean())

    supervised = float((np.asarray(batch.weights) > 0).sum())
    experts = llm.blocks.get("E", MoE())
    assert isinstance(experts, MoE)
    assigned = float((np.asarray(batch.segment_ids) > 0).sum()) * experts.experts_per_token
    found = {
        "attention": of_blocks(segments(batch.segment_ids, batch.positions).keys.local),
        "head": -(-supervised // (config.mesh.context * compute.blocks.loss)),
        "experts": assigned / compute.blocks.experts + experts.experts / 2,
    }
    if compute.blocks.expert_rounds:
        found["experts"] = 1.0
    if config.model.encoder is not None:
        found["encoder attention"] = of_blocks(segments(batch.piece_ids, batch.piece_positions).whole)
    return found
