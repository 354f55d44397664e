"""Writes tests/references/shar: a Lhotse Shar directory of six cuts, and expected.npz with what lhotse reads.

    python -m tests.references.shar

Needs lhotse, which installs torch (made with 1.33.0), not jaxthd. Recordings are tones, which keeps the files
small; a shard holds three cuts. The cuts are, in order: a range of a recording, with its own context and
system prompt; two supervisions, the later one first; channel 1 of two; both channels of two; no text; no
recording. Contexts are in separate files, too; one of the second shard is there alone. For every cut ID with
a recording, expected.npz holds ID.audio [channels, samples] float32, from CutSet.from_shar and
cut.load_audio, and ID.texts, the texts of its supervisions in the order of their starts.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from lhotse import CutSet, MonoCut, MultiCut, Recording, SupervisionSegment
from lhotse.shar import SharWriter

OUT = Path(__file__).parent / "shar"
RATE = 16_000


def recording(folder: Path, name: str, seconds: float, *hertz: float) -> Recording:
    """A recording with one tone in each channel."""
    time = np.arange(round(seconds * RATE)) / RATE
    wave = np.stack([0.3 * np.sin(2 * np.pi * h * time) for h in hertz], axis=1)
    soundfile.write(folder / f"{name}.wav", wave, RATE)
    return Recording.from_file(folder / f"{name}.wav")


def supervisions(cut: str, *texts: tuple[float, str | None]) -> list[SupervisionSegment]:
    """One supervision for each (start, text)."""
    return [SupervisionSegment(f"{cut}-{s}", cut, s, 0.1, text=text) for s, text in texts]


def cuts(folder: Path) -> list[MonoCut | MultiCut]:
    tone, pair = recording(folder, "tone", 0.5, 300), recording(folder, "pair", 0.25, 500, 800)
    told = {"context": "What is said?", "system_prompt": "Listen.", "other": 1}
    made: list[MonoCut | MultiCut] = [
        MonoCut("range", 0.125, 0.25, 0, supervisions("range", (0.0, "one")), recording=tone, custom=told),
        MonoCut("two.words", 0.0, 0.5, 0, supervisions("two", (0.25, "two"), (0.0, "one")), recording=tone),
        MonoCut("second", 0.0, 0.25, 1, supervisions("second", (0.0, "right")), recording=pair),
        MultiCut("a/both", 0.0, 0.25, [0, 1], supervisions("both", (0.0, "both")), recording=pair),
        MonoCut("silent", 0.0, 0.25, 0, supervisions("silent", (0.0, None)), recording=pair),
        MonoCut("nothing", 0.0, 0.25, 0, supervisions("nothing", (0.0, "nothing"))),
    ]
    return made


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as folder:
        made = cuts(Path(folder))
        with SharWriter(str(OUT), {"recording": "flac"}, shard_size=3, warn_unused_fields=False) as writer:
            for cut in made:
                writer.write(cut)
    beside = SharWriter(str(OUT), {"context": "jsonl"}, 3, warn_unused_fields=False, include_cuts=False)
    with beside as writer:
        for cut in made:
            if cut.id == "a/both":
                cut.custom = {"context": "Hear this:"}
            writer.write(cut)
    expected: dict[str, Any] = {}
    fields = {name: sorted(map(str, OUT.glob(f"{name}.*"))) for name in ("cuts", "recording")}
    for cut in CutSet.from_shar(fields=fields):
        if cut.has_recording:
            expected[f"{cut.id}.audio"] = np.asarray(cut.load_audio(), np.float32)
            said = sorted(cut.supervisions, key=lambda s: s.start)
            expected[f"{cut.id}.texts"] = np.array([s.text for s in said if s.text])
    np.savez_compressed(OUT / "expected.npz", **expected)
    print(OUT, sum(path.stat().st_size for path in OUT.iterdir()), "bytes")


if __name__ == "__main__":
    main()
