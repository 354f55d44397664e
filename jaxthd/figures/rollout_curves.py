"""The curves of a run of jaxthd grpo: rewards, answers, divergence, validation, agreement, time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from jaxthd.figures.axes import curve, points, second_axis, titled, xy
from jaxthd.figures.colors import HUES
from jaxthd.figures.goodput import above_bar

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
