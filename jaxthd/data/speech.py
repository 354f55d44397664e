"""Manifest lines -> documents: decode, features, prompt, transcript; and the record of what was left out."""

import json
import threading
from pathlib import Path

import numpy as np

from jaxthd.config import Config
from jaxthd.data.audio import chunk_audio, load_audio
from jaxthd.data.features import DITHER, HOP, document_rng, log_mel
from jaxthd.data.manifest import Utterance
from jaxthd.data.tokenizer import Tokenizer
from jaxthd.packing.document import Document

AUDIO_FIELD = "{audio}"


class SkipLog:
    """Everything left out, once each: one JSON object {"key", "reason"} a line, in a file and counted.

    Usable from several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._seen: set[str] = set()
        if path.exists():
            self._seen = {json.loads(line)["key"] for line in path.read_text().splitlines()}

    def __call__(self, key: str, reason: str) -> None:
        with self._lock:
            if key not in self._seen:
                self._seen.add(key)
                with self.path.open("a") as file:
                    file.write(json.dumps({"key": key, "reason": reason}) + "\n")

    def __len__(self) -> int:
        return len(self._seen)


class SpeechDocuments:
    """Makes the Document of an utterance: bos, prompt with the audio in its place, transcript, eos.

    The transcript and eos are supervised. Audio longer than the encoder's window becomes several chunks,
    each normalized by itself. With no {audio} in the prompt documents are text alone. Call with (utterance,
    epoch); an utterance that cannot be used is reported to `on_skip` and gives None.
    train: dither the audio, drawn from (data.seed, epoch, key).
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, on_skip: SkipLog, *, train: bool) -> None:
        before, self._has_audio, after = config.data.prompt.partition(AUDIO_FIELD)
        placeholder = [tokenizer.audio_id] if self._has_audio else []
        self._head = [tokenizer.bos_id, *tokenizer.encode(before), *placeholder, *tokenizer.encode(after)]
        self._tokenizer = tokenizer
        self._num_mels = config.model.encoder.num_mels
        self._chunk_samples = round(config.model.encoder.chunk_seconds * 100) * HOP
        self._seed = config.data.seed
        self._on_skip = on_skip
        self._train = train

    def __call__(self, utterance: Utterance, epoch: int) -> Document | None:
        try:
            transcript = self._tokenizer.encode(utterance.text)
            if not transcript:
                raise ValueError("the transcript is empty")
            clips = [self._features(utterance, epoch)] if self._has_audio else []
        except ValueError as error:
            self._on_skip(utterance.key, str(error))
            return None
        answer = [*transcript, self._tokenizer.eos_id]
        return Document.splice(
            utterance.key,
            [*self._head, *answer],
            [False] * len(self._head) + [True] * len(answer),
            clips,
            self._tokenizer.audio_id,
        )

    def _features(self, utterance: Utterance, epoch: int) -> list[np.ndarray]:
        """The recording's encoder chunks, [frames, mels] each. Raises AudioError, a ValueError."""
        samples = load_audio(utterance.audio_path, utterance.offset, utterance.duration)
        rng = document_rng(self._seed, epoch, utterance.key) if self._train else None
        dither = DITHER if self._train else 0.0
        pieces = chunk_audio(samples, self._chunk_samples)
        return [log_mel(piece, self._num_mels, dither=dither, rng=rng) for piece in pieces]
