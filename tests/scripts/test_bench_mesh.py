"""The claims of scripts/bench_mesh.py, at sizes a test can afford."""

import pytest

from jaxthd.config import MeshConfig
from jaxthd.terminal.tables import Claim, conclude
from scripts import bench_mesh as bench


@pytest.mark.exhaustive
def test_memory_of_a_pipeline_does_not_grow_with_the_microbatches() -> None:
    mesh = MeshConfig(pipeline=2, stages_per_rank=2)
    few, many = (bench.tiny(mesh, "----", rows=m, microbatches=m) for m in (4, 8))
    assert bench.slots_bytes(few) == bench.slots_bytes(many) == 5 * 256 * 64 * 4
    assert bench.program(many).temporary <= 1.05 * bench.program(few).temporary


@pytest.mark.parametrize(
    ("remat_llm", "passes"), [(False, 1.0), pytest.param(True, 1.5, marks=pytest.mark.exhaustive)]
)
def test_a_stage_runs_forward_as_often_as_it_must(remat_llm: bool, passes: float) -> None:
    """Counted in matrix products. Of a recomputed MLP the second one is not needed."""
    config = bench.tiny(MeshConfig(pipeline=2), "----", rows=2, microbatches=2, tokens=64)
    text = bench.lowered_step(bench.with_remat(config, remat_llm)).compile(bench.UNOPTIMIZED).as_text()
    assert bench.forward_passes(bench.flops_of_parts(text)) == passes


def test_weight_matrices_are_divided_by_the_data_size_exactly() -> None:
    meshes = MeshConfig(), MeshConfig(data=8), MeshConfig(data=8, fsdp=False)
    whole, part, copy = (bench.matrix_bytes(bench.tiny(mesh, "M*-")) for mesh in meshes)
    assert (part, copy) == (whole // 8, whole)


def test_bubbles_are_those_of_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.bubble_section() == [Claim("bubbles are those of the formula, 0 of 27 differ", True)]
    assert " 0.2727 " in capsys.readouterr().out


@pytest.mark.parametrize("pipeline", [2, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_the_program_does_not_grow_with_the_layers(pipeline: int) -> None:
    configs = (bench.tiny(MeshConfig(pipeline=pipeline), "*-" * n, rows=2, microbatches=2) for n in (2, 6))
    few, many = (len(bench.lowered_step(config).as_text()) for config in configs)
    assert many <= 1.05 * few


def test_check_exits_with_1_when_a_claim_fails(capsys: pytest.CaptureFixture[str]) -> None:
    claims = [Claim("one", True), Claim("two", False)]
    conclude(claims, check=False)
    conclude(claims[:1], check=True)
    with pytest.raises(SystemExit, match="1"):
        conclude(claims, check=True)
    assert "FAILS  two" in capsys.readouterr().out
