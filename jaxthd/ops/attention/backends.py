"""Attention's back-ends by name. A new one is a file that ends in an AttentionBackend, and a line here."""

from jaxthd.ops.attention import blockwise, cudnn, pallas, te
from jaxthd.ops.attention.contract import AttentionBackend

BACKENDS: dict[str, AttentionBackend] = {
    b.name: b for b in (te.BACKEND, cudnn.BACKEND, pallas.BACKEND, blockwise.BACKEND)
}
"""In the order in which "auto" tries them. The last one runs everywhere."""


def for_any_intervals(name: str) -> AttentionBackend:
    """The back-end called `name` if it takes any intervals, else the blockwise one."""
    backend = BACKENDS[name]
    return backend if backend.takes_any_intervals else blockwise.BACKEND
