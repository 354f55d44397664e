"""Long recordings in windows: errors, speed and memory, beside those of the same utterances each alone.

    python scripts/bench_long.py runs/my [--set NAME] [--minutes 1 5 20] [--pauses 0.05 0.4] [--check]

runs/my is a run with a validation set of transcripts. Utterances of the set are put one after another, those
of a voice together, at one loudness, without the silence around them, and with pauses of so many seconds;
again from the first where the set is shorter. A process for each length transcribes the recording in windows,
as `jaxthd generate` does, and one the utterances as they are. All is compiled before the clock starts. Memory
is the most that was resident. Words are lost or inserted as in the alignment with the fewest errors.
"""

import re
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

sys.path.insert(0, str(Path(__file__).parents[1]))

from jaxthd import load
from jaxthd.checkpoints.sources import open_settings
from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.data.audio.recordings import load_audio
from jaxthd.data.audio.windows import in_windows
from jaxthd.data.example import Clip, Example
from jaxthd.data.inventory import trained_on
from jaxthd.data.sources.registry import read_source, validation_sources
from jaxthd.inference.wer import Errors, errors_of, make_normaliser, summed
from scripts.benchmark import Claim, benchmark, conclude, show, size_text

MOST = 1.3
"""Times the word error rate alone that the one in windows may be."""
MEMORY = 1.2
"""Times the memory for the shortest recording that any other may take."""


class Heard(NamedTuple):
    """Answers of a process. windows: of the first recording. seconds: of all. peak: bytes of memory."""

    texts: list[str]
    windows: int
    seconds: float
    peak: int


def heard(
    run: str, recordings: Sequence[Clip], warm_up: Sequence[Clip], window: float | None, batch: int
) -> Heard:
    """Transcribes the recordings, after those of the warm-up."""
    model = load(run, batch=batch)
    model.transcribe(warm_up, window=window)
    start = time.perf_counter()
    answers = model.transcribe(recordings, window=window)
    seconds = time.perf_counter() - start
    peak = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return Heard([answer.text for answer in answers], answers[0].windows, seconds, 1024 * int(peak[0]))


def apart(*arguments: Any) -> Heard:
    """What a new process heard."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(heard, *arguments).result()


def write_long(path: Path, examples: Sequence[Example], minutes: float, pauses: Sequence[float]) -> list[int]:
    """Writes a recording of at least so many minutes; returns the numbers of the examples that it holds."""
    rng = np.random.default_rng(round(60 * minutes))
    voices = [str(example.fields.get("voice")) for example in examples]
    rank = {voice: rng.random() for voice in sorted(set(voices))}
    order = sorted(rng.permutation(len(examples)).tolist(), key=lambda n: rank[voices[n]])
    said: list[int] = []
    with soundfile.SoundFile(path, "w", SAMPLE_RATE, 1, "PCM_16") as file:
        for number in cycle(order):
            clip: Any = examples[number].clips[0]
            samples = load_audio(clip.path, clip.offset, clip.duration)
            loud = np.flatnonzero(np.abs(samples) > 0.01 * (peak := np.abs(samples).max()))
            file.write(samples[loud[0] : loud[-1] + 1] * (0.5 / peak))
            file.write(np.zeros(round(rng.uniform(pauses[0], pauses[1]) * SAMPLE_RATE)))
            said.append(number)
            if file.tell() >= 60 * minutes * SAMPLE_RATE:
                break
    return said


def measure(options: Namespace, folder: Path) -> list[tuple[Errors, Errors, int]]:
    """Shows the table. Returns of each length (errors in windows, errors alone, bytes of memory)."""
    settings = open_settings(options.run)
    data, lengths = settings.config.data, trained_on(settings.path)
    window = options.window or (lengths and lengths.usual)
    if not window:
        raise SystemExit(f"{options.run} does not say how long its recordings were: give --window")
    sources = validation_sources(data)
    examples = read_source(sources[options.set or next(iter(sources))], data)[0]
    normalise = make_normaliser(settings.config.train.normaliser)
    texts = [normalise(example.text) for example in examples]
    said = {f: write_long(folder / f"{f:g}.wav", examples, f, options.pauses) for f in options.minutes}
    used = sorted(set().union(*said.values()))
    clips: list[Any] = [examples[number].clips[0] for number in used]
    alone = apart(options.run, clips, clips[: options.batch], None, options.batch)
    each = errors_of([texts[n] for n in used], list(map(normalise, alone.texts)))
    errors_alone = dict(zip(used, each, strict=True))
    rtfx_alone = sum(examples[n].duration or 0.0 for n in used) / alone.seconds
    warm_up, rows, found = [Clip(folder / f"{min(said):g}.wav")], list[list[str]](), []
    for minutes, numbers in said.items():
        clip = Clip(folder / f"{minutes:g}.wav")
        long = apart(options.run, [clip], warm_up, window, options.batch)
        (wrong,) = errors_of([" ".join(texts[n] for n in numbers)], [normalise(long.texts[0])])
        single = summed(errors_alone[n] for n in numbers)
        overlapping = sum(part.overlap > 0 for part in in_windows(clip, window))
        row = [f"{minutes:g}", f"{long.windows:,}", f"{overlapping:,}", f"{wrong.total:,}"]
        row += [f"{wrong.rate:.1%}", f"{single.rate:.1%}"]
        row += [f"{a} / {b}" for a, b in list(zip(wrong, single, strict=True))[:3]]
        row += [f"{soundfile.info(clip.path).duration / long.seconds:.1f}", f"{rtfx_alone:.1f}"]
        rows.append([*row, size_text(long.peak)])
        found.append((wrong, single, long.peak))
    columns = "minutes|windows|overlapping|words|WER|alone|other / alone|lost / alone|inserted / alone"
    title = f"{options.run}: windows of up to {window:.1f} s, {options.batch} at a time"
    show(title, f"{columns}|RTFx|alone|memory", rows)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = benchmark(__doc__)
    parser.add_argument("run", help="workdir of a run")
    parser.add_argument("--set", help="validation set; the first by default")
    parser.add_argument("--minutes", type=float, nargs="+", default=[1.0, 5.0, 20.0], help="lengths")
    parser.add_argument("--pauses", type=float, nargs=2, default=[0.05, 0.4], help="seconds, least and most")
    parser.add_argument("--window", type=float, help="seconds; as `jaxthd generate` by default")
    parser.add_argument("--batch", type=int, default=8, help="windows answered together")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        windows, alone, peaks = zip(*measure(options, Path(folder)), strict=True)
    times, grown = summed(windows).rate / summed(alone).rate, max(peaks) / peaks[0]
    claims = [
        Claim(f"the WER in windows is {times:.2f} times that alone (at most {MOST})", times <= MOST),
        Claim(f"memory grows {grown:.2f} times (at most {MEMORY})", grown <= MEMORY),
    ]
    conclude(claims, check=options.check)


if __name__ == "__main__":
    main()
