"""Pictures of a run: its curves, and the documents of a batch.

    python -m jaxthd.figures.curves --workdir runs/cp2

draws the run's curves anew, from its metrics.jsonl into its curves.png.

Figures are made without pyplot: nothing global is touched and no display is needed.

Legend: T token slots of a buffer, A mel frame slots of a row over all its audio ranks, E = A / 8.
"""

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import (
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
    StrMethodFormatter,
)

from jaxthd.config import Config
from jaxthd.data.loader import BatchReport
from jaxthd.errors import readable_errors
from jaxthd.files.jsonl import naming
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.packing.layout import inverse_permutation, row_permutation
from jaxthd.run.metrics import Number, read_metrics, values

HUES = ("#3b6fb6", "#d1662b", "#3f8f4f", "#8a5fb0", "#b8902a", "#2b8f96", "#b84a6b")
PADDING, INK, FAINT = "#dcdcdc", "#222222", "#9a9a9a"
STRETCHES = 50
"""Most points of a smoothed curve."""
MOST_ROWS = 4
"""Buffers of a batch that are drawn."""
NUMBERED = 0.015
"""A document's number is written where it takes this share of the width."""


def hues(ids: Int[np.ndarray, "*slots"]) -> Float[np.ndarray, "*slots 3"]:
    """RGB of documents by their segment ids, in turn; grey for padding."""
    return np.array([to_rgb(h) for h in (PADDING, *HUES)])[np.where(ids > 0, (ids - 1) % len(HUES) + 1, 0)]


def tint(rgb: Float[np.ndarray, "*slots 3"]) -> Float[np.ndarray, "*slots 3"]:
    return 0.4 * rgb + 0.6


def light(hue: str) -> str:
    """A hue's tint by name, for legends."""
    red, green, blue = tint(np.array(to_rgb(hue)))
    return to_hex((red, green, blue))


def slot_colors(ids: Int[np.ndarray, " T"], audio: Bool[np.ndarray, " T"]) -> Float[np.ndarray, "T 3"]:
    """RGB of each slot: the document's hue where it holds audio, a light tint of it in text, grey padding."""
    rgb = hues(ids)
    return np.where((audio | (ids == 0))[:, None], rgb, tint(rgb))


def slot_legend() -> list[Patch]:
    return [
        Patch(facecolor=HUES[0], label="audio slots of a document (encoder frames)"),
        Patch(facecolor=light(HUES[0]), label="its text tokens"),
        Patch(facecolor=PADDING, label="padding"),
    ]


class Buffer(NamedTuple):
    """A row of a batch in document order, the context layout undone: each [T], as in Batch."""

    ids: Int[np.ndarray, " T"]
    positions: Int[np.ndarray, " T"]
    audio_slots: Int[np.ndarray, " T"]
    weights: Float[np.ndarray, " T"]

    @property
    def audio(self) -> Bool[np.ndarray, " T"]:
        return self.audio_slots >= 0


def document_order(batch: Batch, row: int, config: Config) -> Buffer:
    """Row `row`, as it was before it was laid out over the context ranks of `config`."""
    context, layout = config.mesh.context, config.compute.context_layout
    ids = np.asarray(batch.segment_ids)[row]
    back = inverse_permutation(row_permutation(ids, context, layout, config.data.round_to))
    audio_slots = batch.audio_slots if batch.has_audio else np.full_like(batch.segment_ids, -1)
    fields = batch.segment_ids, batch.positions, audio_slots, batch.weights
    return Buffer(*(np.asarray(x)[row][back] for x in fields))


