"""Answers to conversations: prompts are packed into buffers, and answers are decoded together and streamed.

    generator = Generator(config, mesh, params, buffers)
    turn = Turn("user", (Clip(Path("a.wav")), "What is said?"))
    for delta in generator.stream([Example("a", (turn,))], temperature=0.7):
        print(delta.text, end="", flush=True)

Two programs of fixed shape serve conversations of every length up to the buffer's (steps/generation.py).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Any, Literal, NamedTuple

import grain
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxthd.config import Config
from jaxthd.data.example import Example
from jaxthd.data.packer import pack_documents
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.prompt import PromptTemplate, answer_of
from jaxthd.data.text.tokenizer import TextStream, load_tokenizer
from jaxthd.errors import UserError
from jaxthd.ops.sampling import Sampling
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.prompts import PromptEnds, whole_prompts
from jaxthd.parallel.mesh import DATA, TOKEN_AXES, put_batch, put_rows
from jaxthd.steps.blueprint import Blueprint, Tree
from jaxthd.steps.generation import Draws, make_generation_steps

End = Literal["stop", "length", "interrupted"]
"""Reason for an answer's end: by itself, cut off at the maximum length, or by who asked."""


class AnswerDelta(NamedTuple):
    """The next part of an answer.

    number: the conversation's. text: whole characters; may be empty. tokens: without the one that ends the
    answer. end: set in the last delta of an answer.
    """

    number: int
    text: str
    tokens: tuple[int, ...]
    end: End | None


class Answer(NamedTuple):
    """A whole answer. key: the conversation's. tokens: without the one that ends the answer."""

    key: str
    text: str
    tokens: tuple[int, ...]
    end: End


def whole_answer(key: str, deltas: Sequence[AnswerDelta]) -> Answer:
    """The answer from all its deltas, in order."""
    tokens = tuple(chain(*(delta.tokens for delta in deltas)))
    return Answer(key, "".join(delta.text for delta in deltas), tokens, deltas[-1].end or "length")


