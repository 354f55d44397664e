"""Dropout: features are set to 0 by a hash of what the draw may depend on, so every mesh draws the same.

That is the seed, the step, the document, the token's position in it, the layer, the projection and the
feature; never the rank or the slot. A document counts by its content, the hash of its tokens, so that its
place in the batch does not matter. The hash is the finalizer of MurmurHash3 (Appleby).

Legend: R rows, T token slots of a row, N tokens, D features.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int32, UInt32

_ODD = 0x9E3779B9
"""2^32 over the golden ratio: multiples of it are spread evenly."""


def mixed(x: Array) -> UInt32[Array, "..."]:
    """Hashes of integers: a bit that changes in x changes each bit with probability 1/2."""
    x = x.astype(jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> shift)) * jnp.uint32(factor)
    return x ^ (x >> 16)


def spread(x: Array | int, number: Array | int) -> UInt32[Array, "..."]:
    """Returns hashes of pairs of integers. Python's integers count modulo 2^32."""
    return mixed(_words(x) + _words(number) * jnp.uint32(_ODD))


def _words(x: Array | int) -> UInt32[Array, "..."]:
    # jnp.asarray makes int32 of a Python integer, which raises for half of all CRC-32s.
    return jnp.uint32(x % 2**32) if isinstance(x, int) else x.astype(jnp.uint32)


def token_keys(
    tokens_RT: Int32[Array, "R T"],
    positions_RT: Int32[Array, "R T"],
    documents_RT: Int32[Array, "R T"],
    most: int,
    seed: int,
    step: Array,
) -> UInt32[Array, "R T"]:
    """The draw of each token, by seed, step, its document's tokens and its position.

    documents_RT: the document's number in its row, at most `most`.
    """
    rows_R1 = jnp.arange(len(tokens_RT))[:, None]
    parts_RT = spread(tokens_RT, mixed(positions_RT))
    sums_RG = jnp.zeros((len(tokens_RT), most + 1), jnp.uint32).at[rows_R1, documents_RT].add(parts_RT)
    keys_RT = spread(jnp.take_along_axis(sums_RG, documents_RT, axis=1), spread(seed, step))
    return spread(keys_RT, positions_RT)


def dropped(
    x_ND: Float[Array, "N D"], keys_N: UInt32[Array, " N"], rate: float, first_feature: Array | int = 0
) -> Float[Array, "N D"]:
    """x with a share `rate` of its elements set to 0, and the others divided by 1 - rate.

    keys: for these tokens, layer and projection. first_feature: the number of x's first one.
    """
    features_D = first_feature + jnp.arange(x_ND.shape[1], dtype=jnp.int32)
    bits_ND = spread(keys_N[:, None], features_D)
    return jnp.where(bits_ND >= jnp.uint32(rate * 2**32), x_ND / (1 - rate), 0).astype(x_ND.dtype)
