"""The default data set: spoken digits and short commands, made by espeak-ng on first use and cached.

It gives a fresh machine speech, transcripts and a held-out set without a download. espeak-ng (GPL-3) is a
wheel of the extra `demo`. Only this module loads it, and only to make the files.
"""

import ctypes
import errno
import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soundfile
import soxr
from jaxtyping import Float32
from tqdm import tqdm

from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.data.example import document_rng
from jaxthd.data.sources.manifest import ManifestSource
from jaxthd.data.sources.source import SourceSetting
from jaxthd.data.text.synthetic import GERMAN, SPANISH
from jaxthd.data.text.synthetic_tasks import (
    PACE,
    Task,
    added,
    conversed,
    dictated,
    interrupted,
    questioned,
    telephoned,
    transcribed,
)
from jaxthd.errors import UserError
from jaxthd.files.user_cache import user_cache

VERSION = 3
"""Increased with every change of the generated files, so that an old cache is not used for them."""

PART = 500
"""Utterances that one thread makes in one go. Not by the number of cores: the files would depend on it."""

# A voice is an accent and a variant. Validation has its own variants, so all its voices are new.
_ACCENTS = ("gmw/en-US", "gmw/en", "gmw/en-GB-scotland", "gmw/en-GB-x-rp")
# Training has many variants: a model trained on ten voices does not understand an eleventh. Robots, whispers
# and voices that espeak-ng does not reproduce exactly (Reed, caleb) are excluded.
# fmt: off
_VARIANTS = {
    "train": (
        "m1", "m3", "m4", "m6", "m7", "m8", "f1", "f2", "f4", "klatt", "klatt2", "klatt3", "klatt4",
        "Alex", "Alicia", "Andrea", "Andy", "Annie", "Denis", "Diogo", "Gene", "Henrique", "Hugo",
        "Lee", "Marco", "Mario", "Michael", "Mike", "adam", "anika", "antonio", "aunty", "belinda",
        "benjamin", "boris", "david", "ed", "edward", "grandma", "grandpa", "gustave", "ian",
        "iven", "john", "linda", "max", "miguel", "norbert", "pablo", "paul", "pedro", "quincy",
        "rob", "robert", "sandro", "shelby", "steph", "travis", "victor", "zac",
    ),
    "validation": ("m2", "m5", "f3", "f5"),
}
# fmt: on
_NOISE = (-60.0, -35.0)
"""Decibels of the noise, over the loudest sample."""
Say = Callable[[str, str, int, int], Float32[np.ndarray, " samples"]]


class SyntheticSet(NamedTuple):
    """train, validation: numbers of recordings. task: what they say. accents: of the voices that say it.

    draws: the set whose random numbers it has, itself by default: the same are said by the same voices.
    """

    train: int
    validation: int
    task: Task
    accents: tuple[str, ...] = _ACCENTS
    draws: str | None = None


SETS = {
    "": SyntheticSet(10000, 500, transcribed),
    "spanish": SyntheticSet(
        4000, 500, partial(transcribed, words=SPANISH, language="es"), ("roa/es", "roa/es-419")
    ),
    "german": SyntheticSet(4000, 500, partial(transcribed, words=GERMAN, language="de"), ("gmw/de",)),
    "sums": SyntheticSet(2000, 500, added),
    "sums-answered": SyntheticSet(500, 100, partial(added, answered=True)),
    "questions": SyntheticSet(4000, 500, questioned),
    "telephone": SyntheticSet(6000, 500, telephoned),
    "telephone-lists": SyntheticSet(6000, 500, partial(telephoned, listed=True), draws="telephone"),
    "speakers": SyntheticSet(4000, 500, conversed),
    "pauses": SyntheticSet(2000, 500, interrupted),
    "dictated": SyntheticSet(4000, 500, dictated),
}
"""The synthetic data sets: that of the setting "synthetic", and those of "synthetic:NAME"."""


