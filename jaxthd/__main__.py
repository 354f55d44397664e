"""jaxthd NAME, or python -m jaxthd NAME: runs a command. Without a name: lists the commands.

A command is a file in this folder with a function main(argv); its name has a dash where the file's has _.
Listing them imports none, so it is fast.
"""

import ast
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType

from jaxthd.errors import UserError, readable_errors
from jaxthd.terminal.leaving import ends_in_time

OTHERS = ("__init__", "__main__", "config", "errors")
"""Files in this folder that are no commands."""


def main(argv: Sequence[str] | None = None) -> None:
    """argv: the command's name and its options; None for those of the process."""
    name, *options = (sys.argv[1:] if argv is None else list(argv)) or ["--help"]
    # Called with argv, this is no process of its own.
    with ends_in_time() if argv is None else nullcontext(), readable_errors():
        if name in ("-h", "--help"):
            print(listing())
            return
        names = commands()
        if name not in names:
            close = get_close_matches(name, names)
            meant = f"; did you mean {' or '.join(close)}?" if close else f": {', '.join(names)}"
            raise UserError(f"there is no command {name!r}; expected one of those that `jaxthd` lists{meant}")
        module_of(name).main(options)


def module_of(name: str) -> ModuleType:
    """The module of a command."""
    return import_module(f"jaxthd.{name.replace('-', '_')}")


def commands() -> dict[str, str]:
    """Name -> what the command does: the first line of its file's docstring."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return {file.stem.replace("_", "-"): _first_line(file) for file in files if file.stem not in OTHERS}


def listing() -> str:
    """The commands as text, each with what it does."""
    found = commands()
    width = max(map(len, found))
    lines = [f"  {name:<{width}}  {does}" for name, does in found.items()]
    return "\n".join(["jaxthd COMMAND [OPTIONS]; --help after a command lists its options.", "", *lines])


def _first_line(file: Path) -> str:
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


if __name__ == "__main__":
    main()
