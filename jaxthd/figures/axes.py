"""Parts of the pictures of curves: titled axes, smoothed curves, points."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from jaxthd.figures.colors import INK, PADDING
from jaxthd.run.measured_by import by_validation
from jaxthd.run.metrics import Number, values

SMOOTHED_POINTS = 50
"""Most points of a smoothed curve."""


def titled(axes: Axes, title: str, y: str, color: str = INK) -> None:
    axes.set_title(title, loc="left", fontweight="bold", color=INK)
    axes.set_xlabel("step")
    axes.tick_params(labelbottom=True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel(y, color=color)
    axes.grid(color=PADDING, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def second_axis(axes: Axes, y: str, color: str) -> Axes:
    """A second y axis, at the right."""
    second = axes.twinx()
    second.set_ylabel(y, color=color)
    second.spines[["top"]].set_visible(False)
    return second


def xy(lines: Sequence[Mapping[str, Any]], name: str) -> tuple[list[int], list[Number]]:
    found = values(lines, name)
    return [step for step, _ in found], [value for _, value in found]


def curve(
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
    steps, found = xy(lines, name)
    axes.plot(steps, found, color=color, alpha=0.3, linewidth=0.8)
    cuts = min(SMOOTHED_POINTS, len(found))
    smooth = [
        [float(f(x)) for x in np.array_split(y, cuts or 1) if len(x)]
        for f, y in ((np.mean, steps), (middle, found))
    ]
    axes.plot(*smooth, color=color, linewidth=2, label=label)


def points(
    axes: Axes, lines: Sequence[Mapping[str, Any]], name: str, color: str, label: str, form: str
) -> None:
    """Draws results of validation with markers. They are joined where they were measured in the same way;
    the legend gives the first and the last value of the newest of these curves."""
    curves = [xy(part, name) for part in by_validation(lines)]
    curves = [(steps, found) for steps, found in curves if found]
    for number, (steps, found) in enumerate(curves, 1):
        ends = f"{form.format(found[0])} \N{RIGHTWARDS ARROW} {form.format(found[-1])}"
        text = f"{label}: {ends}" if number == len(curves) else None
        axes.plot(steps, found, "o-", color=color, markersize=4, label=text)
