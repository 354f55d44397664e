"""What a step computes does not depend on the size of its buffers, in float64; each size is one program."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from jaxthd.config import Config, DataConfig, LLMConfig, MeshConfig, ModelConfig, Rung, TrainConfig
from jaxthd.data.ladder import Ladder
from jaxthd.data.packer import pack_documents
from jaxthd.data.runs import RowDocuments
from jaxthd.models.stacks import from_stages
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.ladder import LadderStep, rung_blueprints
from jaxthd.steps.training import loss_and_gradient
from tests.errors import worst_error
from tests.helpers import filled_state
from tests.meshes.runs import variants

TOP = Rung(96, 8, 512)
RUNGS = ((64, 6, 0), (72, 8, 256))
LENGTHS = [[13, 2, 21], [9, 31], [5, 17, 1, 20], [40]]
"""Text tokens of the documents of four rows."""


def ladder_of(config: Config) -> Config:
    data = replace(config.data, rows=4, rungs=RUNGS, **TOP._asdict())
    return replace(config, data=data)


def rows_of(config: Config, *, speaks: bool) -> list[RowDocuments]:
    """Rows that the lower rung holds; the first document of each begins with a clip of 30 or more mel
    frames, if it speaks."""
    rng, encoder = np.random.default_rng(0), config.model.encoder
    rows = []
    for lengths in LENGTHS:
        documents = []
        for number, n in enumerate(lengths):
            count = 30 + n if speaks and number == 0 else 0
            mels = [rng.normal(size=(count, encoder.num_mels)).astype(np.float32)] if count else []
            tokens = [*[3] * len(mels), *rng.integers(4, 50, n).tolist()]
            supervised = [False] * len(mels) + [True] * n
            clips = [mels] if mels else []
            documents.append(Document.splice(f"{len(rows)}.{number}", tokens, supervised, clips, 3))
        rows.append(RowDocuments(documents))
    return rows


def batches(config: Config, *, speaks: bool) -> dict[int, Batch]:
    """The same rows at every rung that holds them."""
    ladder = Ladder.of(pack_documents(config, depths=config.depths_trained), config.data)
    rows = rows_of(config, speaks=speaks)
    return {n: concatenate_rows([ladder.row(row, n).batch for row in rows]) for n in ladder.holding(rows)}


MESHES = [
    pytest.param(MeshConfig(), id="one device"),
    pytest.param(MeshConfig(2, 2, 1, 1), id="data and context"),
    pytest.param(MeshConfig(1, 1, 2, 2), id="pipeline and tensor"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh_config", MESHES)
@pytest.mark.parametrize("speaks", [False, True])
def test_the_rung_changes_neither_loss_nor_gradients_nor_statistics(mesh_config: MeshConfig, speaks: bool):
    config = ladder_of(variants(mesh_config, "float64")[0])
    config = replace(config, train=replace(config.train, microbatches=2))
    with jax.enable_x64(True):
        mesh, blueprint = make_mesh(config.mesh), Blueprint(config)
        state, found = filled_state(blueprint, mesh), {}
        blueprints = rung_blueprints(blueprint)
        for rung, batch in batches(config, speaks=speaks).items():
            gradient = jax.jit(loss_and_gradient(blueprints[rung], mesh))
            found[rung] = jax.device_get(gradient(state.params, state.buffers, put_batch(batch, mesh)))
        assert set(found) == ({1, 2} if speaks else {0, 1, 2})
        top: Any = found.pop(2)
        for each in found.values():
            compared = [
                (x.loss, from_stages((x.gradients, x.buffers), blueprint.stages)) for x in (each, top)
            ]
            assert worst_error(*compared)[0] <= 1e-10


TEXT = Config(
    model=ModelConfig(
        encoder=None,
        llm=LLMConfig(
            pattern="M*", dim=16, q_heads=2, kv_heads=1, head_dim=8, mamba_heads=2, mamba_head_dim=8
        ),
    ),
    data=DataConfig(audio_capacity=0),
    train=TrainConfig(warmup_steps=1),
)


def test_a_step_goes_from_rung_to_rung_with_a_program_each():
    """Four steps over two sizes of buffers, and the same over one, in float64."""
    config = ladder_of(replace(TEXT, compute=replace(TEXT.compute, dtype="float64")))
    config = replace(config, data=replace(config.data, rungs=RUNGS[:1], audio_capacity=0))
    with jax.enable_x64(True):
        mesh, blueprint = make_mesh(config.mesh), Blueprint(config)
        step, found = LadderStep(blueprint, mesh), {}
        for rungs in ((0, 1, 0, 1), (1, 1, 1, 1)):
            state, losses = filled_state(blueprint, mesh), []
            for rung in rungs:
                on_mesh = put_batch(batches(config, speaks=False)[rung], mesh)
                state, metrics = step(rung, state, on_mesh)
                losses.append(float(metrics.loss))
            found[rungs] = losses, jax.device_get(state.params)
        assert worst_error(*found.values())[0] <= 1e-10
        assert len(set(losses)) == 4, "it learns"
        assert step.compilations == 2 == len(config.data.ladder)
