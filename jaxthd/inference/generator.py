"""Answers to conversations: prompts are packed into buffers, and answers are decoded together and streamed.

    generator = Generator(config, mesh, params, buffers)
    turn = Turn("user", (Clip(Path("a.wav")), "What is said?"))
    for delta in generator.stream([Example("a", (turn,))], temperature=0.7):
        print(delta.text, end="", flush=True)

Three programs of fixed shape serve conversations of every length up to the buffer's (drawing.py).
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.sharding import Mesh

from jaxthd.config import Config
from jaxthd.config.front_end import SAMPLE_RATE
from jaxthd.data.audio.recordings import MIN_SAMPLES
from jaxthd.data.example import Example
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.prompt import PromptTemplate
from jaxthd.data.text.tokenizer import TextStream, load_tokenizer
from jaxthd.errors import UserError
from jaxthd.inference.drawing import Drafted, Drawing, Progress, for_drawing, random_bits
from jaxthd.kernels.programs import ProgramCount
from jaxthd.ops.sampling import Sampling
from jaxthd.packing.document import Document
from jaxthd.steps.blueprint import Tree

End = Literal["stop", "length", "interrupted", "skipped"]
"""Reason for an answer's end: by itself, cut off at the maximum length, by who asked; or there is none,
because the conversation cannot be used."""


class AnswerDelta(NamedTuple):
    """The next part of an answer.

    number: the conversation's. text: whole characters; may be empty. tokens: without the one that ends the
    answer. end: set in the last delta of an answer; then windows and reason are as in Answer.
    """

    number: int
    text: str
    tokens: tuple[int, ...]
    end: End | None
    windows: int = 1
    reason: str = ""


class Answer(NamedTuple):
    """A whole answer. key: the conversation's. tokens: without the one that ends the answer.

    windows: of the recording, which were answered one by one (jaxthd/inference/asking.py); of these the texts
    are joined, and the end is "length" if one was cut off. reason: why there is no
    answer, where the end is "skipped".
    """

    key: str
    text: str
    tokens: tuple[int, ...]
    end: End
    windows: int = 1
    reason: str = ""


def whole_answer(key: str, deltas: Sequence[AnswerDelta]) -> Answer:
    """The answer from all its deltas, in order."""
    tokens = tuple(chain(*(delta.tokens for delta in deltas)))
    last = deltas[-1]
    text = "".join(delta.text for delta in deltas)
    return Answer(key, text, tokens, last.end or "length", last.windows, last.reason)


def for_generation(config: Config, batch: int) -> Config:
    """The config for answering up to `batch` conversations at a time: one buffer for each data rank."""
    return for_drawing(config, -(-batch // config.mesh.data))


class Generator:
    """Answers with one model, on any mesh.

    params, buffers: in their device layout (steps/state.py). batch: most conversations answered together;
    decoding fewer costs the same. max_new_tokens: most tokens of an answer.
    stop_ids: the tokens that end an answer; None for those of the prompt template and the tokenizer.
    The prompts of a data rank must fit config.data.capacity token slots and audio_capacity audio frames.
    Raises UserError as PromptTemplate, load_tokenizer and ModelConfig.require_tokens do.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        params: Tree,
        buffers: Tree,
        *,
        batch: int = 8,
        max_new_tokens: int = 256,
        stop_ids: tuple[int, ...] | None = None,
    ) -> None:
        config.model.require_tokens()
        self.config, self.batch = for_generation(config, batch), batch
        self.tokenizer = load_tokenizer(config.data.tokenizer)
        self.stop_ids = stop_ids or PromptTemplate(config.data, self.tokenizer).stop_ids
        self.max_new_tokens = max_new_tokens
        self._weights = params, buffers
        self._documents = SpeechDocuments(self.config, self.tokenizer, train=False)
        sizes = {"places": self.config.data.max_documents, "new_tokens": max_new_tokens}
        # More pages would keep the prompts of further batches beside these, in memory that long prompts need.
        self._drawing = Drawing(self.config, mesh, stop_ids=self.stop_ids, **sizes, pages=1)

    @property
    def programs(self) -> ProgramCount:
        """The programs so far: three for any use."""
        return self._drawing.programs

    @property
    def drafted(self) -> Drafted:
        """The tokens that were drafted for the newest answers."""
        return self._drawing.drafted

    def stream(
        self,
        conversations: Sequence[Example | Document],
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        max_new_tokens: int | None = None,
        every: int = 1,
    ) -> Iterator[AnswerDelta]:
        """Yields the answers as they are decoded; deltas of conversations decoded together are interleaved.

        conversations: or the documents that `prompt` makes of them.
        temperature, top_k, top_p: see jaxthd.ops.sampling.Sampling. What is sampled depends on the seed, the
        conversation's key and the token's number alone.
        every: number of tokens decoded before the host reads them; where tokens are drafted
        (compute.num_speculative_tokens), of steps.
        Before it answers any, it raises UserError for a conversation that cannot be used or does not fit, and
        for a setting out of range.
        """
        most = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        check_sampling(temperature, top_k, top_p)
        _require("every", every, every >= 1, "1 or more")
        expected = f"1 to the generator's {self.max_new_tokens}"
        _require("max_new_tokens", most, 1 <= most <= self.max_new_tokens, expected)
        sampling = Sampling(np.float32(temperature), np.int32(top_k), np.float32(top_p))
        documents = [x if isinstance(x, Document) else self.prompt(x) for x in conversations]
        keys = [[random_bits(seed, document.key)] for document in documents]
        answers = self._drawing.run(
            self._weights, documents, keys, sampling, every=min(every, most), most=most
        )

        def deltas() -> Iterator[AnswerDelta]:
            texts, told = [TextStream(self.tokenizer) for _ in documents], [0 for _ in documents]
            for progress in answers:
                number = progress.answer.prompt
                new = progress.tokens[told[number] :].tolist()
                told[number] += len(new)
                text, end = "".join(map(texts[number].push, new)), _end(progress)
                text += texts[number].finish() if end else ""
                yield AnswerDelta(number, text, tuple(new), end)

        return deltas()

    def generate(self, conversations: Sequence[Example | Document], **settings: Any) -> list[Answer]:
        """The answers, in the conversations' order. Takes what `stream` takes, and raises what it raises."""
        found: list[list[AnswerDelta]] = [[] for _ in conversations]
        for delta in self.stream(conversations, **{"every": self.max_new_tokens} | settings):
            found[delta.number].append(delta)
        return [whole_answer(x.key, deltas) for x, deltas in zip(conversations, found, strict=True)]

    def why_unusable(self, conversation: Example) -> str:
        """Why the conversation cannot be answered; "" if it can."""
        try:
            self.prompt(conversation)
        except UserError as error:
            return str(error)
        return ""

    def most_seconds(self, conversation: Example) -> float:
        """Seconds of the longest recording that fits, in a conversation with one recording; 0.0: none does.

        Raises UserError for a conversation whose texts cannot be used.
        """
        try:
            of_length = self._documents.prompts_by_length(conversation)
        except ValueError as error:
            raise UserError(f"conversation {conversation.key!r}: {error}") from error
        limits, step = self._drawing.limits, MIN_SAMPLES
        steps = range(1, int(limits.seconds * SAMPLE_RATE) // step + 1)
        fitting = bisect_left(steps, True, key=lambda n: bool(limits.fit(of_length(n * step)).reject_reason))
        return fitting * step / SAMPLE_RATE

    def prompt(self, example: Example) -> Document:
        """The conversation as a document to continue. Raises UserError for one that cannot be used, or does
        not fit."""
        if not example.turns or example.turns[-1].role == "assistant":
            raise UserError(
                f"conversation {example.key!r} has no turn to answer; expected the user's at its end: add one"
            )
        try:
            document = self._documents.prompt(example)
        except ValueError as error:
            raise UserError(f"conversation {example.key!r}: {error}") from error
        reject_reason = self._drawing.limits.fit(document).reject_reason
        if reject_reason:
            raise UserError(
                f"conversation {example.key!r} does not fit: {reject_reason}; shorten it, or raise "
                "data.capacity or data.audio_capacity"
            )
        return document


def _end(progress: Progress) -> End | None:
    """Reason for the end of an answer; None before it."""
    if not progress.is_over:
        return None
    return "stop" if progress.ended else "length"


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raises UserError for a value out of range."""
    _require("temperature", temperature, 0 <= temperature < np.inf, "0 or more, and finite")
    _require("top_k", top_k, top_k >= 0, "0 (all tokens) or more")
    _require("top_p", top_p, 0 < top_p <= 1, "more than 0, and at most 1 (all tokens)")


def _require(name: str, value: float | int, holds: bool, expected: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value}; expected {expected}: correct it")
