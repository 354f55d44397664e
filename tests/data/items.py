"""Items and what loads them, for the loader's tests. Worker processes import this: no jax, no grain."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from jaxthd.data.skipped import Skipped
from jaxthd.packing.document import Document
from tests.clips import clip_of
from tests.packing.test_pack import AUDIO, MELS, random_document

SOURCE = range(41)
# Unreadable; too many tokens; too much audio; chunks that fill no two ranks.
BROKEN, LONG, LOUD, WIDE = 5, 12, 23, 34


def load(item: int, epoch: int) -> Document | Skipped:
    if item == BROKEN:
        return Skipped(f"item-{item}", "broken")
    if item == LONG:
        return Document.splice("item-12", [1] * 200, [True] * 200, [], AUDIO)
    if item in (LOUD, WIDE):
        frames = {LOUD: [400, 400], WIDE: [136, 136, 136]}[item]
        clip = [np.ones((n, MELS), np.float32) for n in frames]
        return Document.splice(f"item-{item}", [AUDIO, 3], [False, True], [clip_of(clip)], AUDIO)
    return random_document(np.random.default_rng(item), f"item-{item}", chunk_frames=100)


def to_document(item: int) -> Document | Skipped:
    return load(item, 0)


def quiet(key: str, reason: str) -> None:
    pass


def draw(item: int, epoch: int) -> Document:
    """A document whose token, less 100, is the epoch it was loaded in."""
    return Document.splice(f"item-{item}", [100 + epoch], [False], [], AUDIO)


def where(item: int, epoch: int) -> tuple[int, int, int, int, set[str]]:
    """(item, epoch, process, its session, what it should not have imported)."""
    return item, epoch, os.getpid(), os.getsid(0), {"jax", "grain"} & set(sys.modules)


class Killer:
    """load(item, epoch) -> item, but item 3 ends its process; `once`: only while that file is missing."""

    def __init__(self, way: str, once: Path | None = None) -> None:
        self.way, self.once = way, once

    def __call__(self, item: int, epoch: int) -> int:
        if item == 3 and not (self.once and self.once.exists()):
            if self.once:
                self.once.touch()
            if self.way == "hang":
                time.sleep(600)
            elif self.way == "exit":
                os._exit(7)
            os.kill(os.getpid(), signal.SIGKILL)
        return item


class Told:
    """load(item, epoch) -> (item, the items of its request, of which it was told before)."""

    def ahead(self, items: list[int]) -> None:
        self.items = items

    def __call__(self, item: int, epoch: int) -> tuple[int, list[int]]:
        return item, self.items


def fail(item: int, epoch: int) -> Document:
    if item == 11:
        raise ZeroDivisionError("our defect")
    return draw(item, epoch)


def lock(item: int, epoch: int) -> object:
    """What no process can send."""
    return threading.Lock()
