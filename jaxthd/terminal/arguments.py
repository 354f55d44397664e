"""The command line that most commands share: what to work with, the command's options, and every setting."""

import argparse
import ast
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field, fields, make_dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro

from jaxthd.checkpoints.sources import Settings, open_settings
from jaxthd.config import Config, DataConfig, MeshConfig
from jaxthd.config.data import is_built_in
from jaxthd.config.listing import all_groups, group_names, kind_at, value_at
from jaxthd.config.removed import REMOVED, renewed, warn_once
from jaxthd.config.values import with_value
from jaxthd.errors import UserError
from jaxthd.files.config_file import with_absolute_paths
from jaxthd.files.paths import expand_home, home_path
from jaxthd.terminal.flags import add_opposite, as_flags, is_flag, of_any_block

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
    "type": expand_home,
    "metavar": "WEIGHTS",
    "help": "workdirs of runs (@best or @STEP after one: that checkpoint; @ema, @best+ema, @STEP+ema: its "
    "averaged parameters) or published checkpoints, as in "
    "train.init_from; by default those in SOURCE",
}
SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {
        "type": float,
        "default": 0.0,
        "help": "temperature of sampling; 0, the default, takes the likeliest token",
    },
    "top-k": {"type": int, "default": 0, "help": "sample among the k likeliest tokens; 0 for all"},
    "top-p": {
        "type": float,
        "default": 1.0,
        "help": "sample among the likeliest tokens whose probabilities add up to this",
    },
    "seed": {"type": int, "default": 0, "help": "seed of sampling"},
}
"""Options of commands that sample answers."""
NO_SUBCOMMANDS = (tyro.conf.AvoidSubcommands,)
"""For tyro: whether there is an encoder is the config file's choice; its fields are options like others."""
SOURCE = """\
SOURCE: the workdir of a run (runs/my; runs/my@best, runs/my@2400, runs/my@ema), whose settings are then used;
its config.json; a published checkpoint (a Hugging Face folder); or a Python file with a function
config() -> Config, such as configs/cp2.py.

Settings: --GROUP.SETTING VALUE. Those of type bool are set by --GROUP.X or --GROUP.X True, and by
--GROUP.no-X or --GROUP.X False. So are a command's own flags: --X or --X True, --no-X or --X False.
"""


class CommandLine(NamedTuple):
    """Arguments that a command was given.

    config: the settings of the source, with the overrides. path: the config file or the run's folder. run:
    the run whose settings they are, with its @; None for others. options: the command's own. given: dotted
    names of the settings that the command line gives. settings: the words that give them, as typed.
    """

    config: Config
    path: Path
    run: str | None
    options: argparse.Namespace
    given: tuple[str, ...]
    settings: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """The run's folder; runs/NAME for others, NAME being the config file's or the published folder's."""
        name = self.path.name if self.path.is_dir() else self.path.stem
        return self.path if self.run else Path("runs") / name

    def weights(self) -> list[str]:
        """--weights, by default those of the run or the published checkpoint in SOURCE; [] for a config file
        without it."""
        return self.options.weights or Settings(self.config, self.path, self.run).weights

    def sampling(self) -> dict[str, Any]:
        """The values of SAMPLING's options, as arguments of Generator.stream."""
        return {name.replace("-", "_"): getattr(self.options, name.replace("-", "_")) for name in SAMPLING}

    def require(self, *names: str) -> None:
        """Raises UserError where --weights, or an option of these names, is missing."""
        given = {"weights": self.weights(), **{name: getattr(self.options, name) for name in names}}
        missing = [f"--{name}" for name, value in given.items() if not value]
        if missing:
            expected = " ".join(["--weights SOURCE", *(f"--{name} FILE" for name in names)])
            raise UserError(f"{', '.join(missing)} missing; expected {expected}: add them")

    def require_least(self, **least: int) -> None:
        """Raises UserError for a number among the options that is lower than this."""
        for name, bound in least.items():
            value = getattr(self.options, name)
            if value is not None and value < bound:
                raise UserError(
                    f"--{name.replace('_', '-')} is {value}; expected {bound} or more: correct it"
                )


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
    own = [name for name, option in (options or {}).items() if is_flag(option)]
    words, given = as_flags(words, parser, own, boolean_settings())
    found, overrides = parser.parse_known_args(words, argparse.Namespace(first=first))
    if first and found.config:
        parser.error(f"{first} and --config {found.config} are given; expected one of them: drop one")
    typed = tuple(overrides)
    overrides, removed = _without_removed(overrides)
    if not (source := first or found.config):
        parser.error(
            "SOURCE is missing; expected a config file or a workdir in the first place: "
            f"jaxthd {command} configs/cp2.py"
        )
    opened = open_settings(expand_home(source))
    config = tyro.cli(
        Config,
        default=_with_patterns(_with_mesh_of_rollouts(opened.config, overrides), overrides),
        args=overrides,
        prog=f"jaxthd {command} SOURCE",
        config=NO_SUBCOMMANDS,
    )
    # After the present settings, because some removed ones change what these give: manifests and their tars.
    config, replaced = _with_removed(config, removed)
    config = _with_own_validation(opened.config, config, (*replaced, *given))
    config = with_absolute_paths(config, Path.cwd())
    return CommandLine(config, opened.path, opened.run, found, (*replaced, *given), typed)


