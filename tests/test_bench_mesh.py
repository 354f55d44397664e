"""The claims of scripts/bench_mesh.py, at sizes a test can afford."""

import pytest

from jaxthd.config import MeshConfig
from jaxthd.tables import Claim, conclude
from scripts import bench_mesh as bench


def test_memory_of_a_pipeline_does_not_grow_with_the_microbatches() -> None:
    claims = bench.pipeline_section((1, 3, 6), "*-*-", ranks=2)
    assert [claim.holds for claim in claims] == [True] * 4


def test_weight_matrices_are_divided_by_the_data_size_exactly() -> None:
    whole, part = (bench.matrix_bytes(bench.tiny(MeshConfig(data=data))) for data in (1, 8))
    assert whole == 8 * part
    assert bench.matrix_bytes(bench.tiny(MeshConfig(data=8, fsdp=False))) == whole


def test_bubbles_are_those_of_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.bubble_section() == [Claim("bubbles are those of the formula, 0 of 27 differ", True)]
    assert " 0.2727 " in capsys.readouterr().out


def test_the_program_does_not_grow_with_the_layers() -> None:
    claims = bench.depth_section((4, 12), "*-")
    assert [claim.holds for claim in claims] == [True, True]


def test_check_exits_with_1_when_a_claim_fails(capsys: pytest.CaptureFixture[str]) -> None:
    claims = [Claim("one", True), Claim("two", False)]
    conclude(claims, check=False)
    conclude(claims[:1], check=True)
    with pytest.raises(SystemExit, match="1"):
        conclude(claims, check=True)
    assert "FAILS  two" in capsys.readouterr().out
