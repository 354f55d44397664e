"""What a run measures: a line a step in metrics.jsonl, in TensorBoard files, and what the user sees of it.

Of the keys of a line, "validation_..." are those of the steps that ended in a validation.
"""

import math
import socket
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter
from tqdm import tqdm

from jaxthd.data.loader import BatchReport
from jaxthd.errors import UserError
from jaxthd.files.jsonl import append_line, keep_lines, naming, read_lines

VALIDATION = "validation_"
"""What the names of validation results begin with."""
FLUSH_SECONDS = 5.0
"""Most seconds that TensorBoard, or a reader of plain progress lines, waits for news."""
EVERY_STEP = 10
"""First steps of a call that all get a plain progress line."""
RECENT = 50
"""Steps whose median is the rate shown."""

Number = float | int


def metrics_line(
    step: int, scalars: Mapping[str, Number], report: BatchReport, seconds: float
) -> dict[str, Any]:
    """The metrics of a step: its number, the scalars, what its batch held, and how fast it was.

    scalars: taken over as they are. Of the step: loss, grad_norm (before clipping), learning_rate; so far in
        the run: compilations, skipped_updates, skipped_documents.
    report: the Loader's. seconds: wall time of the step.
    Adds padding_tokens; padding_ratio, the share of token slots that are padding; target_to_input_ratio,
    supervised tokens over all token slots, padding included, as in NeMo's speechlm2; step_seconds; and
    tokens_per_second, of real tokens.
    """
    real, capacity = report.real_tokens, report.capacity_tokens
    return {
        "step": step,
        **scalars,
        "real_tokens": real,
        "padding_tokens": capacity - real,
        "capacity_tokens": capacity,
        "supervised_tokens": report.supervised_tokens,
        "documents": report.documents,
        "audio_seconds": report.audio_seconds,
        "imbalance": report.imbalance,
        "padding_ratio": 1 - real / capacity,
        "target_to_input_ratio": report.supervised_tokens / capacity,
        "tokens_per_second": real / seconds,
        "step_seconds": seconds,
    }


class Metrics:
    """Keeps the metrics of the run in `workdir`, and shows its progress. A context manager.

    first_step: steps done before. Later lines are of a run that was cut off, and are dropped; without a step
    done before, all are.
    steps: the run's last step. tensorboard: write WORKDIR/tensorboard too.
    Raises OSError, naming the file, when one cannot be written.
    """

    def __init__(self, workdir: Path, first_step: int, steps: int, *, tensorboard: bool = True) -> None:
        self._path = workdir / "metrics.jsonl"
        kept = keep_lines(self._path, lambda line: first_step > 0 and line["step"] <= first_step)
        kept = [_null_is_nan(line) for line in kept]
        self._events = EventFile(workdir / "tensorboard", kept) if tensorboard else None
        wer = [value for _, value in values(kept, "validation_wer")]
        self._progress = Progress(steps, wer[-1] if wer else None)

    def step(self, line: Mapping[str, Any]) -> None:
        """Adds a line (metrics_line, perhaps with validation results); it gains "time", in Unix seconds.

        A line with step 0 may hold validation results alone: those of the model before training.
        """
        timed = {**line, "time": round(time.time(), 3)}
        append_line(self._path, timed)
        if self._events:
            self._events.write(timed)
        self._progress.step(timed)

    def say(self, text: str) -> None:
        """A line of its own on the terminal, that leaves the live line whole."""
        self._progress.say(text)

    def __enter__(self) -> "Metrics":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.close()
        if self._events:
            self._events.close()


class NoMetrics(Metrics):
    """In place of Metrics, in a process whose metrics another one keeps."""

    def __init__(self) -> None:
        pass

    def step(self, line: Mapping[str, Any]) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """The metrics of a run, a dict a step; numbers that were not finite are NaN.

    Raises UserError where no run has left any.
    """
    path = workdir / "metrics.jsonl"
    lines = [_null_is_nan(line) for line in read_lines(path)]
    if not lines:
        found = "holds no line" if path.exists() else "does not exist"
        raise UserError(f"{path} {found}; expected the metrics of a run: give the --workdir of jaxthd.train")
    return lines


def _null_is_nan(line: dict[str, Any]) -> dict[str, Any]:
    return {k: math.nan if v is None else v for k, v in line.items()}


def values(lines: Iterable[Mapping[str, Any]], name: str) -> list[tuple[int, Number]]:
    """(step, value) wherever `name` was measured and finite."""
    return [(x["step"], x[name]) for x in lines if math.isfinite(x.get(name, math.nan))]


