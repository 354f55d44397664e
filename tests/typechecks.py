"""In tests every function and dataclass of jaxthd checks types and shapes of its arguments and results.

jaxtyping's import hook does the same with beartype, but slower: it parses a decorator anew for each function,
has beartype write two checks of each at import, and checks arguments both before and after the call. Here a
module's decorated bytecode is kept in a folder, a function's annotations are read at its first call, beartype
writes one check for each distinct annotation, and each value is checked once.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import marshal
import os
import sys
import typing
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, NoReturn

from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import AbstractArray, jaxtyped

Check = Callable[[Any], None]

_SHAPES = jaxtyped("context")
"""Inside, an axis name of jaxtyping stands for one size."""
_DECORATOR = "_checked"
_KINDS = inspect.Parameter


def install_type_checks(package: str, folder: Path) -> None:
    """Modules of the package that are imported from now on check their calls. folder: keeps bytecode."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.meta_path.insert(0, _Finder(package, folder))


def checked(item: Any) -> Any:
    """The function, or the dataclass, that raises an error when it is called with, or returns, a value that
    its annotations do not allow. The sizes of axes with the same name must agree throughout a call."""
    if isinstance(item, type):
        if dataclasses.is_dataclass(item) and not hasattr(item.__init__, "__wrapped__"):
            item.__init__ = checked(item.__init__)  # type: ignore[misc]
        return item
    if not item.__annotations__:
        return item
    checks: _Checks | None = None

    @functools.wraps(item)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal checks
        __tracebackhide__ = True
        if checks is None:
            checks = _checks_of(item)
        if not checks.have_shapes:
            return _call(item, checks, args, kwargs)
        with _SHAPES:
            return _call(item, checks, args, kwargs)

    return call


class _Checks(NamedTuple):
    """Of a function: None for what may be anything."""

    positional: tuple[Check | None, ...]
    further: Check | None
    """Of *args."""
    named: dict[str, Check]
    keywords: Check | None
    """Of **kwargs."""
    result: Check | None
    have_shapes: bool


def _call(function: FunctionType, checks: _Checks, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    __tracebackhide__ = True
    try:
        for check, value in zip(checks.positional, args, strict=False):
            if check is not None:
                check(value)
        if checks.further is not None:
            for value in args[len(checks.positional) :]:
                checks.further(value)
        for name, value in kwargs.items():
            check = checks.named.get(name, checks.keywords)
            if check is not None:
                check(value)
    except BeartypeCallHintViolation as error:
        error.add_note(f"an argument of {function.__module__}.{function.__qualname__}")
        raise
    result = function(*args, **kwargs)
    if checks.result is not None:
        try:
            checks.result(result)
        except BeartypeCallHintViolation as error:
            error.add_note(f"the result of {function.__module__}.{function.__qualname__}")
            raise
    return result


def _checks_of(function: FunctionType) -> _Checks:
    """An inner function is made anew at each call of the outer one; its checks are not."""
    annotations = tuple(function.__annotations__.items())
    try:
        return _checks_of_code(function.__code__, annotations, _Reference(function))
    except TypeError:  # an annotation that is not hashable
        return _read_checks(function)


class _Reference:
    """Holds a function, and is equal to all others: no part of a cache's key."""

    def __init__(self, function: FunctionType) -> None:
        self.function = function

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reference)

    def __hash__(self) -> int:
        return 0


@functools.cache
def _checks_of_code(code: CodeType, annotations: tuple[Any, ...], reference: _Reference) -> _Checks:
    return _read_checks(reference.function)


def _read_checks(function: FunctionType) -> _Checks:
    hints = {name: _resolved(hint, function) for name, hint in function.__annotations__.items()}
    parameters, module = inspect.signature(function).parameters.values(), function.__module__

    def of(*kinds: Any) -> Iterator[tuple[str, Check | None]]:
        return ((p.name, _check_of(hints.get(p.name, Any), module)) for p in parameters if p.kind in kinds)

    by_name = of(_KINDS.POSITIONAL_OR_KEYWORD, _KINDS.KEYWORD_ONLY)
    makes_generator = inspect.isgeneratorfunction(function)
    return _Checks(
        positional=tuple(check for _, check in of(_KINDS.POSITIONAL_ONLY, _KINDS.POSITIONAL_OR_KEYWORD)),
        further=next((check for _, check in of(_KINDS.VAR_POSITIONAL)), None),
        # Those that may be anything are there too: their names are no names of **kwargs.
        named={name: check or _anything for name, check in by_name},
        keywords=next((check for _, check in of(_KINDS.VAR_KEYWORD)), None),
        result=None if makes_generator else _check_of(hints.get("return", Any), module),
        have_shapes=any(map(_has_shapes, hints.values())),
    )


def _resolved(hint: Any, function: FunctionType) -> Any:
    """The annotation; Any for one with a name that is known only to type checkers."""

    def holder() -> None: ...

    holder.__annotations__ = {"hint": hint}
    try:
        return typing.get_type_hints(holder, function.__globals__, include_extras=True)["hint"]
    except NameError:
        return Any


def _anything(value: Any) -> None:
    pass


def _check_of(hint: Any, module: str) -> Check | None:
    # A function that never returns has no result; *args: P.args says nothing of one argument.
    if hint in (Any, object, NoReturn) or isinstance(hint, (typing.ParamSpecArgs, typing.ParamSpecKwargs)):
        return None
    try:
        return _written_check(hint, type(hint), module)
    except TypeError:  # not hashable
        return _write_check(hint, module)


@functools.cache
def _written_check(hint: Any, kind: type, module: str) -> Check:
    """kind: equal annotations need not be of one kind, as list[int] and List[int]."""
    return _write_check(hint, module)


def _write_check(hint: Any, module: str) -> Check:
    """module: has the names in the bounds of type variables."""

    def check(value: Any) -> None: ...

    check.__annotations__ = {"value": hint}
    check.__module__, check.__qualname__ = module, "check"
    return beartype(check)


def _has_shapes(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, AbstractArray):
        return True
    inner = typing.get_args(hint)
    return any(_has_shapes(x) for part in inner for x in (part if isinstance(part, list) else [part]))


class _Finder(MetaPathFinder):
    def __init__(self, package: str, folder: Path) -> None:
        self.package, self.folder = package, folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self.folder)
        return spec


class _Loader(SourceFileLoader):
    def __init__(self, name: str, path: str, folder: Path) -> None:
        super().__init__(name, path)
        self.folder = folder

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        versions = (sys.version, inspect.getsource(_decorate), self.path)
        key = hashlib.sha256(repr(versions).encode() + source).hexdigest()
        kept = self.folder / key
        if kept.exists():
            return marshal.loads(kept.read_bytes())
        tree = ast.parse(importlib.util.decode_source(source))
        _decorate(tree)
        code = compile(tree, self.path, "exec", dont_inherit=True)
        partial = kept.with_suffix(f".{os.getpid()}")
        partial.write_bytes(marshal.dumps(code))
        partial.replace(kept)
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[_DECORATOR] = checked
        super().exec_module(module)


def _decorate(node: ast.AST) -> None:
    """Decorates classes outermost, after `dataclass`, and functions innermost, before `jax.jit`. Only
    statements are searched."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            name = ast.Name(_DECORATOR, ast.Load(), lineno=child.lineno, col_offset=child.col_offset)
            name.end_lineno, name.end_col_offset = child.lineno, child.col_offset
            child.decorator_list.insert(
                0 if isinstance(child, ast.ClassDef) else len(child.decorator_list), name
            )
        if not isinstance(child, ast.expr):
            _decorate(child)
