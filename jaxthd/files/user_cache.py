"""Where later runs find what is kept for them."""

import os
from pathlib import Path


def user_cache() -> Path:
    """$XDG_CACHE_HOME/jaxthd, or ~/.cache/jaxthd: what is made or measured once on a machine.

    It may not exist yet.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxthd"
