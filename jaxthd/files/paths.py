"""Paths as settings, lines and command lines write them."""

import os
from pathlib import Path

from jaxthd.files.remote_path import as_path
from jaxthd.files.stores import is_url


def expand_home(path: str) -> str:
    """Returns the path with a leading ~ or ~USER expanded, unless a file of that very name exists."""
    return os.path.expanduser(path) if path.startswith("~") and not os.path.lexists(path) else path


def home_path(path: str | Path) -> Path:
    """Returns expand_home's path, or a URL's (as_path); the type of arguments of command lines."""
    return as_path(expand_home(str(path)))


def path_exists(text: str) -> bool:
    """Whether there is a file or a folder of that name; True for a URL: its store is asked later."""
    return is_url(text) or os.path.exists(text)
