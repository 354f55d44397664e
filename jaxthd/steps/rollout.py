"""The programs of rollouts: a page of prompts takes places; some tokens are decoded in every place.

A third one makes places without answers, so that these take memory only while answers are drawn.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool

from jaxthd.kernels.xla_options import jit_for
from jaxthd.models.decoding import Pick
from jaxthd.models.places import Admitted, PickFor, admit, decode, empty_places
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.ops.sampling import Drawn, Sampling, draw_with_log_probs
from jaxthd.packing.batch import Batch
from jaxthd.packing.prompts import PromptEnds
from jaxthd.parallel.mesh import AXES, CONTEXT, DATA, TOKEN_AXES, batch_specs, on_ranks
from jaxthd.steps.blueprint import Blueprint, Tree


class InPlaces(NamedTuple):
    """What the places of all data and context ranks hold.

    active: whether the answer has not ended. drawn: its tokens so far, padded, leaves [places, m].
    """

    active: Bool[Any, " places"]
    drawn: Drawn


class RolloutSteps(NamedTuple):
    """empty: (params, buffers, batch, admitted, sampling) -> places without answers; only the arguments'
        shapes count.
    prefill: (params, buffers, places, batch, admitted, sampling) -> places.
    decode: (params, buffers, places, sampling, tokens) -> (places, what they hold), after up to `tokens` more
        tokens in each.
    """

    empty: Callable[[Tree, Tree, Batch, Admitted, Sampling], Tree]
    prefill: Callable[[Tree, Tree, Tree, Batch, Admitted, Sampling], Tree]
    decode: Callable[[Tree, Tree, Tree, Sampling, Any], tuple[Tree, InPlaces]]


def admitted_specs() -> Admitted:
    """PartitionSpecs: each data rank has its own page and prompts, each context rank its own places."""
    rows, places = PartitionSpec(DATA), PartitionSpec(DATA, CONTEXT)
    return Admitted(PromptEnds(rows, rows), rows, places, places)


def make_rollout_steps(
    blueprint: Blueprint, mesh: Mesh, *, stop_ids: tuple[int, ...], new_tokens: int
) -> RolloutSteps:
    """The programs, jitted, with stored batch statistics. The old places' memory is reused.

    stop_ids: tokens that end an answer. new_tokens: most tokens of an answer.
    """
    graph, specs, config = blueprint.graph, blueprint.specs, blueprint.config
    sizes: dict[str, Any] = {"new_tokens": new_tokens, "fill": stop_ids[0], "axes": AXES}

    def empty_rank(params: Tree, buffers: Tree, batch: Batch, admitted: Admitted, sampling: Sampling) -> Tree:
        model = nnx.merge(graph, params, buffers)
        return _held(empty_places(model, batch, admitted, picks(sampling), **sizes))

    def prefill_rank(
        params: Tree, buffers: Tree, places: Tree, batch: Batch, admitted: Admitted, sampling: Sampling
    ) -> Tree:
        model = nnx.merge(graph, params, buffers)
        return _held(admit(model, _own(places), batch, admitted, picks(sampling), **sizes))

    def decode_rank(
        params: Tree, buffers: Tree, places: Tree, sampling: Sampling, tokens: Array
    ) -> tuple[Tree, InPlaces]:
        model = nnx.merge(graph, params, buffers)
        after = decode(model, _own(places), picks(sampling), stop_ids=stop_ids, tokens=tokens)
        return _held(after), InPlaces(after.decoding.active, after.decoding.drawn)

    everywhere, held, by_place = PartitionSpec(), PartitionSpec(AXES), PartitionSpec(TOKEN_AXES)
    on_mesh = NamedSharding(mesh, held)
    admission = batch_specs(), admitted_specs(), everywhere

    def compiled(rank: Callable[..., Any], in_specs: Any, out_specs: Any, **options: Any) -> Any:
        return jit_for(config, mesh, on_ranks(rank, mesh, (*specs, *in_specs), out_specs), **options)

    return RolloutSteps(
        empty=compiled(empty_rank, admission, held, out_shardings=on_mesh),
        prefill=compiled(
            prefill_rank,
            (held, *admission),
            held,
            donate_argnums=2,
            out_shardings=on_mesh,
        ),
        # All processes read all answers.
        decode=compiled(
            decode_rank,
            (held, everywhere, everywhere),
            (held, by_place),
            donate_argnums=2,
            out_shardings=(on_mesh, NamedSharding(mesh, everywhere)),
        ),
    )


def picks(sampling: Sampling) -> PickFor:
    """Draws tokens with their log-probabilities."""

    def pick_for(model: SpeechLM, keys_n2: Array) -> Pick:
        def pick(h_nD: Array, number: Array | int) -> Drawn:
            return draw_with_log_probs(model.logits(h_nD), keys_n2, number, sampling, model.vocabulary_axes)

        return pick

    return pick_for


def _held(tree: Tree) -> Tree:
    """Each rank holds its own places: a row of a leading dim that all axes shard."""
    return jax.tree.map(lambda x: x[None], tree)


def _own(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: x[0], tree)
