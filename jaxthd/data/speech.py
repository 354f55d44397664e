"""Makes documents from examples: tokenizes the turns, decodes recordings, computes and masks features.

Worker processes import it, so it imports neither jax nor grain.
"""

import numpy as np

from jaxthd.config import Config
from jaxthd.data.audio.features import DITHER, HOP, document_rng, log_mel, spec_augment
from jaxthd.data.audio.recordings import chunk_audio, from_samples, load_audio
from jaxthd.data.example import Clip, Example, Samples
from jaxthd.data.skipped import Skipped
from jaxthd.data.text.prompt import PromptTemplate
from jaxthd.data.text.tokenizer import Tokenizer
from jaxthd.packing.document import Document


class SpeechDocuments:
    """Makes the Document of an Example, or a Skipped with the reason. Call it with (example, epoch).

    PromptTemplate writes the turns. Audio longer than model.encoder.chunk_seconds becomes several encoder
    chunks, each normalised by itself. Audio that exceeds data.audio_capacity is not decoded to its end.
    train: dithers the audio and masks its features; the draws depend on (data.seed, epoch, key) alone.
    Raises UserError on construction, as PromptTemplate does.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, *, train: bool) -> None:
        self._template = PromptTemplate(config.data, tokenizer)
        self._audio_id = tokenizer.audio_id
        self._encoder = config.model.encoder
        self._most_seconds = config.data.audio_capacity / 100 + 0.01
        self._seed = config.data.seed
        self._augment = config.data.spec_augment
        self._train = train

    def __call__(self, example: Example, epoch: int) -> Document | Skipped:
        try:
            tokens, supervised = self._template(example.turns)
            dither_rng = document_rng(self._seed, epoch, example.key) if self._train else None
            clips = []
            for number, clip in enumerate(example.clips):
                clips.append(self._features(clip, dither_rng))
                if self._train:
                    rng = document_rng(self._seed, epoch, f"{example.key}/spec_augment/{number}")
                    clips[-1] = spec_augment(clips[-1], self._augment, rng)
        except ValueError as error:
            return Skipped(example.key, str(error))
        return Document.splice(example.key, tokens, supervised, clips, self._audio_id)

    def prompt(self, example: Example) -> Document:
        """The document of a prompt: the example's turns up to where the assistant's next answer begins.

        Nothing is dithered, masked or supervised. Raises ValueError for an example that cannot be used.
        """
        tokens = self._template.prompt(example.turns)
        clips = [self._features(clip, None) for clip in example.clips]
        return Document.splice(example.key, tokens, [False] * len(tokens), clips, self._audio_id)

    def _features(self, clip: Clip | Samples, rng: np.random.Generator | None) -> list[np.ndarray]:
        """The recording's encoder chunks, [frames, mels] each. Raises AudioError, a ValueError."""
        if self._encoder is None:
            raise ValueError("it holds a recording, and the model has no encoder")
        if isinstance(clip, Samples):
            samples = from_samples(clip, self._most_seconds)
        else:
            samples = load_audio(
                clip.path, clip.offset, clip.duration, self._most_seconds, clip.member, clip.channels
            )
        dither = 0.0 if rng is None else DITHER
        chunks = chunk_audio(samples, round(self._encoder.chunk_seconds * 100) * HOP)
        return [log_mel(chunk, self._encoder.num_mels, dither=dither, rng=rng) for chunk in chunks]
