"""Attention's back-ends by name. A new one is a file that ends in an AttentionBackend, and a line here."""

from jaxthd.ops.attention import batched, blockwise, cudnn, te
from jaxthd.ops.attention.contract import AttentionBackend

BACKENDS: dict[str, AttentionBackend] = {
    b.name: b for b in (te.BACKEND, cudnn.BACKEND, batched.BACKEND, blockwise.BACKEND)
}
"""In the order in which "auto" tries them. The last one runs everywhere."""
