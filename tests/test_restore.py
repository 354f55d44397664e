"""A run continues on any mesh: saved on one, restored on others, with the same losses and documents."""

import json
import shutil
import tempfile
from contextlib import ExitStack, closing
from itertools import islice
from pathlib import Path

import pytest

from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.config import (
    ComputeConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from jaxthd.data.dataset import SpeechData
from jaxthd.models.blocks import MLP, Attention, Mamba2, MoE
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import abstract_state, canonical_shardings
from jaxthd.train import train
from jaxthd.validate import DeviceFacts, validate

SAVED_ON = MeshConfig(2, 2, 1, 1)
MESHES = (
    MeshConfig(8),
    MeshConfig(),
    MeshConfig(1, 2, 2, 2),
    MeshConfig(2, 1, 4, 1),
    MeshConfig(context=8),
)
AFTER = 20
"""Steps before the checkpoint, and after it."""


def config_for(mesh: MeshConfig) -> Config:
    """8 rows for 8 data ranks, with audio room for 8 ranks, so that every mesh packs the same buffers."""
    return Config(
        mesh=mesh,
        data=DataConfig(rows=8, capacity=128, max_documents=16, audio_capacity=8 * 640, workers=0),
        model=ModelConfig(
            encoder=EncoderConfig(
                layers=1, dim=32, heads=2, ffn_dim=32, subsampling_channels=4, chunk_seconds=2.0
            ),
            llm=LLMConfig(
                pattern="ME*-ME*-",
                vocab_size=264,
                dim=32,
                blocks={
                    "*": Attention(head_dim=8),
                    "-": MLP(inner=32),
                    "M": Mamba2(heads=4, head_dim=16, state=8),
                    "E": MoE(inner=16, shared_inner=16),
                },
            ),
        ),
        # A mesh of 2 x 1 x 4 x 1 has unequal stages.
        compute=ComputeConfig(context_exchange="ring" if mesh.pipeline < 4 else "all_gather"),
        train=TrainConfig(
            steps=2 * AFTER,
            warmup_steps=4,
            checkpoint_every=AFTER,
            validate_every=0,
            trackers=(),
        ),
    )


def run(config: Config, workdir: Path) -> dict[int, float]:
    """Trains or continues the run; returns the loss of every step it wrote."""
    validate(config, DeviceFacts.of_this_machine(260))
    train(config, workdir)
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def documents(config: Config, position: dict | None, steps: int) -> list[list[str]]:
    """The documents of the next steps, sorted."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        data = stack.enter_context(closing(SpeechData(config, Path(folder))))
        loader = stack.enter_context(closing(data.training()))
        if position is not None:
            loader.set_state(position)
        return [sorted(key for row in r.keys for key in row) for _, r in islice(loader, steps)]


def restored_position(config: Config, workdir: Path) -> dict:
    mesh = make_mesh(config.mesh)
    with Checkpoints(workdir / "checkpoints", 3) as checkpoints:
        restored = checkpoints.restore_latest(
            abstract_state(Blueprint(config)), canonical_shardings(Blueprint(config), mesh)
        )
    assert restored is not None
    return restored[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float], list[list[str]]]:
    """The uninterrupted run: (its workdir, its losses, the documents of its steps)."""
    workdir, config = tmp_path_factory.mktemp("whole"), config_for(SAVED_ON)
    return workdir, run(config, workdir), documents(config, None, 2 * AFTER)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: "x".join(map(str, mesh.sizes)))
def test_a_run_continues_on_another_mesh(
    mesh: MeshConfig, whole: tuple[Path, dict[int, float], list[list[str]]], tmp_path: Path, record_property
):
    """The next loss, to 1e-6; those after it, to 1e-3, because rounding grows; and the documents of each step
    exactly, none read twice and none missing. With all four mixers, experts and an encoder.
    """
    before, losses, read = whole
    workdir, config = tmp_path / "run", config_for(mesh)
    shutil.copytree(before, workdir)
    shutil.rmtree(workdir / "checkpoints" / str(2 * AFTER))
    position = restored_position(config, workdir)
    again = run(config, workdir)
    off = [abs(again[step] / losses[step] - 1) for step in range(AFTER + 1, 2 * AFTER + 1)]
    record_property("apart", f"{max(off):.1e}")
    assert off[0] <= 1e-6
    assert max(off) <= 1e-3
    assert documents(config, position, AFTER) == read[AFTER:]
