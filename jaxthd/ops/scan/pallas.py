"""The scan of ops/scan/ssd.py by Pallas kernels (scan_kernels.py, launched by scan_launches.py), forward and
backward.

What is where. Device memory holds x, B, C, dt, the states between chunks (in the compute dtype) and, in the
backward pass, the gradient of C B^T summed over the heads of a group. Decays and scores of heads stay in
registers. A launch of each:

    states        s before each chunk, one program a (stretch, head, part of the state), in order over chunks
    outputs       y, one program a (chunk, head, tile)
    states        reversed, from C and dy: the gradient of the states after each chunk
    inputs_grad   dx, ddt, one program a (chunk, head, tile)
    scores_grad   d(C B^T), one program a (chunk, group, pair of tiles), its heads one after the other
    shared_grad   dC, then dB, one program a (chunk, group, tile), its heads one after the other

so that nothing is summed in an order that could change. XLA has what is small: sums of decays, and what
context ranks exchange between `states` and the rest; a stretch's state from other ranks is added where states
are read, times what is left of it in that chunk.

Sizes. A tile is 64 tokens, one warpgroup's matrix instruction: its float32 arrays are 32 registers a thread
with 4 warps at [64, 64], 64 at [64, 128] (state 128); shared_grad holds two of the latter, scores_grad four
of the former. Compiled for an H100 (by Triton 3.6, without one), heads of 64, state 128, bfloat16: 66 to 255
registers, at most 60 bytes spilled, 45 to 87 KB of shared memory, all products on the warpgroup instructions;
so two programs or more share a multiprocessor. At 8k tokens of 64 heads, chunks of 128, `outputs` has 8192
programs for 132 multiprocessors and `states`, which cannot be cut along the tokens, 256. States are what
larger chunks save: a chunk's are as many bytes as x of 128 tokens (state 128), written and read; 256 tokens a
chunk halve that for twice the pairs of tokens. In float32 products are exact, hence not on the tensor cores:
for comparisons, not for training.

What is left to XLA. The convolution and its SiLU, the gate and the grouped norm are one loop over elements,
or one and a reduction of a row: XLA fuses such, and a kernel of ours would move the same bytes.

Which lowering: Triton. It lowers on a machine without a GPU, its kernels are traced and interpreted like any
JAX program, it runs on every NVIDIA GPU since Ampere; Mosaic GPU's matrix instructions are one generation's
each. jax 0.11 and 0.12 lower the same kernels, and announce its removal in a later version.

Not yet run on a GPU.

Legend: as ops/scan/ssd.py; n tiles of a chunk, q tokens of a tile. Tokens N are filled up to whole chunks.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jaxtyping import Float

from jaxthd.ops.backend import Device, below_capability, not_nvidia
from jaxthd.ops.scan.contract import ScanBackend, ScanShape
from jaxthd.ops.scan.pallas_launches import (
    Carried,
    Sizes,
    Tokens,
    inputs_grad,
    outputs,
    scores_grad,
    shared_grad,
    states,
)
from jaxthd.ops.scan.ssd import initial_states
from jaxthd.packing.segments import Segments

TILE = 64
SMALLEST = 16
"""Least size of a dim that the tensor cores multiply over."""
CAPABILITY_LEAST = (8, 0)
"""Ampere's compute capability, the first with bfloat16 matrix units."""


class Sums(NamedTuple):
    """Sums of log decay la <= 0, of terms of one sign; or their exponentials, decays.

    within: from the start of a token's tile up to and with it [H, N]. to_tile: from after it to the start of
    tile n of its chunk [H, n, N]. start, end: from its chunk's start up to and with it, from after it to the
    chunk's end [H, N]. total: over a chunk [H, C].
    """

    within: Array
    to_tile: Array
    start: Array
    end: Array
    total: Array


def ssd_pallas(
    x_NHP: Float[Array, "N H P"],
    dt_NH: Float[Array, "N H"],
    a_H: Float[Array, " H"],
    b_NGS: Float[Array, "N G S"],
    c_NGS: Float[Array, "N G S"],
    segments: Segments,
    *,
    chunk: int,
    tile: int = TILE,
) -> Float[Array, "N H P"]:
    """As ops.ssd.ssd, x in float32 or bfloat16; chunk, P, S powers of two, at least 16. Float32.

    On a CPU the kernels are interpreted. Raises ValueError for what they do not take.
    """
    stretches = segments.rows * segments.stretches
    length = len(x_NHP) // stretches
    chunk = chunk_of(chunk, length)
    unfit = why_unfit(chunk, x_NHP.shape[2], b_NGS.shape[2], str(x_NHP.dtype))
    if unfit:
        raise ValueError(f"the scan kernels cannot take this: {'; '.join(unfit)}; use the xla scan")
    padding = -length % chunk
    sizes = Sizes(stretches, (length + padding) // chunk, chunk, min(tile, chunk))

    def filled(x: Array) -> Array:
        if not padding:
            return x
        x = x.reshape(stretches, length, *x.shape[1:])
        return jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2)).reshape(-1, *x.shape[2:])

    # Filling goes on with the last token's document at dt = 0: it leaves the state as it is.
    positions_ZL = segments.positions.reshape(stretches, length)
    filling_Zp = positions_ZL[:, -1:] + jnp.arange(1, padding + 1, dtype=jnp.int32)
    positions_N = jnp.concatenate([positions_ZL, filling_Zp], axis=1).reshape(-1)
    dt_HN = filled(dt_NH.astype(jnp.float32)).T
    la_HN = dt_HN * a_H.astype(jnp.float32)[:, None]
    y_NHP = _scan(sizes, filled(x_NHP), dt_HN, la_HN, filled(b_NGS), filled(c_NGS), positions_N, segments)
    return y_NHP.reshape(stretches, -1, *y_NHP.shape[1:])[:, :length].reshape(x_NHP.shape)


