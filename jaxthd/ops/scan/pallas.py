"""The scan of ops/scan/ssd.py by Pallas kernels, forward and backward: the back-end "pallas".

The kernels are in pallas_kernels.py, their launches in pallas_launches.py.

What is where. Device memory holds x, B, C, dt, the states between scan chunks (in the compute dtype) and, in
the backward pass, the gradient of C B^T summed over the heads of a group. Decays and scores of heads stay in
registers. There is one launch of each:

    states        s before each scan chunk; a program for each (context chunk, head, part of the state), in
    order
                  over its scan chunks
    outputs       y; a program for each (scan chunk, head, tile)
    states        reversed, from C and dy: the gradient of the states after each scan chunk
    inputs_grad   dx, ddt; a program for each (scan chunk, head, tile)
    scores_grad   d(C B^T); a program for each (scan chunk, group, pair of tiles), its heads one after the
    other shared_grad   dC, then dB; a program for each (scan chunk, group, tile), its heads one after the
    other

so that nothing is summed in an order that could change. XLA computes what is small: sums of decays, and what
context ranks exchange between `states` and the rest. The state that enters a context chunk from other ranks
is added where states are read, times what is left of it in that scan chunk.

Sizes. A tile is 64 tokens, one warpgroup's matrix instruction: its float32 arrays take 32 registers a thread
with 4 warps at [64, 64], and 64 at [64, 128] (state 128); shared_grad holds two of the latter, scores_grad
four of the former. Compiled for an H100 (by Triton 3.6, without one), with heads of 64, state 128, bfloat16:
66 to 255 registers, at most 60 bytes spilled, 45 to 87 KB of shared memory, all products on the warpgroup
instructions; so two programs or more share a multiprocessor. At 8k tokens of 64 heads, in scan chunks of 128,
`outputs` has 8192 programs for 132 multiprocessors. `states`, which cannot be divided along the tokens, has
256. Larger scan chunks save states: those of a chunk are as many bytes as x of 128 tokens (state 128),
written and read. 256 tokens a chunk halve that, for twice the pairs of tokens. Products in float32 are exact,
hence not on the tensor cores: they are for comparisons, not for training.

What is left to XLA. The convolution and its SiLU, the gate and the grouped norm are one loop over elements
each, or one and a reduction of a row. XLA fuses these, and a kernel of ours would move the same bytes.

Which lowering: Triton. It lowers on a machine without a GPU, its kernels are traced and interpreted like any
JAX program, and it runs on every NVIDIA GPU since Ampere. The matrix instructions of Mosaic GPU are those of
one generation each. jax 0.11 and 0.12 lower the same kernels, and announce that a later version will not.

Legend: as ops/scan/ssd.py; n tiles of a scan chunk, q tokens of a tile. Tokens N are filled up to whole scan
chunks.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jaxtyping import Float

from jaxthd.ops.backend import RAN_ON_CPU, RAN_ON_GPU, Machine
from jaxthd.ops.pallas_launch import SMALLEST, below_ampere
from jaxthd.ops.scan.contract import ScanBackend, ScanInputs, ScanShape
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
from jaxthd.ops.scan.pallas_split_documents import ScanArrays, enter, with_gradients
from jaxthd.ops.scan.split_documents import put
from jaxthd.ops.scan.ssd import in_whole_chunks, positions_by_scan_chunk
from jaxthd.ops.scan.state_passing import DecayMap, initial_states
from jaxthd.packing.segments import Segments

TILE = 64


class Sums(NamedTuple):
    """Sums of log decay la <= 0, of terms of one sign; or the decays, their exponentials.

    within: from the start of a token's tile to the token, included [H, N]. to_tile: from after the token to
    the start of tile n of its scan chunk [H, n, N]. start, end: from the scan chunk's start to the token,
    included, and from after it to the chunk's end [H, N]. total: over a scan chunk [H, C].
    """

    within: Array
    to_tile: Array
    start: Array
    end: Array
    total: Array


def ssd_pallas(
    inputs: ScanInputs, segments: Segments, *, chunk: int, tile: int = TILE
) -> Float[Array, "N H P"]:
    """As ops.scan.ssd.ssd, for x in float32 or bfloat16, and chunk, P and S powers of two of 16 or more.
    y is in x's dtype.

    On a CPU the kernels are interpreted. Raises ValueError for other dtypes and sizes.
    """
    x_NHP, dt_NH, a_H, b_NGS, c_NGS = inputs
    own = segments if segments.splits is None else segments.splits.on_rank
    context_chunks = own.rows * own.context_chunks
    length = len(x_NHP) // context_chunks
    chunk = chunk_of(chunk, length)
    unfit = why_unfit(chunk, x_NHP.shape[2], b_NGS.shape[2], str(x_NHP.dtype))
    if unfit:
        raise ValueError(f"the scan kernels cannot take this: {'; '.join(unfit)}; use the xla scan")
    sizes = Sizes(context_chunks, -(-length // chunk), chunk, min(tile, chunk))
    filled = partial(in_whole_chunks, context_chunks=context_chunks, chunk=chunk)
    positions_N = positions_by_scan_chunk(own, chunk).reshape(-1)
    dt_HN = filled(dt_NH.astype(jnp.float32)).T
    la_HN = dt_HN * a_H.astype(jnp.float32)[:, None]
    y_NHP = _scan(sizes, filled(x_NHP), dt_HN, la_HN, filled(b_NGS), filled(c_NGS), positions_N, segments)
    return y_NHP.reshape(context_chunks, -1, *y_NHP.shape[1:])[:, :length].reshape(x_NHP.shape)


def chunk_of(chunk: int, length: int) -> int:
    """The scan chunk's size in a context chunk of `length` tokens, where `chunk` is asked for."""
    return min(chunk, max(SMALLEST, pl.next_power_of_2(length)))


