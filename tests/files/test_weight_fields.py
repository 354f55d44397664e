"""Weights of another value of a setting of the model are refused, or taken and said."""

from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config import LLMConfig, ModelConfig, RopeConfig
from jaxthd.errors import UserError
from jaxthd.files.run_folder import flat
from jaxthd.files.weight_fields import REFUSED, SAID, compare_models
from jaxthd.models.blocks import Attention

LLM = LLMConfig(blocks={"*": Attention(rope=RopeConfig(theta=1e4))}, mtp_pattern="*", mtp_shared=False)
MODEL = ModelConfig(llm=LLM)
TEXTS = {
    "pattern": "M-M*E",
    "mtp_pattern": "*E",
    "scaling": "yarn",
    "ffn_form": "swiglu",
    "router": "softmax",
}
FIELDS = flat(asdict(MODEL), "model.")


def other(name: str, value: Any) -> Any:
    """Another value of a field."""
    if isinstance(value, str):
        return TEXTS[name]
    if isinstance(value, bool):
        return not value
    return (0.001, *value[1:]) if isinstance(value, tuple) else value + 1


def changed(node: Any, path: list[str]) -> Any:
    """The settings with another value of the field at the path."""
    old = getattr(node, path[0])
    return replace(node, **{path[0]: changed(old, path[1:]) if path[1:] else other(path[0], old)})


def is_said(name: str) -> bool:
    said, refused = (any(fnmatch(name, x) for x in patterns) for patterns in (SAID, REFUSED))
    return said and not refused


@pytest.mark.parametrize("pattern", [*SAID, *REFUSED])
def test_every_pattern_is_of_a_field(pattern: str):
    assert any(fnmatch(name, pattern) for name in FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_weights_of_another_model_are_refused_or_said_by_name(name: str):
    """Whether or not the arrays have the same shapes."""
    there = changed(MODEL, name.split(".")[1:])
    assert compare_models(Path("run"), MODEL, MODEL) == {}
    if is_said(name):
        assert [*compare_models(Path("run"), there, MODEL)] == [name]
        return
    with pytest.raises(UserError, match=rf"run holds weights of another model:\n  {name}: .* there, .* here"):
        compare_models(Path("run"), there, MODEL)


def test_no_scaling_leads_from_no_rotary_embedding_to_one():
    without = replace(MODEL, llm=replace(LLM, rope=RopeConfig()))
    for there, here in ((without, MODEL), (MODEL, without)):
        with pytest.raises(UserError, match=r"rope\.theta"):
            compare_models(Path("run"), there, here)
