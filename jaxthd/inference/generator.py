"""Answers to conversations: prompts packed into buffers, answers decoded together, text as it comes.

    generator = Generator(config, mesh, params, buffers)
    turn = Turn("user", (Clip(Path("a.wav")), "What is said?"))
    for piece in generator.stream([Example("a", (turn,))], temperature=0.7):
        print(piece.text, end="", flush=True)

Two programs of fixed shape serve conversations of every length up to the buffer's (step.py).
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, islice, takewhile
from typing import Any, Literal, NamedTuple

import grain
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxthd.config import Config
from jaxthd.data.example import Example
from jaxthd.data.packer import pack_documents
from jaxthd.data.speech import SpeechDocuments
from jaxthd.data.text.prompt import PromptTemplate
from jaxthd.data.text.tokenizer import TextStream, load_tokenizer
from jaxthd.errors import UserError
from jaxthd.ops.sampling import Sampling
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.prompts import PromptEnds, whole_prompts
from jaxthd.parallel.mesh import DATA, TOKEN_AXES, put_batch, put_rows
from jaxthd.steps.blueprint import Blueprint, Tree
from jaxthd.steps.generation import Draws, make_generation_steps

End = Literal["stop", "length"]
"""Of an answer: by itself, or cut off."""


class Piece(NamedTuple):
    """More of an answer. number: of the conversation. text: in whole characters; may be empty. tokens: new
    ones, without what ends the answer. end: with the last piece.
    """

    number: int
    text: str
    tokens: tuple[int, ...]
    end: End | None


class Answer(NamedTuple):
    """key: of the conversation. tokens: without what ends it."""

    key: str
    text: str
    tokens: tuple[int, ...]
    end: End


def joined(key: str, pieces: Sequence[Piece]) -> Answer:
    """The answer that these are all pieces of."""
    tokens = tuple(chain(*(piece.tokens for piece in pieces)))
    return Answer(key, "".join(piece.text for piece in pieces), tokens, pieces[-1].end or "length")


def for_generation(config: Config, batch: int) -> Config:
    """The configuration that answers up to `batch` conversations at a time: one buffer a data rank."""
    rows = config.mesh.data
    data = replace(config.data, rows=rows, max_documents=-(-batch // rows), packing="first_fit")
    return replace(config, data=data, train=replace(config.train, microbatches=1))


class Generator:
    """Answers with one model, on any mesh.

    params, buffers: in their training form (state.state_shardings). batch: most conversations answered
    together; decoding costs as if there were as many. max_new_tokens: most tokens of an answer.
    config.data.capacity and config.data.audio_capacity are what a data rank holds of prompts.
    Raises UserError as PromptTemplate and load_tokenizer.
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
    ) -> None:
        self.config = for_generation(config, batch)
        self.tokenizer = load_tokenizer(config.data.tokenizer)
        self.stop_ids = PromptTemplate(config.data, self.tokenizer).stop_ids
        self.max_new_tokens = max_new_tokens
        self._mesh, self._params, self._buffers = mesh, params, buffers
        self._pack = pack_documents(self.config)
        context = config.mesh.context
        self._places = -(-self.config.data.max_documents // context) * context
        """Of a row, for documents."""
        self._documents = SpeechDocuments(self.config, self.tokenizer, train=False)
        self._prefill, self._decode = make_generation_steps(
            Blueprint(self.config), mesh, stop_ids=self.stop_ids, new_tokens=max_new_tokens
        )

    @property
    def compilations(self) -> int:
        """Programs compiled so far: two, whatever was asked."""
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
    ) -> Iterator[Piece]:
        """The answers as they come, those of conversations that are decoded together in turns.

        temperature, top_k, top_p: see ops.sampling.Sampling. What is drawn depends on seed, on the
        conversation's key and the token's number, and on nothing else. every: tokens that are decoded before
        one looks at them.
        Raises UserError for a conversation that cannot be used, or does not fit, before any is answered; and
        for settings out of range.
        """
        most = self.max_new_tokens if max_new_tokens is None else max_new_tokens
        check_sampling(temperature, top_k, top_p)
        _require("every", every, every >= 1, "1 or more")
        expected = f"1 to the generator's {self.max_new_tokens}"
        _require("max_new_tokens", most, 1 <= most <= self.max_new_tokens, expected)
        sampling = Sampling(np.float32(temperature), np.int32(top_k), np.float32(top_p))
        documents = [self._prompt(number, example) for number, example in enumerate(conversations)]

        def pieces() -> Iterator[Piece]:
            for batch, of_place in self._batches(documents):
                keys = np.zeros((self.config.data.rows * self._places, 2), np.uint32)
                for place, number in of_place.items():
                    keys[place] = random_bits(seed, conversations[number].key)
                draws = Draws(put_rows(keys, PartitionSpec(TOKEN_AXES), self._mesh), sampling)
                yield from self._answers(batch, of_place, draws, most, every)

        return pieces()

    def generate(self, conversations: Sequence[Example], **settings: Any) -> list[Answer]:
        """The answers, in the conversations' order. settings, errors: as stream."""
        found: list[list[Piece]] = [[] for _ in conversations]
        for piece in self.stream(conversations, **{"every": self.max_new_tokens} | settings):
            found[piece.number].append(piece)
        return [joined(example.key, pieces) for example, pieces in zip(conversations, found, strict=True)]

    def _prompt(self, number: int, example: Example) -> Document:
        """Its key is the conversation's number."""
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
        """Batches, and by the place of a document in one its conversation's number."""
        packed = iter(grain.MapDataset.source(documents).pipe(self._pack))
        while rows := list(islice(packed, self.config.data.rows)):
            rows += [self._pack.row([])] * (self.config.data.rows - len(rows))
            batches, reports = zip(*rows, strict=True)
            of_place = {
                row * self._places + document: int(key)
                for row, report in enumerate(reports)
                for document, key in enumerate(report.keys)
            }
            yield concatenate_rows(batches), of_place

    def _answers(
        self, batch: Batch, of_place: Mapping[int, int], draws: Draws, most: int, every: int
    ) -> Iterator[Piece]:
        """Of one batch."""
        data, mesh = self.config.data, self._mesh
        ends = whole_prompts(
            batch,
            self.config.mesh.context,
            data.max_documents,
            layout=self.config.compute.context_layout,
            round_to=data.round_to,
        )
        ends = put_rows(ends, PromptEnds(*[PartitionSpec(DATA)] * 2), mesh)
        weights = self._params, self._buffers
        decoding = self._prefill(*weights, put_batch(batch, mesh), ends, draws)
        live = {place: TextStream(self.tokenizer) for place in of_place}
        number = 0
        while live:
            decoding, found = self._decode(*weights, decoding, draws, np.int32(min(number + every, most)))
            tokens, reached = np.asarray(found.tokens), int(found.number)
            for place, text in list(live.items()):
                new = tokens[place, number:reached].tolist()
                said = list(takewhile(lambda token: token not in self.stop_ids, new))
                end: End | None = "stop" if len(said) < len(new) else "length" if reached == most else None
                piece = "".join(map(text.push, said))
                if end:
                    piece += text.finish()
                    del live[place]
                yield Piece(of_place[place], piece, tuple(said), end)
            number = reached


def check_sampling(temperature: float, top_k: int, top_p: float) -> None:
    """Raises UserError where one of these is out of range."""
    _require("temperature", temperature, 0 <= temperature < np.inf, "0 or more, and finite")
    _require("top_k", top_k, top_k >= 0, "0 (all tokens) or more")
    _require("top_p", top_p, 0 < top_p <= 1, "more than 0, and at most 1 (all tokens)")


def _require(name: str, value: float | int, holds: bool, expected: str) -> None:
    if not holds:
        raise UserError(f"{name} is {value}; expected {expected}: correct it")


def random_bits(seed: int, key: str) -> np.ndarray:
    """uint32 [2] that depends on these two alone. The hash is BLAKE2b, as in document_rng."""
    return np.frombuffer(hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest(), "<u4")
