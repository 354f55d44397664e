"""report.html: the documents of an evaluation in one file, to look at and to listen to, without a server.

The file holds what it shows. Recordings are held as MP3, the worst documents' first, up to a size; those of
the others are read from their own files where they are whole files. page.html is the template: plain
JavaScript, which writes all texts as text, never as HTML.
"""

import base64
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import soundfile

from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.data.audio.recordings import from_samples, load_audio
from jaxthd.data.example import Clip, Example, Samples
from jaxthd.evaluation.results import ScoredDocument, SetResult
from jaxthd.files.atomic import write_atomically
from jaxthd.files.jsonl import finite
from jaxthd.inference.wer import Errors, Unit, aligned_words, differs, summed

_TEMPLATE = Path(__file__).with_name("page.html")


class Shown(NamedTuple):
    """A document of the page. set_name, unit: its set's. example: its recordings and fields."""

    set_name: str
    unit: Unit
    document: ScoredDocument
    example: Example

    @property
    def errors(self) -> Errors:
        """Its errors in the set's unit."""
        return getattr(self.document, self.unit)


def write_page(
    path: Path,
    title: str,
    results: Sequence[SetResult],
    examples: Mapping[str, Mapping[str, Example]],
    *,
    compounds: bool,
    audio_bytes: int,
) -> None:
    """Writes the page of these sets. examples: of each set by key. compounds: as in aligned_words.

    audio_bytes: most bytes of recordings in the file. A field "words" of a manifest's line, a list of
    {"word", "start", "end"} in seconds, gives the times of its words, which follow the recording.
    Raises OSError where it cannot be written.
    """
    shown = [Shown(r.name, r.unit, d, examples[r.name][d.decoded.key]) for r in results for d in r.documents]
    documents = [_document(number, each, compounds, path.parent) for number, each in enumerate(shown)]
    by_letter = all(result.unit == "characters" for result in results)
    data = {
        "title": title,
        "rate": "CER" if by_letter else "WER",
        "sets": [{"name": result.name, "figures": _figures(result)} for result in results],
        "documents": documents,
    }
    before, between = _TEMPLATE.read_text(encoding="utf-8").split("{{DATA}}")
    between, after = between.split("{{RECORDINGS}}")
    # "<" would end the script element that holds the data.
    written = json.dumps(finite(data), ensure_ascii=False).replace("<", "\\u003c")
    write_atomically(path, _parts(before + written + between, shown, audio_bytes, after))


def _parts(before: str, shown: Sequence[Shown], audio_bytes: int, after: str) -> Iterator[str]:
    """Yields the file's text in parts; each recording is read when it is written."""
    yield before
    order = sorted(
        range(len(shown)), key=lambda n: (-shown[n].errors.wrong / max(shown[n].errors.total, 1), n)
    )
    for number in order:
        for at, recording in enumerate(shown[number].example.clips):
            if audio_bytes <= 0:
                break
            if sound := _encoded(recording):
                audio_bytes -= len(sound)
                yield f'<script type="text/plain" id="r{number}-{at}">{sound}</script>\n'
    yield after


def _figures(result: SetResult) -> str:
    errors = summed(result.errors())
    rate = (
        f"{'CER' if result.unit == 'characters' else 'WER'} {errors.rate:.2%}" if errors.total else "no text"
    )
    speakers = result.speaker_errors()
    by_speaker = f", cpWER {speakers.rate:.2%}" if speakers else ""
    return f"{len(result.documents):,} documents, {rate}{by_speaker}"


def _document(number: int, shown: Shown, compounds: bool, folder: Path) -> dict[str, Any]:
    """The entry of a document in the data of the page."""
    document, decoded = shown.document, shown.document.decoded
    errors, sides = shown.errors, [document.reference, document.hypothesis]
    if shown.unit == "characters":
        sides = [" ".join(text.replace(" ", "")) for text in sides]
    pairs = aligned_words(sides[0], sides[1], compounds=compounds)
    return {
        "number": number,
        "set": shown.set_name,
        "key": decoded.key,
        "seconds": decoded.audio_seconds,
        "reference": document.reference,
        "hypothesis": document.hypothesis,
        "given": decoded.reference,
        "answered": decoded.hypothesis,
        "ended": decoded.ended,
        "unit": shown.unit,
        "total": errors.total,
        "wrong": errors.wrong,
        "substitutions": errors.substitutions,
        "deletions": errors.deletions,
        "insertions": errors.insertions,
        "rate": errors.rate if errors.total else None,
        "cpwer": document.speakers.rate if document.speakers else None,
        "pairs": [[said, heard, _kind(said, heard)] for said, heard in pairs],
        "recordings": [
            {"id": f"{number}-{at}", **_place(recording, folder)}
            for at, recording in enumerate(shown.example.clips)
        ],
        "times": _times(shown.example),
    }


def _kind(said: str, heard: str) -> str:
    """The name of the error that a pair is; "" for none."""
    if not differs(said, heard):
        return ""
    return "insertion" if not said else "deletion" if not heard else "substitution"


def _place(recording: Clip | Samples, folder: Path) -> dict[str, str]:
    """The path of a recording, seen from the page, where the page lacks it; or why it has none."""
    if isinstance(recording, Clip) and recording.member is None and not recording.offset:
        return {"path": os.path.relpath(recording.path, folder).replace(os.sep, "/"), "why": ""}
    return {
        "path": "",
        "why": "This recording is part of a file; --page-audio puts more of them here.",
    }


def _times(example: Example) -> list[dict[str, Any]]:
    """The times of the words, as the manifest's line has them; [] where it has none."""
    words = example.fields.get("words")
    if not isinstance(words, list):
        return []
    found = []
    for word in words:
        try:
            found.append(
                {"word": str(word["word"]), "start": float(word["start"]), "end": float(word["end"])}
            )
        except (TypeError, KeyError, ValueError):
            return []
    return found


def _encoded(recording: Clip | Samples) -> str | None:
    """The recording as MP3 in base64: 16 kHz, mono; None where it cannot be read."""
    try:
        if isinstance(recording, Samples):
            samples = from_samples(recording)
        else:
            where: Any = {"member": recording.member, "channels": recording.channels}
            samples = load_audio(recording.path, recording.offset, recording.duration, **where)
    except (ValueError, OSError):
        return None
    file = io.BytesIO()
    soundfile.write(file, samples, SAMPLE_RATE, format="MP3", subtype="MPEG_LAYER_III")
    return base64.b64encode(file.getvalue()).decode()
