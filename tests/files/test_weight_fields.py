"""Weights of another value of a setting of the model are refused, or taken and said."""

import re
from dataclasses import asdict, replace
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config import LLMConfig, ModelConfig, RopeConfig
from jaxthd.config.values import with_value
from jaxthd.errors import UserError
from jaxthd.files.run_folder import flat
from jaxthd.files.weight_fields import REFUSED, compare_models
from jaxthd.models.blocks import Attention, LatentAttention

ROPE = RopeConfig(theta=1e4)
LLM = LLMConfig(
    pattern="M-*WLDE",
    blocks={
        "*": Attention(rope=ROPE),
        "W": Attention(rope=ROPE, window=128),
        "L": LatentAttention(rope=ROPE),
    },
    mtp_pattern="*",
    mtp_shared=False,
)
MODEL = ModelConfig(llm=LLM)
TEXTS = {
    "pattern": "M-*WLDE-",
    "mtp_pattern": "*E",
    "scaling": "yarn",
    "form": "swiglu",
    "scores": "softmax",
    "adapter_form": "gelu",
    "norm": "before_gate",
}
FIELDS = {name: value for name, value in flat(asdict(MODEL), "model.").items() if not name.endswith(".kind")}
READ_WITH_OTHERS = [
    f"model.llm.blocks.{escape(letter)}.{name}"
    for letter, block in LLM.blocks.items()
    for name in block.read_with_others
] + [f"model.encoder.{name}" for name in MODEL.audio_encoder.read_with_others]


def other(name: str, value: Any) -> Any:
    """Another value of a field."""
    if isinstance(value, str):
        return TEXTS[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return (0.001, *value[1:]) if value else (3,)
    return value + 1


def is_said(name: str) -> bool:
    """Whether another value is taken and said. No setting leads from no window to one."""
    if name.endswith(".window") and not FIELDS[name]:
        return False
    said, refused = (any(fnmatch(name, x) for x in patterns) for patterns in (READ_WITH_OTHERS, REFUSED))
    return said and not refused


@pytest.mark.parametrize("pattern", [*REFUSED, *READ_WITH_OTHERS])
def test_every_pattern_is_of_a_field(pattern: str):
    assert any(fnmatch(name, pattern) for name in FIELDS)


@pytest.mark.parametrize("name", FIELDS)
def test_weights_of_another_model_are_refused_or_said_by_name(name: str):
    """Whether or not the arrays have the same shapes."""
    path = name.removeprefix("model.")
    there = with_value(MODEL, path, other(name.rpartition(".")[2], FIELDS[name]))
    assert compare_models(Path("run"), MODEL, MODEL) == {}
    if is_said(name):
        assert [*compare_models(Path("run"), there, MODEL)] == [name]
        return
    with pytest.raises(
        UserError, match=rf"run holds weights of another model:\n  {re.escape(name)}: .* there, .* here"
    ):
        compare_models(Path("run"), there, MODEL)


def test_no_scaling_leads_from_no_rotary_embedding_to_one():
    without = replace(MODEL, llm=LLM.with_settings("*WL", rope=RopeConfig()))
    for there, here in ((without, MODEL), (MODEL, without)):
        with pytest.raises(UserError, match=r"rope\.theta"):
            compare_models(Path("run"), there, here)