class SyntheticSource(ManifestSource):
    """The source of the settings "synthetic" and "synthetic:NAME": a manifest of one of SETS, made on first
    use. Raises UserError for another name.
    """

    reads_columns = False

    def __init__(self, setting: SourceSetting) -> None:
        name = setting.path if setting.source else ""
        if name not in SETS:
            raise UserError(
                f"{setting.field} has synthetic:{name}; expected synthetic, or "
                f"{' or '.join(f'synthetic:{each}' for each in SETS if each)}: correct it"
            )
        train, validation = synthetic_manifests(SETS[name].train, SETS[name].validation, kind=name)
        path = train if setting.split == "training" else validation
        super().__init__(setting._replace(path=str(path)))

    @staticmethod
    def recognises(path: str) -> bool:
        """Whether the setting is "synthetic"."""
        return path == "synthetic"


def synthetic_manifests(
    train: int = SETS[""].train,
    validation: int = SETS[""].validation,
    seed: int = 0,
    cache_dir: str | Path | None = None,
    kind: str = "",
) -> tuple[Path, Path]:
    """Returns the paths of the training and the validation manifest; makes them if they are not cached.

    train, validation: numbers of utterances, 0.5 to about 8 s each, most of them short. No voice and no text
    of the validation set occurs in the training set; of sums, no voice. The same arguments always make the
    same files. kind: one of SETS.
    cache_dir: the parent of the data set's folder; default $XDG_CACHE_HOME/jaxthd, or ~/.cache/jaxthd.
    Raises ImportError without the extra `demo`, ValueError for a number below 1.
    """
    if train < 1 or validation < 1:
        raise ValueError(f"train={train}, validation={validation} utterances; expected 1 or more of each")
    folder = Path(cache_dir or user_cache()) / "-".join(
        ["synthetic", *([kind] if kind else []), f"{VERSION}-{train}-{validation}-seed{seed}"]
    )
    if not folder.exists():
        _make(folder, {"train": train, "validation": validation}, seed, kind)
    return folder / "train" / "manifest.jsonl", folder / "validation" / "manifest.jsonl"


def _make(folder: Path, counts: dict[str, int], seed: int, kind: str) -> None:
    """Fills a temporary folder, then renames it, so that an interrupted run leaves no partial data set."""
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        progress = tqdm(total=sum(counts.values()), desc="making synthetic speech", unit="clip", disable=None)
        with progress, ThreadPoolExecutor(os.cpu_count()) as pool:
            for split, count in counts.items():
                part = partial(_utterances, temporary / split, split, seed, kind, progress)
                numbers = [range(count)[start : start + PART] for start in range(0, count, PART)]
                lines = "".join(pool.map(part, numbers))
                (temporary / split / "manifest.jsonl").write_text(lines)
        try:
            temporary.rename(folder)
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise  # otherwise another process made the same files first: use those
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _utterances(
    folder: Path, split: str, seed: int, kind: str, progress: tqdm, numbers: Iterable[int]
) -> str:
    """Writes these recordings, with an espeak-ng of their own, and returns their manifest lines."""
    lines = []
    with _espeak() as say:
        for number in numbers:
            lines.append(_utterance(folder, f"audio/{number:05d}.flac", split, seed, kind, say))
            progress.update()
    return "".join(lines)


def _utterance(folder: Path, name: str, split: str, seed: int, kind: str, say: Say) -> str:
    """Writes one recording and returns its manifest line."""
    draws = kind if SETS[kind].draws is None else SETS[kind].draws
    rng = document_rng(seed, 0, "/".join([*([draws] if draws else []), split, name]))
    spoken = SETS[kind].task(rng, split)
    speakers = 1 + max(speaker for speaker, _ in spoken.parts)
    voices = _voices(rng, split, SETS[kind].accents, speakers, spoken.pace)
    pieces: list[Float32[np.ndarray, " samples"]] = []
    for speaker, text in spoken.parts:
        if pieces:
            pieces.append(np.zeros(int(rng.uniform(*spoken.pauses) * SAMPLE_RATE), np.float32))
        pieces.append(say(text, *voices[speaker]))
    speech = np.concatenate(pieces)
    lead, tail = rng.integers(SAMPLE_RATE // 8, SAMPLE_RATE // 4, 2)
    samples = np.pad(speech * (rng.uniform(0.2, 0.9) / np.abs(speech).max()), (lead, tail))
    if spoken.noisy:
        level = 10 ** (rng.uniform(*_NOISE) / 20) * np.abs(samples).max()
        samples = np.clip(samples + rng.normal(0, level, len(samples)), -1, 1)
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, SAMPLE_RATE, subtype="PCM_16")
    said = {"audio_filepath": name, "duration": len(samples) / SAMPLE_RATE, **spoken.fields}
    return json.dumps({**said, "voice": " ".join(voice.name for voice in voices)}) + "\n"


