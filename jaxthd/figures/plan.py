"""The figure of `jaxthd plan`: lengths of documents, documents of a buffer, padding against capacity."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator, PercentFormatter, StrMethodFormatter

from jaxthd.figures.axes import HUES, INK
from jaxthd.files.jsonl import naming
from jaxthd.planning.search import Plan, percentiles


def draw_plan(plan: Plan, path: Path) -> None:
    """Draws lengths, documents a buffer, and padding against capacity, as a PNG of 1500 x 480 pixels.

    Raises OSError, which names the file, when it cannot be written.
    """
    figure = Figure(figsize=(15, 4.8), dpi=100, layout="constrained")
    lengths, held, padding = figure.subplots(1, 3)
    _draw_lengths(lengths, plan)
    _draw_documents(held, plan)
    _draw_padding(padding, plan)
    figure.legend(loc="outside lower right", ncols=len(plan.curves), frameon=False)
    with naming(path):
        figure.savefig(path)


def _draw_lengths(axes: Axes, plan: Plan) -> None:
    tokens = plan.stream.tokens
    _titled(axes, "Documents", "tokens of a document, audio slots included", "share of documents")
    edges = np.unique(np.geomspace(tokens.min(), tokens.max() + 1, 40).astype(int))
    _histogram(axes, tokens, edges, "capacity", plan.recommended.data.capacity)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _draw_documents(axes: Axes, plan: Plan) -> None:
    data, documents = plan.recommended.data, plan.by_maximum[-1].documents
    _titled(axes, f"Buffers of {data.capacity:,} slots", "documents in a buffer", "share of buffers")
    edges = np.arange(documents.min(), documents.max() + 2) - 0.5
    _histogram(axes, documents, edges, "max_documents", data.max_documents)


def _draw_padding(axes: Axes, plan: Plan) -> None:
    axes.set(xscale="log", yscale="log")
    _titled(axes, "Padding", "capacity: token slots of a buffer", "share of slots that are padding")
    for number, (name, outcomes) in enumerate(plan.curves.items()):
        shares = {o.data.capacity: max(o.padding, 1e-4) for o in outcomes}
        # Later curves are thinner, so that none hides another.
        look: dict[str, Any] = {"color": HUES[number], "linewidth": 6 - number, "markersize": 9 - number}
        axes.plot([*shares], [*shares.values()], "o-", label=name, **look)
    axes.set_xticks([o.data.capacity for o in plan.by_capacity])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _titled(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontweight="bold", color=INK)
    axes.set(xlabel=x, ylabel=y)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.spines[["top", "right"]].set_visible(False)


def _histogram(axes: Axes, x: np.ndarray, edges: np.ndarray, bound: str, at: int) -> None:
    """Draws shares of x, with lines at its percentiles and the bound; labels step down to stay legible."""
    axes.hist(x, edges.tolist(), weights=np.full(len(x), 1 / len(x)), color=HUES[0])
    axes.set_ylim(top=1.35 * axes.get_ylim()[1])
    marks = [*zip(("P50", "P90", "P99", "max"), percentiles(x), strict=True), (bound, at)]
    for number, (name, value) in enumerate(marks):
        axes.axvline(value, color=HUES[1], linewidth=1)
        look: dict[str, Any] = {"ha": "right", "fontsize": 9, "transform": axes.get_xaxis_transform()}
        axes.text(value, 0.96 - 0.05 * number, f"{name} {value:,} ", color=INK, **look)
