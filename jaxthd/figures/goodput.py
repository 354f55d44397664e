"""One bar of a run's time, cause by cause."""

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure

from jaxthd.figures.colors import FAINT, HUES, INK, PADDING, light
from jaxthd.run.metrics import CAUSES

COLORS = {
    "stepping": HUES[2],
    "drawing": light(HUES[2]),
    "compiling": HUES[4],
    "data_wait": HUES[1],
    "reward_wait": light(HUES[1]),
    "validating": HUES[3],
    "saving": HUES[5],
    "lost": HUES[6],
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
