"""Whether damaged tables, cuts and noises are always trained on or listed: never a traceback, never a hang.

    python scripts/fuzz_sources.py [--count 5000] [--seed 0]

As fuzz_data.py, for the data sets that it does not make: parquet and arrow files of up to 5 rows, damaged as
bytes and as values of their cells; manifests of Lhotse cuts with recordings in files, and of noises that
training recordings are augmented with, damaged as bytes and as values of a line. Each input is a function of
(seed, its number), read by itself through the code of a training run: a source, documents made in worker
processes, packing, a skip log. Data sets are filtered and augmented, too. Prints a table; exits 1 and lists
the violations where

- anything is raised but UserError for a data set without a usable item, for a file that is empty, cut or of
  another form, or for a noise that cannot be used;
- reading a data set takes more than 5 s, or ends its process;
- an item is neither a document nor in the skip log, or is both;
- a worker process dies, or takes more than 1 GiB of memory.

Of a table that is damaged as bytes the number of rows is not known: its items must be numbered without a gap.
Needs pyarrow (the extra parquet).
"""

import copy
import json
import re
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from jaxthd.config import AugmentConfig, FilterConfig
from jaxthd.data.audio.augment import Augmentation
from jaxthd.data.loader import make_loader
from jaxthd.data.skipped import SkipLog
from jaxthd.data.sources.noises import read_recordings
from jaxthd.data.sources.registry import open_source, read_source
from jaxthd.data.sources.source import SourceSetting
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.data.workers import Workers
from jaxthd.errors import UserError
from jaxthd.files.jsonl import read_lines
from scripts.fuzz_data import (
    CONFIG as BASE,
)
from scripts.fuzz_data import (
    CUT,
    FORMATS,
    ITEM_SECONDS,
    VALUES,
    Outcome,
    damaged_bytes,
    damaged_entry,
    is_of_container,
    make_recordings,
    run,
    time_limit,
)

CONFIG = replace(
    BASE, data=replace(BASE.data, filter=FilterConfig(min_seconds=0.1, max_characters_per_second=200.0))
)
KINDS = (
    "parquet: bytes",
    "parquet: values",
    "arrow: bytes",
    "arrow: values",
    "cuts: bytes",
    "cuts: values",
    "noises: bytes",
    "noises: values",
)
FILE_CUT = CUT | {"recording": {"sources": [{"type": "file", "channels": [0], "source": "s16.wav"}]}}
NOISE = {"audio_filepath": "s24.flac", "offset": 0.1, "duration": 0.4}
COLUMNS = ("audio", "text", "duration", "id", "messages", "sampling_rate", "lang")


def rows_of(rng: np.random.Generator, folder: Path) -> list[dict[str, Any]]:
    """1 to 5 rows with recordings of one form, as bytes, by path, or as samples."""
    form, rows = int(rng.integers(4)), []
    for number in range(int(rng.integers(1, 6))):
        name = str(rng.choice(list(FORMATS)))
        data = (folder / name).read_bytes()
        wave = rng.normal(0, 0.1, int(rng.choice([0, 1, 400, 4000]))).astype(np.float32).tolist()
        audio: Any = (
            {"bytes": data if rng.random() < 0.8 else damaged_bytes(rng, data), "path": name},
            {"bytes": None, "path": name if rng.random() < 0.8 else "gone.wav"},
            {"array": wave, "sampling_rate": int(rng.choice([8000, 16_000, 0, -1, 2**31 - 1]))},
            data,
        )[form]
        rows.append({"audio": audio, "text": "one two", "id": f"r{number}", "duration": None, "lang": "en"})
    return rows