def validation_text(results: Mapping[str, Any]) -> str:
    """Validation results, by their names in a metrics line, to read."""
    return ", ".join(f"{_label(name)} {_shown(name, value)}" for name, value in results.items())


def _label(name: str) -> str:
    label = name.removeprefix(VALIDATION).replace("_", " ")
    return f"{label[:-3]}WER" if label.endswith("wer") else label


def _shown(name: str, value: Number) -> str:
    if name.endswith(("wer", "accuracy")):
        return f"{value:.1%}"
    return f"{value:.4f}" if name.endswith("loss") else f"{value:,.0f}"


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """A run in a few lines of text: how fast it was, and what became of loss and validation results.

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
    said = [f"{lines[-1]['step']} steps"]
    said += [text.format(median(v for _, v in found)) for k, text in speed if (found := values(lines, k))]
    said += [text.format(found[-1][1]) for k, text in counts if (found := values(lines, k))]
    text = ", ".join(said)
    measured = dict.fromkeys(k for line in lines for k in line if k.startswith(VALIDATION))
    for name in ("loss", *(k for k in measured if k.endswith(("loss", "wer", "accuracy")))):
        if found := values(lines, name):
            kind = "validation " if name in measured else ""
            text += f"\n  {kind}{_label(name)} {_shown(name, found[0][1])} -> {_shown(name, found[-1][1])}"
    return text


class EventFile:
    """The run's TensorBoard file, in `folder`, made anew from the lines so far.

    So every step is in it once, none is missing that a killed process had not written yet, and a file lost or
    never asked for is made good. tensorboardX's SummaryWriter writes from a thread: after a write error, as
    on a full disk, its queue fills and the next call waits for ever; its RecordWriter raises.
    """

    def __init__(self, folder: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        folder.mkdir(exist_ok=True)
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()
        now = time.time()
        self._path = folder / f"events.out.tfevents.{now:.0f}.{socket.gethostname()}"
        self._file, self._flushed = RecordWriter(str(self._path)), -math.inf
        # A TensorBoard that looks on forgets what it has read of the old file.
        start = SessionLog(status=SessionLog.START)
        for event in (Event(file_version="brain.Event:2"), Event(session_log=start)):
            event.wall_time = now
            self._file.write(event.SerializeToString())
        for line in lines:
            self.write(line)

    def write(self, line: Mapping[str, Any]) -> None:
        """validation_loss is found as validation/loss, all others as train/NAME."""
        tags = {
            (f"validation/{k.removeprefix(VALIDATION)}" if k.startswith(VALIDATION) else f"train/{k}"): v
            for k, v in line.items()
            if k not in ("step", "time")
        }
        scalars = Summary(value=[Summary.Value(tag=k, simple_value=v) for k, v in tags.items()])
        event = Event(wall_time=line.get("time", time.time()), step=line["step"], summary=scalars)
        with naming(self._path):
            self._file.write(event.SerializeToString())
            if time.monotonic() - self._flushed > FLUSH_SECONDS:
                self._file.flush()
                self._flushed = time.monotonic()

    def close(self) -> None:
        with naming(self._path):
            self._file.close()


class Progress:
    """Shows a run on standard output: one live line on a terminal, elsewhere plain lines, not of every step.

    The time left follows from the steps after the first of this call, which compiles; validations and
    checkpoints between them are included. Real tokens/s is the median of recent steps.
    """

    def __init__(self, steps: int, wer: Number | None) -> None:
        self._steps, self._wer = steps, wer
        self._rates: deque[Number] = deque(maxlen=RECENT)
        self._first: tuple[int, float] | None = None  # number and end of this call's first step
        self._plain = -math.inf  # when the last plain line was written
        self._bar: tqdm | None = None  # the live line

    def step(self, line: Mapping[str, Any]) -> None:
        step, results = line["step"], {k: v for k, v in line.items() if k.startswith(VALIDATION)}
        self._wer = results.get("validation_wer", self._wer)
        if "loss" in line:
            self._show(step, self._text(line), now=bool(results))
        if results:
            self.say(f"validation at step {step}: {validation_text(results)}")

    def say(self, text: str) -> None:
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
        # Without the first step where there is another.
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
            return
        ended = time.monotonic()
        early = self._first is not None and step < self._first[0] + EVERY_STEP
        if now or early or step == self._steps or ended - self._plain >= FLUSH_SECONDS:
            self._plain = ended
            self.say(f"step {step}/{self._steps}  {text}")
