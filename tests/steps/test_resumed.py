"""Any optimizer, with averages, goes on bit-identically from a checkpoint; elsewhere up to rounding."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.checkpoints.weights import load_weights, named_weights
from jaxthd.config import Config, LLMConfig, MeshConfig, ModelConfig, TrainConfig
from jaxthd.errors import UserError
from jaxthd.files.run_folder import write_config
from jaxthd.models.blocks import MLP, Attention
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.planning.parameters import state_bytes
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import (
    TrainState,
    abstract_state,
    canonical_shardings,
    checkpoint_layout,
    device_layout,
)
from jaxthd.steps.training import make_train_step
from tests.helpers import filled_state
from tests.meshes.batches import CAPACITY, documents

LLM = LLMConfig(
    pattern="-*-",
    vocab_size=64,
    dim=16,
    blocks={"*": Attention(heads=2, kv_heads=1, head_dim=8), "-": MLP(inner=32)},
)
SHARDED, PIPED = MeshConfig(data=2, tensor=2), MeshConfig(1, 1, 2, 2)
DECAY = 0.25
OPTIONS = {
    "muon": (),
    "adafactor": ("min_dim_size_to_factor=8",),
    "lion": (),
    "adamw": ("first_moment=bfloat16",),
}


def run_config(optimizer: str, mesh: MeshConfig) -> Config:
    own: dict[str, Any] = {"optimizer": optimizer, "optimizer_options": OPTIONS[optimizer]}
    train = TrainConfig(
        steps=9,
        warmup_steps=0,
        microbatches=4,
        schedule="warmup_stable_decay",
        decay_steps=8,
        ema_decay=DECAY,
        **own,
    )
    return Config(mesh=mesh, model=ModelConfig(encoder=None, llm=LLM), train=train)


class Run:
    """A training step on a mesh, and batches of ragged texts."""

    def __init__(self, optimizer: str, mesh: MeshConfig) -> None:
        self.config = run_config(optimizer, mesh)
        self.blueprint, self.mesh = Blueprint(self.config), make_mesh(mesh)
        self._step = make_train_step(self.blueprint, self.mesh)

    def batch(self, step: int) -> Batch:
        rows = [[one for one in row if not one.pieces] for row in documents()]
        sizes: dict[str, int] = {
            "capacity": CAPACITY,
            "audio_capacity": 0,
            "max_documents": 16,
        }
        packed = [pack_row(row, **sizes)[0] for row in rows[step:] + rows[:step]]
        return put_batch(concatenate_rows(packed[:8]), self.mesh)

    def first(self) -> TrainState:
        state = filled_state(self.blueprint, self.mesh)
        return state._replace(ema=jax.tree.map(lambda x: x.copy(), state.params))

    def steps(self, state: TrainState, first: int, last: int) -> tuple[TrainState, list[float]]:
        losses = []
        for step in range(first, last):
            state, measured = self._step(state, self.batch(step))
            losses.append(float(measured.loss))
        return state, losses

    def save(self, folder: Path, state: TrainState) -> None:
        with Checkpoints(folder, 1) as checkpoints:
            checkpoints.save(int(state.step), checkpoint_layout(state, self.blueprint, self.mesh), {})

    def restored(self, folder: Path) -> TrainState:
        with Checkpoints(folder, 1) as checkpoints:
            found = checkpoints.restore_latest(
                abstract_state(self.blueprint), canonical_shardings(self.blueprint, self.mesh)
            )
        assert found is not None
        return device_layout(found[0], self.blueprint, self.mesh)


@pytest.mark.parametrize(
    "optimizer",
    [each if each == "muon" else pytest.param(each, marks=pytest.mark.exhaustive) for each in OPTIONS],
)
def test_a_run_goes_on_from_its_checkpoint(optimizer: str, tmp_path: Path):
    """To the bit on its mesh. The average is that of the parameters after each update, in NumPy."""
    run, folder = Run(optimizer, SHARDED), tmp_path / "checkpoints"
    state, average = run.first(), jax.tree.map(np.asarray, run.first().params)
    for number in (1, 2):
        state, _ = run.steps(state, number - 1, number)
        decay = min(DECAY, (1 + number) / (10 + number))
        average = jax.tree.map(lambda a, p, d=decay: d * a + (1 - d) * p, average, state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), state.ema, average)
    run.save(folder, state)
    write_config(tmp_path, run.config)
    held = {name: on_a_device(getattr(state, name)) for name in ("opt_state", "ema")}
    sizes = state_bytes(run.config)
    moments = next(size for name, size in sizes.items() if name.endswith(" moments"))
    assert held == {"opt_state": moments, "ema": sizes["averaged parameters"]}
    saved = named_weights(load_weights([f"{tmp_path}@2+ema"], run.blueprint, run.mesh, partly=False))
    wanted = named_weights(type(load_weights([tmp_path], run.blueprint, run.mesh))(state.ema, state.buffers))
    jax.tree.map(np.testing.assert_array_equal, saved, wanted)
    state, losses = run.steps(state, 2, 4)
    again, found = run.steps(run.restored(folder), 2, 4)
    assert found == losses
    jax.tree.map(np.testing.assert_array_equal, again, state)
    piped = Run(optimizer, PIPED)
    _, elsewhere = piped.steps(piped.restored(folder), 2, 4)
    np.testing.assert_allclose(elsewhere, losses, rtol=1e-5 if optimizer != "lion" else 1e-3)


def on_a_device(tree: Any) -> int:
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


def test_a_checkpoint_of_another_optimizer_or_without_averages_is_refused(tmp_path: Path):
    run, folder = Run("muon", MeshConfig()), tmp_path / "checkpoints"
    run.save(folder, run.first())
    lion = Run("lion", MeshConfig())
    with pytest.raises(UserError, match=r"moments of another optimizer.*train\.optimizer"):
        lion.restored(folder)
    plain = replace(run.config, train=replace(run.config.train, ema_decay=0.0))
    run.blueprint = Blueprint(plain)
    with pytest.raises(UserError, match=r"keeps a moving average.*train\.ema_decay"):
        run.restored(folder)
    run.save(tmp_path / "plain" / "checkpoints", run.first()._replace(ema=None))
    write_config(tmp_path / "plain", plain)
    with pytest.raises(UserError, match=r"no averaged parameters.*train\.ema_decay"):
        load_weights([f"{tmp_path / 'plain'}@ema"], run.blueprint, run.mesh)
