"""Where jaxthd keeps what it has made or measured on this machine, for later runs."""

import os
from pathlib import Path


def user_cache() -> Path:
    """$XDG_CACHE_HOME/jaxthd, or ~/.cache/jaxthd. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxthd"
