"""Who speaks in each output: the diarizer over the packed pieces of recordings.

The first chunk of a recording depends on nothing before it. So the first chunks of all recordings are
computed at once, packed as they lie. The later ones read what the diarizer remembers of the chunks before
(Memory): they are computed one after the other, each recording's on one rank, in a loop that runs as long as
the rank has some. Its arrays are as long as a window; of a recording only the embeddings are held as a whole.

Nothing here has a gradient: an answer is yes or no.

Legend: R rows, E outputs of a row on this rank, N = R E, M outputs of these rows over all ranks that share
them, in the order of `Order`; W outputs of a window, L of a chunk, D dim of the diarizer, S speakers.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from jaxthd.models.front_ends.stacked.module import Pieces
from jaxthd.models.front_ends.transcribe.diarizer import Diarizer
from jaxthd.models.front_ends.transcribe.order import Order, of_rank, over_ranks
from jaxthd.models.front_ends.transcribe.settings import Transcribe
from jaxthd.models.front_ends.transcribe.speaker_cache import Memory
from jaxthd.packing.segments import make_segments
from jaxthd.parallel.params import gathered_module


def heard_speakers(
    diarizer: Diarizer,
    config: Transcribe,
    features_AM: Float[Array, "A M"],
    mask_A: Bool[Array, " A"],
    pieces: Pieces,
    order: Order,
    axes: tuple[str, ...],
    row_axes: tuple[str, ...],
) -> Float[Array, "N S"]:
    """1 where a speaker is heard in an output, else 0. features: not normalised. order: of the recordings.
    mask, axes, row_axes: as in the contract (Encoder)."""
    graph, state = nnx.split(diarizer)
    diarizer = nnx.merge(graph, jax.tree.map(jax.lax.stop_gradient, state))
    rows, count = pieces.segments.rows, len(pieces.segments.ids)
    x_ND = diarizer.encoder.embedded(features_AM, mask_A, count)
    probabilities_NS = diarizer.probabilities(x_ND, pieces)
    heard_NS = (probabilities_NS > config.threshold).astype(x_ND.dtype)
    is_later_M = order.positions >= config.chunk_outputs
    has_later = jax.lax.pmax(is_later_M.any().astype(jnp.int32), axes) > 0

    def later() -> Array:
        """Who speaks in the later chunks."""
        both = (over_ranks(x.reshape(rows, -1, x.shape[1]), row_axes) for x in (x_ND, probabilities_NS))
        embedded_MD, probabilities_MS = (x.reshape(-1, x.shape[-1])[order.source] for x in both)
        whole: Diarizer = gathered_module(diarizer, x_ND.dtype)
        given = order, embedded_MD, probabilities_MS, pieces.segments.block
        heard_MS = later_chunks(whole, config, *given, row_axes)
        at_N = of_rank(order.place, rows, row_axes)
        return jnp.where(is_later_M[at_N][:, None], heard_MS[at_N], heard_NS)

    return jax.lax.stop_gradient(jax.lax.cond(has_later, later, lambda: heard_NS))


class _Loop(NamedTuple):
    """The state between two chunks. before: outputs of the last window between the queue and its chunk."""

    memory: Memory
    window_WS: Float[Array, "W S"]
    heard_MS: Float[Array, "M S"]


def later_chunks(
    diarizer: Diarizer,
    config: Transcribe,
    order: Order,
    embedded_MD: Array,
    probabilities_MS: Array,
    block: int,
    axes: tuple[str, ...],
) -> Float[Array, "M S"]:
    """Who speaks in all chunks but recordings' first ones; anything in those. The ranks of `axes` take the
    recordings in turn.

    diarizer: its variables gathered. embedded: its input. probabilities: of the first chunks. block: of
    attention.
    """
    length, (left, right), sizes = config.chunk_outputs, config.context_outputs, config.diarizer.cache
    count, speakers = len(embedded_MD), config.diarizer.speakers
    slots = sizes.size + sizes.queue + left + length + right
    begins_M = (order.positions > 0) & (order.positions % length == 0)
    recording_M = jnp.cumsum(begins_M & (order.positions == length)) - 1
    ranks, rank = (jax.lax.axis_size(axes), jax.lax.axis_index(axes)) if axes else (1, 0)
    is_own_M = begins_M & (recording_M % ranks == rank)
    (starts,) = jnp.nonzero(is_own_M, size=max(count // length, 1), fill_value=0)
    rows_at = partial(jnp.take, axis=0, mode="clip")
    slot_W, slot_L = jnp.arange(slots, dtype=jnp.int32), jnp.arange(length, dtype=jnp.int32)
    empty = Memory.empty(sizes, embedded_MD.shape[1], speakers, embedded_MD.dtype)

    def chunk(number: Array, carry: _Loop) -> _Loop:
        """Takes the chunk before into the memory, and computes this one."""
        start = starts[number]
        position, stop = order.positions[start], order.stop[start]
        first, is_second = start - position, position == length
        outputs = stop - first
        # The chunk before: of the second chunk that is the first, which has been computed with all others.
        memory, window_WS = jax.tree.map(
            lambda fresh, x: jnp.where(is_second, fresh, x),
            (empty, rows_at(probabilities_MS, first + slot_W)),
            (carry.memory, carry.window_WS),
        )
        memory = memory.after(
            rows_at(embedded_MD, start - length + slot_L),
            window_WS,
            jnp.minimum(left, position - length),
            diarizer.silence[...],
            sizes,
        )
        # The window.
        before = jnp.minimum(left, position)
        all_outputs = outputs + order.is_whole[start]
        end = jnp.minimum(jnp.minimum(position + length, all_outputs) + right, all_outputs)
        remembered = memory.cached + memory.queued
        at_W = position - before + slot_W - remembered
        read_WD = jnp.where((at_W < outputs)[:, None], rows_at(embedded_MD, first + at_W), 0)
        used = remembered + end - (position - before)
        x_WD = jnp.where((slot_W < used)[:, None], memory.at(slot_W, read_WD), 0)
        hidden_W = ((slot_W == used - 1) & (end > outputs)).astype(jnp.int32)
        window_WS = diarizer.probabilities(x_WD, _pieces(used, hidden_W, block))
        heard_LS = rows_at(window_WS, remembered + before + slot_L) > config.threshold
        at_L = jnp.where(start + slot_L < stop, start + slot_L, count)
        heard_MS = carry.heard_MS.at[at_L].set(heard_LS.astype(embedded_MD.dtype), mode="drop")
        return _Loop(memory, window_WS, heard_MS)

    nothing = jnp.zeros((slots, speakers), embedded_MD.dtype), jnp.zeros((count, speakers), embedded_MD.dtype)
    end = jax.lax.fori_loop(0, is_own_M.sum(), chunk, _Loop(empty, *nothing))
    return jax.lax.psum(end.heard_MS, axes)


def _pieces(used: Array, hidden_W: Array, block: int) -> Pieces:
    """A window as the only piece, whose first `used` slots hold outputs. hidden: as in Pieces."""
    slot_W = jnp.arange(len(hidden_W), dtype=jnp.int32)
    is_used_W = slot_W < used
    ids_W, positions_W = is_used_W.astype(jnp.int32), jnp.where(is_used_W, slot_W, 0)
    segments = make_segments(ids_W[None], positions_W[None], block=block, axis=None)
    return Pieces.of(segments, hidden_W, len(hidden_W), (), ())
