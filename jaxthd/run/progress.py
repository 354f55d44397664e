"""A run's progress on standard output, and its summary.

The line of a step has as much as the terminal has room for. Validations get a small table of their own.
"""

import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Any

from tqdm import tqdm

from jaxthd.kernels.programs import ProgramCount
from jaxthd.objectives.metric import VALIDATION, Metric, Number
from jaxthd.run.display import Display, label
from jaxthd.run.measured_by import by_validation
from jaxthd.run.metrics import values
from jaxthd.terminal.tables import aligned, clipped

PLAIN_SECONDS = 5.0
"""Most seconds between plain progress lines."""
EVERY_STEP = 10
"""First steps of a command that each get a plain progress line."""
FILE_COLUMNS = 200
"""Columns where there is no terminal: a table is not clipped in a log."""
BAR = 12
"""Least columns of the live line's bar."""
RECENT = 50
"""Steps whose median rate is shown."""
OF_NOISY = 10
"""Most steps at the beginning and the end of a run that a summary's means of noisy metrics are over."""


class Progress:
    """Shows a run: on a terminal one live line, elsewhere plain lines, not of every step.

    The time left is extrapolated from all steps of this command but the first, which compiles; validations
    and checkpoints between them count. Real tokens/s is the median of recent steps.
    steps: the run's last step. display: how its metrics are shown.
    """

    def __init__(self, steps: int, display: Display) -> None:
        self._steps, self._display = steps, display
        self._held_out: dict[str, str] = {}  # the latest results of validation that the line of a step shows
        self._rates: deque[Number] = deque(maxlen=RECENT)
        self._first: tuple[int, float] | None = None  # number and end of this command's first step
        self._last_plain = -math.inf  # when the last plain line was written
        self._bar: tqdm | None = None  # the live line

    def step(self, line: Mapping[str, Any]) -> None:
        """Shows a metrics line, and the table of its validation results."""
        step, results = line["step"], {k: v for k, v in line.items() if k.startswith(VALIDATION)}
        if "step_seconds" in line:
            self._show(step, self._parts(line), now=bool(results))
        if results:
            self.say(validation_table(step, results, _columns(), self._display))
            found = {name: results.get(f"{VALIDATION}{name}") for name in _leading(self._display.validation)}
            self._held_out |= {
                name: f"held-out {label(name)} {self._display.text(f'{VALIDATION}{name}', value)}"
                for name, value in found.items()
                if value is not None
            }

    def say(self, text: str) -> None:
        """Prints a line of its own, which leaves the live line whole."""
        if self._bar is None:
            print(text, flush=True)
        else:
            tqdm.write(text)

    def close(self) -> None:
        """Ends the live line."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _parts(self, line: Mapping[str, Any]) -> list[str]:
        """The parts of the line, the most important first."""
        step, now, left = line["step"], time.monotonic(), "?"
        if "tokens_per_second" in line:  # absent from a step that found nothing to train on
            self._rates.append(line["tokens_per_second"])
        if self._first is None:
            self._first = step, now
        else:
            first, start = self._first
            left = tqdm.format_interval((now - start) / (step - first) * (self._steps - step))
        leading = [name for name in _leading(self._display.steps) if name in line]
        parts = [f"{label(name)} {self._display.text(name, line[name])}" for name in leading]
        parts += self._held_out.values()
        # The first step, which compiles, counts only as long as there is no other.
        rates = list(self._rates)[1:] or list(self._rates)
        common = {
            "gradient {:.3g}": line.get("grad_norm"),
            "{:,.0f} real tokens/s": median(rates) if rates else None,
            "padding {:.1%}": line.get("padding_ratio"),
            "learning rate {:.2e}": line.get("learning_rate"),
        }
        parts += [text.format(value) for text, value in common.items() if value is not None]
        return [f"ETA {left}", *parts]

    def _show(self, step: int, parts: Sequence[str], *, now: bool) -> None:
        if sys.stdout.isatty():
            used = BAR + len(f" {self._steps}/{self._steps}  ")
            self._show_live(step, fitting(parts, _columns() - used))
            return
        ended = time.monotonic()
        early = self._first is not None and step < self._first[0] + EVERY_STEP
        if now or early or step == self._steps or ended - self._last_plain >= PLAIN_SECONDS:
            self._last_plain = ended
            self.say(f"step {step}/{self._steps}  {'  '.join(parts)}")

    def _show_live(self, step: int, text: str) -> None:
        if self._bar is None:
            self._bar = tqdm(
                desc=text,
                initial=step,
                total=self._steps,
                file=sys.stdout,
                bar_format="{bar} {n_fmt}/{total_fmt}  {desc}",
                dynamic_ncols=True,
                miniters=1,
            )
        self._bar.set_description_str(text, refresh=False)
        self._bar.update(step - self._bar.n)


def fitting(parts: Sequence[str], columns: int) -> str:
    """The parts, as many from the first on as fit."""
    text = parts[0]
    for part in parts[1:]:
        if len(text) + 2 + len(part) > columns:
            break
        text += f"  {part}"
    return text


def _leading(metrics: Sequence[Metric]) -> list[str]:
    """Names of those that the line of a step shows."""
    return [metric.name for metric in metrics if metric.shown == "progress"]


def validation_table(step: int, results: Mapping[str, Any], columns: int, display: Display) -> str:
    """Validation results of a metrics line as a table, a row for each set, at most so many columns wide."""
    shown = {metric.name: metric.shown for metric in display.validation}
    names = list(shown)
    rows: dict[str, dict[str, str]] = {}
    for key, value in results.items():
        own = key.removeprefix(VALIDATION)
        name = display.metric(key).name
        of_set = own.removesuffix(name).rstrip("_") or "all sets"
        rows.setdefault(of_set, {})[name] = display.text(key, value)
    found = dict.fromkeys(chain(*rows.values()))
    # The most important first, since the others may not have room.
    used = sorted((name for name in names if name in found), key=lambda name: shown[name] != "progress")
    used += [name for name in found if name not in names]
    cells = [[clipped(of_set, 24), *(row.get(name, "-") for name in used)] for of_set, row in rows.items()]
    heads = ["set", *map(label, used)]
    if len(rows) == 1:
        heads, cells = heads[1:], [row[1:] for row in cells]
    lines = aligned([heads, *cells], left=(0,) if len(rows) > 1 else ()).splitlines()
    return "\n".join([f"validation at step {step}", *(clipped(f"  {line}", columns) for line in lines)])


def _columns() -> int:
    """The terminal's columns, or those of a file."""
    return shutil.get_terminal_size((FILE_COLUMNS, 24)).columns


