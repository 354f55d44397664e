"""A model that can be used: what jaxthd.load gives, and the commands that use weights work with.

model = jaxthd.load("runs/my@best")
model.transcribe(["a.wav", "b.wav"])
model.generate(["What is two and two?"])
model.score([("a.wav", "turn on the light")])
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jaxthd.checkpoints.sources import open_settings, published_config
from jaxthd.checkpoints.weights import Weights, load_model, training_weights
from jaxthd.config import Config
from jaxthd.data.example import Clip, Example, Samples, Turn, user_turn
from jaxthd.data.inventory import TrainedOn, trained_on
from jaxthd.data.loader import Loader, make_loader
from jaxthd.data.skipped import SkipLog, Skipped
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.prompt import PromptTemplate
from jaxthd.data.text.tokenizer import Tokenizer, load_tokenizer
from jaxthd.errors import UserError
from jaxthd.inference.alignment.aligner import AlignedDocument, Aligner
from jaxthd.inference.alignment.marks import MarkAligner
from jaxthd.inference.asking import answer_all
from jaxthd.inference.generator import Answer, AnswerDelta, Generator, for_generation, whole_answer
from jaxthd.inference.scorer import DocumentScores, Scorer, of_document
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import local_rows, make_mesh
from jaxthd.run.startup import check, simulate_devices, with_kernels
from jaxthd.steps.blueprint import Blueprint

Recording = str | Path | Clip | Samples
Source = str | Path | Sequence[str | Path]


def load(
    source: Source, config: Config | None = None, *, batch: int = 8, max_new_tokens: int = 256
) -> "Model":
    """A model of weights on disk, with its config, tokenizer and template: it transcribes, generates, scores.

    source: the workdir of a run, also with @best, @STEP or @ema; a published checkpoint (a Hugging Face
    folder); or several checkpoints that make one model together. config: other settings than the source's
    own, such as replace(jaxthd.load_config(source), mesh=...). batch: most conversations answered together.
    max_new_tokens: most tokens of an answer.
    Raises FileNotFoundError; UserError for a config that cannot work on this machine, and for a tokenizer or
    weights that cannot be used.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    weights: Sequence[str | Path] = sources
    lengths = None
    if config is None and len(sources) == 1:
        settings = open_settings(sources[0])
        config, weights = settings.config, settings.weights
        lengths = trained_on(settings.path) if settings.run else None
        if not weights:
            raise UserError(
                f"{sources[0]} is a config file, which has no weights; expected the workdir of a run or a "
                f"published checkpoint: jaxthd.load(WEIGHTS, jaxthd.load_config({str(sources[0])!r}))"
            )
    config = config or published_config(sources)
    simulate_devices(config.mesh.devices)
    check(for_generation(config, batch), trains=False)
    model = Model(config, weights, batch=batch, max_new_tokens=max_new_tokens, trained_on=lengths)
    _ = model.weights
    return model


