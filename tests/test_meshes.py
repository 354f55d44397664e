"""Every axis, every combination, one loss: a dozen rows of scripts/check_meshes.py, in float64."""

import pytest

from jaxthd.config import MeshConfig
from scripts.check_meshes import check, meshes, variants

CHOSEN = [
    (MeshConfig(2, 1, 1, 1), 1),
    (MeshConfig(1, 1, 2, 1), 0),
    (MeshConfig(1, 1, 2, 1), 1),
    (MeshConfig(1, 1, 1, 4), 0),
    (MeshConfig(1, 1, 1, 8), 1),
    (MeshConfig(1, 1, 4, 1), 1),
    (MeshConfig(2, 2, 2, 1), 0),
    (MeshConfig(2, 1, 2, 2), 1),
    (MeshConfig(1, 2, 2, 2), 0),
    (MeshConfig(1, 2, 2, 2), 1),
    (MeshConfig(1, 1, 8, 1), 1),
    (MeshConfig(2, 2, 1, 2), 1),
]
"""(mesh, variant)."""


@pytest.mark.parametrize(("mesh", "variant"), CHOSEN, ids=str)
def test_the_mesh_changes_neither_loss_nor_gradients(mesh: MeshConfig, variant: int):
    row = check(variants(mesh, "float64")[variant])
    assert row["error"] <= 1e-10, row


def test_the_script_checks_every_factorisation():
    assert [len(meshes([n])) for n in (1, 2, 4, 8)] == [1, 4, 10, 20]
