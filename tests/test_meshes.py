"""The loss is the same for every axis and combination: runs of tests/meshes, in float64.

One is ordinary: with the blocks of all families, on context, pipeline and tensor ranks.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from jaxthd.config import Config, MeshConfig
from jaxthd.config.values import with_value
from jaxthd.models.stacks import to_stages
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import loss_and_gradient
from tests.meshes.batches import CAPACITY, batch_for
from tests.meshes.gradients import canonical_state, check, worst_of
from tests.meshes.models import HYBRIDS, MODEL, gpt_oss, qwen3_next, with_pattern
from tests.meshes.models import mixed as with_all_blocks
from tests.meshes.runs import KINDS, adapted, meshes, mixed, predicting, unlike, variants

CHOSEN = [
    (MeshConfig(2, 2, 1, 2), 1),
    (MeshConfig(1, 1, 1, 8), 1),
    (MeshConfig(1, 2, 2, 2), 1),
    (MeshConfig(1, 1, 8, 1), 1),
]
"""(mesh, variant)."""


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "variant"), CHOSEN, ids=str)
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
def test_the_mesh_does_not_change_what_an_adapted_hybrid_learns() -> None:
    """The same of every recurrent block, and of the one with attention beside it: LoRA is beside the
    projections of rates, decays and gates too."""
    run = adapted("float64")[1]
    llm = with_pattern(with_all_blocks(MODEL.llm), "DKHC|DKHC")
    row = check(replace(run, model=replace(run.model, llm=llm)))
    assert row["error"] <= 1e-10, row


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [0, 1])
def test_the_mesh_changes_neither_multi_token_prediction_nor_ctc(number: int):
    """Nor any other result. Only here are data 2, pipeline 2 and tensor 2 combined."""
    row = check(predicting("float64")[number])
    assert row["error"] <= 1e-10, row


@pytest.mark.exhaustive
def test_the_mesh_changes_nothing_with_the_blocks_of_all_families() -> None:
    """One block of each kind, with the options of all families, in one program."""
    (config,) = mixed("float64")
    row = check(config)
    assert row["error"] <= 1e-10, row


def test_the_mesh_changes_nothing_with_the_blocks_of_all_families_on_stages() -> None:
    """On context, pipeline and tensor ranks, with what the row above cannot have beside its options: an
    embedding that is also the head, on other stages; experts by a softmax; no latent for queries."""
    llm = replace(with_all_blocks(MODEL.llm, "DKLWH|E*C-|DKLWH|E*C-"), tied_embedding=True)
    llm = llm.with_settings("L", q_lora_rank=0)
    llm = with_value(llm, "blocks.E.router", {"scores": "softmax", "groups": 1, "groups_per_token": 1})
    run = variants(MeshConfig(1, 2, 2, 2), "float64")[1]
    row = check(replace(run, model=replace(MODEL, llm=llm)))
    assert row["error"] <= 1e-10, row


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_are_the_same_on_every_axis(name: str, record_property) -> None:
    """On context, pipeline and tensor ranks; and on eight context ranks."""
    model = replace(MODEL, llm=HYBRIDS[name](MODEL.llm))
    for mesh, variant in ((MeshConfig(1, 2, 2, 2), 1), (MeshConfig(1, 8, 1, 1), 0)):
        row = check(replace(variants(mesh, "float64")[variant], model=model))
        record_property(row["mesh"], f"{row['error']:.1e}")
        assert row["error"] <= 1e-10, row


@pytest.mark.exhaustive
def test_the_mesh_changes_nothing_on_more_context_ranks_than_a_window_reaches() -> None:
    """The gated delta rule passes its state over all of them."""
    llm = gpt_oss(qwen3_next(MODEL.llm, "DE*-"), "DW")
    run = variants(MeshConfig(1, 8, 1, 1), "float64")[0]
    row = check(replace(run, model=replace(MODEL, llm=llm)))
    assert row["error"] <= 1e-10, row


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [1, 2, 4])
def test_stages_that_differ_change_nothing(number: int):
    """Their keys are gathered. Both layouts, with recomputed blocks and without."""
    row = check(unlike("float64")[number])
    assert row["error"] <= 1e-10, row


@pytest.mark.exhaustive
def test_another_capacity_changes_nothing():
    """The same documents in longer buffers, on a pipeline, give the same gradients, by a second program."""
    config = variants(MeshConfig(1, 1, 2, 1), "float64")[0]
    with jax.enable_x64(True):
        mesh = make_mesh(config.mesh)
        held = to_stages(canonical_state("float64"), Blueprint(config).stages)
        program = jax.jit(loss_and_gradient(Blueprint(config), mesh))
        short, long = (program(*held, put_batch(batch_for(config, n), mesh)) for n in (CAPACITY, 96))
        assert program._cache_size() == 2
        assert worst_of(long, short)[0] <= 1e-10


@pytest.mark.nightly
@pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=f"{kind}-{number}")
        for kind, runs in KINDS.items()
        for number, config in enumerate(runs("float32"))
    ],
)
def test_every_run_in_float32_is_within_the_rounding_of_one_device(config: Config, record_property) -> None:
    row = check(config)
    record_property("of what is allowed", f"{row['error'] / row['allowed']:.2f}")
    assert row["error"] <= row["allowed"], row


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