def for_generation(config: Config, batch: int) -> Config:
    """The config for answering up to `batch` conversations at a time: one buffer for each data rank."""
    rows = config.mesh.data
    data = replace(config.data, rows=rows, max_documents=-(-batch // rows), packing="first_fit")
    return replace(config, data=data, train=replace(config.train, microbatches=1))


class Generator:
    """Answers with one model, on any mesh.

    params, buffers: in their training form (steps/state.py). batch: most conversations answered together;
    decoding fewer costs the same. max_new_tokens: most tokens of an answer.
    stop_ids: the tokens that end an answer; None for those of the prompt template and the tokenizer.
    The prompts of a data rank must fit config.data.capacity token slots and audio_capacity mel frames.
    Raises UserError as PromptTemplate and load_tokenizer do.
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
        self.config = for_generation(config, batch)
        self.tokenizer = load_tokenizer(config.data.tokenizer)
        self.stop_ids = stop_ids or PromptTemplate(config.data, self.tokenizer).stop_ids
        self.max_new_tokens = max_new_tokens
        self._mesh, self._params, self._buffers = mesh, params, buffers
        self._pack = pack_documents(self.config)
        context = config.mesh.context
        self._row_documents = -(-self.config.data.max_documents // context) * context
        """Most documents in a row."""
        self._documents = SpeechDocuments(self.config, self.tokenizer, train=False)
        self._prefill, self._decode = make_generation_steps(
            Blueprint(self.config), mesh, stop_ids=self.stop_ids, new_tokens=max_new_tokens
        )

    @property
    def compilations(self) -> int:
        """Number of programs compiled so far: two for any use."""
        steps: Any = (self._prefill, self._decode)
        return sum(step._cache_size() for step in steps)

    def stream(
        self,
        conversations: Sequence[Example],
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        max_new_tokens: int | None = None,
        every: int = 1,
    ) -> Iterator[AnswerDelta]:
        """Yields the answers as they are decoded; deltas of conversations decoded together are interleaved.

        temperature, top_k, top_p: see jaxthd.ops.sampling.Sampling. What is sampled depends on the seed, the
        conversation's key and the token's number alone.
        every: number of tokens decoded before the host reads them.
        Before it answers any, it raises UserError for a conversation that cannot be used or does not fit, and
        for a setting out of range.
        """
        most = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        check_sampling(temperature, top_k, top_p)
        _require("every", every, every >= 1, "1 or more")
        expected = f"1 to the generator's {self.max_new_tokens}"
        _require("max_new_tokens", most, 1 <= most <= self.max_new_tokens, expected)
        sampling = Sampling(np.float32(temperature), np.int32(top_k), np.float32(top_p))
        documents = [self._prompt(number, example) for number, example in enumerate(conversations)]

        def deltas() -> Iterator[AnswerDelta]:
            for batch, numbers in self._batches(documents):
                keys = np.zeros((self.config.data.rows * self._row_documents, 2), np.uint32)
                for document, number in numbers.items():
                    keys[document] = random_bits(seed, conversations[number].key)
                draws = Draws(put_rows(keys, PartitionSpec(TOKEN_AXES), self._mesh), sampling)
                yield from self._answers(batch, numbers, draws, most, every)

        return deltas()

    def generate(self, conversations: Sequence[Example], **settings: Any) -> list[Answer]:
        """The answers, in the conversations' order. settings: as for `stream`; raises what it raises."""
        found: list[list[AnswerDelta]] = [[] for _ in conversations]
        for delta in self.stream(conversations, **{"every": self.max_new_tokens} | settings):
            found[delta.number].append(delta)
        return [whole_answer(x.key, deltas) for x, deltas in zip(conversations, found, strict=True)]

    def why_unusable(self, conversation: Example) -> str:
        """Why the conversation cannot be answered; "" if it can."""
        try:
            self._prompt(0, conversation)
        except UserError as error:
            return str(error)
        return ""

    def _prompt(self, number: int, example: Example) -> Document:
        """The conversation as a document to continue, whose key is the conversation's number."""
        if not example.turns or example.turns[-1].role == "assistant":
            raise UserError(
                f"conversation {example.key!r} has no turn to answer; expected the user's at its end: add one"
            )
        try:
            document = self._documents.prompt(replace(example, key=str(number)))
        except ValueError as error:
            raise UserError(f"conversation {example.key!r}: {error}") from error
        misfit = self._pack.limits.fit(document).misfit
        if misfit:
            raise UserError(
                f"conversation {example.key!r} does not fit: {misfit}; shorten it, or raise data.capacity or "
                "data.audio_capacity"
            )
        return document

    def _batches(self, documents: Sequence[Document]) -> Iterator[tuple[Batch, dict[int, int]]]:
        """Yields (a batch, the numbers of its documents' conversations).

        The numbers are by the document's index in the batch: row * self._row_documents + number in the row.
        """
        packed = iter(grain.MapDataset.source(documents).pipe(self._pack))
        while rows := list(islice(packed, self.config.data.rows)):
            rows += [self._pack.row([])] * (self.config.data.rows - len(rows))
            batches, reports = zip(*rows, strict=True)
            numbers = {
                row * self._row_documents + document: int(key)
                for row, report in enumerate(reports)
                for document, key in enumerate(report.keys)
            }
            yield concatenate_rows(batches), numbers

    def _answers(
        self, batch: Batch, numbers: Mapping[int, int], draws: Draws, most: int, every: int
    ) -> Iterator[AnswerDelta]:
        """The answers of one batch. numbers: see _batches."""
        mesh = self._mesh
        ends = whole_prompts(batch, ContextLayout.of(self.config), self.config.data.max_documents)
        ends = put_rows(ends, PromptEnds(*[PartitionSpec(DATA)] * 2), mesh)
        weights = self._params, self._buffers
        decoding = self._prefill(*weights, put_batch(batch, mesh), ends, draws)
        unfinished = {document: TextStream(self.tokenizer) for document in numbers}
        decoded = 0
        while unfinished:
            decoding, found = self._decode(*weights, decoding, draws, np.int32(min(decoded + every, most)))
            tokens, reached = np.asarray(found.tokens), int(found.number)
            for document, stream in list(unfinished.items()):
                new = tokens[document, decoded:reached].tolist()
                kept, ended = answer_of(new, self.stop_ids)
                end: End | None = "stop" if ended else "length" if reached == most else None
                text = "".join(map(stream.push, kept))
                if end:
                    text += stream.finish()
                    del unfinished[document]
                yield AnswerDelta(numbers[document], text, tuple(kept), end)
            decoded = reached


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raises UserError for a value out of range."""
    _require("temperature", temperature, 0 <= temperature < np.inf, "0 or more, and finite")
    _require("top_k", top_k, top_k >= 0, "0 (all tokens) or more")
    _require("top_p", top_p, 0 < top_p <= 1, "more than 0, and at most 1 (all tokens)")


def _require(name: str, value: float | int, holds: bool, expected: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value}; expected {expected}: correct it")


def random_bits(seed: int, key: str) -> np.ndarray:
    """Random bits, uint32 [2], that depend only on the arguments: their BLAKE2b hash, as in document_rng."""
    return np.frombuffer(hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest(), "<u4")