def summary(lines: Sequence[Mapping[str, Any]], display: Display) -> str:
    """A run in a few lines of text: its speed, and what it is trained and validated for, first and last.

    lines: as read_metrics returns them.
    """
    speed = [
        ("step_seconds", "median {:.2f} s a step"),
        ("tokens_per_second", "{:,.0f} real tokens/s"),
        ("padding_ratio", "padding {:.1%}"),
    ]
    counts = [
        ("skipped_updates", "{} update(s) skipped"),
        ("skipped_documents", "{} document(s) skipped"),
    ]
    parts = [f"{lines[-1]['step']} steps"]
    parts += [text.format(median(v for _, v in found)) for k, text in speed if (found := values(lines, k))]
    if programs := values(lines, "compilations"):
        read = values(lines, "cached_compilations")
        parts.append(ProgramCount(int(programs[-1][1]), int(read[-1][1]) if read else 0).text(" of the step"))
    parts += [text.format(found[-1][1]) for k, text in counts if (found := values(lines, k))]
    text = ", ".join(parts)
    validated = dict.fromkeys(k for line in lines for k in line if k.startswith(VALIDATION))
    newest = by_validation(lines)[-1]
    if newest[0] is not lines[0]:
        text += f"\n  validation has changed before step {newest[0]['step']}; its results since then:"
    in_order = sorted(validated, key=lambda name: display.metric(name).shown != "progress")
    for name in (*dict.fromkeys(metric.name for metric in display.steps), *in_order):
        metric = display.metric(name)
        if metric.shown == "file":
            continue
        measured = [value for _, value in values(newest if name in validated else lines, name)]
        if measured:
            kind = "validation " if name in validated else ""
            text += f"\n  {kind}{label(name)} {_first_and_last(metric, measured)}"
    return text


def _first_and_last(metric: Metric, found: Sequence[Number]) -> str:
    """The first and the last value; of a noisy metric means of as many values at either end."""
    over = max(1, min(OF_NOISY, len(found) // 2)) if metric.is_noisy else 1
    first, last = (sum(some) / over for some in (found[:over], found[-over:]))
    ends = f"{metric.text.format(first)} -> {metric.text.format(last)}"
    return ends + f" (means of {over} steps)" * (over > 1)
