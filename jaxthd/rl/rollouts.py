"""Rollouts: groups of answers drawn to prompts, each token with its log-probability.

    rollouts = Rollouts(config, mesh, stop_ids=PromptTemplate(config.data, tokenizer).stop_ids)
    weights = rollouts.on_own_mesh(params, buffers)
    for group in rollouts.draw(*weights, prompts, seed=0, step=12):
        for answer in group:
            answer.tokens, answer.log_probs, answer.ended

A prompt is encoded and prefilled once for all of its answers. A place whose answer has ended takes an answer
to another prompt. Three programs of fixed shape serve prompts and answers of all lengths (places.py).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float, Int32

from jaxthd.config import Config
from jaxthd.data.packer import pack_documents
from jaxthd.errors import UserError
from jaxthd.inference.generator import check_sampling, random_bits
from jaxthd.ops.sampling import Drawn, Sampling, make_sampling
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.fit import BufferLimits, Fit
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.prompts import whole_prompts
from jaxthd.parallel.mesh import AXES, local_rows, put_batch, put_rows
from jaxthd.rl.places import Admitted, admitted_specs, make_rollout_steps
from jaxthd.rl.resharding import Resharding, same_devices
from jaxthd.rl.scheduler import Page, Scheduler
from jaxthd.steps.blueprint import Blueprint, Tree

TOKENS_AT_ONCE = 8
"""Tokens that are decoded before the host looks for answers that have ended. It affects speed only."""


class Rollout(NamedTuple):
    """An answer of n tokens, the one that ends it included.

    log_probs, drawn_log_probs, entropies: of each token, see ops.sampling.Drawn; float32, or float64 of a
    float64 model. ended: it ended by itself; otherwise it was cut off at the most tokens.
    """

    tokens: Int32[np.ndarray, " n"]
    log_probs: Float[np.ndarray, " n"]
    drawn_log_probs: Float[np.ndarray, " n"]
    entropies: Float[np.ndarray, " n"]
    ended: bool


class RolloutCounts(NamedTuple):
    """The work of drawing, over all data ranks.

    refills: pages of prompts that were prefilled after the first answers had ended, on all ranks at once.
    prompt_slots: token slots of the prompts. tokens: drawn.
    """

    refills: int = 0
    prompt_slots: int = 0
    tokens: int = 0


def for_rollouts(config: Config) -> Config:
    """The config of drawing: on rollout.mesh, with pages of prompts as buffers, a row for each data rank."""
    mesh = config.rollout_mesh
    most = places_of_rank(config) // config.rollout.group_size
    data = replace(config.data, rows=mesh.data, max_documents=most, packing="first_fit")
    return replace(config, mesh=mesh, data=data, train=replace(config.train, microbatches=1))


def places_of_rank(config: Config) -> int:
    """Places of a data rank: its share of rollout.answers_at_once, and room for a group at least; a multiple
    of the context ranks, which share them."""
    rollout, mesh = config.rollout, config.rollout_mesh
    share = max(-(-rollout.answers_at_once // mesh.data), rollout.group_size)
    return -(-share // mesh.context) * mesh.context


class Rollouts:
    """Draws answers. config.rollout gives the settings.

    mesh: that of config.mesh, where the weights are. rollout.mesh may name another one over its devices, on
    which answers are drawn (on_own_mesh).
    stop_ids: the tokens that end an answer; the first one is padding.
    The prompts of a page fit config.data.capacity token slots and audio_capacity mel frames.
    counts: of the last groups drawn.
    """

    def __init__(self, config: Config, mesh: Mesh, *, stop_ids: tuple[int, ...]) -> None:
        self.config, self.stop_ids = for_rollouts(config), stop_ids
        self.counts = RolloutCounts()
        self._pack, self._places = pack_documents(self.config), places_of_rank(config)
        blueprint, self._mesh = Blueprint(self.config), mesh
        self._resharding: Resharding | None = None
        if config.rollout_mesh != config.mesh:
            self._mesh = same_devices(mesh, config.rollout_mesh)
            self._resharding = Resharding(Blueprint(config), mesh, blueprint, self._mesh)
        self._steps = make_rollout_steps(
            blueprint, self._mesh, stop_ids=stop_ids, new_tokens=config.rollout.max_new_tokens
        )

    @property
    def has_own_mesh(self) -> bool:
        """Whether answers are drawn on another mesh than the one where the weights are."""
        return self._resharding is not None

    def on_own_mesh(self, params: Tree, buffers: Tree) -> tuple[Tree, Tree]:
        """The weights, which are in their training form, for `draw` and `stream`: copied to rollout.mesh
        (resharding.py), or themselves where that is the mesh on which they are.
        """
        return self._resharding(params, buffers) if self._resharding else (params, buffers)

    @property
    def mesh(self) -> Mesh:
        """The mesh on which answers are drawn."""
        return self._mesh

    def lowered(self, params: Tree, buffers: Tree) -> dict[str, Any]:
        """The programs "empty", "prefill" and "decode", lowered for weights of these shapes and shardings on
        rollout.mesh. Nothing is allocated but a page without prompts.
        """
        steps: Any = self._steps
        rollout, ranks = self.config.rollout, self.config.mesh.data
        scheduler = Scheduler(
            [], self._pack.limits, ranks=ranks, places=self._places, group_size=rollout.group_size
        )
        nothing = self._inputs(scheduler.nothing(), [], [])
        how = rollout.temperature, rollout.top_k, rollout.top_p
        sampling = make_sampling(*how, self.config.compute.dtype)
        weights = params, buffers
        on = NamedSharding(self._mesh, PartitionSpec(AXES))
        places = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on),
            jax.eval_shape(steps.empty, *weights, *nothing, sampling),
        )
        every = np.int32(TOKENS_AT_ONCE)
        return {
            "empty": steps.empty.lower(*weights, *nothing, sampling),
            "prefill": steps.prefill.lower(*weights, places, *nothing, sampling),
            "decode": steps.decode.lower(*weights, places, sampling, every),
        }

    @property
    def compilations(self) -> int:
        """Number of programs compiled so far: three for any use."""
        steps: Any = self._steps
        return sum(step._cache_size() for step in steps)

    def draw(
        self, params: Tree, buffers: Tree, prompts: Sequence[Document], **settings: Any
    ) -> list[list[Rollout]]:
        """The groups of answers, in the order of the prompts. settings: as for `stream`; raises what it
        raises."""
        groups = dict(self.stream(params, buffers, prompts, **settings))
        return [groups[number] for number in range(len(prompts))]

    def stream(
        self,
        params: Tree,
        buffers: Tree,
        prompts: Sequence[Document],
        *,
        seed: int = 0,
        step: int = 0,
        group_size: int | None = None,
        first_sample: int = 0,
        temperature: float | None = None,
    ) -> Iterator[tuple[int, list[Rollout]]]:
        """Yields (the prompt's number, its answers), each group as soon as all of it has ended.

        params, buffers: of on_own_mesh. prompts: documents without answers.
        A draw depends on (seed, step, the prompt's key, the sample's number, the token's number) alone.
        first_sample: the number of a group's first sample. What is None is as in config.rollout.
        All processes call it with the same arguments, and get the same.
        Before it draws any, it raises UserError for a prompt that does not fit, and for a setting out of
        range.
        """
        rollout = self.config.rollout
        size = rollout.group_size if group_size is None else group_size
        how = rollout.temperature if temperature is None else temperature, rollout.top_k, rollout.top_p
        check_sampling(*how)
        if not 1 <= size <= self._places:
            raise UserError(
                f"a group of {size} answers; expected 1 to {self._places}, the places of a data rank: lower "
                "the size of a group, or raise rollout.answers_at_once"
            )
        fits, ranks = check_prompts(prompts, self._pack.limits), self.config.mesh.data
        scheduler = Scheduler(fits, self._pack.limits, ranks=ranks, places=self._places, group_size=size)
        keys = [
            [random_bits(seed, f"{step}/{prompt.key}/{first_sample + sample}") for sample in range(size)]
            for prompt in prompts
        ]
        sampling = make_sampling(*how, self.config.compute.dtype)
        return self._groups((params, buffers), prompts, keys, scheduler, sampling)

    def _groups(
        self,
        weights: tuple[Tree, Tree],
        prompts: Sequence[Document],
        keys: Sequence[Sequence[np.ndarray]],
        scheduler: Scheduler,
        sampling: Sampling,
    ) -> Iterator[tuple[int, list[Rollout]]]:
        """keys: 64 random bits for each answer to each prompt."""
        self.counts = RolloutCounts()
        done: list[dict[int, Rollout]] = [{} for _ in prompts]
        nothing = self._inputs(scheduler.nothing(), prompts, keys)
        places = self._steps.empty(*weights, *nothing, sampling)
        every = np.int32(TOKENS_AT_ONCE)
        while not scheduler.is_done:
            pages = scheduler.admit()
            if pages:
                slots = sum(len(prompts[number]) for page in pages for number in page.prompts)
                self._count(any(done), slots, 0)
                inputs = self._inputs(pages, prompts, keys)
                places = self._steps.prefill(*weights, places, *inputs, sampling)
            places, found = self._steps.decode(*weights, places, sampling, every)
            active, drawn = jax.tree.map(np.asarray, found)
            for rank, place, held in list(scheduler):
                at = rank * self._places + place
                if active[at]:
                    continue
                scheduler.release(rank, place)
                group = done[held.prompt]
                group[held.sample] = answer = self._answer(drawn, at)
                self._count(0, 0, len(answer.tokens))
                if len(group) == len(keys[held.prompt]):
                    yield held.prompt, [group[sample] for sample in sorted(group)]

    def _answer(self, drawn: Drawn, at: int) -> Rollout:
        """The answer in a place where it has ended. What follows its end is padding."""
        ends = np.flatnonzero(np.isin(drawn.tokens[at], self.stop_ids))
        length = ends[0] + 1 if len(ends) else len(drawn.tokens[at])
        of_tokens: Any = [x[at, :length].copy() for x in jax.tree.leaves(drawn)]
        tokens, log_probs, drawn_log_probs, entropies = of_tokens
        return Rollout(tokens, log_probs, drawn_log_probs, entropies, bool(len(ends)))

    def _inputs(
        self, pages: Sequence[Page], prompts: Sequence[Document], keys: Sequence[Sequence[np.ndarray]]
    ) -> tuple[Batch, Admitted]:
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
        data = self.config.data
        ends = whole_prompts(batch, ContextLayout.of(self.config), data.max_documents)
        taken = np.full((len(mine), self._places), -1, np.int32)
        bits = np.zeros((len(mine), self._places, 2), np.uint32)
        for row, rank in enumerate(mine):
            for place, held in pages[rank].places.items():
                taken[row, place] = documents[row][held.prompt]
                bits[row, place] = keys[held.prompt][held.sample]
        page = np.array([pages[rank].page for rank in mine], np.int32)
        admitted = put_rows(Admitted(ends, page, taken, bits), admitted_specs(), self._mesh)
        return put_batch(batch, self._mesh), admitted

    def _count(self, *more: int) -> None:
        self.counts = RolloutCounts(*map(sum, zip(self.counts, more, strict=True)))


def check_prompts(prompts: Sequence[Document], limits: BufferLimits) -> list[Fit]:
    """The Fit of each prompt in a page. Raises UserError for one without room, or with answers already."""
    fits = [limits.fit(prompt) for prompt in prompts]
    for prompt, fit in zip(prompts, fits, strict=True):
        if prompt.answers:
            raise UserError(
                f"prompt {prompt.key!r} has {len(prompt.answers)} answers already; expected a document of a "
                "prompt alone: leave its answers out (SpeechDocuments.prompt)"
            )
        if fit.misfit:
            raise UserError(
                f"prompt {prompt.key!r} does not fit: {fit.misfit}; shorten it, or raise data.capacity or "
                "data.audio_capacity"
            )
    return fits
