"""What a compiled program does not tell of Pallas kernels: their operations, and what they leave unread."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from jaxthd.config import Config
from jaxthd.ops.attention import pallas
from jaxthd.ops.attention.relative import distances
from jaxthd.ops.scan.pallas import TILE
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.packing.segments import Segments, make_segments

SECTOR = 16
"""Values in bfloat16 that memory reads together."""


class Work(NamedTuple):
    """Of one launch: matrix operations, and bytes of operands that it does not read."""

    flops: float
    unread: float = 0.0

    def shared(self, launches: int) -> "Work":
        """That of one of so many equal launches."""
        return Work(self.flops / launches, self.unread / launches)


Works = dict[tuple[str, str], Work]
"""By part of the model and kernel."""


def pallas_work(config: Config, batch: Batch) -> Works:
    """For this batch of one row on one rank: the tiles that its documents' intervals reach.

    Ranks that share the row are taken to have equal parts of it. The decoder's attention is launched for each
    context rank's keys, and each launch is taken to be the same part of the rank's.
    """
    mesh = config.mesh
    llm, encoder, block = config.model.llm, config.model.encoder, config.compute.blocks.attention

    def segments(ids: Any, positions: Any) -> Segments:
        made: Segments = make_segments(ids, positions, block=block, axis=None)
        return made

    local = segments(batch.segment_ids, batch.positions).local
    found = _attention("attention", local.lo, local.hi, llm.q_heads // mesh.tensor, llm.head_dim)
    found = {name: work.shared(mesh.context**2) for name, work in found.items()}
    if encoder is not None:
        whole = segments(batch.chunk_ids, batch.chunk_positions).whole
        dim = encoder.dim // encoder.heads
        width = len(distances(-(-encoder.chunk_frames // SUBSAMPLING)))
        seen = np.minimum(np.asarray(whole.hi - whole.lo) + 2 * SECTOR, width)
        unread = 2.0 * encoder.heads * float((width - seen).sum())
        clips = _attention("encoder attention", whole.lo, whole.hi, encoder.heads, dim, unread)
        found |= {name: work.shared(mesh.audio_ranks) for name, work in clips.items()}
    return found | _scan(config) if "M" in llm.kinds else found


def _attention(part: str, lo: Array, hi: Array, heads: int, dim: int, unread: float = 0.0) -> Works:
    """unread: bytes of a bias where no query sees a key."""

    def pairs(tiles: pallas.Tiles, *, of_keys: bool = False) -> float:
        tiles = pallas.tiles_for(tiles, len(lo), dim)
        found = pallas.Tiled.of(lo, hi, len(lo), tiles)
        ranges = np.asarray(found.of_keys if of_keys else found.of_queries)
        return float(np.diff(ranges).sum()) * heads * tiles.queries * tiles.keys

    kernels: Iterable[tuple[str, float, int]] = (
        ("forward_kernel", pairs(pallas.FORWARD), 2),
        ("query_grad_kernel", pairs(pallas.BACKWARD), 3),
        ("key_grad_kernel", pairs(pallas.BACKWARD, of_keys=True), 4),
    )
    return {(part, name): Work(2.0 * dim * products * count, unread) for name, count, products in kernels}


def _scan(config: Config) -> Works:
    """Two tokens of a scan chunk meet if their tiles do."""
    llm, chunk = config.model.llm, config.compute.blocks.scan
    tile = min(TILE, chunk)
    heads, inner, state = llm.mamba_heads, llm.mamba_heads * llm.mamba_head_dim, llm.mamba_state
    rows = max(1, config.data.rows // config.mesh.data // config.train.microbatches)
    tokens = rows * config.data.capacity // config.mesh.context
    pairs, of_states = tokens * (chunk + tile) / 2, 2.0 * tokens * inner * state
    of_heads, of_groups = 2 * pairs * inner, 2 * pairs * state
    decays = 2.0 * tokens * heads * tile * tile  # of one bfloat16 term of the log decays
    kernels = {
        "states_kernel": of_states,
        "outputs_kernel": of_states + of_heads + heads * of_groups + 3 * decays,
        "inputs_grad_kernel": of_states + of_heads + heads * of_groups + 3 * decays,
        "scores_grad_kernel": of_heads + llm.mamba_groups * of_groups + 5 * decays,
        "shared_grad_kernel": of_states + llm.mamba_groups * of_groups,
    }
    return {("Mamba2", name): Work(flops) for name, flops in kernels.items()}
