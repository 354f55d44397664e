"""The optimizer's settings mean what config.py says."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

from jaxthd.config import Config, EncoderConfig, LLMConfig, ModelConfig, TrainConfig
from jaxthd.parallel.params import weight_decay_mask
from jaxthd.step import abstract_model, learning_rate_schedule

MODEL = ModelConfig(
    encoder=EncoderConfig(num_mels=16, layers=1, dim=16, heads=2, ffn_dim=16, subsampling_channels=4),
    llm=LLMConfig(pattern="ME*-", dim=16, q_heads=2, kv_heads=1, head_dim=8, mamba_heads=4, mamba_head_dim=8),
    adapter_dim=8,
)


def test_weight_decay_is_on_weight_matrices_only():
    mask = weight_decay_mask(nnx.state(abstract_model(Config(model=MODEL)), nnx.Param))
    flat = {jax.tree_util.keystr(p): m for p, m in jax.tree_util.tree_leaves_with_path(mask)}
    names = {True: set(), False: set()}
    for path, decayed in flat.items():
        names[decayed].add(path.rsplit("['", 1)[1].removesuffix("']"))
    assert {"w", "up", "down", "embedding", "head", "conv_x", "depthwise", "position"} <= names[True]
    assert {"bias", "weight", "a_log", "d", "dt_bias", "conv_bias_x", "content_bias"} <= names[False]
    assert not names[True] & names[False]


def test_learning_rate_warms_up_peaks_and_ends_at_the_minimum():
    config = TrainConfig(steps=100, warmup_steps=10, learning_rate=1e-3, min_learning_rate=1e-5)
    rates = np.array([learning_rate_schedule(config)(i) for i in range(100)])
    np.testing.assert_allclose(rates[[0, 4, 9, 99]], [1e-4, 5e-4, 1e-3, 1e-5], rtol=1e-5)
    assert (np.diff(rates[9:]) < 0).all()


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 1), (10, 10)])
def test_short_runs_have_a_learning_rate(steps: int, warmup: int):
    rates = [
        learning_rate_schedule(replace(TrainConfig(), steps=steps, warmup_steps=warmup))(i)
        for i in range(steps)
    ]
    assert min(rates) > 0
