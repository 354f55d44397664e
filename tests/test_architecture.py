"""Which package may import which, in one table; which files lie outside packages; function lengths."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxthd

ROOT = Path(jaxthd.__file__).parent
LAYERS = (
    {"errors", "config", "files"},
    {"packing"},
    {"ops"},
    {"parallel"},
    {"models"},
    {"objectives"},
    {"kernels"},
    {"steps"},
    {"hf", "checkpoints", "data"},
    {
        "inference",
        "rl",
        "rewards",
        "planning",
        "figures",
        "run",
        "training",
        "validate",
        "terminal",
        "nemo",
        "evaluation",
    },
)
"""All packages, with config and errors, from the bottom up: each imports itself and lower layers. Commands
(the other files beside the packages) import all packages, but no command."""
BESIDE = {
    ("config", "errors"),
    ("files", "config"),
    ("files", "errors"),
    ("checkpoints", "hf"),
    ("checkpoints", "data"),
    ("evaluation", "inference"),
    ("evaluation", "terminal"),
    ("inference", "run"),
    ("inference", "terminal"),
    ("rl", "inference"),
    ("rl", "run"),
    ("rewards", "rl"),
    ("training", "figures"),
    ("training", "inference"),
    ("training", "planning"),
    ("training", "run"),
    ("training", "terminal"),
    ("figures", "run"),
    ("figures", "inference"),
    ("figures", "planning"),
    ("planning", "rl"),
    ("planning", "terminal"),
    ("planning", "validate"),
    ("run", "validate"),
    ("run", "terminal"),
}
"""Allowed (importer, imported) inside a layer."""
NO_COMMANDS = {"__init__", "__main__", "errors"}
MOST_LINES = 80


def modules() -> Iterator[tuple[str, ast.Module]]:
    """(dotted name below jaxthd, its syntax tree) of every module. A package's __init__ has the package's
    name; that of jaxthd itself has an empty name."""
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), ast.parse(path.read_text())


TREES = dict(modules())


def imported(tree: ast.Module) -> set[str]:
    """The modules of jaxthd that a module imports, also inside functions, by their names below jaxthd."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.partition(".")[0] == "jaxthd":
                below = name.partition(".")[2]
                while below not in TREES:  # a name imported from a module is no module
                    below = below.rpartition(".")[0]
                found.add(below)
    return found


IMPORTS = {name: imported(tree) for name, tree in TREES.items()}
LAYER = {package: number for number, layer in enumerate(LAYERS) for package in layer}
COMMANDS = {path.stem for path in ROOT.glob("*.py")} - NO_COMMANDS


def is_allowed(importer: str, package: str) -> bool:
    """Whether the import is allowed. importer, package: the first components of modules' names."""
    if importer == package or (importer, package) in BESIDE:
        return True
    if importer in COMMANDS:
        return package in LAYER
    if importer in ("", "__main__"):  # jaxthd's public names, and the list of commands
        return True
    return package in LAYER and LAYER[package] < LAYER[importer]


def test_every_package_has_a_layer() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages | {"errors"} == LAYER.keys()


@pytest.mark.parametrize("name", TREES)
def test_imports_go_downwards(name: str) -> None:
    importer = name.partition(".")[0]
    wrong = sorted(m for m in IMPORTS[name] if not is_allowed(importer, m.partition(".")[0]))
    assert not wrong, f"{name} imports {wrong}"


def test_the_table_allows_nothing_that_is_not_used() -> None:
    used = {(name.partition(".")[0], m.partition(".")[0]) for name, found in IMPORTS.items() for m in found}
    assert used >= BESIDE


def test_there_is_no_cycle_of_imports() -> None:
    """Neither between modules nor between packages of one layer; layers have none between each other."""
    done: set[str] = set()

    def follow(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " imports ".join([*above[above.index(name) :], name])
        if name not in done:
            for further in sorted(IMPORTS[name]):
                follow(further, (*above, name))
            done.add(name)

    for name in TREES:
        follow(name, ())
    reached = set(BESIDE)
    while further := {(a, d) for a, b in reached for c, d in reached if b == c} - reached:
        reached |= further
    assert not {a for a, b in reached if a == b}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_what_lies_beside_the_packages_is_a_command(name: str) -> None:
    functions = {node.name for node in TREES[name].body if isinstance(node, ast.FunctionDef)}
    assert "main" in functions, f"jaxthd/{name}.py has no main(): it belongs in a package"


@pytest.mark.parametrize("name", TREES)
def test_functions_are_short(name: str) -> None:
    functions = [n for n in ast.walk(TREES[name]) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines = {f"{f.name} at line {f.lineno}": (f.end_lineno or f.lineno) - f.lineno + 1 for f in functions}
    assert not {function: count for function, count in lines.items() if count > MOST_LINES}
