"""The command lines and flags that texts show, and the real parsers that read them. Nothing is run.

A command line begins with jaxthd, `python -m jaxthd...` or `python scripts/...`; a flag with two dashes.
Where a line names a config file or a run that is not there, configs/cp2.py stands for it.
"""

import argparse
import ast
import builtins
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tyro

from jaxthd.__main__ import commands, module_of
from jaxthd.config import Config
from jaxthd.config.listing import all_groups
from jaxthd.errors import UserError
from jaxthd.terminal import arguments
from jaxthd.terminal.arguments import units
from jaxthd.terminal.flags import as_flags

ROOT = Path(__file__).parents[2]
STAND_IN = str(ROOT / "configs" / "cp2.py")
START = re.compile(
    r"(?:[$>] )?(?:\w+=\S+ )*(?:(?:srun|nohup|nice|time)(?: -\S+)* )?"
    r"(?:\S*/)?(?:(?P<command>jaxthd) |python3? "
    r"(?:-m (?P<module>(?:jaxthd|scripts)\S*)|(?P<script>scripts/\S+\.py)))"
)
"""The beginning of a command line: a prompt, variables of the environment, a launcher, and the program."""
COMMANDS = tuple(commands())
OPTIONS = {setting.option: setting for group in all_groups() for setting in group.settings}


class ParsedError(Exception):
    """Raised once a command line is parsed, so that nothing runs."""


class Setting(NamedTuple):
    """A setting of a command line with its values, and the config that it changes."""

    where: str
    base: Config
    words: tuple[str, ...]


class Line(NamedTuple):
    """A line of code. is_whole: whether it stands by itself; inline code may leave out what is required."""

    code: str
    is_whole: bool


def code_of(text: str) -> list[Line]:
    """The code of a page: inline, indented by four spaces, and fenced; continued lines joined. What stands
    two spaces or more after a command explains it.
    """
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.M | re.S)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    indented = re.findall(r"((?:^    .*\n?)+)", rest, re.M)
    inline = [
        " ".join(code.split()) for code in re.findall(r"`([^`]+)`", re.sub(r"^    .*$", "", rest, flags=re.M))
    ]
    blocks = [re.sub(r"\\\n\s*", "", block).splitlines() for block in [*fenced, *indented]]
    whole = [re.split(r"\s{2,}", line.strip())[0] for block in blocks for line in block]
    found = [*(Line(code, False) for code in inline), *(Line(code, True) for code in whole)]
    return [Line(part, line.is_whole) for line in found for part in re.split(r" (?:&&|\||;) ", line.code)]


