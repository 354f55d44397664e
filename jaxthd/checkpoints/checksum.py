"""A checksum of an array's content, computed where the array lies.

Each word (32 bits, or an element of fewer) is mixed with its index in the whole array, and the mixed words
are summed modulo 2^32. A sum has no order, so every sharding and every number of processes gives the same
checksum, and no array is gathered. For a given index the mixing is one to one: changing one word always
changes the sum; any other damage goes unnoticed with probability 2^-32.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Shaped, UInt32

Words = TypeVar("Words", Array, np.ndarray)
BLOCK = 2**20
"""Number of words that the host mixes at a time."""


def named_arrays(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by the names on their paths, such as "params.llm.embedding"."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def checksums(tree: Any) -> dict[str, int]:
    """The checksum of every array of a tree, by name. All processes call it, with the same tree.

    Arrays that this process holds whole on CPU devices are read in place with NumPy, because compiling a
    program takes far longer there than running it.
    """
    arrays = named_arrays(tree)
    on_devices = {name: x for name, x in arrays.items() if not is_on_host(x)}
    sums = jax.device_get(_checksums_on_device(on_devices))
    return {
        name: int(sums[name]) if name in sums else checksum_on_host(np.asarray(x))
        for name, x in arrays.items()
    }


def checksum(x: Shaped[Array, "..."]) -> int:
    """The checksum of one array, of booleans, or of integers or floats that take whole bytes."""
    return checksums(x)[""]


def is_on_host(x: Array) -> bool:
    """Whether NumPy can read the array in place: this process holds it whole, on CPU devices."""
    whole = x.is_fully_addressable or x.is_fully_replicated
    return whole and all(device.platform == "cpu" for device in x.devices())


def checksum_on_host(x: Shaped[np.ndarray, "..."]) -> int:
    """The checksum of an array that NumPy holds."""
    elements = np.ascontiguousarray(x).reshape(-1).view(f"uint{min(8 * x.dtype.itemsize, 32)}")
    total = 0
    # One block at a time, because mixing takes several times the memory of the words.
    for start in range(0, elements.size, BLOCK):
        words = elements[start : start + BLOCK].astype(np.uint32)
        index = (start + np.arange(len(words), dtype=np.uint64)).astype(np.uint32)
        total += int(_mix(words ^ _mix(index)).sum(dtype=np.uint32))
    return total % 2**32


@jax.jit
def checksum_on_device(x: Shaped[Array, "..."]) -> UInt32[Array, ""]:
    """The checksum of an array, computed on its devices; compiled for each shape and sharding."""
    words = _words(x)
    index, stride = jnp.zeros(words.shape, jnp.uint32), 1
    # The index is computed dim by dim: reshaping to one dim would move a sharded array.
    for dim in reversed(range(words.ndim)):
        index += jax.lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= words.shape[dim]
    return jnp.sum(_mix(words ^ _mix(index)), dtype=jnp.uint32)


@jax.jit
def _checksums_on_device(arrays: dict[str, Array]) -> dict[str, Array]:
    return {name: checksum_on_device(x) for name, x in arrays.items()}


def _words(x: Array) -> Array:
    """The bits of x as uint32: a number of 64 bits makes two words, along a new last dim."""
    if x.dtype == jnp.bool:
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, f"uint{min(8 * x.dtype.itemsize, 32)}").astype(jnp.uint32)


def _mix(x: Words) -> Words:
    """uint32 -> uint32, one to one: a flipped input bit flips about half of the output bits.

    Shifts and multipliers are lowbias32's (C. Wellons, Prospecting for Hash Functions, 2018).
    """
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
