"""Digests of code, by which a claim calls itself stale: equal as long as nothing changes that runs.

Comments, docstrings and the layout of the text do not count, nor where code lies: the statements at the top
of modules are hashed each by itself, without imports, and sorted. So a function that moves to another file, a
file that moves to another folder, or better words in a docstring leave the digest as it was.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

UNREAD = {"ctx", "kind", "module", "level", "type_comment"}
"""Fields of syntax trees that say nothing that runs, or where the module lies that a name comes from."""


def digest(root: Path, paths: Iterable[str]) -> str:
    """The digest of files and folders below `root`, 16 hexadecimal digits.

    Raises FileNotFoundError for a path that is not there."""
    hashes = sorted({each for file in files(root, paths) for each in hashes_of(file)})
    return hashlib.sha256("".join(hashes).encode()).hexdigest()[:16]


@cache
def hashes_of(file: Path) -> frozenset[str]:
    """The hashes of a file's parts; a file is read once, though many claims depend on it."""
    return frozenset(hashlib.sha256(part).hexdigest() for part in parts(file))


def files(root: Path, paths: Iterable[str]) -> Iterator[Path]:
    """The Python files below some paths; another file where a path names it."""
    for path in paths:
        if (root / path).is_dir():
            yield from (root / path).rglob("*.py")
        elif (root / path).is_file():
            yield root / path
        else:
            raise FileNotFoundError(f"{path} does not exist; expected a file or folder of the repository")


def parts(file: Path) -> Iterator[bytes]:
    """What of a file is hashed by itself: the statements of a module, or all of another file."""
    content = file.read_bytes()
    if file.suffix != ".py":
        yield content
        return
    for statement in ast.parse(content).body:
        if not isinstance(statement, ast.Import | ast.ImportFrom) and not is_text(statement):
            yield repr(normal(statement)).encode()


def normal(node: Any) -> Any:
    """A syntax tree as nested tuples without docstrings, equal in all versions of Python."""
    if isinstance(node, ast.AST):
        fields = ((name, normal(x)) for name, x in ast.iter_fields(node) if name not in UNREAD)
        return type(node).__name__, *(field for field in fields if field[1] not in (None, ()))
    if isinstance(node, list):
        return tuple(normal(x) for x in node if not is_text(x))
    return node


def is_text(node: Any) -> bool:
    """Whether a statement is a docstring: a text alone."""
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)
