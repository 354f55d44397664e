"""What a run says about its ladder of buffer sizes: when a rung's program is compiled, and how often each is
used.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager

from jaxthd.config import DataConfig, Rung


class RungWatch(AbstractContextManager["RungWatch"]):
    """Call it with every step's rung before the step. say: prints a line, also on exit.

    Without a ladder it says that the step is compiled, once.
    """

    def __init__(self, data: DataConfig, say: Callable[[str], None]) -> None:
        self._ladder, self._say = data.ladder, say
        self._used: Counter[int] = Counter()

    def __call__(self, step: int, rung: int) -> None:
        if not self._used[rung]:
            which = f" for buffers of {describe(self._ladder[rung])}" if len(self._ladder) > 1 else ""
            self._say(f"step {step}: compiling the training step{which}")
        self._used[rung] += 1

    def __exit__(self, *_: object) -> None:
        if used := self.summary():
            self._say(used)

    def summary(self) -> str:
        """How often each rung was used; "" without a ladder."""
        total = self._used.total()
        if len(self._ladder) == 1 or not total:
            return ""
        shares = (f"{self._used[n] / total:.0%} {describe(rung)}" for n, rung in enumerate(self._ladder))
        return f"steps by size of their buffers: {'; '.join(shares)}"


def describe(rung: Rung) -> str:
    return f"{rung.capacity:,} slots, {rung.max_documents} documents, {rung.audio_capacity:,} mel frames"
