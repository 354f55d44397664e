"""Manifest lines -> documents: decode, features, prompt, transcript; and the record of what was left out."""

import threading
from functools import partial
from pathlib import Path

import numpy as np

from jaxthd.config import Config
from jaxthd.data.audio import chunk_audio, load_audio
from jaxthd.data.features import DITHER, HOP, document_rng, log_mel
from jaxthd.data.manifest import Utterance
from jaxthd.data.pipeline import OnSkip
from jaxthd.data.tokenizer import Tokenizer
from jaxthd.jsonl import append_line, keep_lines
from jaxthd.packing.document import Document

AUDIO_FIELD = "{audio}"


class SkipLog:
    """Everything left out: one JSON object {"manifest", "key", "reason"} a line, each item once.

    The file keeps what earlier calls of the same run wrote; len() counts what this one left out.
    Usable from several threads.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._listed = {(line["manifest"], line["key"]) for line in keep_lines(path, lambda line: True)}
        self._left_out: set[tuple[str, str]] = set()

    def of(self, manifest: str) -> OnSkip:
        """What to call with (key, reason) for an item of that manifest."""
        return partial(self._add, manifest)

    def _add(self, manifest: str, key: str, reason: str) -> None:
        with self._lock:
            self._left_out.add((manifest, key))
            if (manifest, key) not in self._listed:
                self._listed.add((manifest, key))
                append_line(self.path, {"manifest": manifest, "key": key, "reason": reason})

    def __len__(self) -> int:
        return len(self._left_out)


class SpeechDocuments:
    """Makes the Document of an utterance: bos, prompt with the audio in its place, transcript, eos.

    The transcript and eos are supervised. Audio longer than the encoder's window becomes several chunks,
    each normalized by itself. With no {audio} in the prompt documents are text alone. Call with (utterance,
    epoch); an utterance that cannot be used is reported to `on_skip` and gives None.
    train: dither the audio, drawn from (data.seed, epoch, key).
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, on_skip: OnSkip, *, train: bool) -> None:
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
