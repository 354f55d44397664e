"""Says why a step's buffers have unusually much padding: what else was full."""

from collections.abc import Callable
from statistics import median

from jaxthd.config import Config
from jaxthd.data.loader import BatchReport
from jaxthd.packing.fit import BufferLimits

SHARE = 0.1
"""Padding up to this share is usual."""
EVERY = 100
"""Least steps between two explanations."""


class PaddingWatch:
    """Call it with every step's report. say: prints a line.

    A step is unusual if more than SHARE of its slots hold padding, and twice the median of the steps before.
    """

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self._ratios: list[float] = []
        self._next = 0

    def __call__(self, step: int, report: BatchReport) -> None:
        ratio = 1 - report.real_tokens / report.capacity_tokens
        usual = median(self._ratios) if self._ratios else 0.0
        self._ratios = [*self._ratios[-EVERY:], ratio]
        if ratio > max(SHARE, 2 * usual) and step >= self._next:
            self._next = step + EVERY
            self._say(f"step {step} has {ratio:.0%} padding: {padding_reason(report, self._config)}")


def padding_reason(report: BatchReport, config: Config) -> str:
    """Why the buffers hold no more tokens, and what to change."""
    data, limits, front_end = config.data, BufferLimits.of(config), config.model.encoder
    rows = [row for row in report.rows if row.documents]
    if not rows:
        return "no document was left for it"
    empty = len(report.rows) - len(rows)
    full = sum(row.segments >= data.max_documents for row in rows)
    most = 0.9 * front_end.seconds(data.audio_capacity) if front_end and limits.array_frames else float("inf")
    heard = sum(row.audio_seconds >= most for row in rows)
    if data.packing == "padded":
        return 'data.packing is "padded": each row holds one document'
    count = len(report.rows)
    if full and full >= heard:
        return f"{full} of {count} buffers hold data.max_documents {data.max_documents} documents; raise it"
    if heard:
        return (
            f"{heard} of {count} buffers are full of audio, data.audio_capacity "
            f"{data.audio_capacity}; raise it, or lower data.capacity (jaxthd plan compares them)"
        )
    if empty:
        return f"{empty} of {count} buffers are empty, because their data have ended"
    return (
        "the next documents were too long for the room that was left, or their audio did not fit the ranks; "
        "raise data.packing_bins (jaxthd plan compares them)"
    )
