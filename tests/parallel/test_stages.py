"""Pipeline stages: every layer once, in order, divided by cost; parameters convert to stages and back."""

from itertools import combinations
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.config import LLMConfig, MeshConfig
from jaxthd.files.config_file import load_config
from jaxthd.models.stacks import from_stages, pipeline_stages, to_stages
from jaxthd.parallel.stages import Stages, divide

CONFIGS = Path(__file__).parents[2] / "configs"
STACKS = LLMConfig(pattern="ME*-").stacks
NANO_LLM = load_config(str(CONFIGS / "nemotron3_nano.py")).model.llm


def stage_costs(patterns: tuple[str, ...], llm: LLMConfig) -> list[float]:
    return [sum(llm.blocks[letter].cost(llm.dim) for letter in pattern) for pattern in patterns]


@pytest.mark.parametrize("count", [2, 4, 8])
def test_nano_is_divided_into_stages_of_nearly_equal_cost(count: int):
    """52 layers do not divide evenly by 8, and layers differ in cost."""
    patterns = pipeline_stages(NANO_LLM, MeshConfig(pipeline=count)).patterns
    assert "".join(patterns) == NANO_LLM.letters
    costs = stage_costs(patterns, NANO_LLM)
    assert max(costs) <= 1.1 * np.mean(costs)


def test_no_other_division_has_a_cheaper_costliest_stage():
    rng = np.random.default_rng(0)
    for _ in range(20):
        n = int(rng.integers(3, 9))
        letters, count = "".join(rng.choice(list("M*-E"), n)), int(rng.integers(2, min(n, 4) + 1))
        costs = rng.integers(1, 20, n).astype(float).tolist()

        def costliest(cuts: tuple[int, ...], costs: list[float] = costs) -> float:
            return max(sum(costs[a:b]) for a, b in zip((0, *cuts), (*cuts, len(costs)), strict=True))

        best = min(costliest(cuts) for cuts in combinations(range(1, n), count - 1))
        found = divide(letters, costs, count)
        assert "".join(found) == letters
        assert all(found)
        assert costliest(tuple(np.cumsum([len(s) for s in found])[:-1].tolist())) == best


def test_a_pattern_of_equal_units_is_divided_into_equal_stages():
    stages = pipeline_stages(LLMConfig(pattern="ME*-ME*-ME*-ME*-"), MeshConfig(pipeline=2, stages_per_rank=2))
    assert stages.patterns == ("ME*-",) * 4
    assert stages.are_equal


def test_marks_divide_as_they_say():
    mesh = MeshConfig(pipeline=2)
    assert pipeline_stages(LLMConfig(pattern="M|E*-"), mesh).patterns == ("M", "E*-")
    assert pipeline_stages(LLMConfig(pattern="M|E*-"), MeshConfig()).patterns == ("ME*-",)
    for pattern in ("M|E|*", "M|", "|ME"):
        with pytest.raises(ValueError, match="stages"):
            pipeline_stages(LLMConfig(pattern=pattern), mesh)
    with pytest.raises(ValueError, match="1 layers cannot be divided into 2"):
        pipeline_stages(LLMConfig(pattern="M"), mesh)


@pytest.mark.parametrize(
    "stages",
    [
        Stages(("ME*", "-ME*-M"), 2, STACKS),
        Stages(("M", "E*", "-ME", "M*-"), 2, STACKS),
        Stages(("MM", "M", "MMM", "E", "M*", "-"), 3, STACKS),
    ],
)
@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
def test_layers_go_to_their_stages_and_back(stages: Stages, array: Any):
    """Each rank finds its stages' layers, in order, where it expects them; the rest is zero."""
    stacks = dict(STACKS)
    params = {
        "decoder": {
            "layers": {
                stacks[letter]: {"w": 1.0 + np.arange(3 * stages.letters.count(letter)).reshape(-1, 3)}
                for letter in set(stages.letters)
            },
            "norm": np.ones(3),
        }
    }
    held = to_stages(jax.tree.map(array, params), stages)
    for letter in set(stages.letters):
        w = np.asarray(held["decoder"]["layers"][stacks[letter]]["w"])
        assert len(w) == stages.rows(letter)
        by_rank = w.reshape(stages.ranks, stages.chunks, stages.most(letter), 3)
        done = 0
        for stage, pattern in enumerate(stages.patterns):
            rows = by_rank[stage % stages.ranks, stage // stages.ranks]
            count = pattern.count(letter)
            whole = params["decoder"]["layers"][stacks[letter]]["w"]  # type: ignore[index]
            np.testing.assert_array_equal(rows[:count], whole[done : done + count])
            assert not rows[count:].any()
            done += count
    jax.tree.map(np.testing.assert_array_equal, from_stages(held, stages), params)
