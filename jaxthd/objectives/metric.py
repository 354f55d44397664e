"""Metrics and panels of curves, by which whatever computes a number also says how people see it.

An objective has these for its own numbers (Objective.metrics, Objective.panels), and a supplier of steps for
its own (jaxthd.run.supplier).
"""

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

Number = float | int
VALIDATION = "validation_"
"""Names of validation metrics begin so in a metrics line; the name of a set may follow."""
Shown = Literal["file", "summary", "progress"]
Middle = Literal["mean", "median", "largest", "each"]
Scale = Literal["linear", "from zero", "log", "share", "stacked"]


class Metric(NamedTuple):
    """A number of a metrics line.

    value: derives it from the facts of a step or a validation; None where it was not measured, or where
        something else computes it, as an objective does.
    text: how it is written for people, in str.format's language. odd: what to do where it is not as it should
        be. docs/metrics.md is made of these (scripts/write_reference.py).
    shown: "summary": at the end of a run too; "progress": there, and in the line of a step.
    is_noisy: one step's value says little, so a summary has means over several.
    """

    name: str
    unit: str
    meaning: str
    value: Callable[[Any], Number | None] | None = None
    text: str = "{:,.6g}"
    odd: str = ""
    shown: Shown = "file"
    is_noisy: bool = False


class Curve(NamedTuple):
    """A metric in a panel, by its name in a metrics line. One of validation is drawn as points.

    label: for the legend; "" where the axis says it. middle: what a smoothed curve averages stretches of the
    run by; "each": nothing is smoothed.
    """

    metric: str
    label: str = ""
    middle: Middle = "mean"


class Panel(NamedTuple):
    """Curves with a title over the steps of a run. y, right_y: what the axes at the left and at the right
    measure, with units. Curves without a number are left out, and so is a panel without a curve.
    """

    title: str
    y: str
    curves: tuple[Curve, ...]
    scale: Scale = "linear"
    right_y: str = ""
    right: tuple[Curve, ...] = ()
    right_scale: Scale = "from zero"


LIKELIHOOD = Panel(
    "Likelihood of the transcripts",
    "nats a supervised token",
    (Curve(f"{VALIDATION}loss", "validation"),),
    "log",
)
"""For objectives whose own loss is another quantity than validation's."""


def measured(metrics: Iterable[Metric], facts: Any) -> dict[str, Number]:
    """The metrics that have a value, by name. facts: what their functions take."""
    found = ((metric.name, metric.value(facts)) for metric in metrics if metric.value)
    return {name: value for name, value in found if value is not None}