class _Voice(NamedTuple):
    name: str
    words_a_minute: int
    pitch: int


def _voices(
    rng: np.random.Generator, split: str, accents: tuple[str, ...], count: int, pace: tuple[int, int] = PACE
) -> list[_Voice]:
    """So many voices, of which no two have the same variant. pace: words a minute, at least and below."""
    voices: list[_Voice] = []
    used: set[str] = set()
    while len(voices) < count:
        accent, variant = str(rng.choice(accents)), str(rng.choice(_VARIANTS[split]))
        if variant not in used:
            rate, pitch = int(rng.integers(*pace)), int(rng.integers(30, 70))
            voices.append(_Voice(f"{accent}+{variant}", rate, pitch))
            used.add(variant)
    return voices


@contextmanager
def _espeak() -> Iterator[Say]:
    """Yields espeak-ng as a function (text, voice, words a minute, pitch 0..100) -> float32 speech at 16 kHz.

    The library is loaded from a fresh copy, so that each thread has its own. Its static variables carry noise
    and flutter from one utterance to the next, so otherwise a second data set of the same process would start
    from the state of the first.
    Source: speak_lib.h of espeak-ng 1.52.
    """
    try:
        import espeakng_loader
    except ImportError as error:
        raise ImportError(
            "the synthetic data set needs espeak-ng, and espeakng_loader is not installed: "
            "pip install 'jaxthd[demo]', or set data.manifest and data.validation_manifest to manifests of "
            "your own (data.validation_manifest '' for none)"
        ) from error
    data = Path(espeakng_loader.get_data_path())
    with tempfile.TemporaryDirectory() as folder:
        library = ctypes.CDLL(shutil.copy(espeakng_loader.get_library_path(), folder))
    buffer_milliseconds = 2000  # each full buffer is a call into Python, which one thread at a time may make
    synchronous, keep_going, utf8, parameter_rate, parameter_pitch = 2, 0x8000, 1, 1, 3
    rate = library.espeak_Initialize(synchronous, buffer_milliseconds, os.fsencode(data), keep_going)
    if rate <= 0:
        raise RuntimeError(f"espeak-ng did not start with the voices in {data}: reinstall espeakng-loader")
    library.espeak_ng_SetRandSeed(0)  # initialisation seeds it with the time of day
    pieces: list[bytes] = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    def collect(wave: int | None, count: int, _events: int | None) -> int:
        """Keeps the samples that espeak-ng hands over, and lets it go on."""
        if wave and count > 0:
            pieces.append(ctypes.string_at(wave, 2 * count))
        return 0

    def say(text: str, voice: str, words_a_minute: int, pitch: int) -> Float32[np.ndarray, " samples"]:
        """Returns float32 speech at 16 kHz. Raises RuntimeError for an unknown voice, and for no sound."""
        # espeak-ng reports an unknown accent but ignores an unknown variant.
        variant = data / "voices" / "!v" / voice.partition("+")[2]
        if not variant.is_file() or library.espeak_SetVoiceByName(voice.encode()):
            raise RuntimeError(f"espeak-ng has no voice {voice!r} in {data}: reinstall espeakng-loader")
        library.espeak_SetParameter(parameter_rate, words_a_minute, 0)
        library.espeak_SetParameter(parameter_pitch, pitch, 0)
        pieces.clear()
        encoded = text.encode() + b"\0"
        size = ctypes.c_size_t(len(encoded))
        status = library.espeak_Synth(encoded, size, 0, 0, 0, utf8, None, None)
        if status or not pieces:
            raise RuntimeError(f"espeak-ng made no sound of {text!r} with voice {voice!r} (status {status})")
        speech = np.frombuffer(b"".join(pieces), np.int16).astype(np.float32) / 32768
        return soxr.resample(speech, rate, SAMPLE_RATE)

    library.espeak_SetSynthCallback(collect)
    try:
        yield say
    finally:
        library.espeak_Terminate()
