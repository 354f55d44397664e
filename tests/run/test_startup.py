"""Devices of a command: simulated where there is no accelerator, or where there are too few."""

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import jax
import pytest

from jaxthd.config import MeshConfig
from jaxthd.errors import UserError
from jaxthd.kernels.machine import Machine
from jaxthd.parallel.devices import device_platform
from jaxthd.parallel.mesh import make_mesh
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
        Machine.of_this,
        lambda: make_mesh(MeshConfig()),
    ):
        with pytest.raises(
            UserError, match=r"JAX_PLATFORMS is 'cuda', and jax cannot start that .* set it to cpu"
        ):
            started()


@pytest.mark.exhaustive
@pytest.mark.parametrize("platform", ["cuda", "gpu", "tpu", "rocm", "banana"])
def test_commands_say_what_to_do_without_the_platform_that_is_asked_for(platform: str, tmp_path: Path):
    """Here no accelerator is installed."""
    single = str(Path(__file__).parents[2] / "configs" / "single.py")
    for words in (["doctor"], ["train", single], ["generate", single, "--weights", "x", "--prompt", "hi"]):
        command = [sys.executable, "-m", "jaxthd", *words]
        environment = os.environ | {"JAX_PLATFORMS": platform, "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(
            command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 1
        assert f"error: JAX_PLATFORMS is '{platform}'" in ran.stderr
        assert "Traceback" not in ran.stderr
