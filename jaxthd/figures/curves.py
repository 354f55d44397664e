"""The curves of a run: loss, validation, optimization, speed; of jaxthd grpo rewards, answers, divergence.

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

from jaxthd.figures.axes import FAINT, HUES, above_bar, curve, points, second_axis, titled, xy
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


Lines = Sequence[Mapping[str, Any]]
PARTS = ("resharding", "rollout", "reward", "scoring", "training")
"""Parts of a step's time, in their order. The first only where answers are drawn on another mesh."""


def rollout_figure(lines: Lines, spent: Mapping[str, float] | None = None) -> Figure:
    """Six axes over the steps, and a bar of the time. lines: as read_metrics returns them.

    spent: seconds of each cause (jaxthd.run.metrics.CAUSES).
    """
    figure = Figure(figsize=(12, 12.2), dpi=100, layout="constrained")
    curves = above_bar(figure, spent or {})
    rewards, answers, divergence, validation, agreement, time = curves.subplots(3, 2, sharex=True).flat

    titled(rewards, "Reward", "mean over the answers drawn")
    curve(rewards, lines, "reward", HUES[0], np.mean, "all, weighted")
    named = dict.fromkeys(name for line in lines for name in line if name.startswith("reward_"))
    parts = [name for name in named if name not in _NO_FUNCTIONS]
    for name, color in zip(parts[:3] * (len(parts) > 1), HUES[1:], strict=False):
        curve(rewards, lines, name, color, np.mean, name.removeprefix("reward_"))
    points(rewards, lines, "validation_reward", HUES[4], "validation, likeliest answers", "{:.3g}")
    rewards.legend(frameon=False)

    titled(answers, "Answers", "tokens of an answer", HUES[0])
    curve(answers, lines, "answer_tokens", HUES[0], np.mean)
    answers.set_ylim(bottom=0)
    _shares(second_axis(answers, "cut off; without spread (dotted)", HUES[1]), lines)

    titled(divergence, "Policy", "nats a token")
    curve(divergence, lines, "kl", HUES[0], np.mean, "KL to the reference")
    curve(divergence, lines, "entropy", HUES[1], np.mean, "entropy")
    divergence.legend(frameon=False)

    titled(validation, "Validation", "share of words, of prompts")
    points(validation, lines, "validation_wer", HUES[1], "word error rate", "{:.1%}")
    points(validation, lines, "validation_pass_at_1", HUES[2], "right in one draw", "{:.1%}")
    points(validation, lines, "validation_pass_at_k", HUES[0], "right in one of a group", "{:.1%}")
    validation.yaxis.set_major_formatter(PercentFormatter(1))
    shares = [float(y) for line in validation.lines for y in line.get_ydata()]
    validation.set_ylim(0, min(1.5, 1.25 * max(shares, default=1.0) or 1.0))  # room for the legend
    if validation.lines:
        validation.legend(frameon=False)

    titled(agreement, "Drawing against training", "difference of log-probabilities, nats")
    curve(agreement, lines, "logprob_difference", HUES[0], np.max, "largest of a step")
    curve(agreement, lines, "logprob_difference_mean", HUES[1], np.mean, "mean")
    if any(y > 0 for line in agreement.lines for y in line.get_ydata()):
        agreement.set_yscale("log")
    agreement.legend(frameon=False)

    titled(time, "Time", "seconds of a step")
    timed = [line for line in lines if "step_seconds" in line]
    seconds = [line["step_seconds"] for line in timed]
    stacked = {part: [line.get(f"{part}_seconds", 0.0) for line in timed] for part in PARTS}
    shown = {part: values for part, values in stacked.items() if any(values)}
    if shown:
        time.stackplot(
            [line["step"] for line in timed],
            *shown.values(),
            labels=list(shown),
            colors=[PART_COLORS[part] for part in shown],
            alpha=0.7,
        )
        time.legend(frameon=False, loc="upper right")
    # The first steps of a command compile for minutes.
    time.set_ylim(0, 3 * float(np.median(seconds)) if seconds else 1)
    return figure


PART_COLORS = dict(zip(PARTS, (HUES[5], *HUES[:4]), strict=True))

_NO_FUNCTIONS = ("reward_std", "reward_spread", "reward_seconds", "reward_failures")
"""Metrics that begin like the mean of a reward function."""


def _shares(axes: Axes, lines: Lines) -> None:
    for name, style in (("cut_off", "-"), ("no_spread", ":")):
        axes.plot(*xy(lines, name), style, color=HUES[1], linewidth=1)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
