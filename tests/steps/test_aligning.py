"""What CTC says of each frame, packed and on a mesh, is what is defined for each document alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxthd.config import MeshConfig
from jaxthd.packing.layout import ContextLayout
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.aligning import make_aligning_step
from jaxthd.steps.blueprint import Blueprint
from tests.alone import Parts, parts, states_of
from tests.models.test_ctc import documents, is_covered, labels_of, pack, run_config, state
from tests.speech_model import PLACEHOLDER

MESH = MeshConfig(data=2, context=2)


def frames_alone() -> list[np.ndarray]:
    """Log softmax over the vocabulary at the audio slots of each document, in their order."""
    graph = Blueprint(run_config()).graph

    @jax.jit
    def run(params: Any, buffers: Any, one: Parts) -> jax.Array:
        model = nnx.merge(graph, params, buffers)
        x_TD, _ = states_of(model, one)
        return jax.nn.log_softmax(model.decoder.norm(x_TD) @ params["head"].T)

    every = [one for row in documents() for one in row]
    found = [np.asarray(run(*state(), jax.tree.map(jnp.asarray, parts(one)))) for one in every]
    return [x[: len(one)][one.is_audio] for x, one in zip(found, every, strict=True)]


def test_frames_are_scored_as_each_document_alone() -> None:
    config = run_config(MESH)
    batch, mesh = pack(config), make_mesh(MESH)
    with jax.enable_x64(True):
        step = jax.jit(make_aligning_step(Blueprint(config), mesh))
        blank_RT, label_RTL, loudness_RA = map(np.asarray, step(*state(), put_batch(batch, mesh)))
        alone = frames_alone()
    np.testing.assert_allclose(loudness_RA, batch.features.mean(-1), atol=1e-6)
    layout, at = ContextLayout.of(config), 0
    for row, of_row in enumerate(documents()):
        every = layout.document_slots(batch.segment_ids[row], None, batch.splits_of(row))
        for one, slots in zip(of_row, every, strict=True):
            frames = slots[batch.is_audio[row][slots]]
            want_FV, labels = alone[at], labels_of(one)
            at += 1
            if not is_covered(one):
                assert not blank_RT[row][slots].any()
                continue
            np.testing.assert_allclose(blank_RT[row][frames], want_FV[:, PLACEHOLDER], rtol=1e-10)
            got_FL = label_RTL[row][frames][:, : len(labels)]
            np.testing.assert_allclose(got_FL, want_FV[:, labels], rtol=1e-10)
