"""The command line that most commands share: what to work with, the command's options, and every setting."""

import argparse
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import tyro

from jaxthd.config import Config, MeshConfig
from jaxthd.config.listing import all_groups, group_names, settings_help
from jaxthd.files.config_file import with_absolute_paths
from jaxthd.files.paths import expand_home, home_path
from jaxthd.files.run_folder import open_settings

PROCESS_OPTIONS: dict[str, dict[str, Any]] = {
    "coordinator": {
        "default": os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "metavar": "HOST:PORT",
        "help": "address of process 0, where there are several processes",
    },
    "processes": {
        "type": int,
        "metavar": "N",
        "default": os.environ.get("JAX_NUM_PROCESSES"),
        "help": "their number",
    },
    "process": {
        "type": int,
        "metavar": "I",
        "default": os.environ.get("JAX_PROCESS_ID"),
        "help": "the number of this one, from 0",
    },
}
"""Options of commands that run in several processes: see jaxthd.run.startup.devices_ready."""
WEIGHTS: dict[str, Any] = {
    "nargs": "+",
    "metavar": "WEIGHTS",
    "help": "workdirs of runs (@best or @STEP after one: that checkpoint; @ema, @best+ema, @STEP+ema: its "
    "averaged parameters) or published checkpoints, as in "
    "train.init_from; by default those of the run in SOURCE",
}
SOURCE = (
    "the workdir of a run (runs/my; runs/my@best, runs/my@2400, runs/my@ema), whose settings are then used; "
    "its config.json; or a Python file with a function config() -> Config, such as configs/cp2.py"
)


class CommandLine(NamedTuple):
    """What a command was given.

    config: the settings of the source, with the overrides. path: the config file or the run's folder. run:
    the run whose settings they are, with its @; None for a config file. options: the command's own. given:
    dotted names of the settings that the command line gives.
    """

    config: Config
    path: Path
    run: str | None
    options: argparse.Namespace
    given: tuple[str, ...]

    def weights(self) -> list[str]:
        """--weights, by default the run's; [] for a config file without it."""
        return self.options.weights or ([self.run] if self.run else [])


def parse_command_line(
    command: str,
    argv: Sequence[str] | None,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    about: str | None = None,
) -> CommandLine:
    """Reads `SOURCE [options] [settings]`; --config SOURCE is the same as SOURCE.

    Every field of Config is an option (--data.capacity 4096). --help shows the command's own options, --help
    GROUP the settings of a group, --help-all all settings.
    options: the command's own: name -> keyword arguments of argparse's add_argument. argv: None for
    sys.argv's. about: the command's docstring, for --help.
    Ends the process with a usage message for options that cannot be parsed. Raises as open_settings does.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    first = words.pop(0) if words and not words[0].startswith("-") else None
    parser = _parser(command, options or {}, about)
    wanted = _help_wanted(words, parser)
    found, overrides = parser.parse_known_args(words if wanted is None else _without_help(words))
    for name, value in vars(found).items():
        if isinstance(value, Path):
            setattr(found, name, home_path(value))
        elif isinstance(value, list):
            values = [home_path(v) if isinstance(v, Path) else v for v in value]
            setattr(found, name, [expand_home(v) for v in value] if name == "weights" else values)
    if first and found.config:
        parser.error(f"{first} and --config {found.config} are given; expected one of them: drop one")
    overrides = _as_flags(overrides, parser)
    source = expand_home(given) if (given := first or found.config) else None
    if wanted is not None:
        _show_help(parser, open_settings(source).config if source else Config(), wanted)
    if source is None:
        parser.error(
            "SOURCE is missing; expected a config file or a workdir in the first place: "
            f"jaxthd {command} configs/cp2.py"
        )
    settings = open_settings(source)
    config = tyro.cli(
        Config,
        default=_with_mesh_of_rollouts(settings.config, overrides),
        args=overrides,
        prog=f"jaxthd {command} SOURCE",
        # Whether there is an encoder is the config file's choice; its fields are options like all others.
        config=(tyro.conf.AvoidSubcommands,),
    )
    config = with_absolute_paths(config, Path.cwd())
    return CommandLine(config, settings.path, settings.run, found, _given(overrides))


def _as_flags(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Returns the words with --GROUP.X True and --GROUP.X=True as --GROUP.X, and False as --GROUP.no-X, for
    settings of type bool: those are the forms that tyro reads. Ends the process for another value.
    """
    known = {x.option for group in all_groups() for x in group.settings if x.types == ("bool",)}
    flags, rest = list[str](), list(words)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        option = f"--{name.removeprefix('--').replace('_', '-')}"
        if not name.startswith("--") or option not in known:
            flags.append(word)
            continue
        if not has_value and rest and not rest[0].startswith("--"):
            has_value, value = "=", rest.pop(0)
        group, _, last = option.rpartition(".")
        if has_value and value.lower() not in ("true", "false"):
            parser.error(
                f"{option} is {value!r}; expected True or False: {option} True, or {group}.no-{last}"
            )
        flags.append(f"{group}.no-{last}" if value.lower() == "false" else option)
    return flags


