"""Reads a data set as a training run does, and compares what it trains on and lists with what was written."""

import argparse
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxthd.config import Config, DataConfig, EncoderConfig, ModelConfig, SpecAugmentConfig
from jaxthd.data.loader import make_loader
from jaxthd.data.skipped import Listed, SkipLog
from jaxthd.data.sources.registry import open_source, read_source
from jaxthd.data.sources.source import SourceSetting
from jaxthd.data.workers import Workers
from jaxthd.errors import UserError
from jaxthd.files.jsonl import read_lines

CONFIG = Config(
    data=DataConfig(
        max_skipped_share=1.0,
        template="chatml",
        system_prompt="Listen.",
        capacity=256,
        audio_capacity=800,
        max_documents=8,
        spec_augment=SpecAugmentConfig(freq=(1, 4), time=(2, 0.05)),
    ),
    model=ModelConfig(encoder=EncoderConfig(num_mels=16, chunk_seconds=1.0)),
)
ITEM_SECONDS = 5.0
MEMORY = 2**30


class Written(NamedTuple):
    """A data set as a generator wrote it, and what it damaged.

    items: the name of each item by its number, as in its key; "" where damage may have changed the name.
    damage: in words, for messages. stops: whether the damage must end the run; None: it may, or may not.
    lost: the numbers of the items that cannot be used, where that is known: they are listed, and all others
        are trained on. None: each may be either.
    heard: how many recordings items have that are trained on, by number.
    """

    setting: SourceSetting
    items: Mapping[int, str]
    damage: str = "values or bytes"
    stops: bool | None = None
    lost: frozenset[int] | None = None
    heard: Mapping[int, int] = {}


