"""Paths as settings and lines write them."""

import os


def expand_home(path: str) -> str:
    """Returns the path with a leading ~ or ~USER expanded, unless a file of that very name exists."""
    return os.path.expanduser(path) if path.startswith("~") and not os.path.lexists(path) else path
