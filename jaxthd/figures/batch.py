"""The figure of a batch: the documents in every buffer, and the ranks that hold them.

Legend: T token slots of a buffer, A mel frame slots of a row over all its audio ranks, E = A / 8.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from jaxthd.config import Config
from jaxthd.data.loader import BatchReport
from jaxthd.figures.colors import INK, hues, slot_colors, slot_legend
from jaxthd.files.jsonl import naming
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.packing.layout import ContextLayout
from jaxthd.run.metrics import Number

MOST_ROWS = 4
"""Most buffers of a batch that are drawn."""
NUMBERED = 0.015
"""A document's number is written where it takes at least this share of the width."""


def draw_batch(batch: Batch, report: BatchReport, config: Config, path: Path) -> None:
    """Draws a batch as a PNG: the documents in every buffer, and the ranks that hold them.

    batch, report: from a loader of `config`. Raises OSError, which names the file, when it cannot be written.
    """
    with naming(path):
        batch_figure(batch, report, config).savefig(path)


class Buffer(NamedTuple):
    """A row of a batch in document order, with the fields of Batch; the context layout is undone.

    ids: the number of the token's document. segments: Batch.segment_ids.
    """

    ids: Int[np.ndarray, " T"]
    segments: Int[np.ndarray, " T"]
    positions: Int[np.ndarray, " T"]
    audio_slots: Int[np.ndarray, " T"]
    weights: Float[np.ndarray, " T"]

    @property
    def audio(self) -> Bool[np.ndarray, " T"]:
        return self.audio_slots >= 0


def document_order(batch: Batch, row: int, config: Config) -> Buffer:
    """A row of the batch, in the order before it was laid out over the context ranks of `config`."""
    ids, cuts = np.asarray(batch.segment_ids)[row], batch.cuts_of(row)
    back = ContextLayout.of(config).inverse(ids, cuts)
    audio_slots = batch.audio_slots if batch.has_audio else np.full_like(batch.segment_ids, -1)
    fields = batch.documents, batch.segment_ids, batch.positions, audio_slots, batch.weights
    return Buffer(*(np.asarray(x)[row][back] for x in fields))


def batch_figure(batch: Batch, report: BatchReport, config: Config) -> Figure:
    """Two strips for each buffer: its token slots in document order, and its audio as the ranks hold it.

    A document has the same colour in both. Where there is room, its number is written on it. White lines
    divide a document with several answers into its segments.
    """
    rows, capacity = batch.tokens.shape
    drawn = min(rows, MOST_ROWS)
    figure = Figure(figsize=(14, 1.1 + 2.5 * drawn), dpi=100, layout="constrained")
    padding = 1 - report.real_tokens / report.capacity_tokens
    figure.suptitle(
        f"{report.documents} documents in {rows} buffer{'s' * (rows > 1)} of {capacity:,} token slots"
        + (f", of which {drawn} are drawn" if drawn < rows else "")
        + f"; {padding:.1%} padding, {report.audio_seconds:,.1f} s of audio",
        fontweight="bold",
        color=INK,
    )
    strips = figure.subplots(2 * drawn, 1, height_ratios=[1.25, 1] * drawn).reshape(drawn, 2)
    for row, (tokens, audio) in enumerate(strips):
        buffer = document_order(batch, row, config)
        _draw_tokens(tokens, buffer, row, config)
        _draw_audio(audio, batch, buffer, row, config.mesh.audio_ranks)
    supervised = Patch(facecolor=INK, label="supervised: the next token is learned")
    figure.legend(handles=[*slot_legend(), supervised], loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_tokens(axes: Axes, buffer: Buffer, row: int, config: Config) -> None:
    capacity, real = len(buffer.ids), int((buffer.ids > 0).sum())
    context = config.mesh.context
    _strip(
        axes,
        f"buffer {row}{_over(context)}: {buffer.ids.max()} documents in {real:,} slots, "
        f"{buffer.weights.sum():,.0f} supervised",
        "token slot, in document order",
        capacity,
    )
    rgb = slot_colors(buffer.ids, buffer.audio)
    for start, stop in stretches(buffer.ids, buffer.audio):
        axes.add_patch(Rectangle((start, 0), stop - start, 1, facecolor=rgb[start], linewidth=0))
    for start, stop in stretches(buffer.ids):
        _number(axes, start, stop, int(buffer.ids[start]))
    for start, _ in stretches(buffer.segments, buffer.ids)[1:]:
        if buffer.ids[start] and buffer.ids[start] == buffer.ids[start - 1]:
            axes.plot([start] * 2, [0, 1], color="white", linewidth=1.2)
    for start, stop in stretches(buffer.weights):
        if buffer.weights[start]:
            axes.add_patch(Rectangle((start, -0.3), stop - start, 0.2, facecolor=INK, linewidth=0))
    chunks = 1 if context == 1 else 2 * context
    _shares(axes, [min(chunk, chunks - 1 - chunk) for chunk in range(chunks)], capacity)


def _draw_audio(axes: Axes, batch: Batch, buffer: Buffer, row: int, ranks: int) -> None:
    if not batch.has_audio:
        _strip(axes, "no audio: the buffer has no room for any", "", 1.0)
        return
    frames = batch.chunk_ids.shape[1]
    seconds = frames * SUBSAMPLING / 100
    filled = float(np.asarray(batch.mel_mask)[row].sum()) / 100
    _strip(axes, f"its audio{_over(ranks)}: {filled:,.1f} of {seconds:,.1f} s", "seconds", seconds)
    owner, chunk = np.zeros(frames, np.int32), np.asarray(batch.chunk_ids)[row]
    owner[buffer.audio_slots[buffer.audio]] = buffer.ids[buffer.audio]
    rank = np.arange(frames) * ranks // frames
    rgb, second = hues(owner), SUBSAMPLING / 100
    for start, stop in stretches(chunk, rank):
        at, width = (start * second, 0), (stop - start) * second
        axes.add_patch(Rectangle(at, width, 1, facecolor=rgb[start], edgecolor="white", linewidth=0.4))
        _number(axes, start * second, stop * second, int(owner[start]))
    _shares(axes, range(ranks), seconds)


def _over(ranks: int) -> str:
    return f", over {ranks} ranks" if ranks > 1 else ""


def _strip(axes: Axes, title: str, x: str, width: Number) -> None:
    axes.set(xlim=(0, width), ylim=(-0.35, 1.4), yticks=[])
    axes.set_xlabel(x, fontsize=9)
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "left", "right"]].set_visible(False)


def _number(axes: Axes, start: Number, stop: Number, number: int) -> None:
    if number and stop - start > NUMBERED * axes.get_xlim()[1]:
        look: dict[str, Any] = {"fontsize": 8, "color": INK, "ha": "center", "va": "center"}
        axes.text((start + stop) / 2, 0.5, str(number), **look)


def _shares(axes: Axes, ranks: Sequence[int], width: Number) -> None:
    """Divides the strip into equal shares and names the rank that holds each; a single rank is not named."""
    share = width / len(ranks)
    for number, rank in enumerate(ranks if len(ranks) > 1 else ()):
        axes.plot([number * share] * 2, [-0.35, 1.4], color=INK, linewidth=1)
        name = f"rank {rank}" if len(ranks) <= 16 else str(rank)
        axes.text((number + 0.5) * share, 1.08, name, fontsize=9, ha="center", color=INK)


def stretches(*rows: Shaped[np.ndarray, " n"]) -> list[tuple[int, int]]:
    """(start, stop) of the longest stretches in which all rows are constant."""
    changes = np.any([row[1:] != row[:-1] for row in rows], axis=0)
    return list(pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(rows[0])]))
