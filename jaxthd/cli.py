"""The command line that every command shares: a config file, and an override for each of its fields."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import tyro

from jaxthd.config import Config, load_config


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
