"""Word times as files: JSON lines, CTM (NIST), WebVTT (W3C); speakers as RTTM (NIST)."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import PurePath
from typing import Any

from jaxthd.inference.alignment.aligner import AlignedDocument
from jaxthd.inference.alignment.words import TimedWord
from jaxthd.run.outputs import OutputFolder

MOST_CHARACTERS = 80
"""Characters of a caption, about two lines on a screen."""
LONGEST_PAUSE = 1.0
"""Seconds without a word after which another caption begins."""


def recording_name(key: str) -> str:
    """The name of a recording in files with spaces between fields: that of its file without the ending. key:
    of an example (Example.key)."""
    path = PurePath(key.partition(":")[2] or key)
    return "_".join(str(path.with_suffix("")).split())


def jsonl_line(key: str, words: Sequence[TimedWord]) -> dict[str, Any]:
    """The words of a recording as an object of a JSONL file."""
    return {"key": key, "words": [word.line() for word in words]}


def ctm(name: str, words: Iterable[TimedWord]) -> str:
    """The words of a recording as lines of a CTM: recording, channel, start, duration, word, score."""
    return "".join(f"{name} 1 {x.start:.3f} {x.end - x.start:.3f} {x.text} {x.score:.4f}\n" for x in words)


def rttm(name: str, words: Sequence[TimedWord]) -> str:
    """Who speaks when in a recording, as lines of an RTTM: a line for each turn of a speaker; "" for words
    without speakers."""
    turns: list[tuple[str, float, float]] = []
    for word in words:
        if turns and turns[-1][0] == word.speaker:
            turns[-1] = word.speaker, turns[-1][1], word.end
        else:
            turns.append((word.speaker, word.start, word.end))
    return "".join(
        f"SPEAKER {name} 1 {start:.3f} {end - start:.3f} <NA> <NA> {speaker} <NA> <NA>\n"
        for speaker, start, end in turns
        if speaker
    )


def webvtt(words: Sequence[TimedWord]) -> str:
    """The words of a recording as captions, in which each word has its time."""
    return "\n".join(["WEBVTT\n", *(_cue(caption) for caption in _captions(words))])


def _cue(words: Sequence[TimedWord]) -> str:
    speaker = f"<v {escape(words[0].speaker)}>" * bool(words[0].speaker)
    first, *rest = words
    text = escape(first.text, quote=False) + "".join(
        f" <{_clock(word.start)}>{escape(word.text, quote=False)}" for word in rest
    )
    return f"{_clock(first.start)} --> {_clock(words[-1].end)}\n{speaker}{text}\n"


def _captions(words: Sequence[TimedWord]) -> Iterator[list[TimedWord]]:
    """Words that are shown together: of one speaker, without a long pause, not too many."""
    caption: list[TimedWord] = []
    for word in words:
        characters = sum(len(x.text) + 1 for x in caption) + len(word.text)
        is_next = bool(caption) and (
            characters > MOST_CHARACTERS
            or word.start - caption[-1].end > LONGEST_PAUSE
            or word.speaker != caption[0].speaker
        )
        if is_next:
            yield caption
            caption = []
        caption.append(word)
    if caption:
        yield caption


def _clock(seconds: float) -> str:
    """HH:MM:SS.mmm."""
    milliseconds = round(1000 * seconds)
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{rest // 1000:02}.{rest % 1000:03}"


def write_word_times(folder: OutputFolder, documents: Sequence[AlignedDocument]) -> None:
    """Writes words.jsonl, words.ctm, captions for each recording, and speakers.rttm where there are any."""
    names = _names([document.key for document in documents])
    folder.write_lines("words.jsonl", (jsonl_line(x.key, x.words) for x in documents))
    pairs = list(zip(names, (x.words for x in documents), strict=True))
    folder.write_text("words.ctm", "".join(ctm(name, words) for name, words in pairs))
    if speakers := "".join(rttm(name, words) for name, words in pairs):
        folder.write_text("speakers.rttm", speakers)
    for name, words in pairs:
        folder.write_text(f"{name.replace('/', '_')}.vtt", webvtt(words))


def _names(keys: Sequence[str]) -> list[str]:
    """Names of recordings, each once: where several have the same, their numbers stand before them."""
    names = [recording_name(key) for key in keys]
    counts = Counter(names)
    return [
        name if counts[name] == 1 else f"{key.partition(':')[0]}_{name}"
        for name, key in zip(names, keys, strict=True)
    ]