def chunk_of(chunk: int, length: int) -> int:
    """The chunks that stretches of so many tokens are cut into."""
    return min(chunk, max(SMALLEST, pl.next_power_of_2(length)))


def why_unfit(chunk: int, head_dim: int, state: int, dtype: str) -> list[str]:
    """What of a scan the kernels do not take, in words; empty if they take it."""
    sizes = {"chunk": chunk, "head dim": head_dim, "state": state}
    unfit = [
        f"{name} {size} is no power of two from {SMALLEST} up"
        for name, size in sizes.items()
        if size < SMALLEST or size & (size - 1)
    ]
    if dtype not in ("float32", "bfloat16"):
        unfit.append(f"dtype {dtype} is neither float32 nor bfloat16")
    return unfit


def _unfit(shape: ScanShape, device: Device) -> str | None:
    reason = not_nvidia(device.platform) or below_capability(device, CAPABILITY_LEAST, "Ampere")
    return reason or " and ".join(why_unfit(shape.chunk, shape.head_dim, shape.state, shape.dtype)) or None


BACKEND = ScanBackend("pallas", _unfit, ssd_pallas, is_interpreted_on_cpu=True)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(
    sizes: Sizes,
    x_NHP: Array,
    dt_HN: Array,
    la_HN: Array,
    b_NGS: Array,
    c_NGS: Array,
    positions_N: Array,
    segments: Segments,
) -> Array:
    return _scan_forward(sizes, x_NHP, dt_HN, la_HN, b_NGS, c_NGS, positions_N, segments)[0]


def _scan_forward(
    sizes: Sizes,
    x_NHP: Array,
    dt_HN: Array,
    la_HN: Array,
    b_NGS: Array,
    c_NGS: Array,
    positions_N: Array,
    segments: Segments,
) -> tuple[Array, Any]:
    decays = _decays(sizes, _sums(sizes, la_HN), positions_N)
    to_end_HN = dt_HN * decays.end
    states_CHSP, last_ZHSP = states(sizes, b_NGS, x_NHP, to_end_HN, decays.total)
    carried, pull = None, None
    if segments.context > 1:
        before_HC, _, whole_HZ = _over_chunks(sizes, decays.total)

        def exchange(whole_HZ: Array, last_ZHSP: Array) -> Array:
            """In initial_states' dims: one group, whose heads' states are one dim."""
            flat = last_ZHSP.reshape(sizes.stretches, 1, 1, len(whole_HZ), -1)
            return initial_states(whole_HZ.T[:, None], flat, segments).reshape(last_ZHSP.shape)

        first_ZHSP, pull = jax.vjp(exchange, whole_HZ, last_ZHSP)
        carried = Carried(before_HC, first_ZHSP)
    tokens = Tokens(positions_N, dt_HN, la_HN, decays.within, decays.to_tile)
    y_NHP = outputs(sizes, c_NGS, b_NGS, x_NHP, tokens, decays.start, states_CHSP, carried)
    return y_NHP, (x_NHP, dt_HN, la_HN, b_NGS, c_NGS, positions_N, states_CHSP, carried, pull)


