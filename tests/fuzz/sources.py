"""Damaged tables, cuts, noises and sets of several containers: a training run reads them."""

import copy
import json
import shutil
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

from jaxthd.config import AugmentConfig, FilterConfig
from jaxthd.data.audio.augment import Augmentation
from jaxthd.data.sources.noises import read_recordings
from jaxthd.data.sources.source import SourceSetting
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.data.workers import Workers
from jaxthd.errors import UserError
from tests.fuzz.checks import (
    CONFIG as BASE,
)
from tests.fuzz.checks import (
    ITEM_SECONDS,
    Outcome,
    Written,
    check,
    numbered,
    time_limit,
    wrongly_refused,
)
from tests.fuzz.damage import VALUES, damaged_bytes, damaged_entry
from tests.fuzz.fields import FIELDS
from tests.fuzz.lines import CUT
from tests.fuzz.recordings import FORMATS, make_recordings
from tests.fuzz.sets import SETS, write_table

CONFIG = replace(
    BASE, data=replace(BASE.data, filter=FilterConfig(seconds=(0.1, 0.0), characters_per_second=(0.0, 200.0)))
)

KINDS = (
    "parquet: bytes",
    "parquet: values",
    "parquet: columns",
    "arrow: bytes",
    "arrow: values",
    "arrow: columns",
    "cuts: bytes",
    "cuts: values",
    "noises: bytes",
    "noises: values",
    *SETS,
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


def with_column(rng: np.random.Generator, rows: list[dict[str, Any]], field: str) -> pyarrow.Table:
    """A table whose recordings are in that column."""
    if field in ("text", "id", "lang", "duration"):
        field = "audio"
    texts = {"text"} if rng.random() < 0.7 else {"text", "id", "lang"}
    found = [{field: row["audio"], **{name: row[name] for name in texts}} for row in rows]
    return pyarrow.Table.from_pylist(found)


def write_input(rng: np.random.Generator, kind: str, folder: Path, name: str) -> Written:
    """Writes one damaged input, a file or folder of that name."""
    what, _, how = kind.partition(": ")
    if kind in SETS:
        (folder / name).mkdir()
        return SETS[kind](rng, folder / name)
    if what in ("parquet", "arrow"):
        return write_rows(rng, folder / f"{name}.{what}", how)
    path, sound = folder / f"{name}.jsonl", FILE_CUT if what == "cuts" else NOISE
    line = damaged_entry(rng, sound) if how == "values" else damaged_bytes(rng, json.dumps(sound).encode())
    path.write_bytes(line + b"\n" + (json.dumps(sound).encode() if rng.random() < 0.8 else b"") + b"\n")
    source = "cuts" if what == "cuts" else ""
    return Written(SourceSetting(str(path), source=source), numbered(path.read_bytes()), kind)


def write_rows(rng: np.random.Generator, path: Path, how: str) -> Written:
    """Writes a table whose bytes or values are damaged, or whose recordings are in any column."""
    rows, heard = rows_of(rng, path.parent), {}
    table = pyarrow.Table.from_pylist(rows)
    if how == "columns":
        table = with_column(rng, rows, str(rng.choice(FIELDS)))
        heard = dict.fromkeys(range(1, len(rows) + 1), 1)
    if how == "values":
        table = damaged_rows(rng, rows)
    try:
        write_table(rng, path, table)
    except pyarrow.ArrowException:  # what the format cannot hold
        table = pyarrow.Table.from_pylist([{"text": "one"}])
        write_table(rng, path, table)
    if how == "bytes":
        path.write_bytes(damaged_bytes(rng, path.read_bytes()))
    items = dict.fromkeys(range(1, table.num_rows + 1), "")
    return Written(SourceSetting(str(path)), items, f"{path.suffix[1:]}: {how}", heard=heard)


def check_noises(written: Written, outcome: Outcome) -> None:
    """Reads one manifest of noises, and adds each of its noises to a recording."""
    path, items = written.setting.path, written.items
    outcome.written += len(items)
    speech = np.random.default_rng(0).normal(0, 0.1, 8000).astype(np.float32)
    try:
        with time_limit(ITEM_SECONDS):
            clips, skipped = read_recordings(path, "data.augment.noise_manifest")
            outcome.trained += len(clips)
            outcome.listed += len(skipped)
            if len(clips) + len(skipped) != len(items):
                outcome.violations.append(
                    f"{path}: {len(clips)} noises, {len(skipped)} listed of {len(items)}"
                )
            for clip in clips:
                augment = Augmentation(AugmentConfig(shares=("noise=1",)), noises=[clip])
                if not np.isfinite(augment(speech, 0, 0, "1:x")).all():
                    outcome.violations.append(f"{path}: samples that are not finite")
    except UserError as error:
        if "no recording that can be used" not in str(error):
            outcome.violations += [f"{path}: {why}" for why in wrongly_refused(written, error)]
        outcome.refused += len(items)
    except ValueError:  # the reason for which a document is skipped
        return
    except Exception:
        outcome.violations.append(f"{path}: {traceback.format_exc()}")


def fuzz(folder: Path, count: int, seed: int, workers: Workers | int) -> dict[str, Outcome]:
    """Checks `count` damaged inputs; the outcomes by kind."""
    make_recordings(folder)
    (folder / "noises.jsonl").write_text(json.dumps(NOISE) + "\n")
    noises, _ = read_recordings(str(folder / "noises.jsonl"), "data.augment.noise_manifest")
    augment = AugmentConfig(speed=(0.9, 1.1), shares=("low_pass=0.3",))
    load = SpeechDocuments(
        CONFIG, ByteTokenizer(), train=True, filtered=True, augmentation=Augmentation(augment, noises)
    )
    outcomes = {kind: Outcome() for kind in KINDS}
    before = set(folder.iterdir())
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        outcome = outcomes[kind]
        written = write_input(np.random.default_rng([seed, number]), kind, folder, f"input{number}")
        start = time.perf_counter()
        if kind.startswith("noises"):
            check_noises(written, outcome)
        else:
            check(written, load, workers, outcome, CONFIG)
        outcome.inputs += 1
        outcome.seconds += time.perf_counter() - start
        for made in set(folder.iterdir()) - before:
            shutil.rmtree(made) if made.is_dir() else made.unlink()
    return outcomes
