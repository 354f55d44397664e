"""Where files are kept that can be made again."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/jaxthd, or ~/.cache/jaxthd."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxthd"