def _scan_backward(sizes: Sizes, residuals: Any, dy_NHP: Array) -> tuple[Any, ...]:
    x_NHP, dt_HN, la_HN, b_NGS, c_NGS, positions_N, states_CHSP, carried, pull = residuals
    dy_NHP = dy_NHP.astype(x_NHP.dtype)
    sums, pull_sums = jax.vjp(partial(_sums, sizes), la_HN)
    decays = _decays(sizes, sums, positions_N)

    dstates_CHSP, dfirst_ZHSP, dtotal_HC = states(
        sizes, c_NGS, dy_NHP, decays.start, decays.total, (states_CHSP, carried)
    )
    dcarried = None
    if carried is not None:
        before_HC, after_HC, _ = _over_chunks(sizes, decays.total)
        dwhole_HZ, dlast_ZHSP = pull(dfirst_ZHSP)
        dcarried = Carried(after_HC, dlast_ZHSP)
        own_ZcHSP = states_CHSP.reshape(sizes.stretches, sizes.chunks, *states_CHSP.shape[1:])
        kept_HZc = jnp.einsum(
            "zhsp,zchsp->hzc",
            dlast_ZHSP,
            own_ZcHSP,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        ) + dwhole_HZ[..., None] * before_HC.reshape(-1, sizes.stretches, sizes.chunks)
        dtotal_HC += after_HC * kept_HZc.reshape(dtotal_HC.shape)

    tokens = Tokens(positions_N, dt_HN, la_HN, decays.within, decays.to_tile)
    dx_NHP, ddt_HN, dto_tile_HnN = inputs_grad(
        sizes, c_NGS, b_NGS, x_NHP, dy_NHP, tokens, decays.end, dstates_CHSP, dcarried
    )
    dcb_CGQQ, dwithin_HnN, dla_HN = scores_grad(sizes, c_NGS, b_NGS, x_NHP, dy_NHP, tokens)
    dc_NGS, dstart_HN = shared_grad(
        sizes, c_NGS, b_NGS, dy_NHP, decays.start, dcb_CGQQ, states_CHSP, carried, reverse=False
    )
    to_end_HN = dt_HN * decays.end
    db_NGS, dend_HN = shared_grad(
        sizes, b_NGS, c_NGS, x_NHP, to_end_HN, dcb_CGQQ, dstates_CHSP, dcarried, reverse=True
    )

    number_n = jnp.arange(sizes.chunk // sizes.tile)[:, None]
    tile_N = jnp.arange(len(positions_N)) % sizes.chunk // sizes.tile
    dsums = Sums(
        jnp.where(number_n < tile_N, dwithin_HnN, 0).sum(1),
        jnp.where(number_n > tile_N, dto_tile_HnN, 0),
        dstart_HN,
        dend_HN,
        dtotal_HC * decays.total,
    )
    return dx_NHP, ddt_HN, dla_HN + pull_sums(dsums)[0], db_NGS, dc_NGS, None, None


_scan.defvjp(_scan_forward, _scan_backward)


def _sums(sizes: Sizes, la_HN: Array) -> Sums:
    """A suffix is a cumulative sum from the end, shifted: nothing is subtracted."""
    tiles = sizes.chunk // sizes.tile
    la_HCnq = la_HN.reshape(len(la_HN), -1, tiles, sizes.tile)
    within_HCnq = jnp.cumsum(la_HCnq, axis=3)
    after_HCnq = jnp.flip(jnp.cumsum(jnp.flip(la_HCnq[..., 1:], 3), axis=3), 3)
    after_HCnq = jnp.pad(after_HCnq, [(0, 0)] * 3 + [(0, 1)])
    tile_HCn = within_HCnq[..., -1]

    def of_tiles(counted_nk: Array) -> Array:
        """Sums over the tiles k that counted [..., k] names: [H, C, ...]."""
        return jnp.where(counted_nk, jnp.expand_dims(tile_HCn, tuple(range(2, counted_nk.ndim + 1))), 0).sum(
            -1
        )

    n = jnp.arange(tiles)
    between = of_tiles((n < n[:, None, None]) & (n > n[:, None]))
    to_tile_HCnnq = after_HCnq[:, :, None] + between[..., None]
    return Sums(
        within_HCnq.reshape(la_HN.shape),
        to_tile_HCnnq.swapaxes(1, 2).reshape(len(la_HN), tiles, -1),
        (within_HCnq + of_tiles(n < n[:, None])[..., None]).reshape(la_HN.shape),
        (after_HCnq + of_tiles(n > n[:, None])[..., None]).reshape(la_HN.shape),
        tile_HCn.sum(-1),
    )


def _decays(sizes: Sizes, sums: Sums, positions_N: Array) -> Sums:
    """exp of the sums; 0 where a document begins between: from the chunk's start, to its end, over all of it.

    Inside the chunk the kernels see to that.
    """
    place_N = jnp.arange(len(positions_N)) % sizes.chunk
    last_C = positions_N.reshape(-1, sizes.chunk)[:, -1]
    to_last_N = jnp.repeat(last_C, sizes.chunk) >= sizes.chunk - 1 - place_N
    within, to_tile, start, end, total = (jnp.exp(x) for x in sums)
    return Sums(
        within,
        to_tile,
        jnp.where(positions_N > place_N, start, 0),
        jnp.where(to_last_N, end, 0),
        jnp.where(last_C >= sizes.chunk, total, 0),
    )


def _over_chunks(sizes: Sizes, total_HC: Array) -> tuple[Array, Array, Array]:
    """Products of chunks' decays: over those of the stretch before a chunk, over those after it [H, C], over
    all [H, Z]."""
    total_HZc = total_HC.reshape(-1, sizes.stretches, sizes.chunks)

    def before(x_HZc: Array) -> Array:
        one = jnp.ones_like(x_HZc[..., :1])
        return jnp.cumprod(jnp.concatenate([one, x_HZc[..., :-1]], axis=2), axis=2)

    before_HZc, after_HZc = before(total_HZc), jnp.flip(before(jnp.flip(total_HZc, 2)), 2)
    whole_HZ = before_HZc[..., -1] * total_HZc[..., -1]
    return before_HZc.reshape(total_HC.shape), after_HZc.reshape(total_HC.shape), whole_HZ
