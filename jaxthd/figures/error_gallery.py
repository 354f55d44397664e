"""A picture of what went most wrong: spectrograms, and texts with the words that differ marked.

Legend: F mel frames, M mel bands.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxthd.figures.curves import FAINT, HUES, INK
from jaxthd.files.jsonl import naming
from jaxthd.inference.wer import aligned_words

WIDTH, POINTS = 13.0, 72
"""Of the picture, in inches; points an inch."""
SIZE = 9
"""Of the letters, in points."""
ADVANCE = 0.602 * SIZE
"""Width of a letter of DejaVu Sans Mono, which comes with matplotlib, in points."""
DPI = 120
"""Dots an inch, at which that is a whole number of them: else letters are drawn wider."""
MARGIN = 7
"""Letters to the left of the words, for what the line is."""
COLUMNS = int(0.94 * WIDTH * POINTS / ADVANCE) - MARGIN
"""Letters of a line of words."""
MOST_LINES = 6
"""Of a text; the rest is left out, and said so."""
LINE = 1.5 * SIZE / POINTS
"""Height of a line of text, in inches."""
SPECTROGRAM, GAP = 1.1, 0.45
"""Heights in inches: of a spectrogram; above it for its title, and below it for its seconds."""


class Case(NamedTuple):
    """title: what it is. chunks: its log-mel features, an array for each piece that the encoder takes by
    itself. reference, hypothesis: normalised, words with single spaces between them.
    """

    title: str
    chunks: Sequence[Float32[np.ndarray, "F M"]]
    reference: str
    hypothesis: str


Line = list[tuple[str, str]]
"""Pairs of words above one another, "" where there is none."""


def draw_worst(cases: Sequence[Case], path: Path) -> None:
    """A PNG, the cases below one another. Raises OSError, naming the file, when it cannot be written."""
    with naming(path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a box stands for what the font has not
        worst_figure(cases).savefig(path)


def worst_figure(cases: Sequence[Case]) -> Figure:
    lines = [wrapped(aligned_words(case.reference, case.hypothesis)) for case in cases]
    heights = [SPECTROGRAM + 2 * GAP + LINE * (3 * len(found) + 1) for found in lines]
    figure = Figure(figsize=(WIDTH, sum(heights) + GAP), dpi=DPI)
    top, whole = sum(heights) + GAP / 2, sum(heights) + GAP
    for case, found, height in zip(cases, lines, heights, strict=True):
        left, width = 0.03, 0.94
        bottom = top - GAP - SPECTROGRAM
        axes = figure.add_axes((left, bottom / whole, width, SPECTROGRAM / whole))
        _draw_features(axes, case)
        text = LINE * (3 * len(found) + 1)
        words = figure.add_axes((left, (bottom - GAP - text) / whole, width, text / whole))
        _draw_words(words, found)
        top -= height
    return figure


def wrapped(pairs: Line) -> list[Line]:
    """Lines of at most COLUMNS letters. Words that have more are cut; what is beyond MOST_LINES is left out,
    a note in its place.
    """
    pairs = [(said[: COLUMNS - 1], heard[: COLUMNS - 1]) for said, heard in pairs]
    lines: list[Line] = [[]]
    used = 0
    for said, heard in pairs:
        width = max(len(said), len(heard)) + 1
        if used and used + width > COLUMNS:
            lines.append([])
            used = 0
        lines[-1].append((said, heard))
        used += width
    if len(lines) > MOST_LINES:
        left_out = sum(map(len, lines[MOST_LINES - 1 :]))
        note = f"... and {left_out} words more"
        lines = [*lines[: MOST_LINES - 1], [(note, note)]]
    return lines


def _draw_features(axes: Axes, case: Case) -> None:
    axes.set_title(case.title, loc="left", fontsize=SIZE + 1, fontweight="bold", color=INK, parse_math=False)
    axes.set_yticks([])
    axes.tick_params(labelsize=SIZE - 1)
    if not case.chunks:
        axes.set_xticks([])
        axes.text(0.5, 0.5, "no recording", ha="center", color=FAINT, transform=axes.transAxes)
        return
    mels_MF = np.concatenate(list(case.chunks)).T
    seconds = mels_MF.shape[1] / 100
    axes.imshow(mels_MF, aspect="auto", origin="lower", cmap="magma", extent=(0, seconds, 0, len(mels_MF)))
    for end in np.cumsum([len(chunk) for chunk in case.chunks])[:-1] / 100:
        axes.axvline(end, color="white", linewidth=1, linestyle=":")
    axes.set_xlabel("seconds", fontsize=SIZE - 1, labelpad=0)


def _draw_words(axes: Axes, lines: Sequence[Line]) -> None:
    axes.set(xlim=(0, 0.94 * WIDTH * POINTS), ylim=(3 * len(lines) + 1, 0))
    axes.axis("off")
    for number, line in enumerate(lines):
        at = 3 * number + 1.0
        for row, (label, hue) in enumerate((("said", HUES[0]), ("heard", HUES[1]))):
            _write(axes, 0, at + row, label, FAINT)
            column = MARGIN
            for pair in line:
                differs, width = pair[0] != pair[1], max(map(len, pair))
                word = pair[row] or "*" * width
                _write(axes, column, at + row, word, hue if differs else INK, bold=differs)
                column += width + 1


def _write(axes: Axes, column: int, row: float, text: str, color: str, *, bold: bool = False) -> None:
    axes.text(
        column * ADVANCE,
        row,
        text,
        color=color,
        fontsize=SIZE,
        family="DejaVu Sans Mono",
        fontweight="bold" if bold else "normal",
        va="center",
        parse_math=False,
    )
