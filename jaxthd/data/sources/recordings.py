"""Recordings that a line names, and the fields that name recordings and are not read.

A recording is named by a path, a URL of a file, an object with one of these, or a list. A field that names a
recording and is not read would leave its text to be trained alone, in silence. So readers ask here about the
fields that they do not read, by the field's name and by its value.
"""

import os
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from jaxthd.config.front_end import SpeakerSegment
from jaxthd.data.example import Clip
from jaxthd.data.sources.lines import json_object, seconds, string
from jaxthd.files.remote_path import as_path
from jaxthd.files.stores import is_url

LISTS = ("audio", "audios", "sound", "sounds")
"""Fields that hold recordings: one, or a list. ms-swift and LLaMA-Factory have audios, NeMo's ShareGPT
sound."""
FIELD_OF_PATH = ("path", "audio_filepath", "audio", "audio_url", "url", "input_audio")
"""Fields of an object that hold its recording: its path, or an object with one of them. Source: transformers'
chat templates (path, url, audio), NeMo (audio_filepath), vLLM and OpenAI (audio_url, input_audio), Qwen
(audio, without a type)."""
OTHER_MODALITIES = frozenset(
    "image images image_path image_url img video videos video_path video_url".split()  # noqa: SIM905
)
DEEPEST, MOST_ITEMS = 4, 16
"""Objects in one another, and items of a list, that are looked at."""

_SUFFIXES = (
    "wav wave flac mp2 mp3 mpga ogg oga opus spx m4a m4b aac ac3 wma aif aiff aifc snd sph nist caf w64 rf64"
    " amr awb 3gp gsm voc wv ape tta mka webm mp4 m4v mkv mov avi mpg mpeg flv pcm raw"
).replace(" ", "|")
_ENDS = re.compile(rf"\.(?:{_SUFFIXES})$", re.I)
_AU = re.compile(r"^[^.:]*\.au$", re.I)
"""A path such as clips/a.au, not a host such as example.net.au."""
_LONGEST_SUFFIX, _LONGEST_PATH = 6, 1024
_OTHER_SUFFIX = re.compile(r"\.[A-Za-z]\w{0,4}$")

_FILE = r"(?:file|path|name|url|uri|src|bytes|data|array|location|input|values|b64|base64)"
_CLEAR = re.compile(rf"(?:audio|wav|waveform|mp3|flac){_FILE}*s?{_FILE}*\d*$")
_VAGUE = re.compile(
    rf"(?:(?:speech|recording|clip|voice|sound|utterance|utt|media){_FILE}+s?|recordings?|clips?|sounds?"
    r"|(?:file|rel|abs)?path|file(?:name|path|url)?)\d*$"
)
# Not voice: it names a speaker, often with a slash (espeak's gmw/en-US+f2 in our own synthetic manifests).
_PLAIN = re.compile(r"(?:speech|utterance|media)\d*$")
_ID = re.compile(r"(?:audio|wav|recording|clip|sound)s?(?:id|key|uid|ref)s?$")
_STARTS = re.compile(
    r"(?:(?:audio|clip|segment|seg|utt|speech)?(?:start|begin|onset)|offset)(?:time|sec|seconds|s|ms|offset)?$"
)

Kind = Literal["any", "path", "slash", ""]
"""The texts that name a recording in a field: any; one that may be a path; one with a slash; none, but by its
suffix."""


@lru_cache(4096)
def _kind(name: str) -> Kind:
    """Judges a field by its name, whatever its case and the marks between its words."""
    plain = _letters(name)
    if _CLEAR.search(plain) and not plain.startswith(("has", "is", "num")):
        return "any"
    if _VAGUE.fullmatch(plain):
        return "path"
    return "slash" if _PLAIN.fullmatch(plain) else ""


def other_recordings(entry: Mapping[str, Any], read: frozenset[str] = frozenset()) -> tuple[str, ...]:
    """Returns the names of fields that name recordings, without those in `read`; "custom.wav" lies in custom.

    A field that is null or empty names nothing; nor does a number or a truth value.
    """
    # Most lines end here. It is asked of every line of a set, so names are compared in one step.
    if read.issuperset(entry):
        return ()
    places: list[str] = []
    for name, value in entry.items():
        if name not in read and not _is_plain(name, value):
            places += _places(name, value, 0)
    return tuple(places)


