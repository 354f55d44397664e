"""Makes documents from examples: tokenizes the turns, decodes recordings, computes and masks features.

Worker processes import it, so it imports neither jax nor grain.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from jaxthd.config import Config, FilterConfig
from jaxthd.config.front_end import SAMPLE_RATE, SpeakerSegment
from jaxthd.data.audio.augment import Augmentation
from jaxthd.data.audio.recordings import TooLongError, from_samples, load_audio
from jaxthd.data.audio.spec_augment import spec_augment
from jaxthd.data.example import Clip, Example, Fields, Member, Samples, Turn, document_rng, with_texts
from jaxthd.data.filters import Filter
from jaxthd.data.skipped import Skipped
from jaxthd.data.text.answers import answer_form
from jaxthd.data.text.prompt import PromptTemplate, mark_ids
from jaxthd.data.text.tokenizer import Tokenizer
from jaxthd.files.remote_path import ask_ahead
from jaxthd.packing.document import AudioPiece, Document, audio_pieces
from jaxthd.packing.fit import BufferLimits

NO_ENCODER = "it holds a recording, and the model has no encoder"


def augmented_key(key: str, number: int) -> str:
    """Seed of the augmentation's draws for recording `number` of an example."""
    return f"{key}/augment/{number}"


class SpeechDocuments:
    """Makes the Document of an Example, or a Skipped with the reason. Call it with (example, epoch).

    Alternatives become the document's answers, and their preferences the extras "preference" of their tokens.
    In training, and with `labels`, the recording of a document with one alone gets the labels that the front
    end makes of its transcript.
    PromptTemplate writes the turns. The front end (model.encoder) makes features of each recording alone, and
    pieces of them. Audio that exceeds data.audio_capacity is not decoded to its end.
    train: dithers the audio and masks its features; the draws depend on (data.seed, epoch, key) alone.
    filtered: items whose duration the data set does not give are judged by data.filter here; the others have
    been before (Filter.sift). augmentation: how recordings are changed, if `train`.
    Raises UserError on construction, as PromptTemplate and FrontEnd.labeller do.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Tokenizer,
        *,
        train: bool,
        filtered: bool = False,
        labels: bool = False,
        augmentation: Augmentation | None = None,
    ) -> None:
        self._template = PromptTemplate(config.data, tokenizer)
        self._template.check_prompts(config.data)
        self._answers = answer_form(config.data.answer)
        self._tokenizer, self._audio_id = tokenizer, tokenizer.audio_id
        self._encoder = config.model.encoder
        seconds = self._encoder.seconds if self._encoder else float
        self._most_seconds = seconds(config.data.audio_capacity) + seconds(1)
        samples = round(SAMPLE_RATE * self._most_seconds)
        if self._encoder and self._encoder.heard(samples) < samples:
            self._most_seconds = np.inf  # the end is cut off
        self._seed, self._limits = config.data.seed, BufferLimits.of(config)
        self._spec_augment = config.data.spec_augment
        has_labels = (train or labels) and self._encoder is not None and self._encoder.label_loss > 0
        self._label = self._encoder.labeller(config.data.tokenizer) if self._encoder and has_labels else None
        self._train, self._augmentation = train, augmentation if train else None
        self._filter = Filter(config.data.filter if filtered else FilterConfig(), tokenizer)
        self._filters = bool(self._filter)

    def __call__(self, example: Example, epoch: int = 0) -> Document | Skipped:
        made = self._made(example, epoch)
        changes_speed = self._augmentation is not None and self._augmentation.config.speed
        if changes_speed and isinstance(made, Document) and self._limits.fit(made).too_large:
            made = self._made(example, epoch, changes_speed=False)
        return made

    def ahead(self, examples: Sequence[Example]) -> None:
        """Has the system read the recordings in tar files of examples that come next, all of them at once."""
        for clip in (clip for example in examples for clip in example.clips):
            if isinstance(clip, Clip) and isinstance(clip.member, Member):
                ask_ahead(clip.path, clip.member.start, clip.member.size)

    def _made(self, example: Example, epoch: int, *, changes_speed: bool = True) -> Document | Skipped:
        try:
            tokens, supervised, answers = self._written(example)
            dither_rng = document_rng(self._seed, epoch, example.key) if self._train else None
            clips = []
            for number, (clip, samples) in enumerate(zip(example.clips, self._samples(example), strict=True)):
                heard = samples
                if self._augmentation:
                    key = augmented_key(example.key, number)
                    augmented = self._augmentation
                    heard = augmented(samples, self._seed, epoch, key, changes_speed=changes_speed)
                masks_rng = document_rng(self._seed, epoch, f"{example.key}/spec_augment/{number}")
                segments = _segments(clip, len(heard) / len(samples))
                clips.append(self._pieces(heard, segments, dither_rng, masks_rng if self._train else None))
        except ValueError as error:
            return Skipped(example.key, str(error))
        if self._label is not None and len(clips) == 1 and clips[0] and not example.alternatives:
            labels = self._label(example.text, sum(piece.tokens for piece in clips[0]))
            clips[0][0] = clips[0][0]._replace(labels=tuple(labels))
        document = self._spliced(example.key, tokens, supervised, clips)
        if not example.alternatives:
            return document
        of_text = np.repeat([np.float32(x.preference) for x in example.alternatives], answers)
        preference = np.pad(of_text, (len(document) - len(of_text), 0))
        return replace(document, extras={"preference": preference}, answers=answers)

    def _written(self, example: Example) -> tuple[list[int], list[bool], tuple[int, ...]]:
        """An example as text: (token ids with one audio_id for each recording, which of them are supervised,
        the lengths of its answers, Document.answers). Raises ValueError for one that cannot be used.
        """
        write = partial(self._answers.write, fields=_described(example))
        if not example.alternatives:
            return *self._template(self._turns(example), example.fields), ()
        texts = [write(alternative.text) for alternative in example.alternatives]
        prompt, answers = self._template.answers(self._turns(example), texts, example.fields)
        tokens, supervised = list(prompt), [False] * len(prompt)
        for ids, of_answer in answers:
            tokens += ids
            supervised += of_answer
        labelled = [
            tuple(ids) for (ids, _), x in zip(answers, example.alternatives, strict=True) if x.preference
        ]
        if len(labelled) > len(set(labelled)):
            raise ValueError("chosen and rejected are the same tokens; expected two answers")
        return tokens, supervised, tuple(len(ids) for ids, _ in answers)

    def _turns(self, example: Example) -> list[Turn]:
        """The turns, the assistant's in the form of data.answer."""
        if not self._answers.changes:
            return list(example.turns)
        write = partial(self._answers.write, fields=_described(example))
        return [with_texts(turn, write) if turn.role == "assistant" else turn for turn in example.turns]

    def prompt(self, example: Example) -> Document:
        """The document of a prompt: the example's turns up to where the assistant's next answer begins.

        Nothing is dithered, masked or supervised. Raises ValueError for an example that cannot be used.
        """
        tokens = self._template.prompt(self._turns(example), example.fields)
        recordings = zip(example.clips, self._samples(example), strict=True)
        clips = [self._pieces(samples, _segments(clip), None, None) for clip, samples in recordings]
        return self._spliced(example.key, tokens, [False] * len(tokens), clips)

    def prompts_by_length(self, example: Example) -> Callable[[int], Document]:
        """Samples at 16 kHz -> the document of a prompt with one recording, if that had so many.

        Its features are zeros that take no memory. Raises ValueError as `prompt` does.
        """
        tokens, front_end = self._template.prompt(example.turns), self._encoder
        if front_end is None:
            raise ValueError(NO_ENCODER)

        def of_length(samples: int) -> Document:
            """The document with a recording of so many samples."""
            pieces = front_end.pieces(samples)
            frames = [0] * (1 + max((piece.run for piece in pieces), default=0))
            for piece in pieces:
                frames[piece.run] = max(frames[piece.run], piece.start + piece.frames)
            runs = [np.broadcast_to(np.float32(0), (n, front_end.width)) for n in frames]
            clips = [audio_pieces(pieces, runs)]
            return self._spliced(example.key, tokens, [False] * len(tokens), clips)

        return of_length

    def _spliced(
        self, key: str, tokens: list[int], supervised: list[bool], clips: list[list[AudioPiece]]
    ) -> Document:
        of_clips = (sum(piece.tokens for piece in clip) for clip in clips)
        marks = mark_ids(self._encoder, self._tokenizer, of_clips) if self._encoder else ()
        return Document.splice(key, tokens, supervised, clips, self._audio_id, marks)

    def _samples(self, example: Example) -> list[np.ndarray]:
        """The recordings as 16 kHz mono. Raises AudioError, and ValueError for an item that is dropped."""
        try:
            found = [self._decoded(clip) for clip in example.clips]
        except TooLongError as error:
            raise ValueError(self._filter.why_too_long(example, self._most_seconds) or str(error)) from error
        if self._filters and example.duration is None:
            why = self._filter.why_dropped(example, sum(map(len, found)) / SAMPLE_RATE)
            if why:
                raise ValueError(why)
        return found

    def _decoded(self, clip: Clip | Samples) -> np.ndarray:
        if self._encoder is None:
            raise ValueError(NO_ENCODER)
        if isinstance(clip, Samples):
            return from_samples(clip, self._most_seconds)
        return load_audio(
            clip.path, clip.offset, clip.duration, self._most_seconds, clip.member, clip.channels
        )

    def _pieces(
        self,
        samples: np.ndarray,
        segments: Sequence[SpeakerSegment] | None,
        dither: np.random.Generator | None,
        masks: np.random.Generator | None,
    ) -> list[AudioPiece]:
        """The recording's pieces. segments: who speaks when; None: that is not known. dither, masks: draw
        noise, and masks on the features; None: none."""
        front_end = self._encoder
        assert front_end is not None
        runs = front_end.features(samples, dither)
        if masks is not None and (self._spec_augment.freq[0] or self._spec_augment.time[0]):
            runs = spec_augment(runs, self._spec_augment, masks, front_end.bands)
        if segments is not None:
            runs = front_end.with_speakers(runs, segments)
        return audio_pieces(front_end.pieces(len(samples)), runs)


def _described(example: Example) -> Fields:
    """The fields of the example's line, and the seconds of its recordings."""
    return {"duration": example.duration, **example.fields}


def _segments(clip: Clip | Samples, stretched: float = 1.0) -> tuple[SpeakerSegment, ...] | None:
    """Who speaks when in a clip whose length has become so many times its own; None: that is not known."""
    if isinstance(clip, Samples) or clip.speakers is None:
        return None
    return tuple(SpeakerSegment(x.start * stretched, x.end * stretched, x.speaker) for x in clip.speakers)
