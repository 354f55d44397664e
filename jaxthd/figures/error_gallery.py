"""The error gallery: spectrograms of documents, with hypothesis and reference, the differing words marked.

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

from jaxthd.figures.axes import FAINT, HUES, INK
from jaxthd.files.jsonl import naming
from jaxthd.inference.wer import differs

WIDTH, POINTS = 13.0, 72
"""The picture's width in inches, and points an inch."""
SIZE = 9
"""Size of the letters, in points."""
ADVANCE = 0.602 * SIZE
"""Width of a letter of DejaVu Sans Mono, which comes with matplotlib, in points."""
DPI = 120
"""Dots an inch. A letter's width is a whole number of them; otherwise letters are drawn wider."""
MARGIN = 11
"""Letters to the left of the words, for the line's label."""
COLUMNS = int(0.94 * WIDTH * POINTS / ADVANCE) - MARGIN
"""Letters of a line of words."""
MOST_LINES = 6
"""Lines of a text that are shown; a note counts the words of the rest."""
LINE = 1.5 * SIZE / POINTS
"""Height of a line of text, in inches."""
SPECTROGRAM, GAP = 1.1, 0.45
"""Heights in inches: a spectrogram; the room for its title above and for its seconds below."""


class Case(NamedTuple):
    """A document of the gallery.

    features: an array for each piece of its audio. words: pairs (reference word, hypothesis word), aligned.
    frame_seconds: from one frame to the next.
    """

    title: str
    features: Sequence[Float32[np.ndarray, "F M"]]
    words: Sequence[tuple[str, str]]
    frame_seconds: float = 0.01


Line = list[tuple[str, str]]
"""Pairs (reference word, hypothesis word), drawn one above the other; "" for a missing word."""


def draw_gallery(cases: Sequence[Case], path: Path) -> None:
    """Draws the cases one below the other, as a PNG. Raises OSError, which names the file, when it cannot be
    written.
    """
    with naming(path), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph", UserWarning)  # a box stands for a letter the font lacks
        gallery_figure(cases).savefig(path)


def gallery_figure(cases: Sequence[Case]) -> Figure:
    """The figure of the cases, each a spectrogram over its lines of words."""
    lines = [wrapped(case.words) for case in cases]
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


def wrapped(pairs: Sequence[tuple[str, str]]) -> list[Line]:
    """Breaks the pairs into lines of at most COLUMNS letters, and shortens words that are longer than a line.

    If there are more than MOST_LINES lines, the last one is a note that counts the remaining words.
    """
    pairs = [(reference[: COLUMNS - 1], hypothesis[: COLUMNS - 1]) for reference, hypothesis in pairs]
    lines: list[Line] = [[]]
    used = 0
    for pair in pairs:
        width = max(map(len, pair)) + 1
        if used and used + width > COLUMNS:
            lines.append([])
            used = 0
        lines[-1].append(pair)
        used += width
    if len(lines) > MOST_LINES:
        remaining = sum(map(len, lines[MOST_LINES - 1 :]))
        note = f"... and {remaining} words more"
        lines = [*lines[: MOST_LINES - 1], [(note, note)]]
    return lines


def _draw_features(axes: Axes, case: Case) -> None:
    axes.set_title(case.title, loc="left", fontsize=SIZE + 1, fontweight="bold", color=INK, parse_math=False)
    axes.set_yticks([])
    axes.tick_params(labelsize=SIZE - 1)
    if not case.features:
        axes.set_xticks([])
        axes.text(0.5, 0.5, "no recording", ha="center", color=FAINT, transform=axes.transAxes)
        return
    mels_MF = np.concatenate(list(case.features)).T
    seconds = mels_MF.shape[1] * case.frame_seconds
    axes.imshow(mels_MF, aspect="auto", origin="lower", cmap="magma", extent=(0, seconds, 0, len(mels_MF)))
    for end in np.cumsum([len(piece) for piece in case.features])[:-1] * case.frame_seconds:
        axes.axvline(end, color="white", linewidth=1, linestyle=":")
    axes.set_xlabel("seconds", fontsize=SIZE - 1, labelpad=0)


def _draw_words(axes: Axes, lines: Sequence[Line]) -> None:
    axes.set(xlim=(0, 0.94 * WIDTH * POINTS), ylim=(3 * len(lines) + 1, 0))
    axes.axis("off")
    for number, line in enumerate(lines):
        at = 3 * number + 1.0
        for row, (label, hue) in enumerate((("reference", HUES[0]), ("hypothesis", HUES[1]))):
            _write(axes, 0, at + row, label, FAINT)
            column = MARGIN
            for pair in line:
                is_wrong, width = differs(*pair), max(map(len, pair))
                word = pair[row] or "*" * width
                _write(axes, column, at + row, word, hue if is_wrong else INK, bold=is_wrong)
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
