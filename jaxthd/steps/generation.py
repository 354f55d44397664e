"""The two programs of generation: prefill of packed prompts; decoding of some tokens of every document."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Bool, Int32, UInt32

from jaxthd.kernels.xla_options import jit_for
from jaxthd.models.decoding import Pick, advance, begin
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.ops.sampling import Drawn, Sampling, draw
from jaxthd.packing.batch import Batch
from jaxthd.packing.prompts import PromptEnds
from jaxthd.parallel.mesh import AXES, DATA, TOKEN_AXES, batch_specs, on_ranks
from jaxthd.steps.blueprint import Blueprint, Tree


class Draws(NamedTuple):
    """Settings of drawing tokens. keys: 64 random bits for each document, in the order of the prompts."""

    keys: UInt32[Any, "RD 2"]
    sampling: Sampling


class Answers(NamedTuple):
    """tokens: decoded so far, what ends an answer included, in the order of the prompts; those from `number`
    on are not decoded yet. active: documents whose answer has not ended.
    """

    number: Int32[Any, ""]
    tokens: Int32[Any, "RD m"]
    active: Bool[Any, " RD"]


Prefill = Callable[[Tree, Tree, Batch, PromptEnds, Draws], Tree]
"""(params, buffers, batch, prompts, draws) -> decoding, at its start."""
Decode = Callable[[Tree, Tree, Tree, Draws, Any], tuple[Tree, Answers]]
"""(params, buffers, decoding, draws, until) -> (decoding, answers), up to `until` tokens of each document."""


def make_generation_steps(
    blueprint: Blueprint, mesh: Mesh, *, stop_ids: tuple[int, ...], new_tokens: int
) -> tuple[Prefill, Decode]:
    """Both programs, jitted, with stored batch statistics. The old decoding's memory is reused.

    stop_ids: tokens that end an answer. new_tokens: most tokens of an answer.
    """
    graph, specs, config = blueprint.graph, blueprint.specs, blueprint.config

    def pick_from(model: SpeechLM, draws: Draws) -> Pick:
        def pick(h_nD: Array, number: Array | int) -> Drawn:
            logits_nV, axes = model.logits(h_nD), model.vocabulary_axes
            return Drawn(draw(logits_nV, draws.keys, number, draws.sampling, axes))

        return pick

    def prefill(params: Tree, buffers: Tree, batch: Batch, ends: PromptEnds, draws: Draws) -> Tree:
        model = nnx.merge(graph, params, buffers)
        pick, fill = pick_from(model, draws), stop_ids[0]
        _, decoding = begin(model, batch, ends, pick, new_tokens=new_tokens, fill=fill, axes=AXES)
        return jax.tree.map(lambda x: x[None], decoding)

    def decode(
        params: Tree, buffers: Tree, decoding: Tree, draws: Draws, until: Array
    ) -> tuple[Tree, Answers]:
        model = nnx.merge(graph, params, buffers)
        own = jax.tree.map(lambda x: x[0], decoding)
        own = advance(model, own, pick_from(model, draws), stop_ids=stop_ids, until=until)
        answers = Answers(own.steps, own.drawn.tokens, own.active)
        return jax.tree.map(lambda x: x[None], own), answers

    # Each rank holds its own decoding: a row of a leading dim that all axes shard.
    everywhere, rows, documents = PartitionSpec(), PartitionSpec(DATA), PartitionSpec(TOKEN_AXES)
    held = PartitionSpec(AXES)
    draw_specs = Draws(documents, Sampling(*[everywhere] * 3))
    prefill_in = (*specs, batch_specs(), PromptEnds(rows, rows), draw_specs)
    decode_in = (*specs, held, draw_specs, everywhere)
    decode_out = held, Answers(everywhere, documents, documents)
    shardings = NamedSharding(mesh, held), NamedSharding(mesh, everywhere)
    return (
        jit_for(config, mesh, on_ranks(prefill, mesh, prefill_in, held), out_shardings=shardings[0]),
        jit_for(
            config,
            mesh,
            on_ranks(decode, mesh, decode_in, decode_out),
            donate_argnums=2,
            out_shardings=shardings,
        ),
    )
