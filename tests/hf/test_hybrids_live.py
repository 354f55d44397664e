"""Hybrid decoders of sizes drawn at random compute what transformers computes, and come back bit by bit.

Nightly: needs --python-reference, an interpreter with torch and transformers.
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxthd.convert import export_weights, import_weights
from tests.errors import relative_errors
from tests.helpers import assert_same
from tests.hf.published import Published, assert_identical, tensors

ROOT = Path(__file__).parents[2]
FAMILIES = (
    "qwen3_5",
    "qwen3_5_moe",
    "bamba",
    "granitemoehybrid",
    "falcon_h1",
    "lfm2",
    "kimi_linear",
    "olmo_hybrid",
)
SEEDS = (11, 12, 13, 14)
pytestmark = pytest.mark.nightly


def library(request: pytest.FixtureRequest, module: str, *arguments: Any) -> str:
    python = request.config.getoption("--python-reference")
    command = [python, "-m", f"tests.references.{module}", *map(str, arguments)]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_odd_sizes_agree_with_the_library(
    name: str, seed: int, request: pytest.FixtureRequest, tmp_path: Path, record_property: Any
) -> None:
    """Logits of documents alone and packed, gradients; the export is the original, and the library opens
    it."""
    library(request, "odd_sizes", name, "--out", tmp_path, "--seed", seed)
    folder, file = tmp_path / f"{name}-{seed}", tmp_path / f"{name}-{seed}.npz"
    family = Published.of(dict(np.load(file)), folder)
    order = [*family.numbers[1:], 0]
    loss, packed, gradients = family.run(order)
    worst = 0.0
    for n, logits in zip(order, packed, strict=True):
        want = family.arrays[f"logits.{n}"]
        (alone,) = family.run([n])[1]
        worst = max(worst, *relative_errors((logits, alone), (want, want)).values())
    record_property("logits", f"{worst:.1e}")
    assert worst <= 2e-5
    np.testing.assert_allclose(loss, family.arrays["loss"], rtol=1e-5)
    want = family.gradients()
    assert_same({x: gradients[x] for x in want}, want, 1e-4)

    import_weights([str(folder)], tmp_path / "imported")
    export_weights(tmp_path / "imported", tmp_path / "out", like=folder)
    export_weights(tmp_path / "imported", tmp_path / "new", form="parts")
    assert_identical(tensors(tmp_path / "out"), tensors(folder))
    for exported in (tmp_path / "out", tmp_path / "new" / "llm"):
        back = json.loads(library(request, "read_back", exported, file).splitlines()[-1])
        assert back["error"] <= 2e-5
        assert not [*back["missing_keys"], *back["unexpected_keys"]]
        assert not back["mismatched"]
