"""What a compiled step costs, by part of the model, by kind of kernel, by loop and by line of source.

The program is walked as it runs: a loop's body as often as the loop turns, of a conditional the dearest
branch. A loop whose trips XLA does not know is named; `often` says how often it turns.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

from jaxthd.planning.hlo import Computation, Frame, Instruction, Program
from jaxthd.planning.kernel_costs import CONTROL, FREE, Cost, Costs, Device
from jaxthd.planning.pallas_work import Work, Works

PARTS = (
    ("models/subsampling.py", "", "subsampling"),
    ("models/encoder_attention.py", "", "encoder attention"),
    ("ops/attention/relative.py", "", "encoder attention"),
    ("models/fastconformer.py", "ConvModule", "encoder convolution"),
    ("models/fastconformer.py", "FeedForward", "encoder MLP"),
    ("models/fastconformer.py", "", "encoder"),
    ("models/mixers/moe.py", "", "experts"),
    ("models/mixers/mamba2.py", "", "Mamba2"),
    ("models/mixers/mlp.py", "", "MLP"),
    ("models/mixers/attention.py", "", "attention"),
    ("models/mixers/", "", "other mixers"),
    ("models/hybrid.py", "", "decoder"),
    ("models/mtp.py", "", "multi-token prediction"),
    ("ops/cross_entropy.py", "", "head"),
    ("models/speech_lm.py", "SpeechLM.leave", "head"),
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
"""(part, op_name) of a loop -> its trips; None where they are not known."""


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
    program: Program,
    device: Device,
    often: Often,
    recorded: Collection[str] | None = None,
    pallas: Works | None = None,
) -> StepCosts:
    """recorded: names of instructions that are in recorded graphs; None for a device without graphs, where
    every launch costs device.launch. pallas: what the program does not tell of Pallas kernels."""
    walk = _Walk(program, device, often, recorded, pallas or {})
    walk.computation(program.entry, 1.0, _Place(OTHER, "?", in_graph=False))
    return walk.found()


class _Place(NamedTuple):
    """Where a computation runs: what an operation without a Python call of its own is counted with."""

    part: str
    line: str
    in_graph: bool


class _Walk:
    def __init__(
        self,
        program: Program,
        device: Device,
        often: Often,
        recorded: Collection[str] | None,
        pallas: Works,
    ) -> None:
        self.program, self.device, self.often = program, device, often
        self.recorded, self.pallas = frozenset(recorded or ()), pallas
        self.costs = Costs(program, device)
        self.kernels: list[Launched] = []
        self.loops: list[Loop] = []
        self.graphs = 0.0

    def computation(self, name: str, times: float, outer: _Place) -> None:
        """Counts `times` runs of a computation."""
        inside, graph_is_open = self.program.computations[name], False
        for x in inside.values():
            if x.op in FREE:
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
            work = self.pallas.get((here.part, name[1]), Work(0.0))
            moved = cost.bytes - work.unread
            seconds = max(moved / device.bandwidth, work.flops / device.peak["bf16"])
            cost = Cost(work.flops, moved, seconds)
        seconds = max(device.kernel if here.in_graph else device.launch, cost.seconds)
        where = here.part, here.line, times, not here.in_graph
        self.kernels.append(Launched(x.name, kind, *where, cost.flops, cost.bytes, cost.seconds, seconds))

    def _branches(self, x: Instruction, times: float, here: _Place) -> None:
        """A call, or the dearest branch of a conditional."""
        names = ("to_apply", "calls", "branch_computations", "true_computation", "false_computation")
        walks = []
        for branch in (branch for name in names for branch in x.attribute(name)):
            walks.append(_Walk(self.program, self.device, self.often, self.recorded, self.pallas))
            walks[-1].computation(branch, times, here)
        dearest = max(walks, key=lambda walk: walk.found().seconds)
        self.kernels += dearest.kernels
        self.loops += dearest.loops
        self.graphs += dearest.graphs

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
    """Sums of kernels with the same key, the dearest first; times, flops, bytes and seconds are of a step."""
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
