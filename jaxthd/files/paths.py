"""Paths as settings, lines and command lines write them; and where later runs find what is kept for them."""

import os
from pathlib import Path


def expand_home(path: str) -> str:
    """Returns the path with a leading ~ or ~USER expanded, unless a file of that very name exists."""
    return os.path.expanduser(path) if path.startswith("~") and not os.path.lexists(path) else path


def home_path(path: str | Path) -> Path:
    """Returns expand_home's path as a Path; the type of arguments of command lines."""
    return Path(expand_home(str(path)))


def user_cache() -> Path:
    """$XDG_CACHE_HOME/jaxthd, or ~/.cache/jaxthd: what is made or measured once on a machine.

    It may not exist yet.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxthd"
