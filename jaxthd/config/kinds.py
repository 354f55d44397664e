"""A register of kinds: classes of settings by the name that they have in `kind`."""

from importlib import import_module
from typing import Any, Generic, TypeVar

Kind = TypeVar("Kind")


class Kinds(Generic[Kind]):
    """The classes of one sort, such as blocks. Those of jaxthd stand first, whoever registers first.

    what: the sort, for messages. built_in: the package that registers jaxthd's own. Settings are below
    models, so it is imported by name.
    """

    def __init__(self, what: str, built_in: str) -> None:
        self._what, self._built_in = what, built_in
        self._kinds: dict[str, type[Kind]] = {}

    def register(self, kind: type[Kind]) -> None:
        """Makes a class known by its name. Raises ValueError for a name that another one has, and for a class
        without default settings."""
        self.all()
        try:
            made: Any = kind()
        except TypeError as error:
            raise ValueError(
                f"{self._what} {kind.__name__} cannot be made without arguments ({error}); expected a "
                "default for each of its settings: give them"
            ) from error
        known = self._kinds.get(made.kind)
        if not made.kind or (known and known is not kind and not _is_same(known, kind)):
            raise ValueError(
                f"{self._what} {kind.__name__} is named {made.kind!r}; expected a name of its own: change "
                "`kind`"
            )
        self._kinds[made.kind] = kind

    def all(self) -> dict[str, type[Kind]]:
        """The classes by name."""
        import_module(self._built_in)
        return self._kinds


def _is_same(known: type, kind: type) -> bool:
    """Whether a class is an earlier one, made again: its file ran twice, as a program or a config file."""
    return known.__qualname__ == kind.__qualname__ and not known.__module__.startswith("jaxthd.")
