"""A run on many machines, on paper: bytes by link, time, imbalance, loading, saving, and what fails first.

Everything is derived from the config, from its compiled step (jaxthd/planning/compiled_step.py), and from
what a machine can do (Cluster). Nothing of it was measured on GPUs. Ranks are numbered as the mesh numbers
devices: the tensor axis is the innermost, so its ranks share a machine.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from jaxthd.config import Config, MeshConfig
from jaxthd.data.loader import BatchReport, RowReport
from jaxthd.packing.fit import BufferLimits
from jaxthd.parallel.mesh import AUDIO_AXES, AXES, ranks_of
from jaxthd.planning.compiled_step import ByAxes, Measured
from jaxthd.planning.layouts import compare_layouts
from jaxthd.planning.lengths import Lengths
from jaxthd.planning.model_flops import model_flops
from jaxthd.planning.parameters import state_bytes
from jaxthd.planning.recurrences import passes, recurrences
from jaxthd.planning.search import flops_per_slot
from jaxthd.steps.blueprint import Blueprint
from jaxthd.terminal.tables import aligned, size_text

GIB = 2**30


@dataclass(frozen=True)
class Cluster:
    """Speeds of machines. Bandwidths are bytes a second into one GPU, or to storage from one machine.

    flops: a second, of a GPU, at its peak. reached: the share of it that a step reaches. memory: bytes of a
    GPU that a run may use. bandwidth: of that memory, bytes a second. audio_rate: seconds of audio that a
    worker process makes features of in a second, on a core of its own. cores: of a machine, for such workers.
    """

    gpus: int = 8
    memory: float = 78.0 * GIB
    flops: float = 989e12
    reached: float = 0.4
    bandwidth: float = 3.35e12
    nvlink: float = 450e9
    network: float = 50e9
    storage: float = 2e9
    audio_rate: float = 400.0
    cores: int = 64


class Exchange(NamedTuple):
    """Bytes that a device receives in a step from ranks that differ from it in `axes`, by link."""

    axes: tuple[str, ...]
    nvlink: float
    network: float


class Limit(NamedTuple):
    """Something that a run may run out of. share: what it takes of what there is; over 1 it fails, or the
    step waits for it."""

    name: str
    share: float
    text: str


class ClusterCost(NamedTuple):
    """seconds: of a step in which computation waits for no exchange, by what it goes to. limits: the tightest
    first. imbalance: of a whole step, the busiest context rank over the mean. checkpoint: bytes in all."""

    exchanges: list[Exchange]
    seconds: dict[str, float]
    bubble: float
    imbalance: float
    checkpoint: int
    limits: list[Limit]


WORK = ("computing", "recurrences", "bubble", "imbalance")
"""Parts of ClusterCost.seconds that a device works, or waits for others that do."""


def exchanges(received: ByAxes, mesh: MeshConfig, cluster: Cluster) -> list[Exchange]:
    """The bytes that a device receives in a step, by link.

    Of g ranks m are on a device's own machine, and (g - m) / (g - 1) of what it receives comes over the
    network. That is exact where m is 1 or g, and for all-to-all; a gather that goes by machines needs less.
    """
    found = []
    for axes, size in received.items():
        ranks, inside = ranks_of(mesh, axes), ranks_inside(mesh, axes, cluster.gpus)
        outside = (ranks - inside) / (ranks - 1)
        found.append(Exchange(axes, size * (1 - outside), size * outside))
    return found


def ranks_inside(mesh: MeshConfig, axes: Sequence[str], gpus: int) -> int:
    """Ranks of a group over these axes that are on one machine of so many GPUs."""
    inside, stride = 1, 1
    for axis in reversed(AXES):
        size = getattr(mesh, axis)
        here = max(1, min(size, gpus // stride))
        inside *= here if axis in axes else 1
        stride *= size
    return inside


def cluster_cost(config: Config, cluster: Cluster, step: Measured) -> ClusterCost:
    """The costs of a compiled step; on text-like lengths where they matter: see text_like."""
    mesh, data = config.mesh, config.data
    found = exchanges(step.received, mesh, cluster)
    computing = step_flops(config) / (mesh.devices * cluster.flops * cluster.reached)
    recurring = sum(x.moved for x in recurrences(config)) / cluster.bandwidth
    bubble = Blueprint(config).schedule.bubble
    imbalance = step_imbalance(config)
    seconds = {
        "computing": computing,
        "recurrences": recurring,
        "bubble": (computing + recurring) * bubble / (1 - bubble),
        "imbalance": (computing + recurring) * (imbalance - 1),
        "NVLink": sum(x.nvlink for x in found) / cluster.nvlink,
        "network": sum(x.network for x in found) / cluster.network,
    }
    work = sum(seconds[name] for name in WORK)
    memory = step.state + step.temporary
    one = state_bytes(replace(config, mesh=MeshConfig()))
    checkpoint = sum(one.values()) - one["gradients"]
    machines = max(mesh.devices / cluster.gpus, 1)
    saving = checkpoint / machines / cluster.storage
    # With a process for each GPU: those of a machine that read the same rows share one loader, and workers.
    sharing = ranks_inside(mesh, AUDIO_AXES, cluster.gpus)
    audio = data.rows / mesh.data * _seconds_of_buffer(config)
    workers = max(data.workers, 1) * sharing
    loading = audio / (workers * cluster.audio_rate)
    fed = sharing * work * cluster.cores * cluster.audio_rate / audio if audio else math.inf
    tokens = data.rows * data.capacity
    limits = [
        Limit("memory", memory / cluster.memory, f"{size_text(memory)} of {size_text(cluster.memory)}"),
        Limit(
            "network", seconds["network"] / work, f"{seconds['network']:.2f} s beside {work:.2f} s of work"
        ),
        Limit("NVLink", seconds["NVLink"] / work, f"{seconds['NVLink']:.2f} s beside {work:.2f} s of work"),
        Limit(
            "loading",
            loading / work,
            f"{audio:,.0f} s of audio a data rank and step, {workers} workers on a machine: {loading:.2f} s; "
            f"{cluster.cores} cores would feed {fed:.1f} GPUs",
        ),
        Limit(
            "saving",
            saving / (config.train.checkpoint_every * work),
            f"{size_text(checkpoint)}, {saving:.1f} s, every {config.train.checkpoint_every} steps",
        ),
        Limit(
            "batch", tokens / MOST_TOKENS, f"{tokens:,} token slots a step; {MOST_TOKENS:,} is usual at most"
        ),
    ]
    ordered = sorted(limits, key=lambda limit: -limit.share)
    return ClusterCost(found, seconds, bubble, imbalance, checkpoint, ordered)


MOST_TOKENS = 32 * 2**20
"""Tokens of the largest steps that large runs report."""


def _seconds_of_buffer(config: Config) -> float:
    """Seconds of audio that fill a buffer."""
    front_end = config.model.encoder
    return front_end.seconds(config.data.audio_capacity) if front_end else 0.0


def step_flops(config: Config) -> float:
    """FLOPs of a step whose buffers are full: a fifth of the slots supervised, all audio frames used. They
    are those of products with weights, recomputed ones too, without attention's scores."""
    data, rows = config.data, config.data.rows
    seconds = _seconds_of_buffer(config)
    row = RowReport(0, 0, data.capacity, data.capacity // 5, data.capacity, seconds, 1.0, 0)
    flops = model_flops(config)(BatchReport((row,) * rows, ((),) * rows))
    return flops * passes(config)


def text_like(capacity: int, count: int = 4000) -> Lengths:
    """Documents whose lengths are log-normal, with a median of 300 and sigma 1.8, up to the capacity."""
    drawn = np.random.default_rng(0).lognormal(math.log(300), 1.8, count)
    tokens = drawn.astype(int).clip(2, capacity)
    return Lengths(tokens, 0 * tokens, 0.0 * tokens, [[]] * count)


@functools.lru_cache(maxsize=16)
def step_imbalance(config: Config) -> float:
    """Work of the busiest context rank over the mean, in products with weights and attention, on buffers of
    text_like documents; 1 on one context rank."""
    if config.mesh.context == 1:
        return 1.0
    config = replace(config, data=replace(config.data, max_documents=config.data.capacity))
    costs = compare_layouts(text_like(config.data.capacity), config, flops_per_slot(config))
    cost = next(x for x in costs if x.layout == config.compute.layout)
    return (cost.slots + cost.attention) / (cost.slots + cost.attention / cost.imbalance)


def describe_cluster(config: Config, cluster: Cluster, step: Measured) -> str:
    """The tables as text. step: the compiled one."""
    cost, mesh = cluster_cost(config, cluster, step), config.mesh
    rows = [["Bytes a device receives in a step, by link", "NVLink", "network", "ranks, on a machine"]]
    for x in cost.exchanges:
        on = f"{ranks_of(mesh, x.axes)}, {ranks_inside(mesh, x.axes, cluster.gpus)}"
        rows.append([" + ".join(x.axes), size_text(x.nvlink), size_text(x.network), on])
    of_all = sum(x.nvlink for x in cost.exchanges), sum(x.network for x in cost.exchanges)
    rows.append(["in all", *map(size_text, of_all), ""])
    times = [["Seconds of a step", "s"], *([name, f"{s:.3f}"] for name, s in cost.seconds.items())]
    fails = [["What fails first", "share", ""]]
    fails += [[limit.name, f"{limit.share:.2f}", limit.text] for limit in cost.limits]
    frames = BufferLimits.of(config).array_frames
    return "\n\n".join(
        [
            f"On machines of {cluster.gpus} GPUs: {cluster.flops / 1e12:,.0f} TFLOP/s each, of which "
            f"{cluster.reached:.0%} reached; NVLink {cluster.nvlink / 1e9:,.0f} GB/s, network "
            f"{cluster.network / 1e9:,.0f} GB/s a GPU; storage {cluster.storage / 1e9:,.0f} GB/s a machine. "
            "On paper: nothing of this was measured.",
            aligned(rows, left=(0,)),
            aligned(times, left=(0,)),
            f"Bubble {cost.bubble:.1%}; imbalance of the whole step over {mesh.context} context ranks "
            f"{cost.imbalance:.3f}, on text-like lengths up to {config.data.capacity:,} tokens; audio arrays "
            f"of {frames:,} audio frames for data.audio_capacity {config.data.audio_capacity:,}.",
            aligned(fails, left=(0, 2)),
        ]
    )
