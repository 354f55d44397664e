"""Documents of validation sets whose text or recording is in the training data too.

A text is the same if it is after the normaliser. A recording is the same if its samples are, as training
reads them (16 kHz mono): the same speech, cut or encoded otherwise, is not found.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jaxthd.data.audio.recordings import clip_seconds, from_samples, load_audio
from jaxthd.data.example import Clip, Example, Samples

_FRAMES = 160
"""Recordings are hashed whose lengths are the same to within this many samples (10 ms)."""


class Match(NamedTuple):
    """A document of a validation set with one of the training data.

    found: "text" or "audio". training: the training document's key; of several, the first one's. times: how
    many training documents are the same.
    """

    key: str
    found: str
    training: str
    times: int


def contaminated(
    held_out: Sequence[Example], training: Iterable[Example], normalise: Callable[[str], str]
) -> list[Match]:
    """The matches, in the order of the held-out documents; a document may have one of each kind.

    Of the training data, the recordings' headers are read, and those whose length is that of a held-out one.
    A recording that cannot be read is none of the matches.
    """
    texts: dict[str, list[str]] = {normalise(example.text): [] for example in held_out if example.text}
    texts.pop("", None)
    lengths: dict[int, list[tuple[str, Clip | Samples]]] = defaultdict(list)
    for example in held_out:
        for clip in example.clips:
            for length in _lengths(clip):
                lengths[length].append((example.key, clip))
    same: dict[str, list[str]] = defaultdict(list)
    hashed: dict[int, dict[str, list[str]]] = {}
    for example in training:
        if (text := normalise(example.text) if example.text else "") in texts:
            texts[text].append(example.key)
        for clip in example.clips:
            candidates = [length for length in _lengths(clip) if length in lengths]
            digest = _digest(clip) if candidates else None
            for length in candidates:
                if length not in hashed:
                    hashed[length] = _by_digest(lengths[length])
                for key in hashed[length].get(digest or "", ()):
                    if example.key not in same[key]:
                        same[key].append(example.key)
    return [match for example in held_out for match in _matches(example, texts, same, normalise)]


def _matches(
    example: Example,
    texts: dict[str, list[str]],
    same: dict[str, list[str]],
    normalise: Callable[[str], str],
) -> Iterator[Match]:
    in_text = texts.get(normalise(example.text), []) if example.text else []
    for found, keys in (("text", in_text), ("audio", same.get(example.key, []))):
        if keys:
            yield Match(example.key, found, keys[0], len(keys))


def _by_digest(recordings: Sequence[tuple[str, Clip | Samples]]) -> dict[str, list[str]]:
    """{digest of the samples: the keys of the documents that have them}."""
    found: dict[str, list[str]] = defaultdict(list)
    for key, clip in recordings:
        if digest := _digest(clip):
            found[digest].append(key)
    return found


def _lengths(clip: Clip | Samples) -> tuple[int, ...]:
    """The recording's length in hundredths of a second, rounded both ways: two that are as good as equal
    share one of them. () for one that cannot be read."""
    seconds = clip_seconds(clip, opened=True)
    if isinstance(seconds, str):
        return ()
    hundredths = seconds * 16_000 / _FRAMES
    return (int(hundredths), int(hundredths) + 1)


def _digest(clip: Clip | Samples) -> str | None:
    """A digest of the samples in steps of 2^-15, those of 16-bit files; None where they cannot be read."""
    try:
        if isinstance(clip, Samples):
            samples = from_samples(clip)
        else:
            where: Any = {"member": clip.member, "channels": clip.channels}
            samples = load_audio(clip.path, clip.offset, clip.duration, **where)
    except (ValueError, OSError):
        return None
    return hashlib.blake2b((samples * 2**15).round().astype("<i4").tobytes(), digest_size=16).hexdigest()
