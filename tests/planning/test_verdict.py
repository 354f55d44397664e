"""Whether a step fits, and how long it takes: a line that says what it follows from."""

import re
from dataclasses import replace

import pytest

from jaxthd.config import ComputeConfig, MeshConfig
from jaxthd.kernels.machine import GPU, MEMORY_BANDWIDTH, PEAK_FLOPS, host_memory, memory_bandwidth
from jaxthd.planning import verdict as module
from jaxthd.planning.cluster import GIB, Cluster, exchanges, step_flops
from jaxthd.planning.recurrences import recurrences
from jaxthd.planning.verdict import (
    Devices,
    chosen_devices,
    gpus_of,
    product_rate,
    seconds_text,
    this_cpu,
    verdict,
)
from tests.planning.test_cluster import SMALL, STEP, delta_config

BF16 = replace(SMALL, compute=ComputeConfig(dtype="bfloat16"))
H100 = GPU("NVIDIA H100 80GB HBM3", 80 * GIB, 79 * GIB, "580.159")


def seconds_in(text: str) -> float:
    found = re.search(r"([\d.]+) (ms|s) a step, predicted: ", text)
    assert found, text
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def test_a_step_is_judged_by_the_memory_that_jax_takes_of_the_gpus_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    gpus = gpus_of(Cluster(), [H100, H100._replace(memory=79 * GIB)])
    assert gpus.cluster.memory == 0.75 * 79 * GIB
    text = verdict(BF16, 59 * GIB, STEP, gpus)
    assert text.startswith(
        "Needs 59.00 GiB a device: fits this machine's 2 x NVIDIA H100 80GB HBM3, of which jax takes 75% "
        "(59.25 GiB; the mesh has 16 devices); "
    )
    assert "--data.capacity" not in text
    text = verdict(BF16, 60 * GIB, STEP, gpus)
    assert text.startswith("Needs 60.00 GiB a device: does not fit this machine's ")
    assert text.endswith("or a smaller --data.capacity")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert gpus_of(Cluster(), [H100]).cluster.memory == pytest.approx(72 * GIB)


def test_the_time_is_that_of_the_products_at_the_rate_that_is_said():
    config = replace(BF16, mesh=MeshConfig())
    cluster = Cluster(flops=1e12, reached=0.25)
    text = verdict(config, GIB, STEP._replace(received={}), Devices("mine", cluster))
    assert seconds_in(text) == pytest.approx(step_flops(config) / (1e12 * 0.25), rel=0.05)
    assert text.endswith(" TFLOP at 25% of 1 TFLOP/s a device")


def test_recurrences_without_a_kernel_are_told_and_counted_on_gpus_alone():
    config = delta_config(remat="none")
    slow = replace(Cluster(), bandwidth=1e6)
    text = verdict(config, GIB, STEP._replace(received={}), Devices("mine", slow))
    moved = sum(x.moved for x in recurrences(config))
    assert text.endswith(f", and {seconds_text(moved / 1e6)} or more of recurrences without a kernel")
    assert seconds_in(text) >= 0.99 * moved / 1e6
    here = verdict(config, GIB, STEP._replace(received={}), this_cpu(config))
    assert "without a kernel" not in here


@pytest.mark.parametrize(("kind", "tera"), [("NVIDIA H200", 4.8), ("NVIDIA H100 PCIe", 2.0), ("cpu", None)])
def test_memory_bandwidths_are_known_by_the_devices_name(kind: str, tera: float | None):
    assert memory_bandwidth(kind) == (tera and tera * 1e12)
    assert MEMORY_BANDWIDTH.keys() <= PEAK_FLOPS.keys()


def test_a_slow_link_bounds_the_step():
    """As the links of the cluster's own table; a step that computes longer hides them."""
    cluster = Cluster(gpus=4, network=1e6)
    carried = sum(x.network for x in exchanges(STEP.received, BF16.mesh, cluster))
    slow = verdict(BF16, GIB, STEP, Devices("mine", cluster))
    assert seconds_in(slow) == pytest.approx(carried / 1e6, rel=0.05)
    assert slow.endswith("what the network carries takes longer")
    assert "takes longer" not in verdict(BF16, GIB, STEP, Devices("mine", replace(cluster, flops=1e6)))


def test_no_time_is_said_where_no_rate_is_known():
    unknown = gpus_of(Cluster(), [H100._replace(name="NVIDIA T4")])
    assert "--device-tflops" in verdict(BF16, GIB, STEP, unknown)
    given = gpus_of(Cluster(), [H100._replace(name="NVIDIA T4")], 15.0 * GIB, 65e12)
    assert (given.cluster.memory, given.cluster.flops) == (15 * GIB, 65e12)
    assert seconds_in(verdict(BF16, GIB, STEP, given)) > 0
    assert "this is float32" in verdict(SMALL, GIB, STEP, gpus_of(Cluster(), [H100]))
    assert "answers are drawn" in verdict(BF16, GIB, None, gpus_of(Cluster(), [H100]))


def test_without_a_gpu_this_machine_counts_where_it_is_large_enough(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "product_rate", lambda: 1e11)
    assumed = gpus_of(Cluster(), [])
    here = chosen_devices(SMALL, host_memory() // 17, assumed, is_given=False)
    text = verdict(SMALL, host_memory() // 17, STEP, here)
    assert "fits this machine (16 CPU devices, " in text
    assert "0.1 TFLOP/s of a matrix product, measured now" in text
    assert seconds_in(text) >= 0.9 * step_flops(SMALL) / (1e11 * module.CPU_REACHED)
    assert chosen_devices(SMALL, host_memory() // 15, assumed, is_given=False) is assumed
    assert "fits an H100, as no GPU is here (78.00 GiB" in verdict(BF16, GIB, STEP, assumed)
    assert chosen_devices(SMALL, 1, assumed, is_given=True) is assumed


def test_the_rate_of_products_is_measured():
    assert 1e9 < product_rate() < 1e14


def test_seconds_are_said_as_people_say_them():
    assert [seconds_text(x) for x in (0.00123, 0.0456, 0.12, 3.456, 61.2)] == [
        "1.2 ms",
        "46 ms",
        "0.12 s",
        "3.46 s",
        "61 s",
    ]
