"""docs/configuration.md describes the present settings, by the names that the command line takes."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import tyro

from jaxthd.config import Config, LLMConfig, MeshConfig, ModelConfig, RolloutConfig
from jaxthd.config.block import block_kinds
from jaxthd.config.front_end import FrontEnd
from jaxthd.config.listing import all_groups, groups
from jaxthd.models.front_ends import FastConformer, Stacked
from tests.docs.reference import METRICS, NEMO, REFERENCE, metrics_reference, nemo_page, reference


@dataclass(frozen=True)
class Undocumented:
    """A group of settings."""

    known: int = 1
    """What it is."""
    unknown: int = 2


def test_the_reference_is_of_the_present_settings():
    assert REFERENCE.read_text() == reference(), "run python scripts/write_reference.py"


def test_the_metrics_are_those_of_the_code():
    assert METRICS.read_text() == metrics_reference(), "run python scripts/write_reference.py"


def test_the_tables_of_nemo_s_keys_are_those_of_the_command():
    text = NEMO.read_text()
    assert text == nemo_page(text), "run python scripts/write_reference.py"
    assert text.count("<!-- keys: ") == 5


DERIVED = {"compute.block_sizes", "compute.encoder_attention", "compute.scan_backend"}
DERIVED |= {"posttraining.share_prompts", "rollout.reward_folders"}


@pytest.mark.parametrize("front_end", [FastConformer(), Stacked()], ids=lambda x: x.kind)
def test_every_setting_is_set_by_the_name_that_the_reference_gives(front_end: FrontEnd):
    """All settings get a value other than their default, in one command line."""
    names = [setting.option for group in all_groups() for setting in group.settings]
    expected, args = {}, []
    blocks = {kind.letter: kind() for kind in block_kinds().values()}
    llm = LLMConfig(pattern="".join(blocks), blocks=blocks)
    base = Config(model=ModelConfig(encoder=front_end, llm=llm), rollout=RolloutConfig(mesh=MeshConfig()))
    for path, hint, default in leaves_of(base):
        if path in DERIVED or path.endswith(".kind"):
            expected[path] = default
            continue
        option = names.pop(names.index(f"--{path.replace('_', '-')}"))
        expected[path], words = other(hint, default)
        if hint is bool and default:
            group, _, name = option.rpartition(".")
            option = f"{group}.no-{name}"
        args += [option, *words]
    assert all(name.startswith("--model.encoder.") for name in names), "of other front ends"
    found = tyro.cli(Config, default=base, args=args, config=(tyro.conf.AvoidSubcommands,))
    assert {path: value for path, _, value in leaves_of(found)} == expected


def leaves_of(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    hints = get_type_hints(type(node))
    for name, value in ((field.name, getattr(node, field.name)) for field in fields(node)):
        hint = hints[name]
        if isinstance(value, dict):
            for letter, block in value.items():
                yield from leaves_of(block, f"{prefix}{name}.{letter}.")
        elif is_dataclass(value):
            yield from leaves_of(value, f"{prefix}{name}.")
        else:
            yield prefix + name, hint, value


def other(hint: Any, default: Any) -> tuple[Any, list[str]]:
    """A value that is not the default, and its words on the command line."""
    if hint is bool:
        return not default, []
    if get_origin(hint) is Literal:
        choice = next(x for x in get_args(hint) if x != default)
        return choice, [choice]
    if isinstance(hint, UnionType):  # one, or several
        return other(get_args(hint)[-1], default)
    if get_origin(hint) is tuple:
        of = get_args(hint)[0]
        if get_origin(of) is Literal:
            choices = get_args(of)[-2:]
            return choices, [*choices]
        if get_origin(of) is tuple:
            return ((1, 2, 3), (4, 5, 6)), list("123456")
        count = 2 if Ellipsis in get_args(hint) else len(get_args(hint))
        return tuple(of(8 + i) for i in range(count)), [str(8 + i) for i in range(count)]
    value = f"{default}x" if hint is str else default + 1
    return value, [str(value)]


def test_a_setting_without_a_docstring_is_refused():
    with pytest.raises(ValueError, match=r"Undocumented\.unknown has no docstring"):
        list(groups(Undocumented))
