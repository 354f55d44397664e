"""The parameters of published sizes agree with what their authors give."""

import pytest

from jaxthd.config import Config, ModelConfig
from jaxthd.planning.parameters import parameter_groups
from scripts.published_sizes import Size, agrees, sizes

SOME = ("Qwen3-30B", "3-Super", "GPT-OSS-20B")


def parameters(size: Size) -> int:
    config = Config(model=ModelConfig(encoder=None, llm=size.llm))
    return sum(group.parameters for group in parameter_groups(config))


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(x, marks=() if any(y in x.name for y in SOME) else pytest.mark.exhaustive, id=x.name)
        for x in sizes()
    ],
)
def test_parameters_are_those_published(size: Size):
    found = parameters(size)
    assert agrees(found, size.total), f"{found:,} parameters, not {size.total}e9"


def test_digits_that_are_published_count():
    assert agrees(8_190_735_360, "8.2")
    assert not agrees(8_190_735_360, "8.1")
    assert agrees(123_611_012_096, "123.611012096")
    assert not agrees(123_611_012_097, "123.611012096")
