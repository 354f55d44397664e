"""Devices of a command: simulated where there is no accelerator, or where there are too few."""

import subprocess
import sys
from argparse import Namespace

import jax
import pytest

from jaxthd.config import MeshConfig
from jaxthd.run import startup

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
