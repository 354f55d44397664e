"""Damaged lines, recordings and tar files: a training run reads them, and nothing may be lost."""

import json
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxthd.data.sources.source import SourceSetting
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import ByteTokenizer
from jaxthd.data.workers import Workers
from tests.fuzz.checks import CONFIG, ITEM_SECONDS, Outcome, Written, check, numbered, time_limit
from tests.fuzz.damage import damaged_bytes, damaged_entry
from tests.fuzz.fields import line_with_recording
from tests.fuzz.lines import CONVERSATIONS, CUT, PREFERENCES, UTTERANCE
from tests.fuzz.ranges import Recording, wrong
from tests.fuzz.recordings import (
    FORMATS,
    damaged_file,
    damaged_tar,
    make_recordings,
    strange_samples,
    write_tar,
)

RANGES = "recording: ranges"
FIELDS = "recording: fields"
KINDS = (
    "utterance: bytes",
    "utterance: values",
    "conversation: bytes",
    "conversation: values",
    "preference: bytes",
    "preference: values",
    FIELDS,
    "recording: file",
    "recording: samples",
    RANGES,
    "cut: bytes",
    "cut: values",
    "tar file",
)


def damaged_line(rng: np.random.Generator, kind: str, folder: Path, name: str) -> bytes:
    """One line of a manifest (more, if damage breaks it); its recording is written beside it."""
    conversation = CONVERSATIONS[rng.integers(len(CONVERSATIONS))]
    preference = PREFERENCES[rng.integers(len(PREFERENCES))]
    match kind:
        case "utterance: bytes":
            return damaged_bytes(rng, json.dumps(UTTERANCE).encode())
        case "utterance: values":
            return damaged_entry(rng, UTTERANCE)
        case "conversation: bytes":
            return damaged_bytes(rng, json.dumps(conversation, ensure_ascii=False).encode())
        case "conversation: values":
            return damaged_entry(rng, conversation)
        case "preference: bytes":
            return damaged_bytes(rng, json.dumps(preference).encode())
        case "preference: values":
            return damaged_entry(rng, preference)
        case "cut: bytes":
            return damaged_bytes(rng, json.dumps(CUT).encode())
        case "cut: values":
            return damaged_entry(rng, CUT)
        case "tar file":
            damaged_tar(rng, folder, folder / f"audio_{name}.tar")
            recording = str(rng.choice(list(FORMATS)))
            return json.dumps({"audio_filepath": recording, "text": "one", "shard_id": int(name)}).encode()
        case "recording: fields":
            return json.dumps(line_with_recording(rng)).encode()
        case "recording: file":
            recording = damaged_file(rng, folder, name)
        case _:
            recording = strange_samples(rng, folder, name)
    timed = {"duration": 0.5, "offset": float(rng.choice([0.0, 0.2]))} if rng.random() < 0.3 else {}
    return json.dumps({"audio_filepath": recording, "text": "one two", **timed}).encode()


def written_lines(
    rngs: Sequence[np.random.Generator], kind: str, folder: Path, inputs: Sequence[int], unused: int
) -> Written:
    """Writes a manifest, or a Shar directory, of a damaged line for each input and mostly an undamaged one.

    unused: the number of a tar file that no input has.
    """
    damaged = [damaged_line(rng, kind, folder, f"{i}") for i, rng in zip(inputs, rngs, strict=True)]
    manifest, tars, sound = folder / f"{kind.replace(': ', '-')}-{inputs[0]}.jsonl", "", UTTERANCE
    path = manifest
    if kind.startswith("preference"):
        sound = PREFERENCES[0]
    if kind.startswith("cut"):
        path, sound = manifest.with_suffix(""), CUT
        path.mkdir()
        manifest = path / "cuts.jsonl"
        write_tar(
            path / "recording.tar", {f"{CUT['id']}.wav": (folder / "s16.wav").read_bytes(), "s16.json": b"{}"}
        )
    if kind == "tar file":
        sound = UTTERANCE | {"shard_id": unused}
        write_tar(folder / f"audio_{unused}.tar", {"s16.wav": (folder / "s16.wav").read_bytes()})
        tars = f"{folder}/audio_{{{','.join(map(str, (*inputs, unused)))}}}.tar"
    last = json.dumps(sound).encode() if rngs[0].random() < 0.8 else b""
    manifest.write_bytes(b"\n".join([*damaged, last]) + b"\n")
    items = numbered(manifest.read_bytes())
    heard = dict.fromkeys(items, 1) if kind == FIELDS else {}
    if last:
        items[max(items)], heard[max(items)] = ("s16" if sound is CUT else "s16.wav"), 1
    return Written(SourceSetting(str(path), tarred_audio=tars), items, kind, heard=heard)


def check_ranges(rng: np.random.Generator, path: Path, outcome: Outcome) -> None:
    """Reads a recording whole and in ranges, and adds to the outcome."""
    recording = Recording(rng, path)
    outcome.inputs, outcome.written = outcome.inputs + 1, outcome.written + 1
    outcome.trained, outcome.listed = outcome.trained + (not recording.lost), outcome.listed + recording.lost
    try:
        with time_limit(ITEM_SECONDS):
            found = list(wrong(rng, recording))
    except Exception:
        found = [traceback.format_exc()]
    outcome.violations += [f"{path}, {recording.form} ({recording.damage}): {text}" for text in found]
    path.unlink()


def fuzz(folder: Path, count: int, seed: int, workers: Workers | int) -> dict[str, Outcome]:
    """Checks `count` damaged inputs in manifests of 1 to 30 lines, most with an undamaged line; by kind."""
    make_recordings(folder)
    load = SpeechDocuments(CONFIG, ByteTokenizer(), train=True)
    outcomes = {kind: Outcome() for kind in KINDS}
    for number, kind in enumerate(KINDS):
        of_kind, outcome = range(number, count, len(KINDS)), outcomes[kind]
        start = time.perf_counter()
        sizes = np.random.default_rng([seed, number, 1]).integers(1, 31, len(of_kind))
        for at, end in zip(np.cumsum(sizes) - sizes, np.cumsum(sizes), strict=True):
            inputs = of_kind[at:end]
            if not inputs:
                break
            rngs = [np.random.default_rng([seed, i]) for i in inputs]
            if kind == RANGES:
                for rng in rngs:
                    check_ranges(rng, folder / "range", outcome)
                continue
            check(written_lines(rngs, kind, folder, inputs, count), load, workers, outcome)
            outcome.inputs += len(inputs)
        outcome.seconds += time.perf_counter() - start
    return outcomes
