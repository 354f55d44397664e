"""The command line that every command shares: a config file, and an override for each of its fields."""

import argparse
from pathlib import Path

import jax
import tyro

from jaxthd.config import Config, load_config


def parse_command_line(command: str, argv: list[str] | None) -> tuple[Config, Path, argparse.Namespace]:
    """(config with overrides applied, the config's path, the command's own options).

    `--config FILE` names the run's settings; every field of Config can be overridden (--data.capacity 4096),
    and --help lists them with the file's values.
    """
    own = argparse.ArgumentParser(add_help=False, prog=f"python -m jaxthd.{command}", allow_abbrev=False)
    own.add_argument("--config", type=Path)
    own.add_argument("--workdir", type=Path)
    options, overrides = own.parse_known_args(argv)
    usage = f"python -m jaxthd.{command} --config configs/cp2.py [--workdir FOLDER]"
    if options.config is None and not {"-h", "--help"} & set(overrides):
        own.error(f"--config is missing; usage: {usage} [--help for every field]")
    default = load_config(options.config) if options.config else Config()
    config = tyro.cli(
        Config,
        default=default,
        args=overrides,
        prog=usage,
        description=(
            "Every setting of the run, with the value it has now. --config FILE: a Python file with a "
            "function config() -> Config, such as configs/cp2.py. --workdir FOLDER: where the run is kept "
            "and continued (default runs/NAME, NAME being the config file's)."
        ),
    )
    return config, options.config, options


def simulate_devices(devices: int) -> bool:
    """Gives a machine without accelerators `devices` CPU devices; True where that is what will run.

    Call before anything touches a jax device.
    """
    jax.config.update("jax_num_cpu_devices", devices)
    return jax.default_backend() == "cpu"
