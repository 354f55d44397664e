"""The start of a command, before it computes anything: processes, devices, the config, the kernels."""

import ctypes
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.extend.backend

from jaxthd.config import Config, MeshConfig, PostTrainingConfig, RolloutConfig, TrainConfig
from jaxthd.data.text.tokenizer import needed_vocabulary
from jaxthd.errors import UserError
from jaxthd.kernels.choose import with_admitted
from jaxthd.kernels.xla_options import prepare_compiler
from jaxthd.parallel.mesh import device_platform
from jaxthd.parallel.processes import is_first, started
from jaxthd.validate import DeviceFacts, validate

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt (man 3 mallopt)."""
_NO_LIMIT = -1
"""A size that no array has. A number of bytes could be 2 GiB at most, and steps of 4,096 slots need more."""


def simulate_devices(devices: int) -> bool:
    """Gives a machine without accelerators `devices` CPU devices; True where CPU devices are what will run.

    A process whose jax has begun keeps its devices: a mesh takes the first of them. Raises UserError where
    they are too few, and as device_platform does.
    """
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        if jax.device_count() < devices:
            raise UserError(
                f"jax has begun in this process with {jax.device_count()} device(s); expected {devices}, as "
                "the mesh has: begin another process, or call simulate_devices first with the most it needs"
            ) from None
        return device_platform() == "cpu"
    # A program of one CPU device runs in the thread that calls it, whose freed memory is kept whatever its
    # size (keep_freed_memory).
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    if devices > 1:
        # A loop with collectives runs beside later loops that do not depend on it, so a device may wait in
        # several at once. With XLA's default of one thread a device they can then wait for one another for
        # ever.
        os.environ.setdefault("PJRT_NPROC", str(max(4 * devices, os.cpu_count() or 1)))
    return device_platform() == "cpu"


@contextmanager
def devices_ready(mesh: MeshConfig, options: Namespace) -> Iterator[None]:
    """The devices of the mesh: joins the processes of the run, if there are several, and simulates CPU
    devices where there is no accelerator. A single process does so too where there are too few accelerators.

    options: parsed with PROCESS_OPTIONS. Raises UserError as jaxthd.parallel.processes.started does.
    """
    with started(options.coordinator, options.processes, options.process) as processes:
        on_cpu = simulate_devices(-(-mesh.devices // processes))
        found = "no accelerator found"
        if not on_cpu and processes == 1 and jax.device_count() < mesh.devices:
            found = (
                f"{jax.device_count()} accelerator(s) ({jax.devices()[0].device_kind}) for a mesh of "
                f"{mesh.devices} devices, which need one each; to use what is there, choose a smaller mesh, "
                "such as that of configs/single.py"
            )
            _leave_accelerators()
            on_cpu = True
        if on_cpu:
            keep_freed_memory()
            by = f" by {processes} processes" if processes > 1 else ""
            how = f"{mesh.devices} CPU devices are simulated{by}"
            print(f"{found}: {how if mesh.devices > 1 else 'running on the CPU'}")
        yield


def keep_freed_memory() -> bool:
    """Makes the C library keep what is freed for what is allocated next; False where it is not glibc.

    A program on CPUs asks for its temporary memory anew in each step. glibc gives arrays of that size back to
    the system at once, and the system fills each page with zeros when it is touched again: a sixth of the
    time of a small step (docs/decisions/host_memory.md). Arrays over 64 MiB that another thread than the main
    one allocates are given back all the same: so programs of one CPU device run in the thread that calls them
    (simulate_devices). Later allocations in the process are treated alike.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    return all([libc.mallopt(option, _NO_LIMIT) for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD)])


def _leave_accelerators() -> None:
    """Makes this process forget the accelerators that it has found, and use CPU devices. Arrays and programs
    that it had are lost.
    """
    jax.extend.backend.clear_backends()
    jax.config.update("jax_platforms", "cpu")


def prepared(config: Config) -> Config:
    """The config, checked on this machine, with the attention and scan back-ends that this machine admits.

    Prints warnings to standard error. All processes of a run call it.
    Raises ConfigError (a UserError) for a config that cannot work, and UserError for a back-end that is not
    admitted, for a tokenizer that cannot be read, for options that XLA does not take, and for a model whose
    head tells no tokens.
    """
    config.model.require_tokens()
    check(config)
    return with_kernels(config)


def check(config: Config, *, trains: bool = True) -> None:
    """Validates the config on this machine, and prints warnings. Raises UserError as `prepared` does.

    trains: whether its data sets are read and its objective is trained for; else what it says about them is
        not checked.
    """
    if not trains:
        unread: dict[str, Any] = {"manifest": ("unread",), "weights": ()}
        plain = {name: getattr(TrainConfig(), name) for name in ("objective", "objective_options", "best_by")}
        config = replace(
            config,
            data=replace(config.data, validation_manifest="", **unread),
            train=replace(config.train, **plain),
            rollout=RolloutConfig(),
            posttraining=PostTrainingConfig(),
        )
    for warning in validate(config, DeviceFacts.of_this_machine(needed_vocabulary(config))):
        _say(f"warning: {warning}")


def with_kernels(config: Config) -> Config:
    """The config with the back-ends that this machine admits; the compiler is set up for it."""
    prepare_compiler(config)
    return with_admitted(config, _say)


def _say(line: str) -> None:
    if is_first():
        print(line, file=sys.stderr)