def why_unfit(chunk: int, head_dim: int, state: int, dtype: str) -> list[str]:
    """Reason why the kernels do not take a scan's shape, in words; empty if they take it."""
    sizes = {"chunk": chunk, "head dim": head_dim, "state": state}
    unfit = [
        f"{name} {size} is no power of two from {SMALLEST} up"
        for name, size in sizes.items()
        if size < SMALLEST or size & (size - 1)
    ]
    if dtype not in ("float32", "bfloat16"):
        unfit.append(f"dtype {dtype} is neither float32 nor bfloat16")
    return unfit


def _unfit(shape: ScanShape, machine: Machine) -> str | None:
    return (
        below_ampere(machine)
        or " and ".join(why_unfit(shape.chunk, shape.head_dim, shape.state, shape.dtype))
        or None
    )


BACKEND = ScanBackend(
    "pallas",
    _unfit,
    ssd_pallas,
    f"{RAN_ON_GPU}; interpreted on a {RAN_ON_CPU}",
    is_interpreted_on_cpu=True,
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(sizes: Sizes, *given: Any) -> Array:
    """given: x, dt, log decay, B, C and positions, of whole scan chunks, and the segments."""
    return _scan_forward(sizes, *given)[0]


def _scan_forward(sizes: Sizes, *given: Any) -> tuple[Array, Any]:
    x_NHP, dt_HN, la_HN, b_NGS, c_NGS, positions_N, segments = given
    sums = _sums(sizes, la_HN)
    decays = _decays(sizes, sums, positions_N)
    states_CHSP, last_ZHSP = states(sizes, b_NGS, x_NHP, dt_HN * decays.end, decays.total)
    carried, pull, entering, read_CHSP = None, None, None, states_CHSP
    if segments.splits is not None:
        arrays = ScanArrays(x_NHP, dt_HN, la_HN, b_NGS, c_NGS)
        entering, more_EWHP = enter(arrays, states_CHSP, sums.total, sizes.chunk, segments)
        read_CHSP = entering.states(states_CHSP, segments)
    elif segments.context > 1:
        before_HC, _, whole_HZ = _over_chunks(sizes, decays.total)

        def exchange(whole_HZ: Array, last_ZHSP: Array) -> Array:
            """Gives initial_states one group, with each head's state as one dim."""
            flat = last_ZHSP.reshape(sizes.context_chunks, 1, 1, len(whole_HZ), -1)
            return initial_states(DecayMap(whole_HZ.T[:, None], flat), segments).reshape(last_ZHSP.shape)

        first_ZHSP, pull = jax.vjp(exchange, whole_HZ, last_ZHSP)
        carried = Carried(before_HC, first_ZHSP)
    tokens = Tokens(positions_N, dt_HN, la_HN, decays.within, decays.to_tile)
    y_NHP = outputs(sizes, c_NGS, b_NGS, x_NHP, tokens, decays.start, read_CHSP, carried)
    if entering is not None:
        y_NHP = put(y_NHP, entering.edges.head, more_EWHP)
    return y_NHP, (*given, states_CHSP, carried, pull, entering)


def _scan_backward(sizes: Sizes, residuals: Any, dy_NHP: Array) -> tuple[Any, ...]:
    x_NHP, dt_HN, la_HN, b_NGS, c_NGS, positions_N, segments, own_CHSP, carried, pull, entering = residuals
    states_CHSP = own_CHSP if entering is None else entering.states(own_CHSP, segments)
    dy_NHP = dy_NHP.astype(x_NHP.dtype)
    sums, pull_sums = jax.vjp(partial(_sums, sizes), la_HN)
    decays = _decays(sizes, sums, positions_N)

    dstates_CHSP, dfirst_ZHSP, dtotal_HC = states(
        sizes, c_NGS, dy_NHP, decays.start, decays.total, (states_CHSP, carried)
    )
    dcarried, dends = None, None
    if entering is not None:
        dstates_CHSP, more_HC, dends = entering.come_back(dstates_CHSP, own_CHSP, dy_NHP, segments)
        dtotal_HC += more_HC
    if carried is not None:
        before_HC, after_HC, _ = _over_chunks(sizes, decays.total)
        dwhole_HZ, dlast_ZHSP = pull(dfirst_ZHSP)
        dcarried = Carried(after_HC, dlast_ZHSP)
        own_ZcHSP = own_CHSP.reshape(sizes.context_chunks, sizes.scan_chunks, *states_CHSP.shape[1:])
        kept_HZc = jnp.einsum(
            "zhsp,zchsp->hzc",
            dlast_ZHSP,
            own_ZcHSP,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        ) + dwhole_HZ[..., None] * before_HC.reshape(-1, sizes.context_chunks, sizes.scan_chunks)
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
        dtotal_HC * decays.total + (0 if dends is None else dends.of_scan_chunks.T),
    )
    found = ScanArrays(dx_NHP, ddt_HN, dla_HN + pull_sums(dsums)[0], db_NGS, dc_NGS)
    if dends is not None:
        found = with_gradients(found, dends, entering.edges)
    return *found, None, None


