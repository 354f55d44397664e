"""Devices of a command: simulated where there is no accelerator, or where there are too few."""

import subprocess
import sys
from argparse import Namespace

import jax
import pytest

from jaxthd.config import MeshConfig
from jaxthd.errors import UserError
from jaxthd.kernels.machine import this_machine
from jaxthd.parallel.mesh import device_platform, make_mesh
from jaxthd.run import startup
from jaxthd.validate import DeviceFacts

OPTIONS = Namespace(coordinator=None, processes=None, process=None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Sets how many accelerators the machine has. Returns a list of how often they were left."""
    left: list[int] = []

    def has(accelerators: int) -> list[int]:
        monkeypatch.setattr(startup, "simulate_devices", lambda devices: not accelerators)
        monkeypatch.setattr(jax, "device_count", lambda: accelerators)
        monkeypatch.setattr(startup, "_leave_accelerators", lambda: left.append(1))
        return left

    return has


def test_too_few_accelerators_are_left_for_simulated_devices(machine, capsys):
    left = machine(1)
    with startup.devices_ready(MeshConfig(context=2), OPTIONS):
        assert left == [1]
    said = capsys.readouterr().out
    for part in ("1 accelerator(s)", "mesh of 2", "2 CPU devices are simulated", "configs/single.py"):
        assert part in said


@pytest.mark.parametrize("devices", [1, 2])
def test_enough_accelerators_are_used(machine, capsys, devices):
    left = machine(2)
    with startup.devices_ready(MeshConfig(context=devices), OPTIONS):
        assert not left
    assert not capsys.readouterr().out


def test_without_an_accelerator_devices_are_simulated(machine, capsys):
    left = machine(0)
    with startup.devices_ready(MeshConfig(context=2), OPTIONS):
        assert not left
    assert "2 CPU devices are simulated" in capsys.readouterr().out


def test_leaving_accelerators_gives_cpu_devices():
    """In a child process, because it forgets the devices of this one."""
    code = (
        "import jax; from jaxthd.run.startup import _leave_accelerators, simulate_devices; "
        "simulate_devices(2); before = jax.devices(); _leave_accelerators(); "
        "assert jax.default_backend() == 'cpu' and len(jax.devices()) == 2 and jax.devices() is not before"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


FREED = """
import resource, threading
import jax, jax.numpy as jnp
from jaxthd.run.startup import keep_freed_memory, simulate_devices

def faults(work):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    work()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def arrays():
    for _ in range(5):
        b"x" * (40 << 20)

def over_2_gib():
    b"x" * (2100 << 20)

def in_a_thread(found):
    thread = threading.Thread(target=lambda: found.append(faults(arrays)))
    thread.start()
    thread.join()
    return found[0]

simulate_devices(1)
given_back = faults(arrays)
assert keep_freed_memory() == (given_back > 0)
arrays()
over_2_gib()
print(given_back, faults(arrays), in_a_thread([]), faults(over_2_gib))
x, plus_one = jnp.zeros((25 << 20,), jnp.float32), jax.jit(lambda x: x + 1)
print(min(faults(lambda: plus_one(x).block_until_ready()) for _ in range(15)))
"""


def test_freed_memory_is_kept_by_the_c_library():
    """In a process of its own, whose C library it changes. The thread's first array is new to it. Some calls
    of the program of 100 MiB find new memory, while an earlier result is not freed yet."""
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    given_back, kept, in_thread, kept_of_large, by_program = map(int, done.stdout.split())
    assert given_back >= 5 * (40 << 20) // 4096 / 512, "this C library keeps freed memory by itself"
    assert kept < given_back / 10
    assert in_thread < given_back / 2
    assert kept_of_large < given_back / 10, "there is no limit"
    assert by_program < (100 << 20) // 4096 / 10


@pytest.mark.parametrize(
    "reason", [AssertionError(), RuntimeError("Unable to initialize backend 'tpu': none")]
)
def test_a_platform_that_does_not_start_is_named(reason: Exception, monkeypatch: pytest.MonkeyPatch):
    """jax asserts, or says why, depending on the platform."""

    def fails() -> str:
        raise reason

    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    monkeypatch.setattr(jax, "default_backend", fails)
    for started in (
        device_platform,
        DeviceFacts.of_this_machine,
        this_machine,
        lambda: make_mesh(MeshConfig()),
    ):
        with pytest.raises(
            UserError, match=r"JAX_PLATFORMS is 'cuda', and jax cannot start that .* set it to cpu"
        ):
            started()