class Texts:
    """Parses what texts show, and collects what cannot be parsed in `faults`, as "where: line: why"."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.lines = self.flags = 0
        self._settings: list[Setting] = []

    def read(self, where: str, text: str, foreign: Sequence[str] = ()) -> None:
        """foreign: flags of other programs that the text shows alone."""
        own: set[str] = set(foreign)
        for line in code_of(text):
            if re.match(START, f"{line.code} "):
                self.lines += 1
                self._note(where, line.code, self._command(where, line))
            for name in re.findall(r"\bscripts[/.](\w+)", line.code):
                own |= options_of_script(name)
        for code, _ in code_of(text):
            if code.startswith("--"):
                self.flags += 1
                self._note(where, code, self._flags(where, code, own))

    def _note(self, where: str, line: str, why: str) -> None:
        if why:
            self.faults.append(f"{where}: {line}: {why}")

    def _command(self, where: str, line: Line) -> str:
        """Returns why the line cannot be parsed; ""."""
        found = re.match(START, f"{line.code} ")
        assert found
        words = shlex.split(f"{line.code} "[found.end() :], comments=True)
        if found["script"]:
            return self._script(where, Path(found["script"]).stem, words, line.is_whole)
        if found["module"] and found["module"].startswith("scripts."):
            return self._script(where, found["module"].removeprefix("scripts."), words, line.is_whole)
        name = found["module"].removeprefix("jaxthd").removeprefix(".") if found["module"] else ""
        name = name or (words.pop(0) if words else "--help")
        if name.isupper() or name in ("--help", "-h"):
            return ""
        if name not in COMMANDS:
            return f"there is no command {name!r}"
        if not words:
            return ""
        return self._parse(where, module_of(name).main, words, line.is_whole)

    def _script(self, where: str, name: str, words: list[str], is_whole: bool) -> str:
        if not (ROOT / "scripts" / f"{name}.py").is_file():
            return f"there is no scripts/{name}.py"
        if "--" in words:  # the rest is a command line itself
            self.read(where, f"`{shlex.join(words[words.index('--') + 1 :])}`")
        parse = parser_of_script(name)
        if parse is None:
            return "the script takes no arguments" if words else ""
        return self._parse(where, parse, words, is_whole) if words else ""

    def _parse(self, where: str, main: Callable[[list[str]], Any], words: list[str], is_whole: bool) -> str:
        """Returns why the program's own parser refuses the words; ""."""
        said = StringIO()

        def settings(kind: Any, *, args: Sequence[str], default: Any = None, **_: Any) -> Any:
            if "--help" in args:  # of a group: it is printed, and the command ends
                raise SystemExit
            for each in units(args):
                self._settings.append(Setting(f"{where}: {shlex.join(words)}", default, each))
            return default

        try:
            with redirect_stderr(said), redirect_stdout(said), parsing_alone(settings, is_whole):
                main(words)
        except ParsedError:
            return ""
        except SystemExit as end:
            return said.getvalue() or str(end) if end.code else ""
        except (UserError, OSError) as error:
            return str(error)
        return "the command parsed nothing"

    def _flags(self, where: str, line: str, own: set[str]) -> str:
        """Returns why flags alone, with or without values, are neither settings nor options; ""."""
        known = own | options_of_commands() | {"--help", "--help-all"}
        for words in units(shlex.split(line, comments=True)):
            name = words[0].partition("=")[0]
            plain = re.sub(r"\.no-(?=[^.]+$)", ".", name)
            if plain in OPTIONS:
                if len(words) > 1 or "=" in words[0]:
                    self._settings.append(Setting(f"{where}: {line}", Config(), words))
            elif name not in known and name.removeprefix("--") not in {group.path for group in all_groups()}:
                return f"there is no flag {name}"
        return ""

    def check_settings(self) -> None:
        """Parses the settings, as few times as there are different values of one: parsing takes a while."""
        waiting = {(each.base, each.words): each for each in self._settings}
        while waiting:
            base = next(iter(waiting))[0]
            batch: dict[str, Setting] = {}
            for each in waiting.values():
                if each.base == base:
                    batch.setdefault(re.sub(r"\.no-|=.*", ".", each.words[0]), each)
            for each in batch.values():
                del waiting[each.base, each.words]
            if refused(base, [word for each in batch.values() for word in each.words]):
                for each in batch.values():
                    self._note(each.where, shlex.join(each.words), refused(base, each.words))


def refused(base: Config, words: Sequence[str]) -> str:
    """Returns why the settings' parser refuses these words; ""."""
    said = StringIO()
    try:
        with redirect_stderr(said), redirect_stdout(said):
            known = arguments.boolean_settings()
            flags, _ = as_flags(words, argparse.ArgumentParser(), (), known)
            tyro.cli(Config, default=base, args=flags, config=(tyro.conf.AvoidSubcommands,))
    except SystemExit:
        return " ".join(re.sub(r"[^\x20-\x7e]", " ", said.getvalue()).split())
    return ""


@contextmanager
def parsing_alone(settings: Callable[..., Config], is_whole: bool) -> Iterator[None]:
    """Inside, a program ends with ParsedError once it has parsed its words. settings: called as tyro.cli is.
    is_whole: whether what is required must be there.
    """
    read = arguments.parse_command_line

    def line(command: str, argv: Sequence[str] | None, *rest: Any) -> Any:
        words = list(argv or ())
        place = words.index("--config") + 1 if "--config" in words else 0
        if not place and (not words or words[0].startswith("-")):
            words.insert(0, STAND_IN)
        path = ROOT / words[place]
        words[place] = str(path) if path.is_file() else STAND_IN
        read(command, words, *rest)
        raise ParsedError

    def parse(parser: argparse.ArgumentParser, words: Any = None, namespace: Any = None) -> Any:
        for each in () if is_whole else all_parsers(parser):
            for action in each._actions:
                action.required = False
        _, unknown = parser.parse_known_args(words, namespace)
        if unknown:
            parser.error(f"unknown: {' '.join(unknown)}")
        raise ParsedError

    # Imported inside, a module would keep the stand-in of parse_command_line for ever.
    modules = [module_of(name) for name in COMMANDS]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments.tyro, "cli", settings)
        patch.setattr(arguments, "parse_command_line", line)
        for module in modules:
            if hasattr(module, "parse_command_line"):
                patch.setattr(module, "parse_command_line", line)
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        yield


