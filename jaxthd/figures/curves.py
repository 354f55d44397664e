"""The curves of a run: loss, validation, optimization, speed.

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
    StrMethodFormatter,
)

from jaxthd.figures.axes import curve, points, second_axis, titled, xy
from jaxthd.figures.colors import FAINT, HUES
from jaxthd.figures.goodput import above_bar
from jaxthd.figures.rollout_curves import rollout_figure
from jaxthd.files.jsonl import naming
from jaxthd.run.metrics import CAUSES, values


def draw_curves(
    lines: Sequence[Mapping[str, Any]], path: Path, seconds: Mapping[str, float] | None = None
) -> None:
    """Draws the run's curves as a PNG, 1200 pixels wide. lines: as read_metrics returns them.

    seconds: of each cause, where the run's time went (jaxthd.run.goodput). Where the last line is further on,
        that counts.
    Raises OSError, which names the file, when it cannot be written.
    """
    has_rewards = any("reward" in line for line in lines)
    with naming(path):
        newest = max(seconds or {}, seconds_of(lines), key=lambda x: sum(x.values()))
        figure = (rollout_figure if has_rewards else curves_figure)(lines, newest)
        figure.savefig(path)


def seconds_of(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The seconds of each cause up to the last line that has them."""
    for line in reversed(lines):
        if "goodput" in line:
            return {cause: line.get(f"{cause}_seconds", 0.0) for cause in CAUSES}
    return {}


def curves_figure(lines: Sequence[Mapping[str, Any]], seconds: Mapping[str, float] | None = None) -> Figure:
    """Four axes over the optimizer's steps: loss, validation, optimization, speed; and a bar of the time.

    seconds: of each cause.
    """
    figure = Figure(figsize=(12, 9.2), dpi=100, layout="constrained")
    curves = above_bar(figure, seconds or {})
    loss, errors, gradient, speed = curves.subplots(2, 2, sharex=True).flat

    titled(loss, "Loss", "nats a supervised token")
    curve(loss, lines, "loss", HUES[0], np.mean, "training")
    points(loss, lines, "validation_loss", HUES[1], "validation", "{:.2f}")
    _log_scale(loss)
    bad = [x["step"] for x in lines if not math.isfinite(x.get("loss", 0) + x.get("grad_norm", 0))]
    if bad:
        at_bottom = {"transform": loss.get_xaxis_transform(), "clip_on": False, "color": "red"}
        loss.plot(bad, np.zeros(len(bad)), "x", label=f"{len(bad)} step(s) not finite", **at_bottom)
    loss.legend(frameon=False)

    titled(errors, "Validation", "share of words, of tokens")
    points(errors, lines, "validation_wer", HUES[1], "word error rate", "{:.1%}")
    points(errors, lines, "validation_accuracy", HUES[2], "accuracy of the next token", "{:.1%}")
    errors.yaxis.set_major_formatter(PercentFormatter(1))
    if errors.lines:
        # The word error rate of an untrained model can be many times 1.
        top = max(1.05, min(1.5, max(max(line.get_ydata()) for line in errors.lines)))
        errors.set_ylim(0, top)
        _mark_above(errors, lines, "validation_wer", top, HUES[1])
        errors.legend(frameon=False)
    else:
        errors.text(0.5, 0.5, "not measured", ha="center", color=FAINT, transform=errors.transAxes)

    titled(gradient, "Optimization", "gradient norm before clipping", HUES[0])
    curve(gradient, lines, "grad_norm", HUES[0], np.mean)
    gradient.set_ylim(bottom=0)
    rate = second_axis(gradient, "learning rate", HUES[1])
    rate.plot(*xy(lines, "learning_rate"), color=HUES[1])
    rate.set_ylim(bottom=0)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))

    titled(speed, "Speed", "real tokens a second", HUES[0])
    curve(speed, lines, "tokens_per_second", HUES[0], np.median)
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    padding = second_axis(speed, "padding, share of token slots", HUES[1])
    steps, shares = xy(lines, "padding_ratio")
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
