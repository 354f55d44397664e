"""The error gallery: every word under its counterpart, differing words marked."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from jaxthd.figures.axes import FAINT, INK
from jaxthd.figures.error_gallery import (
    COLUMNS,
    DPI,
    MOST_LINES,
    WIDTH,
    Case,
    draw_gallery,
    gallery_figure,
    wrapped,
)
from jaxthd.inference.wer import aligned_words

RNG = np.random.default_rng(0)


def case(reference: str, hypothesis: str, *frames: int) -> Case:
    chunks = [RNG.normal(size=(n, 8)).astype(np.float32) for n in frames]
    return Case("dev  3:a$b.wav", chunks, aligned_words(reference, hypothesis))


def words(figure: Figure) -> list[list[tuple[str, bool]]]:
    """Of each case its texts: (word, whether it is marked)."""
    return [
        [(text.get_text(), text.get_color() != INK) for text in axes.texts if text.get_color() != FAINT]
        for axes in figure.axes[1::2]
    ]


def test_words_that_differ_are_marked():
    figure = gallery_figure([case("one two three", "one too three four", 130), case("$a_b^c$", "$a", 30, 70)])
    same, other = words(figure)
    assert same == [
        ("one", False),
        ("two", True),
        ("three", False),
        ("****", True),
        ("one", False),
        ("too", True),
        ("three", False),
        ("four", True),
    ]
    assert other == [("$a_b^c$", True), ("$a", True)]


def test_spectrograms_show_all_frames_by_seconds():
    figure = gallery_figure([case("a", "b", 130, 70), case("a", "b")])
    picture, silent = figure.axes[::2]
    assert picture.images[0].get_array().shape == (8, 200)
    assert picture.get_xlim() == (0, 2)
    assert len(picture.lines) == 1, "where the encoder's pieces meet"
    assert not silent.images
    assert silent.texts[0].get_text() == "no recording"


def test_lines_are_wrapped_and_what_is_too_much_is_counted():
    pairs = [(f"w{n}", "x" * 10) for n in range(300)]
    lines = wrapped(pairs)
    assert len(lines) == MOST_LINES
    shown = [pair for line in lines[:-1] for pair in line]
    assert shown == pairs[: len(shown)]
    assert lines[-1][0][0] == f"... and {300 - len(shown)} words more"
    assert all(sum(max(map(len, pair)) + 1 for pair in line) <= COLUMNS for line in lines)
    assert wrapped([("a", "y" * 10_000)]) == [[("a", "y" * (COLUMNS - 1))]]
    figure = gallery_figure([case("", "y" * 10_000, 10)])
    figure.draw_without_rendering()
    right = max(text.get_window_extent().x1 for text in figure.axes[1].texts)
    assert right <= WIDTH * DPI, "inside the picture"


def test_any_text_is_drawn(tmp_path: Path):
    draw_gallery([case("日本語 ok", "", 20), case("", "", 5)], tmp_path / "gallery.png")
    assert (tmp_path / "gallery.png").read_bytes().startswith(b"\x89PNG")
