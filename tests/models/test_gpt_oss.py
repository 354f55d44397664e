"""A tiny model with GPT-OSS's blocks trains: windows, sinks, clamped gates, biases, experts on two ranks."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxthd.config import Config, DataConfig, MeshConfig, TrainConfig
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import init_state
from jaxthd.steps.training import make_train_step
from tests.helpers import batch_of
from tests.speech_model import GPT

LENGTHS = (9, 1, 14, 6)


@pytest.mark.exhaustive
def test_it_learns_a_batch_by_heart():
    """Every part has a gradient: the sinks, the biases and the experts move too."""
    encoder = replace(GPT.audio_encoder, num_mels=16)
    llm = replace(GPT.llm, vocab_size=264, pattern="WE*E")
    config = Config(
        mesh=MeshConfig(data=1, context=2),
        model=replace(GPT, encoder=encoder, llm=llm),
        data=DataConfig(rows=1, capacity=128, max_documents=8),
        train=TrainConfig(steps=40, learning_rate=1e-2, warmup_steps=2, weight_decay=0.0, aux_loss=0.01),
    )
    mesh = make_mesh(config.mesh)
    blueprint = Blueprint(config)
    step, state = make_train_step(blueprint, mesh), init_state(blueprint, mesh)
    before = jax.tree.map(np.array, jax.device_get(state.params))
    batch, losses = put_batch(batch_of(LENGTHS, 2), mesh), []
    for _ in range(config.train.steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics.loss))
    assert losses[-1] < 0.2 * losses[0]
    layers = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, jax.device_get(state.params))["decoder"]
    assert all(jax.tree.leaves(layers["layers"]))
