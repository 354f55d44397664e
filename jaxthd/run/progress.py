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

from jaxthd.run.measured_by import by_validation
from jaxthd.run.metrics import (
    PREFERENCE_METRICS,
    VALIDATION,
    VALIDATION_METRICS,
    Number,
    label,
    shown,
    values,
)
from jaxthd.terminal.tables import aligned, clipped

PLAIN_SECONDS = 5.0
"""Most seconds between plain progress lines."""
EVERY_STEP = 10
"""First steps of a command that each get a plain progress line."""
BAR = 12
"""Least columns of the live line's bar."""
RECENT = 50
"""Steps whose median rate is shown."""


class Progress:
    """Shows a run: on a terminal one live line, elsewhere plain lines, not of every step.

    The time left is extrapolated from all steps of this command but the first, which compiles; validations
    and checkpoints between them count. Real tokens/s is the median of recent steps.
    steps: the run's last step.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._rates: deque[Number] = deque(maxlen=RECENT)
        self._first: tuple[int, float] | None = None  # number and end of this command's first step
        self._last_plain = -math.inf  # when the last plain line was written
        self._bar: tqdm | None = None  # the live line

    def step(self, line: Mapping[str, Any]) -> None:
        """Shows a metrics line, and the table of its validation results."""
        step, results = line["step"], {k: v for k, v in line.items() if k.startswith(VALIDATION)}
        if "loss" in line:
            self._show(step, self._parts(line), now=bool(results))
        if results:
            self.say(validation_table(step, results, _columns()))

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
        step, now = line["step"], time.monotonic()
        self._rates.append(line["tokens_per_second"])
        # The first step, which compiles, counts only as long as there is no other.
        rate, left = median(list(self._rates)[1:] or self._rates), "?"
        if self._first is None:
            self._first = step, now
        else:
            first, start = self._first
            left = tqdm.format_interval((now - start) / (step - first) * (self._steps - step))
        return [
            f"ETA {left}",
            f"loss {line['loss']:.3f}",
            f"gradient {line['grad_norm']:.3g}",
            f"{rate:,.0f} real tokens/s",
            f"padding {line['padding_ratio']:.1%}",
            f"learning rate {line['learning_rate']:.2e}",
        ]

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


def validation_table(step: int, results: Mapping[str, Any], columns: int) -> str:
    """Validation results of a metrics line as a table, a row for each set, at most so many columns wide."""
    names = [metric.name for metric in (*PREFERENCE_METRICS, *VALIDATION_METRICS)]
    rows: dict[str, dict[str, str]] = {}
    for key, value in results.items():
        own = key.removeprefix(VALIDATION)
        name = next((name for name in names if f"_{own}".endswith(f"_{name}")), own)
        of_set = own.removesuffix(name).rstrip("_") or "all sets"
        rows.setdefault(of_set, {})[name] = shown(key, value)
    found = dict.fromkeys(chain(*rows.values()))
    used = [name for name in names if name in found] + [name for name in found if name not in names]
    cells = [[clipped(of_set, 24), *(row.get(name, "-") for name in used)] for of_set, row in rows.items()]
    heads = ["set", *map(label, used)]
    if len(rows) == 1:
        heads, cells = heads[1:], [row[1:] for row in cells]
    lines = aligned([heads, *cells], left=(0,) if len(rows) > 1 else ()).splitlines()
    return "\n".join([f"validation at step {step}", *(clipped(f"  {line}", columns) for line in lines)])


def _columns() -> int:
    return shutil.get_terminal_size().columns


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """A run in a few lines of text: its speed, and loss and validation results, first and last.

    lines: as read_metrics returns them.
    """
    speed = [
        ("step_seconds", "median {:.2f} s a step"),
        ("tokens_per_second", "{:,.0f} real tokens/s"),
        ("padding_ratio", "padding {:.1%}"),
    ]
    counts = [
        ("compilations", "{} compilation(s) of the step"),
        ("skipped_updates", "{} update(s) skipped"),
        ("skipped_documents", "{} document(s) skipped"),
    ]
    parts = [f"{lines[-1]['step']} steps"]
    parts += [text.format(median(v for _, v in found)) for k, text in speed if (found := values(lines, k))]
    parts += [text.format(found[-1][1]) for k, text in counts if (found := values(lines, k))]
    text = ", ".join(parts)
    validated = dict.fromkeys(k for line in lines for k in line if k.startswith(VALIDATION))
    newest = by_validation(lines)[-1]
    if newest[0] is not lines[0]:
        text += f"\n  validation has changed before step {newest[0]['step']}; its results since then:"
    for name in ("loss", *(k for k in validated if k.endswith(("loss", "wer", "accuracy")))):
        if found := values(newest if name in validated else lines, name):
            kind = "validation " if name in validated else ""
            text += f"\n  {kind}{label(name)} {shown(name, found[0][1])} -> {shown(name, found[-1][1])}"
    return text
