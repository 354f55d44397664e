"""Operations of Pallas kernels equal those of the tiles that a mask by brute force touches."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxthd.config import Config, DataConfig, EncoderConfig, LLMConfig, ModelConfig
from jaxthd.ops.attention.pallas import BACKWARD, FORWARD, Tiles, tiles_for
from jaxthd.planning.pallas_work import pallas_work
from tests.helpers import batch_of

LLM = LLMConfig(pattern="*", q_heads=4, kv_heads=2, head_dim=32, dim=16)
ENCODER = EncoderConfig(num_mels=16, layers=1, dim=32, heads=2, ffn_dim=16, chunk_seconds=2.0)


def touched(tiles: Tiles, ids: np.ndarray, dim: int, *, causal: bool) -> int:
    """Pairs of tokens in tiles that hold an allowed pair."""
    rows, columns, _ = tiles_for(tiles, len(ids), dim)
    size = -len(ids) % (rows * columns)
    ids = np.pad(ids, (0, size))
    i = np.arange(len(ids))
    allowed = (ids[:, None] == ids) & (ids[:, None] > 0) & ((i <= i[:, None]) | (not causal))
    some = allowed.reshape(len(ids) // rows, rows, -1, columns).any((1, 3))
    return int(some.sum()) * rows * columns


def test_operations_are_those_of_the_tiles_that_a_mask_touches():
    config = Config(model=ModelConfig(encoder=ENCODER, llm=LLM), data=DataConfig(capacity=128))
    batch = jax.tree.map(jnp.asarray, batch_of([5, 20, 11, 40], 1))
    found = pallas_work(config, batch)
    parts = (
        ("attention", batch.segment_ids, 4, 32, True),
        ("encoder attention", batch.chunk_ids, 2, 16, False),
    )
    for part, ids, heads, dim, causal in parts:
        for name, tiles, products in (
            ("forward", FORWARD, 2),
            ("query_grad", BACKWARD, 3),
            ("key_grad", BACKWARD, 4),
        ):
            pairs = touched(tiles, np.asarray(ids).reshape(-1), dim, causal=causal)
            assert found[part, f"{name}_kernel"].flops == 2 * dim * products * heads * pairs, (part, name)
    assert found["attention", "forward_kernel"].unread == 0
    assert 0 < found["encoder attention", "forward_kernel"].unread < 2 * 2 * 64 * batch.chunk_ids.size
