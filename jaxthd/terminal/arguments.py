"""The command line that most commands share: a config file, and an option for each of its fields."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tyro

from jaxthd.config import Config, load_config

PROCESS_OPTIONS: dict[str, dict[str, Any]] = {
    "coordinator": {
        "default": os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "help": "HOST:PORT of process 0, where there are several processes",
    },
    "processes": {"type": int, "default": os.environ.get("JAX_NUM_PROCESSES"), "help": "their number"},
    "process": {
        "type": int,
        "default": os.environ.get("JAX_PROCESS_ID"),
        "help": "the number of this one, from 0",
    },
}
"""Options of commands that run in several processes: see jaxthd.run.startup.devices_ready."""


def parse_command_line(
    command: str, argv: list[str] | None, options: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[Config, Path, argparse.Namespace]:
    """Returns (the config with overrides applied, the path of its file, the command's own options).

    `--config FILE` names the config file. Every field of Config is an option (--data.capacity 4096), and
    --help lists them with the file's values.
    options: the command's own, besides --config and --workdir: name -> keyword arguments of argparse's
        add_argument.
    argv: None for sys.argv's. Ends the process with a usage message for options that cannot be parsed.
    """
    usage = f"jaxthd {command} --config configs/cp2.py [--workdir FOLDER]"
    own = argparse.ArgumentParser(add_help=False, prog=f"jaxthd {command}", allow_abbrev=False)
    own.add_argument("--config", type=Path)
    own.add_argument("--workdir", type=Path)
    for name, settings in (options or {}).items():
        own.add_argument(f"--{name}", **settings)
    found, overrides = own.parse_known_args(argv)
    if found.config is None and not {"-h", "--help"} & set(overrides):
        own.error(f"--config is missing; usage: {usage} [--help for every field]")
    others = "".join(f" --{name}: {settings['help']}." for name, settings in (options or {}).items())
    config = tyro.cli(
        Config,
        default=load_config(found.config) if found.config else Config(),
        args=overrides,
        prog=usage,
        description=(
            f"Also: python -m jaxthd.{command}. Below: every setting of the run, with the value it has now. "
            "--config FILE: a Python file with a function config() -> Config, such as configs/cp2.py. "
            "--workdir FOLDER: where the run is kept and continued (default runs/NAME, NAME being the config "
            f"file's).{others}"
        ),
        # Whether there is an encoder is the config file's choice; its fields are options like all others.
        config=(tyro.conf.AvoidSubcommands,),
    )
    return config, found.config, found