_scan.defvjp(_scan_forward, _scan_backward)


def _sums(sizes: Sizes, la_HN: Array) -> Sums:
    """Suffixes are cumulative sums from the end, shifted, so that nothing is subtracted."""
    tiles = sizes.chunk // sizes.tile
    la_HCnq = la_HN.reshape(len(la_HN), -1, tiles, sizes.tile)
    within_HCnq = jnp.cumsum(la_HCnq, axis=3)
    after_HCnq = jnp.flip(jnp.cumsum(jnp.flip(la_HCnq[..., 1:], 3), axis=3), 3)
    after_HCnq = jnp.pad(after_HCnq, [(0, 0)] * 3 + [(0, 1)])
    tile_HCn = within_HCnq[..., -1]

    def of_tiles(counted_nk: Array) -> Array:
        """Sums over the tiles k where counted [..., k] is True: [H, C, ...]."""
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
    """The exponentials of the sums. start, end and total are 0 where a document begins between their ends;
    for within and to_tile the kernels mask that.
    """
    offset_N = jnp.arange(len(positions_N)) % sizes.chunk
    last_C = positions_N.reshape(-1, sizes.chunk)[:, -1]
    to_last_N = jnp.repeat(last_C, sizes.chunk) >= sizes.chunk - 1 - offset_N
    within, to_tile, start, end, total = (jnp.exp(x) for x in sums)
    return Sums(
        within,
        to_tile,
        jnp.where(positions_N > offset_N, start, 0),
        jnp.where(to_last_N, end, 0),
        jnp.where(last_C >= sizes.chunk, total, 0),
    )


def _over_chunks(sizes: Sizes, total_HC: Array) -> tuple[Array, Array, Array]:
    """Products of the scan chunks' decays in a context chunk: of those before each, of those after it [H, C],
    and of all [H, Z].
    """
    total_HZc = total_HC.reshape(-1, sizes.context_chunks, sizes.scan_chunks)

    def before(x_HZc: Array) -> Array:
        """Products of the factors before each, [H, Z, c]."""
        one = jnp.ones_like(x_HZc[..., :1])
        return jnp.cumprod(jnp.concatenate([one, x_HZc[..., :-1]], axis=2), axis=2)

    before_HZc, after_HZc = before(total_HZc), jnp.flip(before(jnp.flip(total_HZc, 2)), 2)
    whole_HZ = before_HZc[..., -1] * total_HZc[..., -1]
    return before_HZc.reshape(total_HC.shape), after_HZc.reshape(total_HC.shape), whole_HZ