def damaged_rows(rng: np.random.Generator, rows: list[dict[str, Any]]) -> pyarrow.Table:
    """Replaces values of cells where pyarrow can store the result, and renames or drops columns."""
    rows = copy.deepcopy(rows)
    for _ in range(int(rng.integers(1, 4))):
        row = rows[int(rng.integers(len(rows)))]
        name = str(rng.choice(COLUMNS))
        within = row.get(name)
        if isinstance(within, dict) and within and rng.random() < 0.7:
            row, name = within, str(rng.choice(list(within)))
        old = row.get(name)
        row[name] = copy.deepcopy(VALUES[int(rng.integers(len(VALUES)))])
        try:
            pyarrow.Table.from_pylist(rows)
        except (pyarrow.ArrowException, OverflowError, UnicodeError, ValueError, TypeError):
            row[name] = old
            for each in rows:  # a value of another type, in a column of its own type
                each[str(rng.choice(COLUMNS[3:]))] = [None, 7, "x", 0.5, True, [1.0], [{}], b"\xff"][
                    int(rng.integers(8))
                ]
    try:
        table = pyarrow.Table.from_pylist(rows)
    except (pyarrow.ArrowException, OverflowError, UnicodeError, ValueError, TypeError):
        table = pyarrow.Table.from_pylist([{"text": "one"}])
    if rng.random() < 0.2:
        names = list(table.column_names)
        at = int(rng.integers(len(names)))
        names[at] = str(rng.choice(["text", "audio", "", "a.b", "duration", names[at].upper()]))
        table = table.rename_columns(names)
    if rng.random() < 0.1 and table.num_columns > 1:
        table = table.remove_column(int(rng.integers(table.num_columns)))
    return table


def write_table(rng: np.random.Generator, path: Path, table: pyarrow.Table) -> None:
    group = int(rng.integers(1, 4))
    if path.suffix == ".parquet":
        codec = str(rng.choice(["none", "snappy", "zstd", "gzip"]))
        pyarrow.parquet.write_table(table, path, row_group_size=group, compression=codec)
        return
    make = pyarrow.ipc.new_stream if rng.random() < 0.7 else pyarrow.ipc.new_file
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=group)


def write_input(rng: np.random.Generator, kind: str, folder: Path, name: str) -> tuple[Path, set[str] | None]:
    """Writes one damaged input. Returns its path and the numbers of its items; None: not known."""
    what, _, how = kind.partition(": ")
    if what in ("parquet", "arrow"):
        path, rows = folder / f"{name}.{what}", rows_of(rng, folder)
        table = damaged_rows(rng, rows) if how == "values" else pyarrow.Table.from_pylist(rows)
        try:
            write_table(rng, path, table)
        except pyarrow.ArrowException:  # what the format cannot hold
            table = pyarrow.Table.from_pylist([{"text": "one"}])
            write_table(rng, path, table)
        if how == "bytes":
            path.write_bytes(damaged_bytes(rng, path.read_bytes()))
        return path, {str(n + 1) for n in range(table.num_rows)} if how == "values" else None
    path, sound = folder / f"{name}.jsonl", FILE_CUT if what == "cuts" else NOISE
    line = damaged_entry(rng, sound) if how == "values" else damaged_bytes(rng, json.dumps(sound).encode())
    path.write_bytes(line + b"\n" + (json.dumps(sound).encode() if rng.random() < 0.8 else b"") + b"\n")
    lines = enumerate(path.read_bytes().split(b"\n"), 1)
    return path, {str(n) for n, text in lines if text.strip()}