def _with_own_validation(before: Config, config: Config, given: Collection[str]) -> Config:
    """The config without the built-in validation set of the source, where the command line replaces built-in
    training data with the user's own and names no validation set: that of the source is of other data."""
    sets = [x.path for x in before.data.validation_sets]
    was_built_in = bool(sets) and all(map(is_built_in, (*sets, *before.data.manifest)))
    is_own = not any(map(is_built_in, config.data.manifest))
    if "data.validation_manifest" in given or not (was_built_in and is_own):
        return config
    return with_value(config, "data.validation_manifest", DataConfig().validation_manifest)


def units(words: Sequence[str]) -> list[tuple[str, ...]]:
    """The words in groups: each flag with the values that follow it."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return [tuple(each) for each in found]


def boolean_settings() -> dict[str, bool]:
    """Whether each setting is of type bool, by its path (of_any_block)."""
    return {of_any_block(x.path): x.types == ("bool",) for group in all_groups() for x in group.settings}


def _without_removed(words: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """(the words without settings that there were, those by group and name: jaxthd/config/removed.py)."""
    kept, removed = list[str](), dict[str, dict[str, Any]]()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        option, has_value, value = word.partition("=")
        group, _, last = option.removeprefix("--").replace("-", "_").rpartition(".")
        above, _, outer = group.rpartition(".")
        if above == "model.llm" and isinstance(was := _was(above, outer), dict) and last in was:
            group, last = above, f"{outer}.{last}"  # of a group of settings that there was
        of_group = REMOVED.get(group, {}) if word.startswith("--") else {}
        name = last if last in of_group or "." in last else last.removeprefix("no_")
        if name.partition(".")[0] not in of_group:
            kept.append(word)
            continue
        values = [value] if has_value else []
        while not has_value and rest and not rest[0].startswith("--"):
            values.append(rest.pop(0))
        read = [_value(text) for text in values] or [name == last]
        outer, _, inner = name.partition(".")
        several = isinstance(of_group[outer].was, tuple)
        found = tuple(read) if several or len(read) > 1 else read[0]
        of_names = removed.setdefault(group, {})
        of_names[outer] = {**of_names.get(outer, {}), inner: found} if inner else found
    return kept, removed


def _was(group: str, name: str) -> Any:
    """The default of a setting that there was; None for others."""
    return REMOVED[group][name].was if name in REMOVED[group] else None


def _value(text: str) -> Any:
    """A number or a truth value that the text writes, else the text."""
    if text.lower().lstrip("+-") in ("inf", "nan"):
        return float(text)
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


def _with_removed(config: Config, removed: Mapping[str, Mapping[str, Any]]) -> tuple[Config, list[str]]:
    """(the config with what replaced these settings, the dotted names of that). Tells what did, on stderr."""
    names = []
    for group, given in removed.items():
        own = attrgetter(group)(config)
        before = {x.name: getattr(own, x.name) for x in fields(own)}
        present, notes = renewed(group, before | dict(given))
        for note in notes:
            warn_once("the command line", note)
        new = {name: value for name, value in present.items() if value != before[name]}
        names += [f"{group}.{name}" for name in new]
        for name, value in new.items():
            config = with_value(config, f"{group}.{name}", value)
    return config, names


def _with_patterns(config: Config, overrides: Sequence[str]) -> Config:
    """The config with the patterns that the command line gives, so that it may give settings of their blocks
    too. Tells which blocks are new, on stderr."""
    given: dict[str, Any] = {}
    for word, following in zip(overrides, [*overrides[1:], ""], strict=False):
        option, mark, value = word.partition("=")
        name = option.replace("-", "_").removeprefix("__model.llm.")
        if option.startswith("--model.llm.") and name in ("pattern", "mtp_pattern"):
            given[name] = value if mark else following
    llm = replace(config.model.llm, **given)
    for letter in llm.blocks.keys() - config.model.llm.blocks.keys():
        block = llm.blocks[letter]
        sizes = ", ".join(f"{x.name} {getattr(block, x.name)}" for x in fields(block) if x.name != "kind")
        warn_once(
            "the command line",
            f"model.llm.blocks.{letter} is new, {block.label} with {sizes}: give others as "
            f"--model.llm.blocks.{letter}.NAME",
        )
    return replace(config, model=replace(config.model, llm=llm)) if given else config


def _with_mesh_of_rollouts(config: Config, overrides: Sequence[str]) -> Config:
    """The config with a mesh for rollouts where the command line gives a part of one."""
    if config.rollout.mesh or not any(word.startswith("--rollout.mesh.") for word in overrides):
        return config
    return replace(config, rollout=replace(config.rollout, mesh=MeshConfig()))


def _parser(
    command: str, options: Mapping[str, Mapping[str, Any]], about: str | None
) -> argparse.ArgumentParser:
    first, _, rest = (about or "").strip().partition("\n\n")
    parser = argparse.ArgumentParser(
        prog=f"jaxthd {command}",
        usage=f"jaxthd {command} SOURCE [options] [--GROUP.SETTING ...]",
        description=first,
        epilog=f"{SOURCE}\n{rest}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="SOURCE", help="the same as SOURCE in the first place")
    groups = f"this help, or a group of settings with SOURCE's values: {', '.join(group_names())}"
    parser.add_argument("-h", "--help", nargs="?", action=_Help, metavar="GROUP", help=groups)
    parser.add_argument("--help-all", nargs=0, action=_Help, help="all settings")
    for name, settings in options.items():
        at_home: dict[str, Any] = {"type": home_path} if settings.get("type") is Path else {}
        parser.add_argument(f"--{name}", **{**settings, **at_home})
        if is_flag(settings):
            add_opposite(parser, name)
    return parser


class _Help(argparse.Action):
    """Shows the command's own options, or the settings of a group with the values of the SOURCE before it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        names = [values.partition(".")[0]] if values else group_names() * (option_string == "--help-all")
        if not names:
            parser.print_help()
            parser.exit()
        if names[0] not in group_names():
            parser.error(f"--help {values}: expected a group of settings: {', '.join(group_names())}")
        source = namespace.first or namespace.config
        config = open_settings(expand_home(source)).config if source else Config()
        tyro.cli(
            _as_helped(config, names), args=["--help"], prog=f"{parser.prog} SOURCE", config=NO_SUBCOMMANDS
        )


def _as_helped(config: Config, names: Collection[str]) -> Any:
    """These groups as a dataclass for tyro's help: one paragraph a text, with bounds, and its values."""
    groups: list[tuple[str, Any, Any]] = []
    for number, group in enumerate(all_groups()):
        if group.path.partition(".")[0] not in names:
            continue
        values = value_at(config, group.path) or kind_at(group.path)()  # defaults where there is none
        if not isinstance(values, group.kind):  # another front end than the config's
            continue
        settings: list[tuple[str, Any, Any]] = []
        for each in group.settings:
            text = each.text + (f" ({each.bounds})" if each.bounds else "")
            hint: Any = Annotated[each.hint, tyro.conf.arg(help=text)]
            settings.append((each.name, hint, field(default=getattr(values, each.name))))
        kind: Any = make_dataclass(group.kind.__name__, settings, namespace={"__doc__": group.text})
        named: Any = Annotated[kind, tyro.conf.arg(name=group.path)]
        groups.append((f"group_{number}", named, field(default_factory=kind)))
    return make_dataclass("Settings", groups)
