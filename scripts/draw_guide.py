"""Draws the guide's figures, docs/figures/*.svg.

    python -m scripts.draw_guide [--out docs/figures]

No number is written by hand: scripts/guide_numbers.py computes them with jaxthd's own code. Each file also
holds its numbers (as its Description), so that a test can tell whether the figures match the present code.
"""

import argparse
import io
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib.style
import numpy as np
from jaxtyping import Bool, Float, Int, Shaped
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Polygon, Rectangle

from jaxthd.figures.axes import FAINT, HUES, INK, PADDING, light, tint
from scripts.guide_numbers import (
    AUDIO,
    CAPACITY,
    CHUNK,
    RANKS,
    Numbers,
    buffer_numbers,
    layout_numbers,
    pipeline_numbers,
    ring_numbers,
    slot_numbers,
    state_numbers,
)

OUT = Path(__file__).parents[1] / "docs" / "figures"


class Drawing(NamedTuple):
    """numbers: computes what the figure shows, as JSON. draw: draws the figure from them."""

    numbers: Callable[[], Numbers]
    draw: Callable[[Numbers], Figure]


def hues(ids: Int[np.ndarray, "*slots"]) -> Float[np.ndarray, "*slots 3"]:
    """RGB of documents, one hue after the other by segment id; grey for padding."""
    return np.array([to_rgb(h) for h in (PADDING, *HUES)])[np.where(ids > 0, (ids - 1) % len(HUES) + 1, 0)]


def slot_colors(ids: Int[np.ndarray, " T"], audio: Bool[np.ndarray, " T"]) -> Float[np.ndarray, "T 3"]:
    """RGB of each slot: the document's hue for audio, its light tint for text, grey for padding."""
    rgb = hues(ids)
    return np.where((audio | (ids == 0))[:, None], rgb, tint(rgb))


def slot_legend() -> list[Patch]:
    """Legend entries for slot_colors."""
    return [
        Patch(facecolor=HUES[0], label="audio slots of a document (encoder frames)"),
        Patch(facecolor=light(HUES[0]), label="its text tokens"),
        Patch(facecolor=PADDING, label="padding"),
    ]


def stretches(*rows: Shaped[np.ndarray, " n"]) -> list[tuple[int, int]]:
    """(start, stop) of the longest stretches in which all rows are constant."""
    changes = np.any([row[1:] != row[:-1] for row in rows], axis=0)
    return list(pairwise([0, *(np.flatnonzero(changes) + 1).tolist(), len(rows[0])]))


def strip(axes: Axes, held: Numbers, y: float = 0.0, height: float = 1.0) -> None:
    """Draws slots from left to right: each document has a hue, its text a tint of it."""
    ids, audio = np.array(held["ids"]), np.array(held["audio"], bool)
    rgb = slot_colors(ids, audio)
    for start, stop in stretches(ids, audio):
        axes.add_patch(Rectangle((start, y), stop - start, height, facecolor=rgb[start], linewidth=0))