def draw_curves(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The run's curves as a PNG of 1200 x 800 pixels. lines: as read_metrics returns them.

    Raises OSError, naming the file, when it cannot be written.
    """
    _save(curves_figure(lines), path)


def draw_batch(batch: Batch, report: BatchReport, config: Config, path: Path) -> None:
    """The documents of a batch as a PNG: what every buffer holds, and which rank has it.

    batch, report: as the Loader of `config` gives them.
    Raises OSError, naming the file, when it cannot be written.
    """
    _save(batch_figure(batch, report, config), path)


def _save(figure: Figure, path: Path) -> None:
    with naming(path):
        figure.savefig(path)


def curves_figure(lines: Sequence[Mapping[str, Any]]) -> Figure:
    """Four pictures: loss, validation, optimization, speed; all over the optimizer's steps."""
    figure = Figure(figsize=(12, 8), dpi=100, layout="constrained")
    loss, errors, gradient, speed = figure.subplots(2, 2, sharex=True).flat

    _titled(loss, "Loss", "nats a supervised token")
    _curve(loss, lines, "loss", HUES[0], np.mean, "training")
    _points(loss, lines, "validation_loss", HUES[1], "validation", "{:.2f}")
    _log_scale(loss)
    bad = [x["step"] for x in lines if not math.isfinite(x.get("loss", 0) + x.get("grad_norm", 0))]
    if bad:
        at_bottom = {"transform": loss.get_xaxis_transform(), "clip_on": False, "color": "red"}
        loss.plot(bad, np.zeros(len(bad)), "x", label=f"{len(bad)} step(s) not finite", **at_bottom)
    loss.legend(frameon=False)

    _titled(errors, "Validation", "share of words, of tokens")
    _points(errors, lines, "validation_wer", HUES[1], "word error rate", "{:.1%}")
    _points(errors, lines, "validation_accuracy", HUES[2], "accuracy of the next token", "{:.1%}")
    errors.yaxis.set_major_formatter(PercentFormatter(1))
    if errors.lines:
        # An untrained model can say many times more words than there are.
        errors.set_ylim(0, max(1.05, min(1.5, max(max(line.get_ydata()) for line in errors.lines))))
        errors.legend(frameon=False)
    else:
        errors.text(0.5, 0.5, "not measured", ha="center", color=FAINT, transform=errors.transAxes)

    _titled(gradient, "Optimization", "gradient norm before clipping", HUES[0])
    _curve(gradient, lines, "grad_norm", HUES[0], np.mean)
    gradient.set_ylim(bottom=0)
    rate = _second(gradient, "learning rate", HUES[1])
    rate.plot(*_xy(lines, "learning_rate"), color=HUES[1])
    rate.set_ylim(bottom=0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))

    _titled(speed, "Speed", "real tokens a second", HUES[0])
    _curve(speed, lines, "tokens_per_second", HUES[0], np.median)
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    padding = _second(speed, "padding, share of token slots", HUES[1])
    steps, shares = _xy(lines, "padding_ratio")
    padding.plot(steps, shares, color=HUES[1], linewidth=0.8)
    padding.set_ylim(0, max(0.1, 1.1 * max(shares, default=0)))
    padding.yaxis.set_major_formatter(PercentFormatter(1))
    return figure


