"""The curves of a run: the panels that its objective and its supplier ask for, and a bar of its time.

Figures are made without pyplot: nothing global changes and no display is needed.
"""

import math
from collections.abc import Mapping, Sequence
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
    ScalarFormatter,
    StrMethodFormatter,
)

from jaxthd.figures.axes import HEIGHT, HUES, INK, above_bar, curve, points, second_axis, titled, xy
from jaxthd.files.jsonl import naming
from jaxthd.objectives.metric import VALIDATION, Curve, Panel, Scale
from jaxthd.run.display import Display
from jaxthd.run.metrics import CAUSES, values

Lines = Sequence[Mapping[str, Any]]
ROW = 3.8
"""Height of a row of panels, in inches."""
LEGEND = 0.08
"""Room for an entry of a long legend, as a share of the axis."""
MOST_SHARE = 1.5
"""End of an axis of shares: the word error rate of an untrained model can be many times 1."""


def draw_curves(
    lines: Lines, path: Path, display: Display, seconds: Mapping[str, float] | None = None
) -> None:
    """Draws the run's curves as a PNG, 1200 pixels wide. lines: as read_metrics returns them.

    seconds: of each cause, where the run's time went (jaxthd.run.goodput). Where the last line is further on,
        that counts.
    Raises OSError, which names the file, when it cannot be written.
    """
    with naming(path):
        newest = max(seconds or {}, seconds_of(lines), key=lambda x: sum(x.values()))
        run_figure(lines, display, newest).savefig(path)


def seconds_of(lines: Lines) -> dict[str, float]:
    """The seconds of each cause up to the last line that has them."""
    for line in reversed(lines):
        if "goodput" in line:
            return {cause: line.get(f"{cause}_seconds", 0.0) for cause in CAUSES}
    return {}


def run_figure(lines: Lines, display: Display, seconds: Mapping[str, float] | None = None) -> Figure:
    """The panels of a run over its steps, two in a row, and a bar of the time.

    seconds: of each cause.
    """
    panels = [panel for panel in display.panels if _measured(panel.curves + panel.right, lines)]
    rows = -(-len(panels) // 2)
    figure = Figure(figsize=(12, HEIGHT + ROW * max(rows, 1)), dpi=100, layout="constrained")
    above = above_bar(figure, seconds or {})
    places = list(above.subplots(rows, 2, sharex=True, squeeze=False).flat) if rows else []
    for axes, panel in zip(places, panels, strict=False):
        draw_panel(axes, panel, lines, display)
    for axes in places[len(panels) :]:
        axes.set_visible(False)
    bad = [x["step"] for x in lines if not math.isfinite(x.get("loss", 0) + x.get("grad_norm", 0))]
    if bad and places:
        first = places[0]
        at_bottom: Any = {"transform": first.get_xaxis_transform(), "clip_on": False, "color": "red"}
        first.plot(bad, np.zeros(len(bad)), "x", label=f"{len(bad)} step(s) not finite", **at_bottom)
        first.legend(frameon=False)
    return figure


def draw_panel(axes: Axes, panel: Panel, lines: Lines, display: Display) -> None:
    """Draws the panel's curves that have a number, each in its own color, those of the right axis too."""
    left, right = _measured(panel.curves, lines), _measured(panel.right, lines)
    hues = [HUES[number % len(HUES)] for number in range(len(left) + len(right))]
    titled(axes, panel.title, panel.y, hues[0] if right and len(left) == 1 else INK)
    if panel.scale == "stacked":
        _stack(axes, left, lines, hues[: len(left)])
    else:
        _draw(axes, left, lines, hues[: len(left)], panel.scale, display)
    drawn = [axes]
    if right:
        of_right = hues[len(left) :]
        drawn.append(second_axis(axes, panel.right_y, of_right[0] if len(right) == 1 else INK))
        _draw(drawn[1], right, lines, of_right, panel.right_scale, display)
    found = [pair for each in drawn for pair in zip(*each.get_legend_handles_labels(), strict=True)]
    if found:  # on the axes that lie above the others
        handles, labels = zip(*found, strict=True)
        drawn[-1].legend(handles, labels, frameon=False)


def _measured(curves: Sequence[Curve], lines: Lines) -> list[Curve]:
    return [curve for curve in curves if values(lines, curve.metric)]


def _draw(
    axes: Axes, curves: Sequence[Curve], lines: Lines, hues: Sequence[str], scale: Scale, display: Display
) -> None:
    for which, hue in zip(curves, hues, strict=True):
        if which.metric.startswith(VALIDATION):
            points(axes, lines, which.metric, hue, which.label, display.metric(which.metric).text)
        else:
            curve(axes, lines, which, hue)
    found = [value for which in curves for value in xy(lines, which.metric)[1]]
    if scale == "share":
        peak = max(found)
        top = min(max(1.2 * peak, 0.05), 1.05) if peak <= 1 else min(1.05 * peak, MOST_SHARE)
        axes.set_ylim(0, top)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None if top < 0.1 else 0))
        for which, hue in zip(curves, hues, strict=True):
            _mark_above(axes, lines, which.metric, top, hue)
    elif scale == "log" and any(value > 0 for value in found):
        _log_scale(axes)
    else:
        low, high = axes.get_ylim()
        if scale == "from zero":
            low, high = 0.0, 1.05 * max(found) or 1.0
        axes.set_ylim(low, high + LEGEND * len(curves) * (high - low) * (len(curves) > 2))
        _plain_labels(axes)


def _stack(axes: Axes, curves: Sequence[Curve], lines: Lines, hues: Sequence[str]) -> None:
    """Draws the curves on top of each other. The first steps of a command, which compile, leave the axes."""
    timed = [line for line in lines if any(which.metric in line for which in curves)]
    heights = [[line.get(which.metric, 0.0) for line in timed] for which in curves]
    steps, labels = [line["step"] for line in timed], [which.label for which in curves]
    axes.stackplot(steps, *heights, labels=labels, colors=list(hues), alpha=0.7)
    axes.set_ylim(0, 3 * float(np.median(np.sum(heights, axis=0))) or 1)


def _mark_above(axes: Axes, lines: Lines, name: str, top: float, color: str) -> None:
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


def _plain_labels(axes: Axes) -> None:
    """Labels of large numbers have commas, and those of small ones one power of ten."""
    if max(map(abs, axes.get_ylim())) >= 1000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    else:
        formatter = ScalarFormatter(useOffset=False)
        formatter.set_powerlimits((-2, 3))
        axes.yaxis.set_major_formatter(formatter)


def _log_scale(axes: Axes) -> None:
    """Makes the y axis logarithmic, with few labels.

    Over less than a factor of 5 the labels are evenly spaced. Over more they are at 1, 2 and 5 times each
    power of ten, and over more than three powers of ten at powers only, or some of them.
    """
    axes.set_yscale("log", nonpositive="mask")
    low, high = axes.get_ylim()
    marks = (1, 2, 5) if high < 2000 * low else (1,)
    axes.yaxis.set_major_locator(MaxNLocator(6) if high < 5 * low else LogLocator(subs=marks, numticks=8))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
