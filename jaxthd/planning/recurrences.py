"""Costs of recurrences on a GPU that has no kernel for them, from their traced code.

XLA gives each product of matrices to a library: its operands are read from memory, and its result is written
there. In the chunks of a recurrence the matrices are small, and that traffic takes longer than their
operations: of 64 tokens in float32, 11 operations a byte, where an H100 does 20. So the bytes of the products
over the memory's bandwidth bound the time from below; what lies between products takes more. For 8,192 tokens
and 32 heads of 128 in bfloat16, both passes, the bound is 11.0 GB of the delta rule, and 12.8 GB of Kimi's; a
program for an H100 (jax 0.12, compiled without one) moves 24.3 and 44.4 GB.
"""

import math
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from jaxthd.config import Block, Config
from jaxthd.packing.segments import make_segments
from jaxthd.terminal.tables import aligned, size_text

_TOKENS = 1024
"""Tokens that are traced: whole chunks, so that a token costs what it costs among any number of them."""


class Recurrence(NamedTuple):
    """The recurrence of a kind of block, in XLA's code on GPUs. moved: bytes of a device's memory that its
    products read and write in a step, in all its layers."""

    title: str
    layers: int
    moved: float


def recurrences(config: Config) -> list[Recurrence]:
    """The decoder's recurrences that no kernel computes on a GPU, by kind of block."""
    data, mesh, llm = config.data, config.mesh, config.model.llm
    tokens = data.rows * data.capacity / (mesh.data * mesh.context) * passes(config)
    found = []
    for letter, layers in Counter(llm.letters).items():
        block = llm.blocks[letter]
        if of_token := bytes_of_token(block, mesh.tensor, config.compute.dtype):
            found.append(Recurrence(block.title, layers, layers / mesh.pipeline * tokens * of_token))
    return found


def passes(config: Config) -> float:
    """Operations of a step over those of one forward and one backward pass: layers may be computed again."""
    return 4 / 3 if config.compute.remat in ("auto", "layers", "full") else 1.0


def describe_recurrences(config: Config, bandwidth: float) -> str:
    """The table of `recurrences` as text, for a memory of this bandwidth; "" where there is none."""
    rows = [["Recurrences without a kernel, on a GPU", "layers", "bytes of products", "at least"]]
    for x in recurrences(config):
        rows.append([x.title, str(x.layers), size_text(x.moved), f"{1e3 * x.moved / bandwidth:,.1f} ms"])
    return aligned(rows, left=(0,)) if len(rows) > 1 else ""


@cache
def bytes_of_token(block: Block, tensor: int, dtype: str) -> float:
    """Bytes that the products of its recurrence read and write for a token, forward and backward; 0 where it
    has none, or kernels of its own."""
    if (found := block.recurrence(tensor, _TOKENS, jnp.dtype(dtype))) is None:
        return 0.0
    function, inputs = found

    def both(ids: Any, inputs: Any) -> Any:
        """The outputs, and the gradients of the inputs."""
        segments = make_segments(ids, ids, block=_TOKENS, axis=None)
        outputs, pull = jax.vjp(lambda given: function(segments, given), inputs)
        return outputs, pull(outputs)

    traced = jax.make_jaxpr(both)(jax.ShapeDtypeStruct((1, _TOKENS), jnp.int32), inputs)
    return product_bytes(traced.jaxpr) / _TOKENS


def product_bytes(program: Any) -> float:
    """Bytes of the operands and results of all products of matrices of a jaxpr, as often as it runs them."""
    total = 0.0
    for x in program.eqns:
        if x.primitive.name == "dot_general":
            total += sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in (*x.invars, *x.outvars))
        runs = x.params.get("length", 1) if x.primitive.name == "scan" else 1
        total += runs * sum(map(product_bytes, jaxprs_in_params(x.params)))
    return total
