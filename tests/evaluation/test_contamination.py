"""Documents are found in the training data by their text after the normaliser, and by their samples."""

from pathlib import Path

import numpy as np
import soundfile

from jaxthd.data.example import Clip, Example, Samples, utterance
from jaxthd.evaluation.contamination import Match, contaminated
from jaxthd.inference.wer import make_normaliser

RATE = 16_000


def example(key: str, recording: Clip | Samples, text: str) -> Example:
    return Example(key, utterance(recording, text, "{audio}", "{audio}"))


def test_what_training_has_too_is_found_and_nothing_else(tmp_path: Path):
    rng = np.random.default_rng(0)
    sounds = [rng.uniform(-0.5, 0.5, n).astype(np.float32) for n in (9000, 9000, 20000, 4001)]
    files = []
    for number, sound in enumerate(sounds):
        files.append(tmp_path / f"{number}.wav")
        soundfile.write(files[-1], sound, RATE)
    soundfile.write(same := tmp_path / "other name.flac", soundfile.read(files[0])[0], RATE)
    training = [
        example("1:a", Clip(files[1]), "Turn on the light!"),
        example("2:b", Clip(same), "said otherwise"),
        example("3:c", Clip(tmp_path / "gone.wav"), "turn on the LIGHT"),
        example("4:d", Clip(files[2], 0.25, 0.5), "a part"),
    ]
    held_out = [
        example("1:x", Clip(files[0]), "turn on the light"),
        example("2:y", Clip(files[2]), "the whole of a part"),
        example("3:z", Clip(files[2], 0.25, 0.5), "the same part"),
        example("4:w", Samples(soundfile.read(files[0], dtype="float32")[0], RATE), "in memory"),
        example("5:v", Clip(files[3]), "turn off the light"),
        example("6:u", Clip(tmp_path / "missing.wav"), "..."),
    ]
    found = contaminated(held_out, iter(training), make_normaliser("basic"))
    assert found == [
        Match("1:x", "text", "1:a", 2),
        Match("1:x", "audio", "2:b", 1),
        Match("3:z", "audio", "4:d", 1),
        Match("4:w", "audio", "2:b", 1),
    ]