class Model:
    """A model on config.mesh: it transcribes, generates and scores.

    config: settings that are checked for this machine (jaxthd.run.startup.check, as `load` does). weights: in
    the checkpoint layout (steps/state.py); or sources as jaxthd.checkpoints.weights.load_weights takes them,
    which are read when they are first needed. batch, max_new_tokens: as in `load`. trained_on: the lengths of
    recordings that it was trained on; longer ones are answered in windows. None: they are not known.
    config is then with the kernels that this machine admits, and without multi-token prediction unless arrays
    were given or decoding drafts with it.
    """

    def __init__(
        self,
        config: Config,
        weights: Weights | Sequence[str | Path],
        *,
        batch: int = 8,
        max_new_tokens: int = 256,
        trained_on: TrainedOn | None = None,
    ) -> None:
        has_arrays = isinstance(weights, Weights)
        self.config = with_kernels(config if has_arrays else config.without_idle_mtp)
        self.mesh = make_mesh(self.config.mesh)
        self._given, self._batch, self._max_new_tokens = weights, batch, max_new_tokens
        self._trained_on = trained_on
        self._scorers: dict[tuple[int, bool], Scorer] = {}

    @cached_property
    def blueprint(self) -> Blueprint:
        """The structure of the model on its mesh."""
        return Blueprint(self.config)

    @cached_property
    def weights(self) -> Weights:
        """The model's arrays in their device layout, on the mesh. Raises UserError where the sources cannot
        be read, or do not hold the whole model."""
        if isinstance(self._given, Weights):
            return training_weights(self._given, self.blueprint, self.mesh)
        return load_model(self._given, self.blueprint, self.mesh)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of data.tokenizer."""
        return load_tokenizer(self.config.data.tokenizer)

    @cached_property
    def template(self) -> PromptTemplate:
        """The template that writes turns as token ids, and knows which tokens end an answer."""
        return PromptTemplate(self.config.data, self.tokenizer)

    @cached_property
    def generator(self) -> Generator:
        """The programs that answer conversations."""
        weights, most = self.weights, self._max_new_tokens
        sizes: dict[str, Any] = {"batch": self._batch, "max_new_tokens": most}
        return Generator(self.config, self.mesh, weights.params, weights.buffers, **sizes)

    def scorer(self, *, top_k: int = 0, every_token: bool = False) -> Scorer:
        """The program that scores packed documents. top_k, every_token: see Scorer."""
        key = top_k, every_token
        if key not in self._scorers:
            self._scorers[key] = Scorer(self.blueprint, self.mesh, top_k=top_k, every_token=every_token)
        return self._scorers[key]

    @cached_property
    def aligner(self) -> Aligner | MarkAligner:
        """The program that finds words in time. Raises UserError for a model that was not trained to."""
        kind = MarkAligner if self.config.model.marks.classes else Aligner
        return kind(self.blueprint, self.mesh, self.tokenizer)

    def transcribe(
        self,
        recordings: Recording | Sequence[Recording],
        *,
        prompt: str | None = None,
        window: float | None = None,
        **settings: Any,
    ) -> list[Answer]:
        """The answers to recordings, in their order.

        recordings: one or several; files, or jaxthd.Samples(array, rate). prompt: text of the user's turn, by
        default data.prompt. window, settings, warnings and errors: as in `generate`.
        """
        several = [recordings] if isinstance(recordings, str | Path | Clip | Samples) else recordings
        examples = [self._question(number, each, prompt) for number, each in enumerate(several, 1)]
        return self.generate(examples, window=window, **settings)

    def generate(
        self, prompts: str | Sequence[str | Example], *, window: float | None = None, **settings: Any
    ) -> list[Answer]:
        """The answers to prompts, in their order. prompts: texts of a user's turn, or conversations.

        window: seconds of the longest recording that is read at once; None: of the longest that the model was
        trained on, if that is known. A longer one, or one that the buffers do not hold, is answered window by
        window (Answer.windows), of the median of its training without `window`.
        settings: of sampling, as in Generator.stream; the likeliest tokens without any. One that cannot be
        used is skipped: its answer says why (Answer.reason), and a warning lists all of them.
        Raises UserError where none can be used, and for settings out of range.
        """
        several = [prompts] if isinstance(prompts, str) else prompts
        placeholder = self.config.data.audio_placeholder
        conversations = [
            Example(f"{number}:prompt", (user_turn(each, [], placeholder),))
            if isinstance(each, str)
            else each
            for number, each in enumerate(several, 1)
        ]
        found: list[list[AnswerDelta]] = [[] for _ in conversations]
        settings = {"every": settings.get("max_new_tokens") or self._max_new_tokens} | settings
        for delta in answer_all(
            self.generator, conversations, window=window, trained_on=self._trained_on, **settings
        ):
            found[delta.number].append(delta)
        answers = [whole_answer(x.key, deltas) for x, deltas in zip(conversations, found, strict=True)]
        why = why_skipped(answers)
        if why and all(answer.end == "skipped" for answer in answers):
            raise UserError(why)
        if why:
            warnings.warn(why, stacklevel=2)
        return answers

    def score(
        self,
        documents: Sequence[tuple[Recording, str] | Example | Document],
        *,
        top_k: int = 0,
        every_token: bool = False,
    ) -> list[DocumentScores]:
        """The scores of each document, in their order. Of several processes all call it, and get the same.

        documents: recordings with a text of the assistant's turn, conversations, or made ones
        (jaxthd.SpeechDocuments). Each answer of a document with several (Document.answers) is scored as if it
        were the only one; of such documents only the answers are. top_k, every_token: see Scorer.
        Raises UserError where two documents have the same key, and where one cannot be used, or does not fit
        the config's buffers.
        """
        made, number = self._numbered(documents, lambda: self._make_document)
        has_answers = any(document.answers for document in made)
        check_scored(has_answers, every_token)
        scorer = self.scorer(top_k=top_k, every_token=every_token)
        with self._packed(made, self.config, answers=has_answers) as batches:
            found = sorted(scorer(self.weights, batches), key=lambda x: number[x.key])
        shares = self.config.posttraining.share_prompts
        return [of_document(x, d, shares) for x, d in zip(found, made, strict=True)]

    def align(self, documents: Sequence[tuple[Recording, str] | Example | Document]) -> list[AlignedDocument]:
        """The words of each document's text in time, in their order. Of several processes all call it, and
        get the same.

        documents: as in `score`, of one recording and one text each. One that cannot be aligned says why
        (AlignedDocument.reason). Raises UserError as `score` does, and for a model that was not trained with
        CTC.
        """
        aligner = self.aligner
        made, number = self._numbered(documents, lambda: self._make_aligned)
        with self._packed(made, aligner.config) as batches:
            return sorted(aligner(self.weights, batches), key=lambda x: number[x.key])

    def _numbered(
        self,
        given: Sequence[tuple[Recording, str] | Example | Document],
        maker: Callable[[], SpeechDocuments],
    ) -> tuple[list[Document], dict[str, int]]:
        """(The documents, the number of each by its key). Raises UserError where two have the same key, and
        as `_documents`."""
        made = self._documents(given, maker)
        number = {document.key: n for n, document in enumerate(made)}
        if len(number) < len(made):
            raise UserError(
                f"{len(made)} documents have {len(number)} keys; expected a key of its own for each, by "
                "which its scores are known: rename some"
            )
        return made, number

    def _packed(self, documents: Sequence[Document], config: Config, *, answers: bool = False) -> Loader:
        """The documents in batches, in their order as far as packing keeps it."""
        return make_loader(
            [documents],
            _as_it_is,
            config,
            rows=local_rows(self.mesh, config.data.rows),
            repeat=False,
            shuffle=False,
            answers=answers,
            on_skip=_refuse,
            skipped=SkipLog(Path(), writes=False),
        )

    @cached_property
    def _make_document(self) -> SpeechDocuments:
        """Makes documents of conversations. Raises UserError where the config cannot pack and score them."""
        check(self.config, trains=False)
        return SpeechDocuments(self.config, self.tokenizer, train=False)

    @cached_property
    def _make_aligned(self) -> SpeechDocuments:
        """Makes documents to align, as _make_document."""
        check(self.config, trains=False)
        return SpeechDocuments(self.aligner.config, self.tokenizer, train=False, labels=True)

    def _documents(
        self,
        given: Sequence[tuple[Recording, str] | Example | Document],
        maker: Callable[[], SpeechDocuments],
    ) -> list[Document]:
        """The documents, made where they are not yet. Raises UserError for one that cannot be used.

        maker: gives what makes them. It is asked only where one has to be made.
        """
        made: list[Document] = []
        for number, each in enumerate(given, 1):
            if isinstance(each, tuple):
                recording, text = each
                asked = self._question(number, recording, None)
                each = Example(asked.key, (*asked.turns, Turn("assistant", (text,))))
            document = each if isinstance(each, Document) else maker()(each)
            if isinstance(document, Skipped):
                _refuse(*document)
            made.append(document)
        return made

    def _question(self, number: int, recording: Recording, prompt: str | None) -> Example:
        """The conversation that asks about a recording. Raises UserError as user_turn."""
        data = self.config.data
        asked = data.prompt if prompt is None else prompt
        part = Path(recording) if isinstance(recording, str) else recording
        path = part.path if isinstance(part, Clip) else part
        name = "samples" if isinstance(path, Samples) else path
        return Example(f"{number}:{name}", (user_turn(asked, [part], data.audio_placeholder),))


def why_skipped(answers: Sequence[Answer]) -> str:
    """The conversations that have no answer because they cannot be used, and why, for people; "" if none."""
    skipped = [answer for answer in answers if answer.end == "skipped"]
    if not skipped:
        return ""
    lines = "".join(f"\n  {answer.reason}" for answer in skipped)
    return f"{len(skipped)} of {len(answers)} could not be used, and have no answer:{lines}"


def check_scored(has_answers: bool, every_token: bool) -> None:
    """Raises UserError where every token is to be scored of documents with several answers."""
    if has_answers and every_token:
        raise UserError(
            "every token is to be scored, and documents have several answers, of which these alone can be; "
            "expected documents of one sequence each, or scores of the supervised tokens: leave out "
            "--every-token (every_token)"
        )


def _refuse(key: str, reason: str) -> NoReturn:
    raise UserError(f"document {key!r} cannot be packed: {reason}; change the config, or drop the document")


def _as_it_is(document: Document, epoch: int) -> Document:
    return document