def entitle(axes: Axes, title: str) -> None:
    """Writes a title above the axes, from their left end."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)


def canvas(axes: Axes, title: str, width: float, low: float, high: float) -> None:
    """Makes the axes a plain area of these bounds under a title."""
    axes.set(xlim=(0, width), ylim=(low, high))
    axes.set_axis_off()
    entitle(axes, title)


def write(axes: Axes, x: float, y: float, text: str, **look: Any) -> None:
    axes.text(x, y, text, **{"fontsize": 9, "ha": "center", "va": "center", "color": INK, **look})


def draw_buffer(numbers: Numbers) -> Figure:
    ids, supervised = np.array(numbers["ids"]), np.array(numbers["supervised"])
    lengths = np.bincount(ids)[1:]
    longest, count = int(lengths.max()), len(lengths)
    figure = Figure(figsize=(11, 5), layout="constrained")
    padded, below, positions = figure.subplots(3, 1, height_ratios=(count, 2.6, 2))
    wasted = 1 - lengths.sum() / (count * longest)
    canvas(
        padded, f"Padded: {count} rows of {longest} slots, {wasted:.0%} of them padding", CAPACITY, 0, count
    )
    for row, length in enumerate(lengths):
        of_row = ids == row + 1
        y = count - 1 - row
        padded.add_patch(Rectangle((length, y), longest - length, 0.8, facecolor=PADDING, linewidth=0))
        strip(padded, {name: np.array(numbers[name])[of_row] for name in ("ids", "audio")}, y, 0.8)
    legend = Patch(facecolor=INK, label="supervised: the next token counts in the loss")
    padded.legend(handles=[*slot_legend(), legend], loc="center right", frameon=False)

    title = f"Packed: the same in one buffer of {len(ids)} slots, {np.mean(ids == 0):.0%} of them padding"
    canvas(below, title, CAPACITY, -1.7, 1)
    strip(below, numbers)
    for start, stop in stretches(supervised):
        if supervised[start]:
            below.add_patch(Rectangle((start, -0.3), stop - start, 0.2, facecolor=INK, linewidth=0))
    for edge in numbers["cu_seqlens"]:
        below.plot([edge, edge], [-0.65, 1], color=INK, linewidth=1, clip_on=False)
        write(below, edge, -0.95, str(edge))
    write(below, 0, -1.4, "cu_seqlens", ha="left", color=FAINT)
    for start, stop in stretches(ids):
        if ids[start] and stop - start > 3:
            write(below, (start + stop) / 2, 0.5, str(ids[start]))

    for start, stop in stretches(ids):
        if ids[start]:
            y = numbers["positions"][start:stop]
            positions.plot(np.arange(start, stop), y, color=HUES[(ids[start] - 1) % len(HUES)], linewidth=2)
    positions.set(xlim=(0, CAPACITY), ylim=(0, longest), xlabel="token slot")
    entitle(positions, "Positions restart in each document")
    positions.spines[["top", "right"]].set_visible(False)
    return figure


def draw_slots(numbers: Numbers) -> Figure:
    ids = np.array(numbers["ids"])
    rows = ("token", "target", "weight", "segment id", "position")
    figure = Figure(figsize=(11, 2.4), layout="constrained")
    axes = figure.subplots()
    canvas(axes, "Two documents, slot by slot: what is predicted where", len(ids), 0, len(rows))
    axes.set_xlim(-1.4, len(ids))
    colors = slot_colors(ids, np.array(numbers["audio"], bool))
    for row, name in enumerate(rows):
        y = len(rows) - 1 - row
        write(axes, -0.15, y + 0.5, name, ha="right", fontweight="bold")
        for slot, value in enumerate(numbers[name]):
            filled = name == "token" or (numbers["weight"][slot] and name in ("target", "weight"))
            color = colors[slot] if filled else "white"
            axes.add_patch(Rectangle((slot, y), 1, 0.94, facecolor=color, edgecolor=PADDING, linewidth=0.8))
            is_dark = name == "token" and value == AUDIO
            write(axes, slot + 0.5, y + 0.47, str(value), fontsize=8, color="white" if is_dark else INK)
    return figure


def draw_layouts(numbers: Numbers) -> Figure:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    first, *others = figure.subplots(RANKS + 1)
    ids, n = np.array(numbers["on ranks"]["ids"]), CAPACITY // RANKS
    canvas(first, "The whole buffer is divided", CAPACITY, -0.7, 1)
    strip(first, numbers["in order"])
    for chunk in range(2 * RANKS):
        first.plot([chunk * CHUNK] * 2, [-0.1, 1.1], color=INK, linewidth=1, clip_on=False)
        rank = min(chunk, 2 * RANKS - 1 - chunk)
        write(first, (chunk + 0.5) * CHUNK, -0.4, f"rank {rank}", fontsize=8)
    first.plot([CAPACITY] * 2, [-0.1, 1.1], color=INK, linewidth=1, clip_on=False)
    work = np.array(numbers["attention work"])
    for rank, axes in enumerate(others):
        canvas(axes, "", n, -0.6, 1)
        own = {name: x[rank * n : (rank + 1) * n] for name, x in numbers["on ranks"].items()}
        strip(axes, own)
        axes.plot([n / 2] * 2, [-0.1, 1.1], color=INK, linewidth=1, clip_on=False)
        share, empty = work[rank] / work.mean(), int((ids[rank * n : (rank + 1) * n] == 0).sum())
        note = f"rank {rank}: attention work {share:.2f} of the mean, {empty} slots of padding"
        write(axes, 0, -0.35, note, ha="left", fontsize=8)
    figure.legend(handles=slot_legend(), loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_ring(numbers: Numbers) -> Figure:
    """Draws a panel for each ring step, with what all ranks compute in it."""
    n = CAPACITY // RANKS
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    row = figure.subplots(1, RANKS)
    ids = np.array(numbers["ids"])
    for step, (axes, of_ranks) in enumerate(zip(row, numbers["keys"], strict=True)):
        pairs = 0
        for rank, (lo, hi) in enumerate(np.array(of_ranks)):
            source, pairs = (rank - step) % RANKS, pairs + int((hi - lo).sum())
            corner = source * n, rank * n
            axes.add_patch(Rectangle(corner, n, n, facecolor="#f6f6f6", edgecolor=FAINT, linewidth=0.6))
            if not (hi > lo).any():
                write(axes, corner[0] + n / 2, corner[1] + n / 2, "skipped", fontsize=7, color=FAINT)
            for start, stop in stretches(np.where(hi > lo, ids[rank], 0)):
                if hi[start] > lo[start]:
                    outline = staircase(lo[start:stop], hi[start:stop], start) + corner
                    rgb = hues(ids[rank, start : start + 1])[0]
                    axes.add_patch(
                        Polygon(outline, facecolor=rgb if step else tint(rgb), edgecolor=INK, linewidth=0.8)
                    )
        axes.set(xlim=(0, CAPACITY), ylim=(CAPACITY, 0), aspect="equal")
        names, middles = [str(rank) for rank in range(RANKS)], (np.arange(RANKS) + 0.5) * n
        axes.set_xticks(middles, names)
        axes.set_yticks(middles, names)
        axes.tick_params(length=0)
        axes.set_xlabel(f"keys of rank\n{pairs:,} pairs")
        name = f"ring step {step}" if step else "own keys"
        axes.set_title(name, fontsize=10, color=INK)
    row[0].set_ylabel("queries of rank", color=INK)
    return figure


def staircase(lo: np.ndarray, hi: np.ndarray, first: int) -> np.ndarray:
    """Corners [points, (key, query)] of the area in which query first + i sees the keys [lo[i], hi[i])."""
    y = np.repeat(np.arange(first, first + len(lo) + 1), 2)[1:-1]
    right, left = (np.stack([np.repeat(x, 2), y], axis=1) for x in (hi, lo))
    points = np.concatenate([right, left[::-1]])
    before, after = np.roll(points, 1, axis=0), np.roll(points, -1, axis=0)
    straight = ((before == points) & (points == after)).any(axis=1)
    return points[~straight].astype(float)


def draw_states(numbers: Numbers) -> Figure:
    ids, state = np.array(numbers["ids"]), np.array(numbers["state"])
    figure = Figure(figsize=(11, 4.8), layout="constrained")
    tokens, curve, table = figure.subplots(3, 1, height_ratios=(1, 3.4, 2.2))
    canvas(tokens, "The buffer in document order, and the rank that holds each chunk", CAPACITY, -0.6, 1)
    strip(tokens, numbers)
    entitle(curve, "The state, token by token: zero before each document")
    curve.set(xlim=(0, CAPACITY), ylim=(0, 1.15 * state.max()), xticks=[])
    curve.spines[["top", "right"]].set_visible(False)
    for start, stop in stretches(ids):
        if ids[start]:
            color = HUES[(ids[start] - 1) % len(HUES)]
            curve.plot(np.arange(start, stop) + 1, state[start:stop], color=color, linewidth=2)
    canvas(table, "What the ranks exchange, and what follows from it", CAPACITY, 0, 3)
    for chunk, rank in enumerate(numbers["ranks"]):
        left, middle = chunk * CHUNK, (chunk + 0.5) * CHUNK
        write(tokens, middle, -0.35, f"chunk {chunk}: rank {rank}", fontsize=8)
        for axes, low, high in ((tokens, -0.1, 1.1), (curve, 0, 1.15 * state.max()), (table, 0, 3)):
            axes.plot([left, left], [low, high], color=INK, linewidth=1, clip_on=False)
        keeps, adds, enters = (numbers[name][chunk] for name in ("keeps", "adds", "enters"))
        if chunk:
            face = INK if keeps else "white"
            curve.plot([left], [enters], "o", markerfacecolor=face, markeredgecolor=INK, clip_on=False)
        write(table, middle, 2.5, f"keeps {keeps:.0%}", color=INK if keeps else FAINT)
        write(table, middle, 1.5, f"adds {adds:.2f}")
        goes_on = numbers["positions"][left] > 0
        write(table, middle, 0.5, f"enters {enters:.2f}", color=INK if goes_on else FAINT)
    handles = [
        curve.plot([], [], "o", markerfacecolor=face, markeredgecolor=INK, linestyle="", label=label)[0]
        for face, label in (
            (INK, "enters the chunk and reaches its end"),
            ("white", "a boundary in the chunk ends it"),
        )
    ]
    figure.legend(handles=handles, frameon=False, loc="outside lower center", ncols=2)
    return figure


def draw_pipeline(numbers: Numbers) -> Figure:
    passes = ("forward", HUES[0]), ("backward", HUES[1])
    titles = {"1": "1F1B: one stage a rank", "2": "Interleaved: two stages a rank (light, dark)"}
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    for (chunks, title), axes in zip(titles.items(), figure.subplots(2, 1), strict=True):
        found = numbers[chunks]
        ticks = len(found["forward"][0][0])
        for half, (name, hue) in enumerate(passes):
            for rank, (microbatches, stages) in enumerate(zip(*found[name], strict=True)):
                for tick, (micro, stage) in enumerate(zip(microbatches, stages, strict=True)):
                    if micro >= 0:
                        corner = tick, rank + 0.46 * half
                        face = hue if stage else light(hue)
                        axes.add_patch(Rectangle(corner, 1, 0.44, facecolor=face, edgecolor="white"))
                        color = "white" if stage else INK
                        write(axes, tick + 0.5, corner[1] + 0.23, str(micro), fontsize=8, color=color)
        axes.set(xlim=(0, ticks), ylim=(RANKS, 0), xlabel="tick")
        axes.set_yticks(np.arange(RANKS) + 0.46, [f"rank {rank}" for rank in range(RANKS)])
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        entitle(axes, f"{title}; ranks idle {found['bubble']:.0%} of the time")
    handles = [Patch(facecolor=light(hue), label=f"{name} of a microbatch") for name, hue in passes]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    return figure


DRAWINGS = {
    "buffer": Drawing(buffer_numbers, draw_buffer),
    "slots": Drawing(slot_numbers, draw_slots),
    "layouts": Drawing(layout_numbers, draw_layouts),
    "ring": Drawing(ring_numbers, draw_ring),
    "states": Drawing(state_numbers, draw_states),
    "pipeline": Drawing(pipeline_numbers, draw_pipeline),
}


def svg(name: str, numbers: Numbers) -> str:
    """The named figure as SVG text with its numbers; every call gives the same text."""
    look: Any = {"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9}
    with matplotlib.style.context("default"), matplotlib.rc_context(look):
        file = io.StringIO()
        metadata = {"Date": None, "Description": json.dumps(numbers)}
        DRAWINGS[name].draw(numbers).savefig(file, format="svg", metadata=metadata)
    return file.getvalue()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Draws the guide's figures.")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for the figures")
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    for name, drawing in DRAWINGS.items():
        (out / f"{name}.svg").write_text(svg(name, drawing.numbers()))
        print(out / f"{name}.svg")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RANKS)
    main()
