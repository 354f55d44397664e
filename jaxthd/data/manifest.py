"""NeMo JSONL manifests: one JSON object a line, naming a recording and its transcript."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxthd.errors import UserError


@dataclass(frozen=True)
class Utterance:
    """One usable line of a manifest.

    key: "<line number>:<audio_filepath as written>": unique in the manifest, the same wherever it lies.
    audio_path: absolute, or relative to the working directory if the manifest's path was.
    duration: seconds from `offset`; None means to the end of the file.
    offset: seconds into the file.
    fields: what else the line held (lang, speaker, ...).
    """

    key: str
    audio_path: Path
    text: str
    duration: float | None = None
    offset: float = 0.0
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Fault:
    """An item that cannot be used, and why. Runs skip these, count them and list them."""

    key: str
    reason: str


def read_manifest(path: str | Path, setting: str = "data.manifest") -> tuple[list[Utterance], list[Fault]]:
    """Reads a NeMo manifest: audio_filepath and text, optionally duration and offset in seconds.

    A relative audio_filepath is taken from the manifest's folder. Recordings are not opened. Every line that
    is not blank becomes an Utterance or a Fault, in order.
    setting: what the path was given as, for the messages.
    Raises FileNotFoundError when there is no such file, UserError when it holds no usable line.
    Source: NeMo's ASR dataset documentation (manifest format).
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(
            f"no manifest at {path}; expected a JSONL file with audio_filepath and text on every line: "
            f"correct {setting}"
        )
    utterances: list[Utterance] = []
    faults: list[Fault] = []
    with path.open("rb") as lines:  # bytes, so that one badly encoded line is one fault
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            name = ""
            try:
                entry = _parse(line)
                name = _string(entry, "audio_filepath")
                utterances.append(_utterance(f"{number}:{name}", name, entry, path.parent))
            except ValueError as error:
                faults.append(Fault(f"{number}:{name}", str(error)))
    if not utterances:
        listed = "".join(f"\n  line {fault.key} {fault.reason}" for fault in faults[:5])
        raise UserError(
            f"{path} ({setting}) has no usable line ({len(faults)} faulty); expected one JSON object a line "
            f"with audio_filepath and text: correct the file{listed}"
        )
    return utterances, faults


def _parse(line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise ValueError(f"a JSON {type(entry).__name__}; expected an object")
    return entry


def _utterance(key: str, name: str, entry: dict[str, Any], folder: Path) -> Utterance:
    if not name:
        raise ValueError("audio_filepath is empty")
    duration = _seconds(entry, "duration")
    if duration == 0:
        raise ValueError("duration is 0; expected more than 0 seconds, or no duration to read the whole file")
    return Utterance(
        key=key,
        audio_path=folder / name,  # an absolute name replaces the folder
        text=_string(entry, "text"),
        duration=duration,
        offset=_seconds(entry, "offset") or 0.0,
        fields={k: v for k, v in entry.items() if k not in {"audio_filepath", "text", "duration", "offset"}},
    )


def _string(entry: dict[str, Any], name: str) -> str:
    if name not in entry:
        raise ValueError(f"{name} is missing; found {sorted(entry)}")
    value = entry[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r}; expected a string")
    value.encode()  # half a surrogate pair is valid JSON and no text: a UnicodeEncodeError, a ValueError
    return value


def _seconds(entry: dict[str, Any], name: str) -> float | None:
    """A finite number of seconds >= 0; None where the field is absent or null."""
    value = entry.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} is {value!r}; expected a number of seconds")
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} is {value}; expected a finite number of seconds, 0 or more")
    return float(value)
