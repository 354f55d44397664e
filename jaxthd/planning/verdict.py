"""Whether a step fits the devices that it is meant for, and how long it takes there, in one line."""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxthd.config import Config
from jaxthd.kernels.machine import GPU, host_memory, memory_bandwidth, peak_flops
from jaxthd.planning.cluster import WORK, Cluster, ClusterCost, cluster_cost, step_flops
from jaxthd.planning.compiled_step import Measured
from jaxthd.terminal.tables import size_text

CPU_REACHED = 0.4
"""Share of the rate of a large matrix product that a step reaches on CPUs: 0.31 to 0.47, by the median step
of configs/first_run.py, single.py and cp2.py on two cores."""
JAX_SHARE = 0.75
"""Share of a GPU's memory that jax takes, where XLA_PYTHON_CLIENT_MEM_FRACTION says nothing else."""
_SIZE = 1536
"""Rows and columns of the matrices whose product is timed: 7 GFLOP."""


class Devices(NamedTuple):
    """The devices that a step is judged by.

    name: for people. cluster: what they can do. has_rate: whether their rate is known. is_cpu: whether they
    are this machine's CPUs, which share its memory.
    """

    name: str
    cluster: Cluster
    has_rate: bool = True
    is_cpu: bool = False


def gpus_of(
    cluster: Cluster, found: Sequence[GPU], memory: float | None = None, flops: float | None = None
) -> Devices:
    """The GPUs of this machine (`found`), or those that `cluster` assumes where it has none.

    memory, flops: given in place of theirs.
    """
    name, peak = "an H100, as no GPU is here", cluster.flops
    if found:
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or JAX_SHARE)
        name = f"this machine's {len(found)} x {found[0].name}, of which jax takes {share:.0%}"
        kind, room = found[0].name, share * min(gpu.memory for gpu in found)
        bandwidth = memory_bandwidth(kind) or cluster.bandwidth
        cluster, peak = replace(cluster, memory=room, bandwidth=bandwidth), peak_flops(kind) or 0.0
    if memory or flops:
        name, peak = "a device as given", flops or peak
    return Devices(
        name,
        replace(cluster, memory=memory or cluster.memory, flops=peak or cluster.flops),
        has_rate=peak > 0,
    )


def this_cpu(config: Config) -> Devices:
    """The CPU devices that the config's mesh would have here. Their rate is measured: it takes a second."""
    devices = config.mesh.devices
    cluster = Cluster(
        memory=host_memory() / devices,
        flops=product_rate() / devices,
        reached=CPU_REACHED,
        bandwidth=math.inf,  # what it reaches counts recurrences
    )
    return Devices("this machine", cluster, is_cpu=True)


def product_rate() -> float:
    """Operations a second of a large product of float32 matrices on this machine's CPUs, measured."""
    a = np.ones((_SIZE, _SIZE), np.float32)
    seconds = []
    for _ in range(4):
        start = time.perf_counter()
        a @ a
        seconds.append(time.perf_counter() - start)
    return float(2 * _SIZE**3 / min(seconds))


def chosen_devices(config: Config, needed: int, gpus: Devices, *, is_given: bool) -> Devices:
    """The devices to judge by: this machine's CPUs where the mesh fits them and no others are meant.

    needed: bytes of a device. is_given: whether `gpus` are this machine's, or were described.
    """
    fits_here = needed * config.mesh.devices <= host_memory()
    return this_cpu(config) if fits_here and not is_given else gpus


def verdict(config: Config, needed: int, step: Measured | None, devices: Devices) -> str:
    """Says in a line what a device needs, whether that fits, and how long a step takes.

    needed: bytes of a device. step: the compiled one, of this config; None where a step draws answers.
    """
    count, room = config.mesh.devices, devices.cluster.memory
    if devices.is_cpu:
        where = f"{devices_text(config, 'CPU ')}, {size_text(count * room)} in all"
    else:
        where = f"{size_text(room)}" + f"; the mesh has {devices_text(config)}" * (count > 1)
    fits = "fits" if needed <= room else "does not fit"
    text = f"Needs {size_text(needed)} a device: {fits} {devices.name} ({where}); "
    text += step_time(config, step, devices) if step else "no time is predicted: answers are drawn"
    advice = ". Less is needed with more devices (--mesh.data, --mesh.tensor), or a smaller --data.capacity"
    return text + advice * (needed > room)


def devices_text(config: Config, kind: str = "") -> str:
    """The number of the mesh's devices, as text. kind: a word before "devices"."""
    count = config.mesh.devices
    return f"{count:,} {kind}device{'s' * (count > 1)}"


def step_time(config: Config, step: Measured, devices: Devices) -> str:
    """The predicted time of a step, with the rate that it follows from; or why there is none."""
    cluster = devices.cluster
    if not devices.has_rate:
        return "no time is predicted: the peak of this GPU is not known (--device-tflops gives it)"
    if not devices.is_cpu and config.compute.dtype != "bfloat16":
        return f"no time is predicted: GPUs' rates are those of bfloat16, and this is {config.compute.dtype}"
    cost = cluster_cost(config, cluster, step)
    seconds, bound = _seconds(cost, devices)
    if devices.is_cpu:
        rate = f"{config.mesh.devices * cluster.flops / 1e12:.2g} TFLOP/s of a matrix product, measured now"
    else:
        rate = f"{cluster.flops / 1e12:,.0f} TFLOP/s a device"
    flops = step_flops(config) / 1e12
    work = f"{flops:,.0f}" if flops >= 100 else f"{flops:.3g}"
    work += f" TFLOP at {cluster.reached:.0%} of {rate}"
    if recurring := cost.seconds["recurrences"]:
        work += f", and {seconds_text(recurring)} or more of recurrences without a kernel"
    return f"{seconds_text(seconds)} a step, predicted: {work}{bound}"


def _seconds(cost: ClusterCost, devices: Devices) -> tuple[float, str]:
    """(seconds of a step in which the slowest part hides the others, words where that is a link)."""
    work = sum(cost.seconds[name] for name in WORK)
    if devices.is_cpu:
        return work, ""
    slowest, link = max((cost.seconds["NVLink"], "NVLink"), (cost.seconds["network"], "the network"))
    if slowest <= work:
        return work, ""
    return slowest, f" take {seconds_text(work)}, and what {link} carries takes longer"


def seconds_text(seconds: float) -> str:
    """Seconds for people, in s or ms."""
    if seconds < 0.1:
        return f"{1000 * seconds:.2g} ms"
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
