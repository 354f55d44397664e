"""Every setting of a model is in a class, and weights of another value are treated as the class says."""

from dataclasses import asdict, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from jaxthd.config import AdaptConfig, LLMConfig, ModelConfig, RopeConfig
from jaxthd.errors import UserError
from jaxthd.files.run_folder import flat
from jaxthd.files.weight_fields import FREE, MEANING, RESCALED, SAID, SHAPE, compare_models

LLM = LLMConfig(rope=RopeConfig(theta=1e4), mtp_pattern="*", mtp_shared=False)
MODEL = ModelConfig(llm=LLM)
TEXTS = {
    "pattern": "M-M*E",
    "mtp_pattern": "*E",
    "scaling": "yarn",
    "ffn_form": "swiglu",
    "router": "softmax",
}
FIELDS = flat(asdict(MODEL), "model.") | flat(asdict(AdaptConfig()), "adapt.")


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


def classes_of(name: str) -> list[str]:
    """The classes whose patterns match; of SAID and another one the other, which has the exceptions."""
    classes = {"shape": SHAPE, "meaning": MEANING, "said": SAID, "rescaled": RESCALED, "free": FREE}
    found = [each for each, patterns in classes.items() if any(fnmatch(name, x) for x in patterns)]
    return [each for each in found if each != "said"] or found


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_in_one_class(name: str):
    assert len(classes_of(name)) == 1, "put it into one of the classes of jaxthd/files/weight_fields.py"


@pytest.mark.parametrize("pattern", [*SHAPE, *MEANING, *SAID, *RESCALED, *FREE])
def test_every_pattern_is_of_a_field(pattern: str):
    names = {**FIELDS, "model.encoder": None}  # a field by itself in a text-only model
    assert any(fnmatch(name, pattern) for name in names)


@pytest.mark.parametrize("name", [name for name in FIELDS if name.startswith("model.")])
def test_weights_of_another_model_are_refused_or_said_by_name(name: str):
    """Whether or not the arrays have the same shapes."""
    there = changed(MODEL, name.split(".")[1:])
    assert compare_models(Path("run"), MODEL, MODEL) == {}
    if classes_of(name) == ["said"]:
        assert [*compare_models(Path("run"), there, MODEL)] == [name]
        return
    with pytest.raises(UserError, match=rf"run holds weights of another model:\n  {name}: .* there, .* here"):
        compare_models(Path("run"), there, MODEL)


def test_no_scaling_leads_from_no_rotary_embedding_to_one():
    without = replace(MODEL, llm=replace(LLM, rope=RopeConfig()))
    for there, here in ((without, MODEL), (MODEL, without)):
        with pytest.raises(UserError, match=r"rope\.theta"):
            compare_models(Path("run"), there, here)
