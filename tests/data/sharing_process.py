"""A process of a run of three, of which the last two share rows. Its batches are kept in a file.

    python -m tests.data.sharing_process PORT NUMBER FOLDER END

END: what becomes of process 1, which loads for process 2, at the end: "killed" or "hangs".
"""

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from jaxthd.data.loader import Loader, make_loader, whole_position
from jaxthd.data.shared_batches import find_sharers
from jaxthd.data.skipped import SkipLog
from jaxthd.parallel import processes
from jaxthd.parallel.processes import started
from tests.data import items
from tests.data.test_loader import settings

ROWS = [(1,), (0, 2), (0, 2)]
"""Rows of each process."""
loaded: list[int] = []
"""Items that this process has loaded."""
ends = ""
"""What becomes of this process at its next item."""


def load(item: int, epoch: int) -> Any:
    """items.load, which counts."""
    loaded.append(item)
    if ends == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif ends:
        time.sleep(600)
    return items.load(item, epoch)


def parts(loader: Loader, whole: Callable[[dict[str, Any]], Any]) -> Iterator[tuple[str, Any]]:
    """(name, batches) of a run from its beginning and of one that goes on from a state; those states.

    whole: merges the states of all processes."""
    yield "first", list(islice(loader, 3))
    state = whole(loader.get_state())
    yield "state", state
    yield "on", list(islice(loader, 4))
    loader.set_state(state)
    yield "restored", loader.get_state()["latest"]
    yield "again", list(islice(loader, 4))
    yield "after", whole(loader.get_state())


@contextmanager
def opened(rows: Collection[int], log: SkipLog, prefetch: int, **more: Any) -> Iterator[Loader]:
    """A loader of these rows, shared with the processes of this machine."""
    own = {"on_skip": partial(log.add, "set"), "on_read": lambda row, key: log.count_read(row, "set")}
    own |= {"skipped": log, "sharers": find_sharers(rows), "prefetch": prefetch}
    with closing(make_loader([items.SOURCE], load, settings(), rows=rows, **own, **more)) as loader:
        yield loader


def main(port: str, number: str, folder: str, end: str) -> None:
    """Writes FOLDER/NUMBER.pickle, and FOLDER/skipped.jsonl in process 0."""
    me = int(number)
    with started(f"localhost:{port}", len(ROWS), me):
        log = SkipLog(Path(folder, "skipped.jsonl"), writes=not me)
        with opened(ROWS[me], log, 2) as loader:
            found = dict(parts(loader, whole_position))
        with opened(ROWS[me], log, 0, repeat=False) as loader:
            found["pass"] = list(loader)
            found["keys"] = loader.keys(found["pass"][0][1])
        found |= {"loaded": loaded, "read": log.read_of("set")}
        Path(folder, f"{number}.pickle").write_bytes(pickle.dumps(found))
        processes.PATIENCE_SECONDS = 3
        with opened(ROWS[me], log, 2) as loader:
            next(loader)
            globals()["ends"] = end * (me == 1)
            list(islice(loader, 20))


if __name__ == "__main__":
    main(*sys.argv[1:])
