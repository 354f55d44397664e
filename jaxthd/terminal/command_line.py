"""The command line that every command shares: a config file, and an override for each of its fields."""

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import tyro

from jaxthd.config import Config, load_config
from jaxthd.data.text.tokenizer import needed_vocabulary
from jaxthd.kernels.choose import with_admitted
from jaxthd.kernels.xla_options import prepare_compiler
from jaxthd.parallel.processes import is_first, started
from jaxthd.validate import DeviceFacts, validate

PROCESS_OPTIONS: dict[str, dict[str, Any]] = {
    "coordinator": {
        "default": os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "help": "HOST:PORT of process 0, where there are several",
    },
    "processes": {"type": int, "default": os.environ.get("JAX_NUM_PROCESSES"), "help": "their number"},
    "process": {"type": int, "default": os.environ.get("JAX_PROCESS_ID"), "help": "this one's, from 0"},
}


def parse_command_line(
    command: str, argv: list[str] | None, options: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[Config, Path, argparse.Namespace]:
    """(config with overrides applied, the config's path, the command's own options).

    options: arguments of argparse's add_argument by name, of options besides --config and --workdir.

    `--config FILE` names the run's settings; every field of Config can be overridden (--data.capacity 4096),
    and --help lists them with the file's values.
    """
    own = argparse.ArgumentParser(add_help=False, prog=f"python -m jaxthd.{command}", allow_abbrev=False)
    own.add_argument("--config", type=Path)
    own.add_argument("--workdir", type=Path)
    for name, settings in (options or {}).items():
        own.add_argument(f"--{name}", **settings)
    found, overrides = own.parse_known_args(argv)
    usage = f"python -m jaxthd.{command} --config configs/cp2.py [--workdir FOLDER]"
    if found.config is None and not {"-h", "--help"} & set(overrides):
        own.error(f"--config is missing; usage: {usage} [--help for every field]")
    default = load_config(found.config) if found.config else Config()
    others = "".join(f" --{name}: {settings['help']}." for name, settings in (options or {}).items())
    config = tyro.cli(
        Config,
        default=default,
        args=overrides,
        prog=usage,
        description=(
            "Every setting of the run, with the value it has now. --config FILE: a Python file with a "
            "function config() -> Config, such as configs/cp2.py. --workdir FOLDER: where the run is kept "
            f"and continued (default runs/NAME, NAME being the config file's).{others}"
        ),
    )
    return config, found.config, found


def simulate_devices(devices: int) -> bool:
    """Gives a machine without accelerators `devices` CPU devices; True where that is what will run.

    Call before anything touches a jax device.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    if devices > 1:
        # A loop that holds collectives runs beside later ones that need nothing of it, so that a device waits
        # in several. With XLA's default of a thread for each device all may then wait for one another.
        os.environ.setdefault("PJRT_NPROC", str(max(4 * devices, os.cpu_count() or 1)))
    return jax.default_backend() == "cpu"


@contextmanager
def ready(config: Config, options: argparse.Namespace) -> Iterator[Config]:
    """The devices of config.mesh, joined with the other processes' if there are any; the config is validated.

    Yields it with the kernels that are admitted (jaxthd.kernels.choose). options: parsed with PROCESS_OPTIONS.
    Raises UserError as validate, with_admitted and jaxthd.parallel.processes.started.
    """
    with started(options.coordinator, options.processes, options.process) as processes:
        devices = config.mesh.devices
        if simulate_devices(-(-devices // processes)):
            several = f"{devices} CPU devices are simulated" + (
                f" by {processes} processes" * (processes > 1)
            )
            print(f"no accelerator found: {several if devices > 1 else 'running on the CPU'}")
        vocabulary = needed_vocabulary(config)
        for warning in validate(config, DeviceFacts.of_this_machine(vocabulary)) if is_first() else ():
            print(f"warning: {warning}", file=sys.stderr)
        prepare_compiler(config)
        yield with_admitted(config, lambda line: print(line, file=sys.stderr) if is_first() else None)
