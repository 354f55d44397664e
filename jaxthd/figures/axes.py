"""Parts that the pictures share: colours, titled axes, smoothed curves, points, a bar of a run's time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator

from jaxthd.objectives.metric import Curve, Number
from jaxthd.run.measured_by import by_validation
from jaxthd.run.metrics import CAUSES, values

HUES = ("#3b6fb6", "#d1662b", "#3f8f4f", "#8a5fb0", "#b8902a", "#2b8f96", "#b84a6b")
"""One after the other for curves, documents and ranks."""
PADDING, INK, FAINT = "#dcdcdc", "#222222", "#9a9a9a"


def tint(rgb: Float[np.ndarray, "*slots 3"]) -> Float[np.ndarray, "*slots 3"]:
    """Lighter colours of the same hues."""
    return 0.4 * rgb + 0.6


def light(hue: str) -> str:
    """The name of a hue's tint, for legends."""
    red, green, blue = tint(np.array(to_rgb(hue)))
    return to_hex((red, green, blue))


SMOOTHED_POINTS = 50
"""Most points of a smoothed curve."""


def titled(axes: Axes, title: str, y: str, color: str = INK) -> None:
    """Gives axes over steps their title, the y axis' label in this color, and a grid."""
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
    """(steps, values) of the lines in which the metric is, and is finite."""
    found = values(lines, name)
    return [step for step, _ in found], [value for _, value in found]


MIDDLES: dict[str, Callable[[np.ndarray], Any]] = {"mean": np.mean, "median": np.median, "largest": np.max}
"""Averages of a smoothed curve over a stretch of the run, by Curve.middle."""


def curve(axes: Axes, lines: Sequence[Mapping[str, Any]], which: Curve, color: str) -> None:
    """Draws every step faintly, and over it a curve that is smoothed over SMOOTHED_POINTS parts of the
    run; or every step alone."""
    steps, found = xy(lines, which.metric)
    if which.middle == "each":
        axes.plot(steps, found, color=color, linewidth=0.9, label=which.label)
        return
    axes.plot(steps, found, color=color, alpha=0.3, linewidth=0.8)
    cuts = min(SMOOTHED_POINTS, len(found))
    smooth = [
        [float(f(x)) for x in np.array_split(y, cuts or 1) if len(x)]
        for f, y in ((np.mean, steps), (MIDDLES[which.middle], found))
    ]
    axes.plot(*smooth, color=color, linewidth=2, label=which.label)


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


COLORS = {
    "starting": light(HUES[0]),
    "restoring": HUES[0],
    "stepping": HUES[2],
    "drawing": light(HUES[2]),
    "compiling": HUES[4],
    "data_wait": HUES[1],
    "reward_wait": light(HUES[1]),
    "validating": HUES[3],
    "saving": HUES[5],
    "lost": HUES[6],
    "stalled": INK,
    "other": PADDING,
}
FONT = 13
"""Larger than elsewhere: the bar is read at a glance, also where the picture is small."""
LEAST = 0.0005
"""Shares under this are not named."""


HEIGHT = 1.2
"""Size of the bar with title and legend, in inches."""


def above_bar(figure: Figure, seconds: Mapping[str, float]) -> SubFigure:
    """Draws goodput_bar at the bottom of the figure; returns the part above."""
    grid = figure.add_gridspec(2, 1, height_ratios=(figure.get_figheight() - HEIGHT, HEIGHT))
    goodput_bar(figure.add_subfigure(grid[1]).subplots(), seconds)
    return figure.add_subfigure(grid[0])


def goodput_bar(axes: Axes, seconds: Mapping[str, float]) -> None:
    """Draws the seconds of each cause (jaxthd.run.metrics.CAUSES) as parts of one bar, with their shares."""
    total = sum(seconds.values())
    title = f"Where the time went{f': {duration(total)}' if total else ''}"
    axes.set_title(title, loc="left", fontweight="bold", color=INK)
    axes.set(yticks=[], xticks=[], xlim=(0, 1), ylim=(-0.5, 0.5))
    axes.spines[:].set_visible(False)
    if not total:
        axes.text(0.5, 0, "not measured", ha="center", va="center", color=FAINT)
        return
    left = 0.0
    for cause in CAUSES:
        share = seconds.get(cause, 0.0) / total
        if share >= LEAST:
            name = f"{cause.replace('_', ' ')} {share:.1%}"
            axes.barh(0, share, 1, left, color=COLORS[cause], label=name)
        left += share
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(0, 0),
        ncols=-(-len(CAUSES) // 2),
        frameon=False,
        fontsize=FONT,
        handlelength=1,
        handletextpad=0.4,
        columnspacing=1,
    )


def duration(seconds: float) -> str:
    """A time for people, such as "2 h 5 min", "3 min 20 s" or "4.2 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
