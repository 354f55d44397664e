"""Rotary embeddings: read from config.json, against the library's frequencies; what they do to features."""

import json
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxthd.config import RopeConfig
from jaxthd.errors import UserError
from jaxthd.hf.rotary import rope_config, rope_fields
from jaxthd.ops.rotary import frequencies, rotated
from tests.hf.published import REFERENCES

CASES = json.loads((REFERENCES / "rope.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda case: json.dumps(case["fields"])[:60])
def test_frequencies_are_the_librarys(case: dict[str, Any]):
    rope = rope_config(case["fields"], partial=True)
    assert rope.rotated(case["fields"]["head_dim"]) == case["features"]
    np.testing.assert_allclose(frequencies(rope, case["features"]), case["frequencies"], rtol=2e-6)
    assert rope.rotation_factor == pytest.approx(case["factor"], rel=1e-12)
    assert rope_config(rope_fields(rope), partial=True) == rope
    older = {k: v for k, v in rope_fields(rope).items() if k != "rope_parameters"}
    assert rope_config(older, partial=True) == rope


def test_the_scale_of_scores_is_deepseeks():
    """By hand: (0.1 * 0.8 * log(40) + 1)^2."""
    assert rope_config(CASES[8]["fields"]).score_factor == pytest.approx((0.08 * np.log(40) + 1) ** 2)
    assert rope_config(CASES[6]["fields"]).score_factor == 1


def test_features_are_rotated_by_complex_numbers():
    """Each pair is a complex number times exp(i angle) times the factor; the rest of the head stays."""
    rope = RopeConfig(
        theta=50.0, fraction=0.6, scaling="yarn", factor=5.0, original_positions=40, truncate=False
    )
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        x_NHd, positions_N = rng.normal(size=(7, 3, 10)), np.array([0, 1, 2, 0, 5, 1000, 3])
        got = rotated(jnp.asarray(x_NHd), jnp.asarray(positions_N, jnp.int32), rope)
        angle_N1f = positions_N[:, None, None] * frequencies(rope, 6)
        turned = (x_NHd[..., :3] + 1j * x_NHd[..., 3:6]) * np.exp(1j * angle_N1f) * rope.rotation_factor
        want = np.concatenate([turned.real, turned.imag, x_NHd[..., 6:]], -1)
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "without original_max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "linear"}}, "without factor"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12]}}, "mrope_section"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"partial_rotary_factor": 0.25}, r"partial_rotary_factor 0\.25"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, r"rotary_factor 0\.5"),
    ],
)
def test_what_is_not_computed_is_refused(fields: dict[str, Any], said: str):
    with pytest.raises(UserError, match=said):
        rope_config(fields)


def test_the_librarys_base_counts_where_none_is_given():
    assert rope_config({}) == RopeConfig(theta=1e4)
    assert replace(rope_config({}), theta=0.0) == RopeConfig()
