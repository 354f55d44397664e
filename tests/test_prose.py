"""Docstrings say what a thing is or does: few open without a subject and a verb, few functions have none."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import jaxthd

ROOT = Path(jaxthd.__file__).parent
VERBLESS = re.compile(r"(?:Of|Those|The same|That of|What|Which|How)\b")
"""Openings that name no thing. "Whether" is right for a boolean."""
MOST_VERBLESS = 20
MOST_UNDOCUMENTED = 473
"""Functions without a docstring whose names have no underscore before them, those inside others too."""


def trees() -> Iterator[tuple[str, ast.Module]]:
    """(path below jaxthd, its syntax tree) of every module."""
    for path in sorted(ROOT.rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def docstrings(tree: ast.Module) -> Iterator[str]:
    """The docstrings of a module, its classes and functions, and those below its fields and constants."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str):
                yield text.strip()


def test_few_docstrings_open_without_a_subject_and_a_verb():
    found = [(name, x[:60]) for name, tree in trees() for x in docstrings(tree) if VERBLESS.match(x)]
    assert len(found) <= MOST_VERBLESS, found


def test_few_functions_have_no_docstring():
    found = [
        (name, node.name)
        for name, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    assert len(found) <= MOST_UNDOCUMENTED, found
