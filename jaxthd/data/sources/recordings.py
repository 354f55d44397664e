"""Recordings that a line names: by a path, a URL of a file, an object with one of these, or a list."""

import os
import re
import reprlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from jaxthd.data.example import Clip
from jaxthd.data.sources.lines import json_object, seconds, string
from jaxthd.data.sources.recording_fields import FIELD_OF_PATH, LISTS, names_recording, other_recordings

Locate = Callable[[str], Clip]
"""(name) -> where the recording lies. Raises ValueError with the reason if there is no such recording."""
LONGEST_PATH = 4096
"""Bytes of a path, as Linux bounds them."""
_OF_RECORDINGS = frozenset({"type", "offset", "duration", "text", "role", "content", *FIELD_OF_PATH})
"""Fields of an object that say which recording it is."""


def in_folder(folder: Path) -> Locate:
    """Returns what locates recordings in files, by paths from the folder, with ~ and as file:// URLs.

    A path that is not absolute and begins with ~ is the home folder's, unless the folder holds such a name.
    """

    def locate(name: str) -> Clip:
        if len(name) > LONGEST_PATH or (":" in name and name.startswith("data:")):
            raise ValueError(
                f"{reprlib.repr(name)} is no path, but {len(name):,} characters; expected the path of a "
                "file: write the recording into one"
            )
        if ":" in name and "://" in name:
            name = _path_of_url(name)
        if name.startswith("~") and not os.path.exists(folder / name):  # Path.exists raises for long names
            name = os.path.expanduser(name)
        return Clip(folder / name)  # an absolute name replaces the folder

    return locate


def _path_of_url(url: str) -> str:
    scheme, _, rest = url.partition("://")
    if not re.fullmatch(r"[A-Za-z][\w+.-]*", scheme):
        return url
    if scheme.lower() != "file":
        raise ValueError(
            f"{reprlib.repr(url)} is not on a disk; expected the path of a file, since nothing is read from "
            "the network: download it"
        )
    return unquote(rest.removeprefix("localhost"))


def clip_of(entry: dict[str, Any], name: str, locate: Locate) -> Clip:
    """Returns the recording that a field names, with the entry's offset and duration. Raises ValueError."""
    path = string(entry, name)
    if not path:
        raise ValueError(f"{name} is empty; expected the path of a recording")
    duration = seconds(entry, "duration")
    if duration == 0:
        raise ValueError("duration is 0; expected more than 0 seconds, or no duration to read the whole file")
    return replace(locate(path), offset=seconds(entry, "offset") or 0.0, duration=duration)


def path_of(value: Any) -> str | None:
    """Returns the path of a recording: the text itself, or that in an object, or in a list of one."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        value = next((path for name in FIELD_OF_PATH if (path := path_of(value.get(name)))), None)
    return value if isinstance(value, str) and value else None


def recording_of(entry: dict[str, Any], locate: Locate) -> Clip | None:
    """Returns the recording of an object: that of its first field of FIELD_OF_PATH; None if it names none.

    Raises ValueError for one that is in the line itself (base64, samples), or in another field.
    """
    name = next((name for name in FIELD_OF_PATH if entry.get(name)), None)
    if name is None:
        return _unnamed(entry, locate)
    if isinstance(entry[name], dict):
        timed = {n: entry[n] for n in ("offset", "duration") if entry.get(n) is not None}
        inner = recording_of(timed | entry[name], locate)
        if inner is None:
            raise ValueError(f"path is missing; found {reprlib.repr(sorted(entry[name]))} in {name}")
        return inner
    return clip_of(entry, name, locate)


def _unnamed(entry: dict[str, Any], locate: Locate) -> Clip | None:
    """The recording of an object without a field of FIELD_OF_PATH: None, or a URL in `data`."""
    inside = next((name for name in ("data", "bytes", "array") if entry.get(name)), None)
    if inside:
        data = entry[inside]
        if inside == "data" and isinstance(data, str) and ("://" in data[:10] or names_recording(data)):
            return clip_of(entry, "data", locate)
        raise ValueError(
            f"the recording is in the line itself ({inside}); expected the path of a file: write it into one"
        )
    if others := other_recordings(entry, _OF_RECORDINGS):
        found = reprlib.repr(sorted(entry))
        raise ValueError(f"path is missing; found {found}: {others[0][:60]} names a recording; call it path")
    empty = next((name for name in FIELD_OF_PATH if entry.get(name) == ""), None)
    return clip_of(entry, empty, locate) if empty else None


def listed_recordings(entry: dict[str, Any], locate: Locate) -> list[Clip]:
    """Returns the recordings of a line's or a message's list, which may be one recording without a list.

    Raises ValueError for two lists that differ. An `offset` of the line is that of its only recording.
    """
    names = [name for name in LISTS if entry.get(name)]
    if not names:
        return []
    if names[1:] and any(entry[name] != entry[names[0]] for name in names):
        raise ValueError(f"{names[0]} and {names[1]} are given; expected one list of recordings: drop one")
    listed, clips = entry[names[0]], []
    items = listed if isinstance(listed, list) else [listed]
    for item in items:
        if isinstance(item, str):
            timed = len(items) == 1 and entry.get("offset") is not None
            range_ = {"offset": entry["offset"], "duration": entry.get("duration")} if timed else {}
            clips.append(clip_of({"path": item} | range_, "path", locate))
            continue
        named = json_object(item, f"an entry of {names[0]}")
        clip = recording_of(named, locate)
        if clip is None:
            raise ValueError(f"path is missing; found {reprlib.repr(sorted(named))} in {names[0]}")
        clips.append(clip)
    return clips
