"""Whether damaged data is always either trained on or listed: never a traceback, never a hang.

    python scripts/fuzz_data.py [--count 1000] [--seed 0]

Makes damaged inputs, each a function of (seed, number of the input): lines of utterances, conversations and
preferences, and cuts of Lhotse Shar, damaged as bytes and as values; recordings, as files and as samples; tar
files, as bytes and as headers. Reads them through the code of a training run: a data set, documents made in
worker processes, packing, skipped items in a skip log. Prints a table; exits 1 and lists the violations where

- anything is raised but UserError for a data set without a usable line, or for a file that is empty, cut or
  of another form;
- reading a line or a recording takes more than 5 s, or ends its process;
- a line is neither a document nor in the skip log, or is both;
- a feature is not finite;
- a worker process takes more than 1 GiB of memory.

Messages of libraries about damaged recordings go to standard error. Takes a minute on 2 cores.
"""

import argparse
import copy
import io
import json
import os
import resource
import signal
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from jaxthd.config import Config, DataConfig, EncoderConfig, ModelConfig, SpecAugmentConfig
from jaxthd.data.loader import make_loader
from jaxthd.data.skipped import SkipLog
from jaxthd.data.sources.registry import open_source, read_source
from jaxthd.data.sources.source import SourceSetting
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.tokenizer import ByteTokenizer
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
        spec_augment=SpecAugmentConfig(freq_masks=1, freq_width=4, time_masks=2),
    ),
    model=ModelConfig(encoder=EncoderConfig(num_mels=16, chunk_seconds=1.0)),
)
ITEM_SECONDS = 5.0
MEMORY = 2**30
FORMATS: dict[str, dict[str, Any]] = {
    "s16.wav": {"subtype": "PCM_16"},
    "f32.wav": {"subtype": "FLOAT"},
    "s24.flac": {"subtype": "PCM_24"},
    "vorbis.ogg": {"subtype": "VORBIS"},
    "opus.ogg": {"subtype": "OPUS"},
    "layer3.mp3": {},
    "gsm.wav": {"subtype": "GSM610"},
    "variable.mp3": {"bitrate_mode": "VARIABLE", "compression_level": 0.5},
    "adpcm.wav": {"subtype": "MS_ADPCM"},
}
UTTERANCE = {"audio_filepath": "s16.wav", "text": "one two", "duration": 0.5, "offset": 0.1, "lang": "en"}
CUT = {
    "id": "s16",
    "start": 0.1,
    "duration": 0.5,
    "channel": 0,
    "supervisions": [
        {"id": "s", "start": 0.2, "duration": 0.3, "channel": 0, "text": "two"},
        {"id": "t", "start": 0.0, "duration": 0.2, "channel": 0, "text": "one"},
    ],
    "recording": {"sources": [{"type": "shar", "channels": [0], "source": ""}], "channel_ids": [0]},
    "custom": {"context": "What is said?", "system_prompt": "Be brief."},
    "type": "MonoCut",
}
CONVERSATIONS: list[dict[str, Any]] = [
    {
        "id": "nemo",
        "conversations": [
            {"from": "System", "value": "Be brief.", "type": "text"},
            {"from": "User", "value": "s16.wav", "type": "audio", "duration": 0.5, "offset": 0.0},
            {"from": "User", "value": "What is said?", "type": "text"},
            {"from": "Assistant", "value": "One two.", "type": "text"},
        ],
    },
    {
        "audio": ["f32.wav", {"audio_filepath": "s24.flac", "offset": 0.2, "duration": 0.3}],
        "conversations": [
            {"from": "human", "value": "{audio} or {audio}?"},
            {"from": "gpt", "value": "The first."},
            {"from": "human", "value": "Sure?"},
            {"from": "gpt", "value": "Yes."},
        ],
    },
    {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "audio", "path": "vorbis.ogg"}, {"type": "text", "text": "?"}],
            },
            {"role": "assistant", "content": "Three."},
        ]
    },
    {
        "audios": ["s16.wav", {"url": "s24.flac"}],
        "messages": [
            {"role": "user", "content": "<audio> or <audio>?"},
            {"role": "assistant", "content": "Both."},
        ],
    },
    {
        "audio_filepath": "s16.wav",
        "offset": 0.1,
        "messages": [
            {"role": "user", "content": [{"text": "What?"}]},
            {"role": "user", "content": [{"type": "audio_url", "audio_url": {"url": "s24.flac"}}]},
            {"role": "assistant", "content": "Three."},
        ],
    },
]

