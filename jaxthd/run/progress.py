"""A run's progress on standard output, and its summary."""

import math
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from tqdm import tqdm

from jaxthd.run.metrics import VALIDATION, Number, label, shown, values

PLAIN_SECONDS = 5.0
"""Most seconds between plain progress lines."""
EVERY_STEP = 10
"""First steps of a command that each get a plain progress line."""
RECENT = 50
"""Steps whose median rate is shown."""


class Progress:
    """Shows a run: on a terminal one live line, elsewhere plain lines, not of every step.

    The time left is extrapolated from all steps of this command but the first, which compiles; validations
    and checkpoints between them count. Real tokens/s is the median of recent steps.
    steps: the run's last step. wer: the last word error rate, None if there is none yet.
    """

    def __init__(self, steps: int, wer: Number | None) -> None:
        self._steps, self._wer = steps, wer
        self._rates: deque[Number] = deque(maxlen=RECENT)
        self._first: tuple[int, float] | None = None  # number and end of this command's first step
        self._last_plain = -math.inf  # when the last plain line was written
        self._bar: tqdm | None = None  # the live line

    def step(self, line: Mapping[str, Any]) -> None:
        step, results = line["step"], {k: v for k, v in line.items() if k.startswith(VALIDATION)}
        self._wer = results.get("validation_wer", self._wer)
        if "loss" in line:
            self._show(step, self._text(line), now=bool(results))
        if results:
            self.say(f"validation at step {step}: {validation_text(results)}")

    def say(self, text: str) -> None:
        """Prints a line of its own, which leaves the live line whole."""
        if self._bar is None:
            print(text, flush=True)
        else:
            tqdm.write(text)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _text(self, line: Mapping[str, Any]) -> str:
        step, now = line["step"], time.monotonic()
        self._rates.append(line["tokens_per_second"])
        # The first step, which compiles, counts only as long as there is no other.
        rate, left = median(list(self._rates)[1:] or self._rates), "?"
        if self._first is None:
            self._first = step, now
        else:
            first, start = self._first
            left = tqdm.format_interval((now - start) / (step - first) * (self._steps - step))
        wer = "" if self._wer is None else f"  WER {self._wer:.1%}"
        return (
            f"ETA {left}  loss {line['loss']:.3f}{wer}  {rate:,.0f} real tokens/s  "
            f"padding {line['padding_ratio']:.1%}"
        )

    def _show(self, step: int, text: str, *, now: bool) -> None:
        if sys.stdout.isatty():
            self._show_live(step, text)
            return
        ended = time.monotonic()
        early = self._first is not None and step < self._first[0] + EVERY_STEP
        if now or early or step == self._steps or ended - self._last_plain >= PLAIN_SECONDS:
            self._last_plain = ended
            self.say(f"step {step}/{self._steps}  {text}")

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


def validation_text(results: Mapping[str, Any]) -> str:
    """Validation results, by their names in a metrics line, for people."""
    return ", ".join(f"{label(name)} {shown(name, value)}" for name, value in results.items())


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
    for name in ("loss", *(k for k in validated if k.endswith(("loss", "wer", "accuracy")))):
        if found := values(lines, name):
            kind = "validation " if name in validated else ""
            text += f"\n  {kind}{label(name)} {shown(name, found[0][1])} -> {shown(name, found[-1][1])}"
    return text