@dataclass
class Outcome:
    """Counts for one kind of damage.

    written: items that the generator wrote. trained, listed, refused: what became of each of them; refused:
    of a data set that UserError refused as a whole.
    """

    inputs: int = 0
    written: int = 0
    trained: int = 0
    listed: int = 0
    refused: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block after that many seconds."""

    def ring(*_: object) -> None:
        raise TimeoutError(f"no end after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def is_of_container(error: Exception) -> bool:
    """Whether an error refuses a file of several items as a whole, as empty, damaged or of another form."""
    reasons = (
        "how many items are lost is not known",
        "expected items in each file of a data set",
        "expected JSON lines, plain or compressed",
        "expected a tar file that is not compressed",
        "expected a parquet or arrow file",
        "its rows would be trained as text alone",
    )
    return any(reason in str(error) for reason in reasons)


def check(
    written: Written,
    load: Callable[..., Any],
    workers: Workers | int,
    outcome: Outcome,
    config: Config = CONFIG,
) -> None:
    """Reads a data set once as a training run does, and adds to the outcome.

    Every item that was written must be trained on, listed or refused, once, under its name.
    """
    title = f"{written.setting.path} ({written.damage})"
    log = SkipLog(Path(f"{written.setting.path}.skipped"))
    outcome.written += len(written.items)
    keys: list[str] = []
    try:
        with time_limit(ITEM_SECONDS):
            source = open_source(written.setting)
            examples, skipped = read_source(source, config.data)
            source.digest()
            source.containers()
        on_skip = Listed(log, [written.setting.path])
        for item in skipped:
            on_skip(item.key, item.reason)
        options: dict[str, Any] = {"repeat": False, "answers": True, "on_skip": on_skip, "workers": workers}
        with make_loader([examples], load, config, **options) as loader:
            for batch, report in loader:
                keys += [key for row in report.keys for key in row]
                if not np.isfinite(batch.features).all():
                    outcome.violations.append(f"{title}: features that are not finite, in {report.keys}")
    except TimeoutError:
        outcome.violations.append(f"{title}: {traceback.format_exc()}")
        return
    except (UserError, OSError) as error:  # which end a command with their message (readable_errors)
        outcome.refused += len(written.items)
        outcome.violations += [f"{title}: {why}" for why in wrongly_refused(written, error)]
        return
    except Exception:
        outcome.violations.append(f"{title}: {traceback.format_exc()}")
        return
    clips = {key: len(example.clips) for example in examples if (key := example.key) in set(keys)}
    entries = read_lines(log.path)
    listed = [entry["key"] for entry in entries]
    outcome.trained += len(keys)
    outcome.listed += len(listed)
    outcome.violations += [f"{title}: {why}" for why in _wrongly_read(written, keys, listed, clips)]
    outcome.violations += [f"{title}: {e}" for e in entries if "worker process died" in e["reason"]]


def wrongly_refused(written: Written, error: Exception) -> Iterator[str]:
    """Says why the whole data set should not be refused: it is not damaged, and has items left."""
    unusable = re.search(r"no usable (line|row) \((\d+) skipped\)", str(error))
    if unusable and int(unusable[2]) != len(written.items):
        yield f"{len(written.items)} items were written: {error}"
    elif unusable or written.stops:
        return
    elif written.stops is False or not is_of_container(error):
        yield str(error)


def _wrongly_read(
    written: Written, trained: list[str], listed: list[str], clips: Mapping[str, int]
) -> Iterator[str]:
    """Says what is wrong about the items that are trained on and listed. clips: recordings by key."""
    if written.stops:
        yield "the run goes on"
    numbers = [int(key.partition(":")[0]) for key in (*trained, *listed)]
    if sorted(numbers) != sorted(written.items):
        yield f"trained {trained}, listed {listed}; written {dict(written.items)}"
        return
    for number, key in zip(numbers, (*trained, *listed), strict=True):
        name = key.partition(":")[2]
        if name and written.items[number] not in ("", name):
            yield f"{key} was written as {written.items[number]}"
    for number, key in zip(numbers, trained, strict=False):
        if clips[key] != written.heard.get(number, clips[key]):
            yield f"{key} is trained on with {clips[key]} recordings, {written.heard[number]} were written"
    if written.lost is not None and {int(key.partition(":")[0]) for key in listed} != written.lost:
        yield f"listed {listed}, damaged {sorted(written.lost)} of {dict(written.items)}"


def numbered(lines: bytes) -> dict[int, str]:
    """The numbers of the lines of a manifest that are not blank, each with no name that is known."""
    return {n: "" for n, line in enumerate(lines.split(b"\n"), 1) if line.strip()}


def run(fuzz: Callable[[Path, int, int, Workers], dict[str, Outcome]], count: int, seed: int) -> None:
    """Fuzzes with worker processes, prints the outcomes by kind, and exits with 1 after a violation.

    fuzz: (folder, number of damaged inputs, seed, workers) -> outcomes by kind.
    """
    workers = Workers(os.cpu_count() or 1, ITEM_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = fuzz(Path(folder), count, seed, workers)
    workers.close()
    columns = ("inputs", "written", "trained", "listed", "refused", "seconds", "violations")
    print(f"{'damage':24}" + "".join(f"{name:>12}" for name in columns))
    for kind, outcome in outcomes.items():
        _print(kind, [getattr(outcome, name) for name in columns])
    sums = [sum((getattr(each, name) for each in outcomes.values()), start=0) for name in columns[:-1]]
    _print("all", [*sums, sum(len(each.violations) for each in outcomes.values())])
    violations = [text for outcome in outcomes.values() for text in outcome.violations]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"largest worker process: {peak / 2**20:.0f} MiB")
    if peak > MEMORY:
        violations.append(f"a worker process took {peak / 2**20:.0f} MiB")
    print("\n".join(violations) or "every item that was written is trained on, listed or refused")
    sys.exit(bool(violations))


def fuzzer(doc: str | None, count: int) -> argparse.ArgumentParser:
    """The parser of a fuzzer. doc: its help. count: the default of --count."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count, help="damaged inputs")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _print(kind: str, cells: Sequence[Any]) -> None:
    cells = [len(cell) if isinstance(cell, list) else cell for cell in cells]
    shown = [f"{cell:,}" if isinstance(cell, int) else f"{cell:.1f}" for cell in cells]
    print(f"{kind:24}" + "".join(f"{cell:>12}" for cell in shown))
