"""The checksum is the same wherever the array lies, and no small damage escapes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxthd.checkpoints.checksum import checksum, checksum_on_device, checksums, named_arrays

DTYPES = ("bool", "int8", "int32", "int64", "uint32", "float16", "bfloat16", "float32", "float64")


def random_bits(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """NaN, infinities and denormals included."""
    rng = np.random.default_rng(0)
    if dtype == "bool":
        return rng.integers(2, size=shape).astype(bool)
    kind = jnp.dtype(dtype)
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * kind.itemsize), kind).reshape(shape)


def by_definition(x: np.ndarray) -> int:
    """In Python's integers, one word at a time."""

    def mix(word: int) -> int:
        word = (word ^ word >> 16) * 0x7FEB352D % 2**32
        word = (word ^ word >> 15) * 0x846CA68B % 2**32
        return word ^ word >> 16

    words = np.frombuffer(x.tobytes(), f"<u{min(x.dtype.itemsize, 4)}").tolist()
    return sum(mix(word ^ mix(index)) for index, word in enumerate(words)) % 2**32


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_placement_gives_the_value_of_the_definition(dtype: str):
    mesh = jax.make_mesh((2, 4), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
    x = random_bits(dtype, (4, 8, 3))
    specs = [(), ("data",), ("data", "context"), (None, ("context", "data")), ("context", "data")]
    with jax.enable_x64(True):
        placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec))) for spec in specs]
        for y in (jnp.asarray(x), *placed):
            assert checksum(y) == int(checksum_on_device(y)) == by_definition(x)


def test_a_sharded_array_is_not_gathered():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    for spec in (PartitionSpec("data"), PartitionSpec(None, "data")):
        x = jax.ShapeDtypeStruct((16, 24), jnp.float32, sharding=NamedSharding(mesh, spec))
        program = checksum_on_device.lower(x).compile().as_text()
        assert "all-reduce" in program
        assert "all-gather" not in program
        assert "all-to-all" not in program


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_flipped_bit_and_every_swap_changes_it(dtype: str):
    x = random_bits(dtype, (3, 5))
    stored = np.frombuffer(x.tobytes(), np.uint8)
    bits = np.arange(0, 8 * stored.size, 8 if dtype == "bool" else 1)
    flipped = np.tile(stored, (len(bits), 1))
    flipped[np.arange(len(bits)), bits // 8] ^= (1 << bits % 8).astype(np.uint8)
    flat = x.reshape(-1)
    pairs = [(i, j) for i in range(15) for j in range(i) if flat[i].tobytes() != flat[j].tobytes()]
    swapped = np.stack([flat] * len(pairs))
    for row, (i, j) in zip(swapped, pairs, strict=True):
        row[[i, j]] = row[[j, i]]
    with jax.enable_x64(True):
        want = checksum(jnp.asarray(x))
        for damaged in (flipped.view(x.dtype), swapped):
            sums = jax.vmap(checksum_on_device)(jnp.asarray(damaged.reshape(-1, 3, 5)))
            assert len(sums) >= 15
            assert want not in np.asarray(sums)


def test_scalars_empty_arrays_and_trees_by_name():
    tree = {"a": jnp.int32(7), "b": [jnp.zeros((0, 3)), jnp.zeros((2, 3))]}
    sums = checksums(tree)
    assert sums == {name: int(checksum_on_device(x)) for name, x in named_arrays(tree).items()}
    assert sums == {
        "a": by_definition(np.int32([7])),
        "b.0": 0,
        "b.1": by_definition(np.zeros(6, np.float32)),
    }