def _titled(axes: Axes, title: str, y: str, color: str = INK) -> None:
    axes.set_title(title, loc="left", fontweight="bold", color=INK)
    axes.set_xlabel("step")
    axes.tick_params(labelbottom=True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(y, color=color)
    axes.grid(color=PADDING, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _log_scale(axes: Axes) -> None:
    """For what is drawn in y. Labels are few: in even steps over less than a factor of 5, then 1, 2 and 5 of
    each power of ten, over many powers some of these alone.
    """
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    marks = (1, 2, 5) if high < 2000 * low else (1,)
    axes.yaxis.set_major_locator(MaxNLocator(6) if high < 5 * low else LogLocator(subs=marks, numticks=8))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _second(axes: Axes, y: str, color: str) -> Axes:
    """A scale of its own at the right."""
    second = axes.twinx()
    second.set_ylabel(y, color=color)
    second.spines[["top"]].set_visible(False)
    return second


def _xy(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[Number]]:
    found = values(lines, name)
    return [step for step, _ in found], [value for _, value in found]


def _curve(
    axes: Axes,
    lines: Sequence[Mapping[str, Any]],
    name: str,
    color: str,
    middle: Callable[[np.ndarray], Any],
    label: str = "",
) -> None:
    """Every step, faint, and over it the middle of at most STRETCHES stretches of the run."""
    steps, found = _xy(lines, name)
    axes.plot(steps, found, color=color, alpha=0.3, linewidth=0.8)
    cuts = min(STRETCHES, len(found))
    smooth = [
        [float(f(x)) for x in np.array_split(y, cuts or 1) if len(x)]
        for f, y in ((np.mean, steps), (middle, found))
    ]
    axes.plot(*smooth, color=color, linewidth=2, label=label)


def _points(
    axes: Axes, lines: Sequence[Mapping[str, Any]], name: str, color: str, label: str, form: str
) -> None:
    """Measured now and then: markers; the legend says where it began and ended."""
    steps, found = _xy(lines, name)
    if found:
        ends = f"{form.format(found[0])} \N{RIGHTWARDS ARROW} {form.format(found[-1])}"
        axes.plot(steps, found, "o-", color=color, markersize=4, label=f"{label}: {ends}")


def batch_figure(batch: Batch, report: BatchReport, config: Config) -> Figure:
    """Two strips a buffer: its token slots in document order, and its audio as the ranks hold it.

    A document has one colour in both, and its number in the buffer where there is room: the segment id.
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
    learnt = Patch(facecolor=INK, label="supervised: the next token is learned")
    figure.legend(handles=[*slot_legend(), learnt], loc="outside lower center", ncols=4, frameon=False)
    return figure


def _draw_tokens(axes: Axes, buffer: Buffer, row: int, config: Config) -> None:
    capacity, real = len(buffer.ids), int((buffer.ids > 0).sum())
    context, each = config.mesh.context, config.compute.context_layout == "document"
    over = f"{', each document' * (each and context > 1)}{_over(context)}"
    _strip(
        axes,
        f"buffer {row}{over}: {buffer.ids.max()} documents in {real:,} slots, "
        f"{buffer.weights.sum():,.0f} supervised",
        "token slot, in document order",
        capacity,
    )
    rgb = slot_colors(buffer.ids, buffer.audio)
    for start, stop in stretches(buffer.ids, buffer.audio):
        axes.add_patch(Rectangle((start, 0), stop - start, 1, facecolor=rgb[start], linewidth=0))
    for start, stop in stretches(buffer.ids):
        _number(axes, start, stop, int(buffer.ids[start]))
    for start, stop in stretches(buffer.weights):
        if buffer.weights[start]:
            axes.add_patch(Rectangle((start, -0.3), stop - start, 0.2, facecolor=INK, linewidth=0))
    chunks = 1 if context == 1 or each else 2 * context
    _shares(axes, [min(chunk, chunks - 1 - chunk) for chunk in range(chunks)], capacity)


def _draw_audio(axes: Axes, batch: Batch, buffer: Buffer, row: int, ranks: int) -> None:
    if not batch.has_audio:
        _strip(axes, "no audio: the buffer has no room for any", "", 1.0)
        return
    frames = batch.chunk_ids.shape[1]
    seconds = frames * SUBSAMPLING / 100
    heard = float(np.asarray(batch.mel_mask)[row].sum()) / 100
    _strip(axes, f"its audio{_over(ranks)}: {heard:,.1f} of {seconds:,.1f} s", "seconds", seconds)
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
    """Equal shares of the strip, each with the rank that holds it above; a single one needs none."""
    share = width / len(ranks)
    for place, rank in enumerate(ranks if len(ranks) > 1 else ()):
        axes.plot([place * share] * 2, [-0.35, 1.4], color=INK, linewidth=1)
        name = f"rank {rank}" if len(ranks) <= 16 else str(rank)
        axes.text((place + 0.5) * share, 1.08, name, fontsize=9, ha="center", color=INK)


def stretches(*rows: Shaped[np.ndarray, " n"]) -> list[tuple[int, int]]:
    """(start, stop) of the longest stretches in which none of the rows changes."""
    changes = np.any([row[1:] != row[:-1] for row in rows], axis=0)
    return list(pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(rows[0])]))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m jaxthd.figures.curves", description="Draws a run's curves anew."
    )
    parser.add_argument("--workdir", type=Path, required=True, help="folder of the run; receives curves.png")
    workdir = parser.parse_args(argv).workdir
    draw_curves(read_metrics(workdir), workdir / "curves.png")
    print(workdir / "curves.png")


if __name__ == "__main__":
    with readable_errors():
        main()
