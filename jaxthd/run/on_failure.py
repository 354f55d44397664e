"""Files and folders that a command has made, and that are removed where it fails."""

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from jaxthd.parallel.processes import is_first


class RemovedOnFailure(AbstractContextManager["RemovedOnFailure"]):
    """A context manager: if what is inside fails or is interrupted, the paths that were not there when it was
    made are removed, and so are folders that were made above them, once they are empty.

    What was there before stays as it is. Of several processes, process 0 removes.
    unless: asked after a failure; where it returns True, all stays.
    """

    def __init__(self, *paths: Path, unless: Callable[[], bool] = lambda: False) -> None:
        self._unless = unless
        self._new = [path for path in paths if is_first() and not path.exists()]
        above = {folder for path in self._new for folder in path.parents if not folder.exists()}
        self._above = sorted(above, key=lambda folder: -len(folder.parts))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or self._unless():
            return
        for path in self._new:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for folder in self._above:
            with suppress(OSError):  # it holds something else
                folder.rmdir()
