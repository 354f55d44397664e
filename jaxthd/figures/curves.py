"""The curves of a run: loss, validation, optimization, speed.

Figures are made without pyplot: nothing global changes and no display is needed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import (
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
    StrMethodFormatter,
)

from jaxthd.figures.colors import FAINT, HUES, INK, PADDING
from jaxthd.files.jsonl import naming
from jaxthd.run.metrics import Number, values

SMOOTHED_POINTS = 50
"""Most points of a smoothed curve."""


def draw_curves(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the run's curves as a PNG of 1200 x 800 pixels. lines: as read_metrics returns them.

    Raises OSError, which names the file, when it cannot be written.
    """
    with naming(path):
        curves_figure(lines).savefig(path)


def curves_figure(lines: Sequence[Mapping[str, Any]]) -> Figure:
    """Four axes over the optimizer's steps: loss, validation, optimization, speed."""
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
        # The word error rate of an untrained model can be many times 1.
        top = max(1.05, min(1.5, max(max(line.get_ydata()) for line in errors.lines)))
        errors.set_ylim(0, top)
        _mark_above(errors, lines, "validation_wer", top, HUES[1])
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


def _mark_above(axes: Axes, lines: Sequence[Mapping[str, Any]], name: str, top: float, color: str) -> None:
    """Marks the values above the top of the axes there, and writes them beside the marks."""
    for step, value in values(lines, name):
        if value > top:
            axes.scatter(step, top, marker="^", color=color, clip_on=False)
            axes.annotate(
                f"{value:.0%}",
                (step, top),
                (6, -4),
                textcoords="offset points",
                va="top",
                color=color,
                annotation_clip=False,
            )


def _titled(axes: Axes, title: str, y: str, color: str = INK) -> None:
    axes.set_title(title, loc="left", fontweight="bold", color=INK)
    axes.set_xlabel("step")
    axes.tick_params(labelbottom=True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(y, color=color)
    axes.grid(color=PADDING, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _log_scale(axes: Axes) -> None:
    """Makes the y axis logarithmic, with few labels.

    Over less than a factor of 5 the labels are evenly spaced. Over more they are at 1, 2 and 5 times each
    power of ten, and over more than three powers of ten at powers only, or some of them.
    """
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    marks = (1, 2, 5) if high < 2000 * low else (1,)
    axes.yaxis.set_major_locator(MaxNLocator(6) if high < 5 * low else LogLocator(subs=marks, numticks=8))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _second(axes: Axes, y: str, color: str) -> Axes:
    """A second y axis, at the right."""
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
    """Draws every step faintly, and over it a smoothed curve.

    middle: averages the values in each of at most SMOOTHED_POINTS stretches of the run, as np.mean does.
    """
    steps, found = _xy(lines, name)
    axes.plot(steps, found, color=color, alpha=0.3, linewidth=0.8)
    cuts = min(SMOOTHED_POINTS, len(found))
    smooth = [
        [float(f(x)) for x in np.array_split(y, cuts or 1) if len(x)]
        for f, y in ((np.mean, steps), (middle, found))
    ]
    axes.plot(*smooth, color=color, linewidth=2, label=label)


def _points(
    axes: Axes, lines: Sequence[Mapping[str, Any]], name: str, color: str, label: str, form: str
) -> None:
    """Draws occasional measurements with markers; the legend gives the first and the last value."""
    steps, found = _xy(lines, name)
    if found:
        ends = f"{form.format(found[0])} \N{RIGHTWARDS ARROW} {form.format(found[-1])}"
        axes.plot(steps, found, "o-", color=color, markersize=4, label=f"{label}: {ends}")
