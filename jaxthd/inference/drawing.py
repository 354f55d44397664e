"""Draws answers to packed prompts: the host's side of places.py, for one answer to each prompt or for groups.

A prompt is encoded and prefilled once for all of its answers. A place whose answer has ended takes an answer
to another prompt. Three programs of fixed shape serve prompts and answers of all lengths.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthd.config import Config
from jaxthd.data.packer import pack_documents
from jaxthd.inference.places import NewSequences, make_drawing_steps, new_sequence_specs
from jaxthd.inference.scheduler import Page, Running, Scheduler
from jaxthd.kernels.programs import ProgramCount, together
from jaxthd.ops.sampling import Drawn, Sampling
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.prompts import whole_prompts
from jaxthd.parallel.mesh import AXES, local_rows, put_batch, put_rows
from jaxthd.steps.blueprint import Blueprint, Tree


def for_drawing(config: Config, prompts: int) -> Config:
    """The config of drawing on config.mesh: a page of up to so many prompts for each data rank."""
    data = replace(config.data, rows=config.mesh.data, max_documents=prompts, packing="first_fit")
    return replace(config, data=data, train=replace(config.train, microbatches=1))


class Progress(NamedTuple):
    """An answer as far as it is drawn.

    tokens: so far, without the one that ends it. ended: it ended by itself. is_over: nothing more is drawn.
    at: its row in `drawn`, whose leaves are [places of all ranks, most tokens].
    """

    answer: Running
    tokens: np.ndarray
    ended: bool
    is_over: bool
    at: int
    drawn: Drawn


class Drafted(NamedTuple):
    """Tokens that were drafted for answers that went on, and how many of these were accepted."""

    tokens: int = 0
    accepted: int = 0


class Drawing:
    """Draws answers on a mesh. The prompts of a page fit its token slots and audio frames.

    config: as for_drawing makes it. stop_ids: the tokens that end an answer; the first one is padding.
    places: least of a data rank; their number is a multiple of the context ranks, which share them.
    new_tokens: most tokens of an answer. pages: of prompts, for each data rank; with one, new prompts wait
    until all answers have ended.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        *,
        stop_ids: tuple[int, ...],
        places: int,
        new_tokens: int,
        pages: int,
    ) -> None:
        self._config, self._mesh, self._stop_ids, self._pages = config, mesh, stop_ids, pages
        self.places = -(-places // config.mesh.context) * config.mesh.context
        self._new_tokens = new_tokens
        self._pack = pack_documents(config, depths=config.depths_drafted_with)
        self.limits, self.drafted = self._pack.limits, Drafted()
        """drafted: of the newest `run`, so far."""
        blueprint = Blueprint(config)
        if blueprint.writes_layers(mesh):
            blueprint = Blueprint(replace(config, compute=replace(config.compute, unroll_layers=True)))
        self._steps: Any = make_drawing_steps(
            blueprint, mesh, stop_ids=stop_ids, new_tokens=new_tokens, pages=pages
        )

    @property
    def programs(self) -> ProgramCount:
        """The programs so far: three for any use."""
        return together(step.count for step in self._steps)

    def lowered(self, params: Tree, buffers: Tree, sampling: Sampling, every: int) -> dict[str, Any]:
        """The programs "empty", "prefill" and "decode", lowered for weights of these shapes and shardings.
        Nothing is allocated but a page without prompts.
        """
        steps, weights = self._steps, (params, buffers)
        nothing = self._inputs(self._scheduler([], 1).nothing(), [], [])
        on = NamedSharding(self._mesh, PartitionSpec(AXES))
        places = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on),
            jax.eval_shape(steps.empty, *weights, *nothing, sampling),
        )
        return {
            "empty": steps.empty.lower(*weights, *nothing, sampling),
            "prefill": steps.prefill.lower(*weights, places, *nothing, sampling),
            "decode": steps.decode.lower(*weights, places, sampling, np.int32(every)),
        }

    def run(
        self,
        weights: tuple[Tree, Tree],
        prompts: Sequence[Document],
        keys: Sequence[Sequence[np.ndarray]],
        sampling: Sampling,
        *,
        every: int,
        most: int | None = None,
    ) -> Iterator[Progress]:
        """Yields each answer's progress after up to `every` more steps of decoding; the last time it is over.
        A step decodes a token, and those drafted after it that hold (compute.num_speculative_tokens).

        weights: (params, buffers) in their device layout. prompts: that fit, without answers. keys: 64 random
        bits for each answer to each prompt, all of which have as many. most: tokens of an answer, new_tokens
        or fewer. All processes call it with the same arguments, and get the same.
        """
        scheduler = self._scheduler(prompts, len(keys[0]) if keys else 1)
        nothing = self._inputs(scheduler.nothing(), prompts, keys)
        places = self._steps.empty(*weights, *nothing, sampling)
        while not scheduler.is_done:
            if pages := scheduler.admit():
                inputs = self._inputs(pages, prompts, keys)
                places = self._steps.prefill(*weights, places, *inputs, sampling)
            places, found = self._steps.decode(*weights, places, sampling, np.int32(every))
            active, drawn, drafted = jax.tree.map(np.asarray, found)
            self.drafted = Drafted(*drafted.sum(axis=0).tolist()) if drafted is not None else Drafted()
            for rank, place, answer in list(scheduler):
                at = rank * self.places + place
                progress = self._progress(answer, drawn, at, bool(active[at]), most or self._new_tokens)
                if progress.is_over:
                    scheduler.release(rank, place)
                yield progress

    def _progress(self, answer: Running, drawn: Drawn, at: int, active: bool, most: int) -> Progress:
        """What follows an answer's end, or its newest token, is padding, which begins with an end token."""
        ends = np.flatnonzero(np.isin(drawn.tokens[at], self._stop_ids))
        length = int(ends[0]) if len(ends) else len(drawn.tokens[at])
        ended = not active and length < min(most, len(drawn.tokens[at]))
        is_over = not active or length >= most
        return Progress(answer, drawn.tokens[at, : min(length, most)], ended, is_over, at, drawn)

    def _scheduler(self, prompts: Sequence[Document], group_size: int) -> Scheduler:
        sizes = {"ranks": self._config.mesh.data, "places": self.places, "pages": self._pages}
        fits = [self.limits.fit(prompt) for prompt in prompts]
        return Scheduler(fits, self.limits, **sizes, group_size=group_size)

    def _inputs(
        self, pages: Sequence[Page], prompts: Sequence[Document], keys: Sequence[Sequence[np.ndarray]]
    ) -> tuple[Batch, NewSequences]:
        """The packed prompts and their places, on the mesh."""
        mine = local_rows(self._mesh, len(pages))
        batches, documents = [], []
        for rank in mine:
            # The packer may order prompts anew; the report says how, by these keys.
            named = [replace(prompts[number], key=str(number)) for number in pages[rank].prompts]
            batch, report = self._pack.row(named)
            batches.append(batch)
            documents.append({int(key): document for document, key in enumerate(report.keys)})
        batch = concatenate_rows(batches)
        ends = whole_prompts(batch, ContextLayout.of(self._config), self._config.data.max_documents)
        taken = np.full((len(mine), self.places), -1, np.int32)
        bits = np.zeros((len(mine), self.places, 2), np.uint32)
        for row, rank in enumerate(mine):
            for place, answer in pages[rank].places.items():
                taken[row, place] = documents[row][answer.prompt]
                bits[row, place] = keys[answer.prompt][answer.sample]
        page = np.array([pages[rank].page for rank in mine], np.int32)
        admitted = put_rows(NewSequences(ends, page, taken, bits), new_sequence_specs(), self._mesh)
        return put_batch(batch, self._mesh), admitted


def random_bits(seed: int, key: str) -> np.ndarray:
    """Random bits, uint32 [2], that depend only on the arguments: their BLAKE2b hash, as in document_rng."""
    return np.frombuffer(hashlib.blake2b(f"{seed}/{key}".encode(), digest_size=8).digest(), "<u4")