def recording_ids(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of fields such as audio_id, which name a recording that lies elsewhere.

    They matter where a line has no recording; beside one they are its own name.
    """
    return tuple(n for n, v in entry.items() if v and isinstance(v, str) and _ID.search(_letters(n)))


def unread_start(entry: Mapping[str, Any]) -> str | None:
    """Returns the field that says where in a recording the text begins, if it is not `offset`; else None."""
    if entry.get("offset") is not None:
        return None
    return next((n for n, v in entry.items() if type(v) in (int, float) and v > 0 and is_start(n)), None)


@lru_cache(4096)
def is_start(name: str) -> bool:
    """Whether a field other than `offset` is called as one that says where a range of a recording begins."""
    return name != "offset" and _STARTS.match(_letters(name)) is not None


def _letters(name: str) -> str:
    """The letters and digits of a field's name, whatever its case and the marks between its words."""
    return re.sub(r"[\W_]+", "", name).lower()


def _is_plain(name: str, value: Any) -> bool:
    """Whether a cheap look shows that a field names no recording: this is asked of every field of a set."""
    if type(value) is str:
        return not _kind(name) and "." not in value[-_LONGEST_SUFFIX:] and ":" not in value[:10]
    return value is None or type(value) in (int, float, bool)


def other_modalities(entry: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of fields that hold pictures or films."""
    if OTHER_MODALITIES.isdisjoint(map(str.lower, entry)):
        return ()
    return tuple(n for n, v in entry.items() if n.lower() in OTHER_MODALITIES and v and v is not True)


def _places(name: str, value: Any, depth: int) -> Iterator[str]:
    """Yields where a recording is named, in a field and below it: each place once."""
    if isinstance(value, str):
        if names_recording(value, _kind(name)):
            yield name
    elif isinstance(value, bytes):
        if value and _kind(name):
            yield name
    elif isinstance(value, dict) and value and depth < DEEPEST:
        if _is_recording(value):
            yield name
            return
        inner = [place for n, v in value.items() if v is not None for place in _places(str(n), v, depth + 1)]
        yield from (f"{name}.{place}" for place in inner)
    elif isinstance(value, list) and value and depth < DEEPEST:
        samples = isinstance(value[0], int | float | list) and not isinstance(value[0], bool)
        if (samples and _kind(name) == "any") or any(_names(name, x, depth) for x in value[:MOST_ITEMS]):
            yield name


def _names(name: str, item: Any, depth: int) -> bool:
    """Whether an item of a list names a recording."""
    return next(_places(name, item, depth + 1), None) is not None


def _is_recording(value: Mapping[str, Any]) -> bool:
    """Whether an object is a recording as datasets or Lhotse writes it, with its sound inside or beside."""
    if value.get("sampling_rate") is not None and (value.get("array") or value.get("sources")):
        return True
    return bool(value.get("bytes"))


def names_recording(text: str, kind: Kind = "") -> bool:
    """Whether a text names a recording: by a file's suffix, as a data URL, or for its field's kind."""
    if not text or len(text) > _LONGEST_PATH:
        return bool(text) and (kind == "any" or text.startswith("data:audio"))
    end = text[-_LONGEST_SUFFIX:]
    if "." in end and (_ENDS.search(end) or _AU.search(text)):
        return "\n" not in text
    if text.startswith(("data:audio", "audio/")):  # a folder, or a media type such as audio/wav
        return not any(map(str.isspace, text))
    if "://" in text[:10] and "?" in text:
        return names_recording(text.partition("?")[0], kind)
    if not kind or not text.strip():
        return False
    if kind == "any":
        return True
    is_path = not any(map(str.isspace, text)) and not _OTHER_SUFFIX.search(text)
    return is_path and (kind == "path" or "/" in text)


def holds_recordings(name: str, kind: Any) -> bool:
    """Whether a column of a table holds recordings, by its name and its type of pyarrow's."""
    text = str(kind)
    is_struct, is_list = ("struct<" in text, "list<" in text)
    fields = set(re.findall(r"(\w+): ", text)) if is_struct else set()
    if fields & {"bytes", "array"} or (fields and "sampling_rate" in fields):
        return True
    is_samples = is_list and re.search(r"(float|double|int16)", text) is not None
    return bool(_kind(name)) if "binary" in text else _kind(name) == "any" and is_samples


def refusal(names: tuple[str, ...]) -> str:
    """Says why a line is not read whose recordings are in fields that are not read."""
    first, more = names[0][:60], f" and {len(names) - 1} more" if names[1:] else ""
    remedy = "write it so" if "." in first else f"data.columns audio={first}, or {first}= to leave it out"
    return f"{first}{more} names a recording that is not read; expected audio or audio_filepath: {remedy}"


# --- the recordings themselves ---

Locate = Callable[[str], Clip]
"""(name) -> where the recording lies. Raises ValueError with the reason if there is no such recording."""
LONGEST_PATH = 4096
"""Bytes of a path, as Linux bounds them."""
SEGMENTS = "speaker_segments"
"""The field that says who speaks when: a list of {"speaker": "a", "start": 0.5, "end": 2.0}, in seconds from
where the recording, or its range, begins."""
RANGE = ("offset", "duration", SEGMENTS)
"""Fields that say something of a recording beside its path."""
_OF_RECORDINGS = frozenset({"type", *RANGE, "text", "role", "content", *FIELD_OF_PATH})
"""Fields of an object that say which recording it is."""


def in_folder(folder: Path) -> Locate:
    """Returns what locates recordings in files, by paths from the folder, with ~, and as URLs.

    A path that is not absolute and begins with ~ is the home folder's, unless the folder holds such a name.
    """

    def locate(name: str) -> Clip:
        """Returns the file of a path or a URL. Raises ValueError for what is neither."""
        if len(name) > LONGEST_PATH or (":" in name and name.startswith("data:")):
            raise ValueError(
                f"{reprlib.repr(name)} is no path, but {len(name):,} characters; expected the path of a "
                "file: write the recording into one"
            )
        if is_url(name):
            return Clip(as_path(name))
        if ":" in name and "://" in name:
            name = _path_of_url(name)
        # Path.exists raises for long names
        if name.startswith("~") and not (is_url(folder) or os.path.exists(folder / name)):
            name = os.path.expanduser(name)
        return Clip(folder / name)  # an absolute name replaces the folder

    return locate


def _path_of_url(url: str) -> str:
    scheme, _, rest = url.partition("://")
    if not re.fullmatch(r"[A-Za-z][\w+.-]*", scheme):
        return url
    if scheme.lower() != "file":
        raise ValueError(
            f"{reprlib.repr(url)} is not read; expected the path of a file, or a URL of s3, gs, az, http or "
            "https: copy it there, or download it"
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
    segments = speaker_segments(entry) if entry.get(SEGMENTS) is not None else None
    offset = seconds(entry, "offset") or 0.0
    return replace(locate(path), offset=offset, duration=duration, speakers=segments)


def speaker_segments(entry: dict[str, Any]) -> tuple[SpeakerSegment, ...]:
    """Returns who speaks when in an entry's recording. Raises ValueError."""
    if not isinstance(entry[SEGMENTS], list):
        raise ValueError(f"{SEGMENTS} is {reprlib.repr(entry[SEGMENTS])}; expected a list, empty for silence")
    found = []
    for each in entry[SEGMENTS]:
        segment = json_object(each, f"an entry of {SEGMENTS}")
        start, end, speaker = seconds(segment, "start"), seconds(segment, "end"), segment.get("speaker")
        is_named = isinstance(speaker, str | int) and not isinstance(speaker, bool)
        if start is None or end is None or end <= start or not is_named:
            raise ValueError(
                f"an entry of {SEGMENTS} is {reprlib.repr(segment)}; expected a speaker, a name or a number, "
                "start, and a larger end, in seconds"
            )
        found.append(SpeakerSegment(start, end, str(speaker)))
    return tuple(found)


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
        timed = {n: entry[n] for n in RANGE if entry.get(n) is not None}
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
            timed = RANGE if len(items) == 1 and entry.get("offset") is not None else RANGE[2:]
            range_ = {name: entry.get(name) for name in timed} if len(items) == 1 else {}
            clips.append(clip_of({"path": item} | range_, "path", locate))
            continue
        named = json_object(item, f"an entry of {names[0]}")
        clip = recording_of(named, locate)
        if clip is None:
            raise ValueError(f"path is missing; found {reprlib.repr(sorted(named))} in {names[0]}")
        clips.append(clip)
    return clips