def _with_mesh_of_rollouts(config: Config, overrides: Sequence[str]) -> Config:
    """The config with a mesh for rollouts where the command line gives a part of one."""
    if config.rollout.mesh or not any(word.startswith("--rollout.mesh.") for word in overrides):
        return config
    return replace(config, rollout=replace(config.rollout, mesh=MeshConfig()))


def _parser(
    command: str, options: Mapping[str, Mapping[str, Any]], about: str | None
) -> argparse.ArgumentParser:
    first, _, rest = (about or "").strip().partition("\n\n")
    more = (
        "Settings: --help GROUP lists a group with SOURCE's values, --help-all lists all. Those of type bool "
        "are set by --GROUP.X or --GROUP.X True, and by --GROUP.no-X or --GROUP.X False. "
        f"Groups: {', '.join(group_names())}.\n\n{rest}"
    )
    parser = argparse.ArgumentParser(
        prog=f"jaxthd {command}",
        usage=f"jaxthd {command} SOURCE [options] [--GROUP.SETTING ...]",
        description=first,
        epilog=f"SOURCE: {SOURCE}.\n\n{more}",
        formatter_class=_Paragraphs,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="SOURCE", help="the same as SOURCE in the first place")
    for name, settings in options.items():
        parser.add_argument(f"--{name}", **settings)
    return parser


class _Paragraphs(argparse.HelpFormatter):
    """Wraps texts to the terminal. Indented lines stay lines; what goes on hangs below its second column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=_columns())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for is_indented, group in groupby(text.strip().splitlines(), lambda line: line[:1] in ("", " ")):
            if is_indented:
                for line in group:
                    column = re.match(r" *(?:\S+ )*?\S*  +|  *", line)
                    hang = " " * len(column[0] if column else "")
                    lines += textwrap.wrap(line, width, subsequent_indent=hang, break_long_words=False) or [
                        ""
                    ]
            else:
                lines += textwrap.wrap(" ".join(group), width)
        return "\n".join(lines)


def _columns() -> int:
    return max(40, min(shutil.get_terminal_size().columns, 110))


def _help_wanted(words: Sequence[str], parser: argparse.ArgumentParser) -> list[str] | None:
    """The groups whose settings are asked for: [] for the options alone; None where no help is asked for."""
    if "--help-all" in words:
        return group_names()
    asked = [n for n, word in enumerate(words) if word in ("-h", "--help")]
    if not asked:
        return None
    after = [word for word in words[asked[0] + 1 :] if not word.startswith("-")][:1]
    for name in after:
        if name.partition(".")[0] not in group_names():
            parser.error(f"--help {name}: expected a group of settings: {', '.join(group_names())}")
    return [name.partition(".")[0] for name in after]


def _without_help(words: Sequence[str]) -> list[str]:
    """The words before the one that asks for help."""
    asked = [n for n, word in enumerate(words) if word in ("-h", "--help", "--help-all")]
    return list(words[: asked[0]])


def _show_help(parser: argparse.ArgumentParser, config: Config, wanted: Sequence[str]) -> NoReturn:
    print(settings_help(config, wanted, _columns()) if wanted else parser.format_help().rstrip())
    sys.exit(0)


def _given(overrides: Sequence[str]) -> tuple[str, ...]:
    """The dotted names of the settings that these words set."""
    known = {setting.path for group in all_groups() for setting in group.settings}
    names = []
    for word in overrides:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_") if word.startswith("--") else ""
        group, _, last = name.rpartition(".")
        names += [each for each in (name, f"{group}.{last.removeprefix('no_')}") if each in known]
    return tuple(dict.fromkeys(names))
