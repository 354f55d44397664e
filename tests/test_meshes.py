"""The loss is the same for every axis and combination: rows of scripts/check_meshes.py, in float64.

One is typical; with the blocks of all families on data, context and tensor ranks, every axis is ordinary.
"""

import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from jaxthd.config import MeshConfig
from jaxthd.models.stacks import to_stages
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import loss_and_gradient
from scripts.check_meshes import (
    CAPACITY,
    adapted,
    batch_for,
    canonical_state,
    check,
    deepseek,
    gpt_oss,
    meshes,
    mixed,
    predicting,
    qwen3,
    qwen3_next,
    unlike,
    variants,
    worst_of,
)

CHOSEN = [(MeshConfig(2, 2, 2, 1), 0)]
"""(mesh, variant)."""
OTHERS = [
    (MeshConfig(2, 2, 1, 2), 1),
    (MeshConfig(1, 1, 1, 8), 1),
    (MeshConfig(1, 2, 2, 2), 1),
    (MeshConfig(1, 1, 8, 1), 1),
]


@pytest.mark.parametrize(
    ("mesh", "variant"),
    [*CHOSEN, *(pytest.param(*row, marks=pytest.mark.exhaustive) for row in OTHERS)],
    ids=str,
)
def test_the_mesh_changes_neither_loss_nor_gradients(mesh: MeshConfig, variant: int):
    row = check(variants(mesh, "float64")[variant])
    assert row["error"] <= 1e-10, row


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [0, 2])
def test_the_mesh_does_not_change_what_an_adapted_model_learns(number: int):
    """LoRA's gradients equal those derived from the dense model's; frozen parameters have none."""
    row = check(adapted("float64")[number])
    assert row["error"] <= 1e-10, row


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [0, 1])
def test_the_mesh_changes_neither_multi_token_prediction_nor_ctc(number: int):
    """Nor any other result. Only here are data 2, pipeline 2 and tensor 2 combined."""
    row = check(predicting("float64")[number])
    assert row["error"] <= 1e-10, row


def test_the_mesh_changes_nothing_with_the_blocks_of_all_families() -> None:
    """One block of each kind, with the options of all families, in one program."""
    (config,) = mixed("float64")
    row = check(config)
    assert row["error"] <= 1e-10, row


@pytest.mark.exhaustive
def test_the_mesh_changes_nothing_with_the_blocks_of_qwen3():
    """On context, pipeline and tensor ranks, as the first row of each family below; the test above has the
    blocks of all of them on data ranks."""
    row = check(qwen3("float64")[0])
    assert row["error"] <= 1e-10, row


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [2])
def test_the_mesh_changes_nothing_with_the_blocks_of_qwen3_next(number: int):
    """Gated delta rule, gates of attention and of the shared expert, zero-centred norms. Each context rank
    has a value head of its own."""
    row = check(qwen3_next("float64")[number])
    assert row["error"] <= 1e-10, row


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [1, 2])
def test_the_mesh_changes_nothing_with_the_blocks_of_gpt_oss(number: int):
    """The second row has more context ranks than a window reaches."""
    row = check(gpt_oss("float64")[number])
    assert row["error"] <= 1e-10, row


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [0, 1])
def test_the_mesh_changes_nothing_with_the_blocks_of_deepseek(number: int):
    """Latent attention, and experts of a limited number of groups. The second has no latent for queries."""
    row = check(deepseek("float64")[number])
    assert row["error"] <= 1e-10, row


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [1, 2, 4])
def test_stages_that_differ_change_nothing(number: int):
    """Their ring is one of pairs. All layouts, and all that a stage may recompute."""
    row = check(unlike("float64")[number])
    assert row["error"] <= 1e-10, row


@pytest.mark.exhaustive
def test_capacities_may_change_along_a_ladder():
    """The same documents in longer buffers, on a pipeline, give the same gradients, by a second program."""
    config = variants(MeshConfig(1, 1, 2, 1), "float64")[0]
    with jax.enable_x64(True):
        mesh = make_mesh(config.mesh)
        held = to_stages(canonical_state("float64"), Blueprint(config).stages)
        program = jax.jit(loss_and_gradient(Blueprint(config), mesh))
        short, long = (program(*held, put_batch(batch_for(config, n), mesh)) for n in (CAPACITY, 96))
        assert program._cache_size() == 2
        assert worst_of(long, short)[0] <= 1e-10


def test_the_script_checks_every_factorisation():
    assert [len(meshes([n])) for n in (1, 2, 4, 8)] == [1, 4, 10, 20]


@pytest.mark.exhaustive
def test_sixteen_devices_have_all_four_axes(tmp_path: Path):
    """2 x 2 x 2 x 2, both variants, by the script in a process of its own, whose devices are sixteen."""
    options = ["--mesh", "2", "2", "2", "2", "--dtype", "float64", "--out", str(tmp_path / "rows.jsonl")]
    found = subprocess.run(
        [sys.executable, "scripts/check_meshes.py", *options],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert "2 of 2 hold" in found.stdout, found.stderr
    lines = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [line["mesh"] for line in lines] == ["2x2x2x2"] * 2