HEARD = {"audio_filepath": "s16.wav", "duration": 0.5}
PREFERENCES: list[dict[str, Any]] = [
    HEARD | {"chosen": "one two", "rejected": "won too", "text": "one two", "context": "What is said?"},
    HEARD | {"completion": "one two", "label": True},
    {
        "audio": ["f32.wav"],
        "prompt": [{"role": "user", "content": "{audio} Is it?"}],
        "chosen": [{"role": "assistant", "content": "Yes."}],
        "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "No."}]}],
    },
    {
        "id": "implicit",
        "chosen": [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "Yes."}],
        "rejected": [{"from": "human", "value": "Is it?"}, {"from": "gpt", "value": "No."}],
    },
]


def make_recordings(folder: Path) -> None:
    """Writes the undamaged recordings: 0.8 s of noise in every format, two channels in some."""
    rng = np.random.default_rng(0)
    for number, (name, options) in enumerate(FORMATS.items()):
        rate = (16_000, 44_100, 48_000, 8_000)[number % 4]
        soundfile.write(folder / name, rng.normal(0, 0.1, (rate * 4 // 5, 1 + number % 2)), rate, **options)


# --- damage ---


def damaged_bytes(rng: np.random.Generator, data: bytes) -> bytes:
    """Damages the bytes one or more times: truncates them, flips bits, or removes, repeats, overwrites or
    inserts a range."""
    for _ in range(rng.choice([1, 1, 1, 3])):
        start, stop = sorted(int(x) for x in rng.integers(0, len(data) + 1, 2))
        stop = min(stop, start + int(rng.choice([1, 8, 10_000])))
        out = bytearray(data)
        match rng.integers(7):
            case 0:
                del out[start:]
            case 1:
                for _ in range(rng.choice([1, 2, 20]) if data else 0):
                    # Half of the positions are in a possible header.
                    at = int(rng.integers(min(len(out), 64) if rng.random() < 0.5 else len(out)))
                    out[at] ^= 1 << int(rng.integers(8))
            case 2:
                del out[start:stop]
            case 3:
                out[start:start] = out[start:stop]
            case 4:
                out[start:stop] = rng.bytes(stop - start)
            case 5:
                out[start:start] = rng.choice(
                    [b"\x00", b"\xff\xfe", b'"', b"\n", b"}", b"[" * 2000, b"9" * 5000, b"\xed\xa0\x80"]
                )
            case 6:
                out[start:stop] = bytes(stop - start)
        data = bytes(out)
    return data


RAW = {f"raw {depth}": b"[" * depth + b"]" * depth for depth in (100, 900, 2000)} | {"raw 9": b"9" * 5000}
"""Marker -> the text that replaces it, which json would not write."""
VALUES: list[Any] = [
    *(None, True, 0, -1, 1e-300, 1e308, -0.0, 10**400, float("nan"), float("inf"), float("-inf")),
    *("", " ", "\x00", "\ud800", "a" * 100_000, "{audio}", "<|im_end|>", ".", "/", "..", "ä" * 300, "0.5"),
    *([], {}, [None], ["s16.wav"], {"path": "s16.wav"}, {"type": "audio"}, *RAW),
]
"""Values that replace a field's. Python's json accepts NaN and infinities."""


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of every value inside, at any depth."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def damaged_entry(rng: np.random.Generator, entry: dict[str, Any]) -> bytes:
    """Replaces, removes, renames, repeats or exchanges one to three values anywhere in the object."""
    entry = copy.deepcopy(entry)
    twice = b""
    for _ in range(rng.integers(1, 4)):
        found = list(places(entry))
        if not found:
            break
        container, key = found[rng.integers(len(found))]
        match rng.integers(6):
            case 0 | 1:
                container[key] = copy.deepcopy(VALUES[rng.integers(len(VALUES))])
            case 2:
                del container[key]
            case 3 if isinstance(container, dict):
                container[str(key).upper()] = container.pop(key)
            case 3:
                container.insert(key, copy.deepcopy(container[key]))
            case 4:
                other, place = found[rng.integers(len(found))]
                container[key] = copy.deepcopy(other[place]) if place in other or place != key else None
            case 5 if container is entry:
                twice = json.dumps({key: VALUES[rng.integers(len(VALUES))]}).encode()[1:-1] + b", "
    line = b"{" + twice + json.dumps(entry).encode()[1:]
    for name, text in RAW.items():
        line = line.replace(json.dumps(name).encode(), text)
    return line


def damaged_file(rng: np.random.Generator, folder: Path, name: str) -> str:
    """Writes a damaged file, or none; returns its name."""
    source = folder / str(rng.choice(list(FORMATS)))
    path = (
        folder / f"{name}{source.suffix if rng.random() < 0.8 else rng.choice(['.raw', '.wav', '.flac', ''])}"
    )
    match rng.integers(8):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(rng.choice(["nowhere", path.name, "/dev/zero", "s16.wav"]))
        case 2:
            path.write_bytes(rng.choice([b"", b"\x00" * 5000, b"RIFF", b"fLaC", b"OggS", rng.bytes(3000)]))
        case 3 if source.suffix == ".flac":
            data = bytearray(source.read_bytes())
            data[18:26] = rng.bytes(8)  # rate, channels, bits and number of samples
            path.write_bytes(data)
        case 3 if source.suffix == ".wav":
            data = bytearray(source.read_bytes())
            start, size = ((4, 4), (20, 2), (22, 2), (24, 4), (32, 2), (34, 2), (40, 4))[rng.integers(7)]
            data[start : start + size] = rng.choice([rng.bytes(size), bytes(size), b"\xff" * size])
            path.write_bytes(data)
        case _:
            path.write_bytes(damaged_bytes(rng, source.read_bytes()))
    return path.name


def write_tar(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def damaged_tar(rng: np.random.Generator, folder: Path, path: Path) -> None:
    """Writes a tar file of the recordings, one with a long name, damaged in its headers or anywhere."""
    files = {name: (folder / name).read_bytes() for name in FORMATS} | {"long" * 40: b"x"}
    names = list(files)
    rng.shuffle(names)
    write_tar(path, {name: files[name] for name in names})
    if rng.random() < 0.3:
        path.write_bytes(damaged_bytes(rng, path.read_bytes()))
        return
    data = bytearray(path.read_bytes())
    with tarfile.open(path) as tar:
        at = int(rng.choice([info.offset for info in tar.getmembers()]))
    # Name, size, checksum, type, name of the link's target, magic.
    start, size = ((0, 100), (124, 12), (148, 8), (156, 1), (157, 100), (257, 8))[rng.integers(6)]
    number = int(rng.choice([-1, -512, 0, 1, 2**20, 2**33, 2**40, 2**62])).to_bytes(12, "big", signed=True)
    signed = (b"\xff" if number[0] else b"\x80") + number[1:]
    strange = [rng.bytes(size), bytes(size), b"../" * 40, rng.choice(list(b"012345678gxLKSXVD")), signed]
    kept = strange[rng.integers(len(strange))]
    data[at + start : at + start + size] = bytes([kept] if isinstance(kept, np.integer) else kept)[
        :size
    ].ljust(size, b"\0")
    if rng.random() < 0.8:
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    path.write_bytes(data)


def strange_samples(rng: np.random.Generator, folder: Path, name: str) -> str:
    """Writes a sound file in a valid format whose samples no recording should have."""
    channels = int(rng.choice([1, 2, 255, 1024]))
    rate = int(rng.choice([1, 999, 1001, 11_025, 16_000, 16_000, 44_100, 655_350, 2**31 - 1]))
    wave = rng.normal(0, 0.1, (int(rng.choice([0, 1, 159, 320, 4000])), channels)).astype(np.float32)
    if wave.size:
        strange = [0.0, 1.0, np.nan, np.inf, -np.inf, 1e6, 1e30, 3.4e38, 1e-42][rng.integers(9)]
        wave[(slice(None) if rng.random() < 0.5 else int(rng.integers(len(wave))))] = strange
    soundfile.write(folder / f"{name}.wav", wave, rate, subtype="FLOAT")
    return f"{name}.wav"


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
        case "recording: file":
            recording = damaged_file(rng, folder, name)
        case _:
            recording = strange_samples(rng, folder, name)
    timed = {"duration": 0.5, "offset": float(rng.choice([0.0, 0.2]))} if rng.random() < 0.3 else {}
    return json.dumps({"audio_filepath": recording, "text": "one two", **timed}).encode()


KINDS = (
    "utterance: bytes",
    "utterance: values",
    "conversation: bytes",
    "conversation: values",
    "preference: bytes",
    "preference: values",
    "recording: file",
    "recording: samples",
    "cut: bytes",
    "cut: values",
    "tar file",
)

# --- the check ---


@dataclass
class Outcome:
    """Counts for one kind of damage. refused: lines of manifests that UserError refused as a whole."""

    inputs: int = 0
    lines: int = 0
    documents: int = 0
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


def is_of_container(error: UserError) -> bool:
    """Whether an error refuses a file of several items as a whole, as empty, damaged or of another form."""
    reasons = (
        "how many items are lost is not known",
        "expected items in each file of a data set",
        "expected JSON lines, plain or compressed",
        "expected a tar file that is not compressed",
        "expected a parquet or arrow file",
    )
    return any(reason in str(error) for reason in reasons)


def check(
    manifest: Path, load: Callable[..., Any], workers: Workers | int, outcome: Outcome, tars: str = ""
) -> None:
    """Reads one manifest, or the Shar directory of cuts, once as a training run does, and adds to the
    outcome. tars: the tar files of the manifest.
    """
    lines = {str(n) for n, line in enumerate(manifest.read_bytes().split(b"\n"), 1) if line.strip()}
    outcome.lines += len(lines)
    log = SkipLog(manifest.with_suffix(".skipped"))
    on_skip = log.of([str(manifest)])
    documents: list[str] = []
    try:
        with time_limit(ITEM_SECONDS):
            path = manifest.parent if manifest.name == "cuts.jsonl" else manifest
            source = open_source(SourceSetting(str(path), tarred_audio=tars))
            examples, skipped = read_source(source, CONFIG.data)
        for item in skipped:
            on_skip(item.key, item.reason)
        options: dict[str, Any] = {"repeat": False, "answers": True, "on_skip": on_skip, "workers": workers}
        with make_loader([examples], load, CONFIG, **options) as loader:
            for batch, report in loader:
                documents += [key.partition(":")[0] for row in report.keys for key in row]
                if not np.isfinite(batch.mels).all():
                    outcome.violations.append(f"{manifest}: features that are not finite, in {report.keys}")
    except UserError as error:
        if f"no usable line ({len(lines)} skipped)" in str(error) or is_of_container(error):
            outcome.refused += len(lines)
            return
        outcome.violations.append(f"{manifest}: {error}")
    except Exception:
        outcome.violations.append(f"{manifest}: {traceback.format_exc()}")
        return
    entries = read_lines(log.path)
    listed = [entry["key"].partition(":")[0] for entry in entries]
    outcome.documents += len(documents)
    outcome.listed += len(listed)
    if sorted(documents + listed) != sorted(lines):
        odd = sorted(lines.symmetric_difference(documents + listed) | (set(documents) & set(listed)))
        outcome.violations.append(f"{manifest}: lines {odd} are neither a document nor listed, or both")
    outcome.violations += [f"{manifest}: {e}" for e in entries if "worker process died" in e["reason"]]


def fuzz(folder: Path, count: int, seed: int, workers: Workers | int) -> dict[str, Outcome]:
    """Checks `count` damaged inputs in manifests of 1 to 30 lines, most with an undamaged line; by kind."""
    make_recordings(folder)
    load = SpeechDocuments(CONFIG, ByteTokenizer(), train=True)
    outcomes = {kind: Outcome() for kind in KINDS}
    for number, kind in enumerate(KINDS):
        of_kind, outcome = range(number, count, len(KINDS)), outcomes[kind]
        sizes = np.random.default_rng([seed, number, 1]).integers(1, 31, len(of_kind))
        for at, end in zip(np.cumsum(sizes) - sizes, np.cumsum(sizes), strict=True):
            inputs = of_kind[at:end]
            if not inputs:
                break
            rngs = [np.random.default_rng([seed, i]) for i in inputs]
            damaged = [damaged_line(r, kind, folder, f"{i}") for i, r in zip(inputs, rngs, strict=True)]
            manifest, tars, sound = folder / f"{kind.replace(': ', '-')}-{inputs[0]}.jsonl", "", UTTERANCE
            if kind.startswith("preference"):
                sound = PREFERENCES[0]
            if kind.startswith("cut"):
                manifest, sound = manifest.with_suffix("") / "cuts.jsonl", CUT
                manifest.parent.mkdir()
                wave = (folder / "s16.wav").read_bytes()
                write_tar(manifest.parent / "recording.tar", {"s16.wav": wave, "s16.json": b"{}"})
            if kind == "tar file":
                sound = UTTERANCE | {"shard_id": count}
                write_tar(folder / f"audio_{count}.tar", {"s16.wav": (folder / "s16.wav").read_bytes()})
                tars = f"{folder}/audio_{{{','.join(map(str, (*inputs, count)))}}}.tar"
            last = json.dumps(sound).encode() if rngs[0].random() < 0.8 else b""
            manifest.write_bytes(b"\n".join([*damaged, last]) + b"\n")
            start = time.perf_counter()
            check(manifest, load, workers, outcome, tars)
            outcome.inputs += len(inputs)
            outcome.seconds += time.perf_counter() - start
    return outcomes


def run(
    doc: str | None, fuzz: Callable[[Path, int, int, Workers], dict[str, Outcome]], count: int, unit: str
) -> None:
    """The command of a fuzz script: prints the outcomes by kind, and exits with 1 after a violation.

    fuzz: (folder, number of damaged inputs, seed, workers) -> outcomes by kind. count: inputs by default.
    unit: what each damaged input is, for the last line.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=count, help="damaged inputs")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    workers = Workers(os.cpu_count() or 1, ITEM_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        outcomes = fuzz(Path(folder), options.count, options.seed, workers)
    workers.close()
    columns = ("inputs", "lines", "documents", "listed", "refused", "seconds", "violations")
    print(f"{'damage':24}" + "".join(f"{name:>12}" for name in columns))
    for kind, outcome in outcomes.items():
        cells = [getattr(outcome, name) for name in columns]
        shown = [f"{c:.1f}" if isinstance(c, float) else len(c) if isinstance(c, list) else c for c in cells]
        print(f"{kind:24}" + "".join(f"{cell:>12}" for cell in shown))
    violations = [text for outcome in outcomes.values() for text in outcome.violations]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"largest worker process: {peak / 2**20:.0f} MiB")
    if peak > MEMORY:
        violations.append(f"a worker process took {peak / 2**20:.0f} MiB")
    print("\n".join(violations) or f"every {unit} is a document or listed")
    sys.exit(bool(violations))


if __name__ == "__main__":
    run(__doc__, fuzz, 1000, "line")
