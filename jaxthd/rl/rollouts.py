"""Rollouts: groups of answers drawn to prompts, each token with its log-probability.

rollouts = Rollouts(config, mesh, stop_ids=PromptTemplate(config.data, tokenizer).stop_ids)
weights = rollouts.on_own_mesh(params, buffers)
for group in rollouts.draw(*weights, prompts, seed=0, step=12):
    for answer in group:
        answer.tokens, answer.log_probs, answer.ended
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int32

from jaxthd.config import Config
from jaxthd.errors import UserError
from jaxthd.inference.drawing import Drawing, Progress, for_drawing, random_bits
from jaxthd.inference.generator import check_sampling
from jaxthd.kernels.programs import ProgramCount
from jaxthd.ops.sampling import Sampling, make_sampling
from jaxthd.packing.document import Document
from jaxthd.packing.fit import BufferLimits
from jaxthd.rl.resharding import Resharding, same_devices
from jaxthd.steps.blueprint import Blueprint, Tree

PAGES = 4
"""Pages of prompts. Few places with long answers then keep no others waiting; half of the pages would do if
all answers were equally long."""
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

    @classmethod
    def of(cls, progress: Progress) -> "Rollout":
        """The answer of a place, which is over."""
        length, drawn = len(progress.tokens) + progress.ended, progress.drawn._asdict()
        return cls(
            **{name: x[progress.at, :length].copy() for name, x in drawn.items()}, ended=progress.ended
        )


def for_rollouts(config: Config) -> Config:
    """The config of drawing: on rollout.mesh, with pages of prompts as buffers, a row for each data rank."""
    config = replace(config, mesh=config.rollout_mesh)
    return for_drawing(config, places_of_rank(config) // config.rollout.group_size)


def places_of_rank(config: Config) -> int:
    """Places of a data rank: its share of rollout.answers_at_once, and room for a group at least; a multiple
    of the context ranks, which share them."""
    rollout, mesh = config.rollout, config.rollout_mesh
    share = max(-(-rollout.answers_at_once // mesh.data), rollout.group_size)
    return -(-share // mesh.context) * mesh.context


class Rollouts:
    """Draws groups of answers. config.rollout gives the settings.

    mesh: that of config.mesh, where the weights are. rollout.mesh may name another one over its devices, on
    which answers are drawn (on_own_mesh).
    stop_ids: the tokens that end an answer; the first one is padding.
    The prompts of a page fit config.data.capacity token slots and audio_capacity audio frames.
    """

    def __init__(self, config: Config, mesh: Mesh, *, stop_ids: tuple[int, ...]) -> None:
        self.config, self.mesh = for_rollouts(config), mesh
        """mesh: the one on which answers are drawn."""
        self._resharding: Resharding | None = None
        if config.rollout_mesh != config.mesh:
            self.mesh = same_devices(mesh, config.rollout_mesh)
            self._resharding = Resharding(Blueprint(config), mesh, Blueprint(self.config), self.mesh)
        sizes = {"places": places_of_rank(config), "new_tokens": config.rollout.max_new_tokens}
        self._drawing = Drawing(self.config, self.mesh, stop_ids=stop_ids, **sizes, pages=PAGES)

    @property
    def has_own_mesh(self) -> bool:
        """Whether answers are drawn on another mesh than the one where the weights are."""
        return self._resharding is not None

    def on_own_mesh(self, params: Tree, buffers: Tree) -> tuple[Tree, Tree]:
        """The weights, which are in their device layout, for `draw` and `stream`: copied to rollout.mesh
        (resharding.py), or themselves where that is the mesh on which they are.
        """
        return self._resharding(params, buffers) if self._resharding else (params, buffers)

    def lowered(self, params: Tree, buffers: Tree) -> dict[str, Any]:
        """The programs of drawing, lowered for weights of these shapes on rollout.mesh; see Drawing."""
        return self._drawing.lowered(params, buffers, self._sampling(), TOKENS_AT_ONCE)

    def _sampling(self, temperature: float | None = None) -> Sampling:
        """As config.rollout says, but for a temperature that is given. Raises UserError as check_sampling."""
        rollout = self.config.rollout
        how = rollout.temperature if temperature is None else temperature, rollout.top_k, rollout.top_p
        check_sampling(*how)
        return make_sampling(*how, self.config.compute.dtype)

    @property
    def programs(self) -> ProgramCount:
        """The programs so far: three for any use."""
        return self._drawing.programs

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
        sampling, most = self._sampling(temperature), self._drawing.places
        size = self.config.rollout.group_size if group_size is None else group_size
        if not 1 <= size <= most:
            raise UserError(
                f"a group of {size} answers; expected 1 to {most}, the places of a data rank: lower "
                "the size of a group, or raise rollout.answers_at_once"
            )
        check_prompts(prompts, self._drawing.limits)
        keys = [
            [random_bits(seed, f"{step}/{prompt.key}/{first_sample + sample}") for sample in range(size)]
            for prompt in prompts
        ]
        return self._groups((params, buffers), prompts, keys, sampling)

    def _groups(
        self,
        weights: tuple[Tree, Tree],
        prompts: Sequence[Document],
        keys: Sequence[Sequence[np.ndarray]],
        sampling: Sampling,
    ) -> Iterator[tuple[int, list[Rollout]]]:
        """keys: 64 random bits for each answer to each prompt."""
        done: list[dict[int, Rollout]] = [{} for _ in prompts]
        for progress in self._drawing.run(weights, prompts, keys, sampling, every=TOKENS_AT_ONCE):
            if progress.is_over:
                number, sample, _ = progress.answer
                group = done[number]
                group[sample] = Rollout.of(progress)
                if len(group) == len(keys[number]):
                    yield number, [group[sample] for sample in sorted(group)]


def check_prompts(prompts: Sequence[Document], limits: BufferLimits) -> None:
    """Raises UserError for a prompt that has no room in a page, or has answers already."""
    for prompt in prompts:
        if prompt.answers:
            raise UserError(
                f"prompt {prompt.key!r} has {len(prompt.answers)} answers already; expected a document of a "
                "prompt alone: leave its answers out (SpeechDocuments.prompt)"
            )
        if reject_reason := limits.fit(prompt).reject_reason:
            raise UserError(
                f"prompt {prompt.key!r} does not fit: {reject_reason}; shorten it, or raise data.capacity or "
                "data.audio_capacity"
            )
