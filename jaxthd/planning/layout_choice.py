"""Chooses the context layout of a training run by its data, where compute.context_layout is "auto".

WORKDIR/layout.json keeps the choice: a run that is continued on the same mesh has the same layout.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxthd.config import Config
from jaxthd.data.text.tokenizer import needed_vocabulary
from jaxthd.errors import UserError
from jaxthd.files.atomic import write_atomically
from jaxthd.files.run_folder import holds_a_run
from jaxthd.objectives.answers import compares_answers
from jaxthd.packing.layout import LayoutKind
from jaxthd.parallel.processes import exchange, is_first
from jaxthd.planning.layouts import LAYOUT_COSTS, LAYOUTS, LayoutCost, compare_layouts
from jaxthd.planning.lengths import Lengths, draw, first, measure, read_examples
from jaxthd.planning.search import flops_per_slot
from jaxthd.steps.forward import objective_of
from jaxthd.terminal.tables import table
from jaxthd.validate import DeviceFacts, findings

FILE = "layout.json"
MOST_READ = 5_000
"""Most documents whose lengths decide."""
MOST_BUFFERS = 100
"""Buffers that they are packed into, at most: placing them on ranks takes milliseconds a buffer."""
TOLERANCE = 0.005
"""Least gain, as a share of a step's cost, for which another layout than "buffer" is chosen."""


def with_layout(config: Config, workdir: Path) -> Config:
    """The config with a layout in place of "auto": that of the run in the workdir, or one that is chosen now.

    Process 0 chooses and prints the reason; all processes call it. Where the config cannot work it is
    "buffer", without a reason: jaxthd.run.startup.prepared says what is wrong.
    """
    if config.compute.context_layout != "auto" or config.mesh.context == 1:
        return config
    (layout, *_) = exchange(_of_run(config, workdir) or _chosen(config) if is_first() else None)
    return _with(config, layout)


def keep_layout(given: Config, config: Config, workdir: Path) -> None:
    """Process 0 writes the layout of `config` into the workdir, if `given` left it to be chosen."""
    if is_first() and given.compute.context_layout != config.compute.context_layout:
        text = json.dumps({"layout": config.compute.layout, "mesh": config.mesh.sizes})
        write_atomically(workdir / FILE, text + "\n")


def _of_run(config: Config, workdir: Path) -> LayoutKind | None:
    """The layout of the run in the workdir on this mesh; None without such a run."""
    if not holds_a_run(workdir):
        return None
    try:
        stored: dict[str, Any] = json.loads((workdir / FILE).read_text())
        layout: LayoutKind = stored["layout"]
        same = tuple(stored["mesh"]) == tuple(config.mesh.sizes) and layout in LAYOUTS
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if same:
        print(f"context layout: {layout}, as the run was begun with")
        return layout
    return None


def _chosen(config: Config) -> LayoutKind:
    if not _works(config):
        return "buffer"
    if compares_answers(objective_of(config)) or config.data.packing == "padded":
        print("context layout: buffer; others are not chosen by themselves for such documents")
        return "buffer"
    try:
        costs = _costs(config)
    except UserError as error:  # reading the data raises it again, if need be
        print(
            f"context layout: buffer, since lengths of documents cannot be read: {str(error).splitlines()[0]}"
        )
        return "buffer"
    if not costs:
        print("context layout: buffer, since no document fits a buffer")
        return "buffer"
    best, by_buffer = costs[0], next(cost for cost in costs if cost.layout == "buffer")
    layout = best.layout if by_buffer.total > (1 + TOLERANCE) * best.total else "buffer"
    title = "Context layouts; the busiest rank in million multiply-adds a real token"
    print(f"{table(title, LAYOUT_COSTS, [cost.cells for cost in costs])}\ncontext layout: {layout}")
    return layout


def _works(config: Config) -> bool:
    """Whether the config is sound with the layout "buffer"."""
    try:
        device = DeviceFacts.of_this_machine(needed_vocabulary(config))
    except UserError:  # the tokenizer cannot be read
        return False
    return all(finding.is_warning for finding in findings(_with(config, "buffer"), device))


def _costs(config: Config) -> list[LayoutCost]:
    """Those of the layouts that need no other setting changed and skip no more documents; cheapest first.

    Empty if no document fits a buffer.
    """
    sources = read_examples(config, MOST_READ, say=lambda line: None)
    found = [measure(examples, config)[0] for examples in sources]
    stream = _first(draw(found, config.data), config.data.capacity)
    costs = compare_layouts(stream, _with(config, "buffer"), flops_per_slot(config))
    by_buffer = next((cost for cost in costs if cost.layout == "buffer"), None)
    if by_buffer is None:
        return []
    same_settings = (cost for cost in costs if cost.config == _with(config, cost.layout))
    return [cost for cost in same_settings if cost.skipped <= by_buffer.skipped]


def _first(stream: Lengths, capacity: int) -> Lengths:
    """The first documents, as many as fill MOST_BUFFERS. Those that exceed a buffer fill nothing."""
    fitting = np.where(stream.tokens <= capacity, stream.tokens, 0)
    return first(stream, 1 + int(np.searchsorted(np.cumsum(fitting), MOST_BUFFERS * capacity)))


def _with(config: Config, layout: LayoutKind) -> Config:
    return replace(config, compute=replace(config.compute, context_layout=layout))