def all_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and those of its commands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


@cache
def options_of_commands() -> frozenset[str]:
    """The options of all commands, as their parsers have them."""
    found = {"--config"}

    def line(command: str, argv: Any, options: Any = None, *rest: Any) -> Any:
        found.update(f"--{name}" for name in options or {})
        raise ParsedError

    def parse(parser: argparse.ArgumentParser, *_: Any) -> Any:
        found.update(name for each in all_parsers(parser) for name in each._option_string_actions)
        raise ParsedError

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse)
        for name in COMMANDS:
            module = module_of(name)
            if hasattr(module, "parse_command_line"):
                patch.setattr(module, "parse_command_line", line)
            with suppress(ParsedError):
                module.main([])
    return frozenset(found)


@cache
def options_of_script(name: str) -> set[str]:
    """The flags that a script's file names, and those that all benchmarks share."""
    path = ROOT / "scripts" / f"{name}.py"
    text = path.read_text() if path.is_file() else ""
    if "scripts.benchmark" in text:
        text += (ROOT / "scripts" / "benchmark.py").read_text()
    return set(re.findall(r'"(--[\w-]+)"', text))


class _Lazy(dict[str, Any]):
    """The names of a script's file, each made when it is read: only what the parser needs is run."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        super().__init__(__name__="parser", __file__=str(path), __doc__=ast.get_docstring(tree))
        self._makers: dict[str, ast.stmt] = {}
        for statement in tree.body:
            for name in _names_of(statement):
                self._makers[name] = statement

    def __missing__(self, name: str) -> Any:
        if name not in self._makers:
            return getattr(builtins, name)
        statement = self._makers[name]
        if isinstance(statement, ast.FunctionDef):
            self[name] = lambda *args, **kwargs: self._function(statement)(*args, **kwargs)
        else:
            exec(compile(ast.Module([statement], []), name, "exec"), {}, self)
        return self[name]

    def _function(self, statement: ast.FunctionDef) -> Any:
        """The function, with the names of the file that it reads."""
        read = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)} & self._makers.keys()
        names = {name: self[name] for name in read}
        exec(compile(ast.Module([statement], []), statement.name, "exec"), names)
        return names[statement.name]


def _names_of(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return [(alias.asname or alias.name).partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.Assign):
        return [x.id for target in statement.targets for x in ast.walk(target) if isinstance(x, ast.Name)]
    if isinstance(statement, ast.FunctionDef):
        return [statement.name]
    if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        return [statement.target.id]
    return []


@cache
def parser_of_script(name: str) -> Callable[[list[str]], None] | None:
    """Returns a function that parses words as the script does; None for a script without a parser."""
    path = ROOT / "scripts" / f"{name}.py"
    tree = ast.parse(path.read_text())
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        for number, statement in enumerate(function.body):
            calls = [call for call in ast.walk(statement) if isinstance(call, ast.Call)]
            for call in calls:
                called = (
                    call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
                )
                if called in ("parse_args", "parse_known_args", "parse_command_line"):
                    body = function.body[: number + 1]
                    names = _Lazy(path, tree)
                    return lambda words: _parse_in(names, function, body, words)
    return None


def _parse_in(names: _Lazy, function: ast.FunctionDef, body: list[ast.stmt], words: list[str]) -> None:
    for argument in function.args.args:
        names[argument.arg] = words
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", [function.name, *words])
        for statement in body:
            exec(compile(ast.Module([statement], []), "parser", "exec"), {}, names)
