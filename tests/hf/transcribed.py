"""The reference of Nemotron 3.5 Transcribe as a folder on disk, and the model imported from it.

tests/references/transcribe.py makes it, and says what is in it.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from jaxthd.config.front_end import SpeakerSegment
from jaxthd.models.front_ends import Transcribe
from jaxthd.packing.document import AudioPiece, Document, audio_pieces
from tests.hf.published import Published, group, load_reference
from tests.waves import talk

AUDIO_TOKEN, CAPACITY, AUDIO = 48, 240, 1664


class Transcribed(Published):
    """As Published, with recordings in place of features."""

    @property
    def front_end(self) -> Transcribe:
        encoder = self.config.model.audio_encoder
        assert isinstance(encoder, Transcribe)
        return encoder

    def samples(self, number: int) -> np.ndarray:
        """A document's recording."""
        return talk(number, int(self.arrays["samples"][number])).astype(np.float32) / 32768

    def clip(self, number: int) -> list[AudioPiece]:
        """A document's recording, of which the data does not say who speaks."""
        samples = self.samples(number)
        return audio_pieces(self.front_end.pieces(len(samples)), self.front_end.features(samples, None))

    def named_clip(self, number: int) -> list[AudioPiece]:
        """The recording with the reference's speakers. Its first output has all of them, in order."""
        samples, front_end, found = self.samples(number), self.front_end, []
        activity, seconds = self.arrays[f"activity.{number}"], front_end.seconds(front_end.stack)
        for speaker in range(activity.shape[1]):
            found.append(SpeakerSegment(1e-9 * speaker, 1e-6 + 1e-9 * speaker, f"{9 - speaker}"))
            for output in np.flatnonzero(activity[:, speaker]):
                begin, end = max(output * seconds, 1e-5), (output + 1) * seconds - 1e-9
                found.append(SpeakerSegment(begin, end, f"{9 - speaker}"))
        runs = front_end.with_speakers(front_end.features(samples, None), found[::-1])
        return audio_pieces(front_end.pieces(len(samples)), runs)

    def document(self, number: int, *, named: bool = False) -> Document:
        tokens = self.arrays[f"tokens.{number}"].astype(np.int32)
        is_audio = tokens == AUDIO_TOKEN
        supervised = np.arange(len(tokens)) > np.flatnonzero(is_audio)[-1]
        clip = self.named_clip(number) if named else self.clip(number)
        return Document(str(number), tokens, is_audio, supervised, tuple(clip))

    def run(
        self, numbers: Sequence[int], capacity: int = CAPACITY, audio_capacity: int = AUDIO, **how: Any
    ) -> tuple[float, list[np.ndarray], dict[str, np.ndarray]]:
        return super().run(numbers, capacity, audio_capacity, **how)


def labelled(pieces: Sequence[AudioPiece], labels: tuple[int, ...]) -> tuple[AudioPiece, ...]:
    """The pieces of a recording with labels."""
    return (pieces[0]._replace(labels=labels), *pieces[1:])


@functools.cache
def reference() -> dict[str, np.ndarray]:
    """All arrays of the reference."""
    return load_reference("transcribe")


def write_transcribe(folder: Path) -> Path:
    """The reference's checkpoint as a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(str(reference()["config"]))
    stored = group(reference(), "weight") | group(reference(), "unread")
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
