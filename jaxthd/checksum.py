"""A checksum of what an array holds, computed where the array lies.

Each 32-bit word is mixed with its index in the whole array, and the mixed words are summed modulo 2^32. A sum
has no order, so every sharding and every number of processes gives the same, without gathering the array. The
mixing is one to one for a given index: a change of a single word changes the sum for certain, any other
damage escapes with probability 2^-32.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Shaped, UInt32


def named_arrays(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by the names on their paths, such as "params.llm.embedding"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def checksums(tree: Any) -> dict[str, int]:
    """The checksum of every array of a tree, by name; one program for each shape, dtype and sharding."""
    return {name: int(checksum(x)) for name, x in named_arrays(tree).items()}


@jax.jit
def checksum(x: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """The checksum of one array's bits: an array of booleans, integers or floats of whole bytes."""
    words = _words(x)
    index, stride = jnp.zeros(words.shape, jnp.uint32), 1
    # In place of reshaping to one dim, which would move a sharded array.
    for dim in reversed(range(words.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= words.shape[dim]
    return jnp.sum(_mix(words ^ _mix(index)), dtype=jnp.uint32)


def _words(x: Array) -> Array:
    """The bits of x as uint32: a number of 64 bits makes two words, along a new last dim."""
    if x.dtype == jnp.bool:
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, f"uint{min(8 * x.dtype.itemsize, 32)}").astype(jnp.uint32)


def _mix(x: Array) -> Array:
    """uint32 -> uint32, one to one: each input bit flips about half of the output bits.

    Shifts and multipliers: lowbias32, C. Wellons, Prospecting for Hash Functions (2018).
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
