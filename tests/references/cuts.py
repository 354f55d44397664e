"""Writes tests/references/cuts: a manifest of Lhotse cuts, and expected.npz with what lhotse reads of them.

    python -m tests.references.cuts

Needs lhotse (made with 1.33.0), which installs torch, not jaxthd. Recordings are tones, which keeps the files
small. The cuts are, in order: a range of a recording; two supervisions, the later one first; channel 1 of
two; both channels of two; one whose recording is made faster; one that is padded; one with another appended;
one without a supervision. For every cut ID that is not changed or mixed, expected.npz holds ID.audio
[channels, samples] float32, from cut.load_audio.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from lhotse import CutSet, MonoCut, MultiCut, Recording, SupervisionSegment

OUT = Path(__file__).parent / "cuts"
RATE = 16_000


def recording(name: str, seconds: float, *hertz: float) -> Recording:
    """A recording with one tone in each channel, by a path from the manifest's folder."""
    time = np.arange(round(seconds * RATE)) / RATE
    wave = np.stack([0.3 * np.sin(2 * np.pi * h * time) for h in hertz], axis=1)
    soundfile.write(f"audio/{name}.wav", wave, RATE)
    return Recording.from_file(f"audio/{name}.wav")


def said(text: str, start: float = 0.0, channel: Any = 0) -> SupervisionSegment:
    return SupervisionSegment(text, "r", start, 0.2, channel, text)


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    (OUT / "audio").mkdir(parents=True)
    os.chdir(OUT)
    one, two = recording("one", 0.6, 440), recording("two", 0.4, 440, 660)
    part = MonoCut("range", 0.125, 0.25, 0, [said("one")], recording=one, custom={"context": "What is said?"})
    cuts = [
        part,
        MonoCut("two.words", 0.0, 0.6, 0, [said("two", 0.25), said("one")], recording=one),
        MonoCut("second", 0.0, 0.4, 1, [said("right", channel=1)], recording=two),
        MultiCut("both", 0.0, 0.4, [0, 1], [said("both", channel=[0, 1])], recording=two),
    ]
    expected: dict[str, Any] = {f"{cut.id}.audio": np.asarray(cut.load_audio(), np.float32) for cut in cuts}
    cuts += [
        MonoCut("fast", 0.0, 0.3, 0, [said("one")], recording=one.perturb_speed(1.1)),
        part.with_id("padded").pad(duration=1.0),
        part.with_id("appended").append(cuts[1]),
        MonoCut("silent", 0.0, 0.4, 0, [], recording=one),
    ]
    CutSet.from_cuts(cuts).to_file("cuts.jsonl.gz")
    np.savez_compressed("expected.npz", **expected)


if __name__ == "__main__":
    main()
