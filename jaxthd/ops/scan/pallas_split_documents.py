"""States that enter context chunks of split documents, between the launches of the scan kernels.

split_documents.py says what is added where. The kernels scan as if every context chunk were a document. So
XLA adds to the states before scan chunks what is left there of states that entered; and in the backward pass,
to the gradients of the states after scan chunks, what comes back from the ends of context chunks. What comes
back to a state that entered is the gradient of the state after its first scan chunk, which the kernels find
in any case.

Legend: as ops/scan/pallas.py; E, W as split_documents.py.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from jaxthd.ops.scan.split_documents import (
    Edges,
    Ends,
    entered,
    find_edges,
    put,
    taken,
    through_head,
    through_scan_chunks,
)
from jaxthd.packing.segments import Segments


class ScanArrays(NamedTuple):
    """The kernels' inputs, of whole scan chunks; or their gradients. la: the logarithm of the decays."""

    x: Float[Array, "N H P"]
    dt: Float[Array, "H N"]
    la: Float[Array, "H N"]
    b: Float[Array, "N G S"]
    c: Float[Array, "N G S"]


class Entering(NamedTuple):
    """States that enter context chunks, as the backward pass needs them.

    through: what is left of them after their first scan chunk. before: what is left of them before each scan
    chunk that they reach. after: what is left, before a context chunk's last scan chunk, of the state after
    each earlier one. pull: of `entered`, from the states and outputs to Ends.
    """

    edges: Edges
    state: Float[Array, "E H S P"]
    through: Float[Array, "E H"]
    before: Float[Array, "C H"]
    after: Float[Array, "C H"]
    pull: Any

    def states(self, states_CHSP: Array, segments: Segments) -> Float[Array, "C H S P"]:
        """The states before scan chunks with what is left there of those that enter, in their dtype."""
        return _with_faded(states_CHSP, self.before, self.state, self.edges.reaching, segments)

    def come_back(
        self, dstates_CHSP: Array, states_CHSP: Array, dy_NHP: Array, segments: Segments
    ) -> tuple[Float[Array, "C H S P"], Float[Array, "H C"], Ends]:
        """Takes the gradients of the states after scan chunks, as the kernels find them. Returns them with
        what comes back from the ends of context chunks; what this adds to the gradient of the decay over
        each scan chunk; and the gradients of Ends.

        states: before scan chunks, on this rank from zero.
        """
        dfirst_EHSP = dstates_CHSP[self.edges.first].astype(jnp.float32)
        dmore_EWHP = taken(dy_NHP, self.edges.head).astype(jnp.float32)
        (dends,) = self.pull((self.through[..., None, None] * dfirst_EHSP, dmore_EWHP))
        dthrough_EH = self.through * (self.state * dfirst_EHSP).sum((2, 3))
        dends = dends._replace(from_start=dends.from_start + dthrough_EH[:, None])
        following_C = self.edges.following
        dstates_CHSP = _with_faded(dstates_CHSP, self.after, dends.before, following_C, segments)
        products_CH = (dends.before[following_C] * states_CHSP.astype(jnp.float32)).sum((2, 3))
        return dstates_CHSP, (self.after * products_CH).T, dends


def enter(
    given: ScanArrays, states_CHSP: Array, of_scan_chunks_HC: Array, chunk: int, segments: Segments
) -> tuple[Entering, Float[Array, "E W H P"]]:
    """The states that enter, and what they add to the outputs of the tokens Edges.head.

    states: before scan chunks, on this rank from zero. of_scan_chunks: the logarithm of the decay over each.
    """
    edges = find_edges(segments, chunk, len(given.x) // segments.rows)
    ends = Ends(
        x=taken(given.x, edges.tail),
        dt=taken(given.dt.T, edges.tail),
        b=taken(given.b, edges.tail),
        to_end=taken(given.la.T, edges.tail),
        c=taken(given.c, edges.head),
        from_start=taken(given.la.T, edges.head),
        before=states_CHSP[edges.last].astype(jnp.float32),
        of_scan_chunks=of_scan_chunks_HC.T,
    )

    def of_edges(ends: Ends) -> tuple[Array, Array]:
        """`entered` at these edges."""
        return entered(ends, edges, segments)

    (state_EHSP, more_EWHP), pull = jax.vjp(of_edges, ends)
    through_EH = through_head(ends, edges)
    before_CH = through_scan_chunks(ends.of_scan_chunks, edges) * through_EH[edges.reaching]
    after_CH = through_scan_chunks(ends.of_scan_chunks, edges, after=True)
    return Entering(edges, state_EHSP, through_EH, before_CH, after_CH, pull), more_EWHP


def with_gradients(given: ScanArrays, dends: Ends, edges: Edges) -> ScanArrays:
    """The gradients with those that Ends get added to their tokens."""
    x, dt, la, b, c = given
    la = put(put(la.T, edges.tail, dends.to_end), edges.head, dends.from_start).T
    x, b, c = put(x, edges.tail, dends.x), put(b, edges.tail, dends.b), put(c, edges.head, dends.c)
    return ScanArrays(x, put(dt.T, edges.tail, dends.dt).T, la, b, c)


def _with_faded(x_CHSP: Array, faded_CH: Array, state_EHSP: Array, of_C: Array, segments: Segments) -> Array:
    """x plus what is left of the states `of`, in x's dtype; x if no document is split."""

    def added(x_CHSP: Array, state_EHSP: Array) -> Array:
        """Adds the states."""
        more_CHSP = faded_CH[..., None, None] * state_EHSP[of_C]
        return (x_CHSP.astype(jnp.float32) + more_CHSP).astype(x_CHSP.dtype)

    assert segments.splits is not None
    found: Array = jax.lax.cond(
        segments.splits.width > 0, added, lambda x_CHSP, _: x_CHSP, x_CHSP, state_EHSP
    )
    return found