def check(
    path: Path,
    items: set[str] | None,
    kind: str,
    workers: Workers | int,
    load: Callable[..., Any],
    outcome: Outcome,
) -> None:
    """Reads one input as a training run does, and adds to the outcome."""
    log, documents = SkipLog(path.with_name(f"{path.name}.skipped")), []
    on_skip = log.of([str(path)])
    try:
        with time_limit(ITEM_SECONDS):
            source = open_source(SourceSetting(f"cuts:{path}" if kind.startswith("cuts") else str(path)))
            examples, skipped = read_source(source, CONFIG.data)
            source.digest()
        for item in skipped:
            on_skip(item.key, item.reason)
        options: dict[str, Any] = {"repeat": False, "answers": True, "on_skip": on_skip, "workers": workers}
        with make_loader([examples], load, CONFIG, **options) as loader:
            for batch, report in loader:
                documents += [key.partition(":")[0] for row in report.keys for key in row]
                if not np.isfinite(batch.mels).all():
                    outcome.violations.append(f"{path}: features that are not finite, in {report.keys}")
    except UserError as error:
        found = re.search(r"no usable (line|row) \((\d+) skipped\)", str(error))
        if found and (items is None or int(found[2]) == len(items)):
            outcome.refused += int(found[2])
            outcome.lines += int(found[2])
            return
        if is_of_container(error):
            outcome.refused += len(items or "1")
            outcome.lines += len(items or "1")
            return
        outcome.violations.append(f"{path}: {error}")
        return
    except Exception:
        outcome.violations.append(f"{path}: {traceback.format_exc()}")
        return
    entries = read_lines(log.path)
    listed = [entry["key"].partition(":")[0] for entry in entries]
    outcome.documents += len(documents)
    outcome.listed += len(listed)
    outcome.lines += len(documents) + len(listed)
    expected = items or {str(n + 1) for n in range(len(documents) + len(listed))}
    if sorted(documents + listed) != sorted(expected):
        outcome.violations.append(f"{path}: documents {documents}, listed {listed}, expected {expected}")
    outcome.violations += [f"{path}: {e}" for e in entries if "worker process died" in e["reason"]]


def check_noises(path: Path, items: set[str] | None, folder: Path, outcome: Outcome) -> None:
    """Reads one manifest of noises, and adds each of its noises to a recording."""
    assert items is not None
    outcome.lines += len(items)
    speech = np.random.default_rng(0).normal(0, 0.1, 8000).astype(np.float32)
    try:
        with time_limit(ITEM_SECONDS):
            clips, skipped = read_recordings(str(path), "data.augment.noise_manifest")
            outcome.documents += len(clips)
            outcome.listed += len(skipped)
            if len(clips) + len(skipped) != len(items):
                outcome.violations.append(
                    f"{path}: {len(clips)} noises, {len(skipped)} listed of {len(items)}"
                )
            for clip in clips:
                augment = Augmentation(AugmentConfig(noise_probability=1.0), noises=[clip])
                if not np.isfinite(augment(speech, 0, 0, "1:x")).all():
                    outcome.violations.append(f"{path}: samples that are not finite")
    except UserError as error:
        if "no recording that can be used" not in str(error) and not is_of_container(error):
            outcome.violations.append(f"{path}: {error}")
        outcome.refused += len(items)
    except ValueError:  # the reason for which a document is skipped
        return
    except Exception:
        outcome.violations.append(f"{path}: {traceback.format_exc()}")


def fuzz(folder: Path, count: int, seed: int, workers: Workers | int) -> dict[str, Outcome]:
    """Checks `count` damaged inputs; the outcomes by kind."""
    make_recordings(folder)
    noises, _ = read_recordings(str(sound_noises(folder)), "data.augment.noise_manifest")
    augment = AugmentConfig(speed=(0.9, 1.1), noise_probability=0.5, low_pass_probability=0.3)
    load = SpeechDocuments(
        CONFIG, ByteTokenizer(), train=True, filtered=True, augmentation=Augmentation(augment, noises)
    )
    outcomes = {kind: Outcome() for kind in KINDS}
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        rng, outcome = np.random.default_rng([seed, number]), outcomes[kind]
        path, items = write_input(rng, kind, folder, str(number))
        start = time.perf_counter()
        if kind.startswith("noises"):
            check_noises(path, items, folder, outcome)
        else:
            check(path, items, kind, workers, load, outcome)
        outcome.inputs += 1
        outcome.seconds += time.perf_counter() - start
        for made in (path, path.with_name(f"{path.name}.skipped")):
            made.unlink(missing_ok=True)
    return outcomes


def sound_noises(folder: Path) -> Path:
    path = folder / "noises.jsonl"
    path.write_text(json.dumps(NOISE) + "\n")
    return path


if __name__ == "__main__":
    run(__doc__, fuzz, 5000, "item")
