"""Memory, work and program size of compiled steps fall, or stay, as the mesh promises."""

from itertools import product

import pytest

from jaxthd.config import MeshConfig
from jaxthd.parallel.schedule import make_schedule
from jaxthd.planning.compiled_step import lowered_step
from tests import mesh_costs as costs


@pytest.mark.exhaustive
def test_memory_of_a_pipeline_does_not_grow_with_the_microbatches() -> None:
    mesh = MeshConfig(pipeline=2, stages_per_rank=2)
    few, many = (costs.tiny(mesh, "----", rows=m, microbatches=m) for m in (4, 8))
    assert costs.slots_bytes(few) == costs.slots_bytes(many) == 5 * 256 * 64 * 4
    assert costs.program(many).temporary <= 1.05 * costs.program(few).temporary


@pytest.mark.exhaustive
def test_a_stage_runs_forward_as_often_as_it_must() -> None:
    """Of a recomputed MLP the second product is not needed: half a pass."""
    config = costs.tiny(MeshConfig(pipeline=2), "----", rows=2, microbatches=2, tokens=64)
    recomputed, kept = (costs.program(costs.with_remat(config, x)) for x in costs.CHOICES)
    passes = [costs.forward_passes(config, x, kept) for x in (kept, recomputed)]
    assert passes == [1.0, 1.5]


def test_weight_matrices_are_divided_by_the_data_size_exactly() -> None:
    meshes = MeshConfig(), MeshConfig(data=8), MeshConfig(data=8, fsdp=False)
    whole, part, copy = (costs.matrix_bytes(costs.tiny(mesh, "M*-")) for mesh in meshes)
    assert (part, copy) == (whole // 8, whole)


def test_bubbles_are_those_of_the_formula() -> None:
    for ranks, stages, microbatches in product((2, 4, 8), (1, 2, 4), (8, 16, 32)):
        bubble = make_schedule(microbatches, ranks, stages).bubble
        assert bubble == pytest.approx(costs.bubble_formula(ranks, stages, microbatches), abs=1e-9)


@pytest.mark.parametrize("pipeline", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_the_program_does_not_grow_with_the_layers(pipeline: int) -> None:
    configs = (costs.tiny(MeshConfig(pipeline=pipeline), "*-" * n, rows=2, microbatches=2) for n in (2, 6))
    few, many = (len(lowered_step(config).as_text()) for config in configs)
    assert many <= 1.05 * few
