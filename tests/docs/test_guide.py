"""The guide says what is so: figures and reference are of the present code, and what it names exists."""

import doctest
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from itertools import combinations
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints
from xml.etree import ElementTree

import numpy as np
import pytest
import tyro
from matplotlib.axis import Axis
from matplotlib.patches import Polygon
from matplotlib.text import Text

from jaxthd.config import Config
from scripts.draw_guide import DRAWINGS, OUT, svg
from scripts.guide_numbers import CHUNK, DECAY, RANKS
from scripts.write_reference import REFERENCE, groups, reference

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
WRITTEN = [page for page in PAGES if page != REFERENCE]


@dataclass(frozen=True)
class Undocumented:
    """A group of settings."""

    known: int = 1
    """What it is."""
    unknown: int = 2


def test_the_reference_is_of_the_present_settings():
    assert REFERENCE.read_text() == reference(), "run python scripts/write_reference.py"


def test_every_setting_is_set_by_the_name_that_the_reference_gives():
    """To another value than its default, all in one command line."""
    names = [setting.name.strip("`") for group in groups() for setting in group.settings]
    expected, args = {}, []
    for path, hint, default in leaves_of(Config()):
        option = names.pop(names.index(f"--{path.replace('_', '-')}"))
        expected[path], said = other(hint, default)
        if hint is bool and default:
            group, _, name = option.rpartition(".")
            option = f"{group}.no-{name}"
        args += [option, *said]
    assert not names
    found = tyro.cli(Config, args=args)
    assert {path: value for path, _, value in leaves_of(found)} == expected


def leaves_of(node: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    for name, hint in get_type_hints(type(node)).items():
        value = getattr(node, name)
        if is_dataclass(hint):
            yield from leaves_of(value, f"{prefix}{name}.")
        else:
            yield prefix + name, hint, value


def other(hint: Any, default: Any) -> tuple[Any, list[str]]:
    """A value that is not the default, and how it is said."""
    if hint is bool:
        return not default, []
    if get_origin(hint) is Literal:
        choice = next(x for x in get_args(hint) if x != default)
        return choice, [choice]
    if isinstance(hint, UnionType):  # one, or several
        return other(get_args(hint)[-1], default)
    if get_origin(hint) is tuple:
        of = get_args(hint)[0]
        return (of(8), of(9)), ["8", "9"]
    value = f"{default}x" if hint is str else default + 1
    return value, [str(value)]


def test_a_setting_without_a_docstring_is_refused():
    with pytest.raises(ValueError, match=r"Undocumented\.unknown has no docstring"):
        list(groups(Undocumented))


@pytest.fixture(scope="module")
def numbers() -> dict[str, Any]:
    return {name: drawing.numbers() for name, drawing in DRAWINGS.items()}


@pytest.mark.parametrize("name", DRAWINGS)
def test_the_figures_are_of_the_present_code(name: str, numbers: dict[str, Any]):
    again = f"run python -m scripts.draw_guide: {name}.svg is of other code"
    drawn = (OUT / f"{name}.svg").read_text()
    held = json.loads(ElementTree.fromstring(drawn).findtext(f".//{DESCRIPTION}", ""))
    then, now = dict(flat(held)), dict(flat(numbers[name]))
    assert then.keys() == now.keys(), again
    for path, value in now.items():
        assert then[path] == (pytest.approx(value, rel=1e-3) if isinstance(value, float) else value), again
    assert pictured(drawn) == pictured(svg(name, held)), again


def pictured(drawn: str) -> tuple[list[str], list[str]]:
    """Words and colours of a figure; not where they are, which depends on matplotlib's version."""
    texts = [x for x in ElementTree.fromstring(drawn).iter() if x.tag.endswith(("}text", "}tspan"))]
    words = [word for x in texts for word in (x.text or "").split()]
    return words, re.findall(r"fill: (#[0-9a-f]{6})", drawn)


def flat(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else None
    if inner is None:
        yield path, node
    for key, value in inner or ():
        yield from flat(value, f"{path}/{key}")


@pytest.mark.parametrize("name", DRAWINGS)
def test_no_text_of_a_figure_lies_on_another(name: str, numbers: dict[str, Any]):
    figure = DRAWINGS[name].draw(numbers[name])
    figure.draw_without_rendering()
    unseen = {x for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for x in unseen_labels(axis)}
    texts = [x for x in figure.findobj(Text) if isinstance(x, Text) and x.get_text() and x not in unseen]
    boxes = [(x.get_text(), x.get_window_extent()) for x in texts]
    assert len(boxes) > 5
    assert [(a, b) for (a, one), (b, two) in combinations(boxes, 2) if one.overlaps(two)] == []


def unseen_labels(axis: Axis) -> Iterator[Text]:
    """Of ticks beyond the axis, and all of an axis that is switched off."""
    low, high = sorted(axis.get_view_interval())
    for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
        if not (axis.axes.axison and low <= tick.get_loc() <= high and tick.label1.get_visible()):
            yield tick.label1
        if not tick.label2.get_visible():
            yield tick.label2


def test_the_ring_draws_every_pair_of_a_document_once(numbers: dict[str, Any]):
    figure = DRAWINGS["ring"].draw(numbers["ring"])
    for row, (layout, held) in enumerate(numbers["ring"].items()):
        lengths = np.bincount(np.ravel(held["ids"]))[1:]
        panels = figure.axes[row * RANKS : (row + 1) * RANKS]
        drawn = [sum(map(area, (x for x in axes.patches if isinstance(x, Polygon)))) for axes in panels]
        said = [int(axes.get_xlabel().split()[-2].replace(",", "")) for axes in panels]
        assert drawn == said, layout
        assert sum(said) == (lengths * (lengths + 1) // 2).sum()
    assert any(x.get_text() == "skipped" for axes in figure.axes for x in axes.texts)


def area(polygon: Polygon) -> float:
    x, y = polygon.get_xy().T
    return abs(np.dot(x[:-1], y[1:]) - np.dot(x[1:], y[:-1])) / 2


def test_the_states_that_the_ranks_exchange_are_those_of_a_recurrence(numbers: dict[str, Any]):
    held = numbers["states"]
    state, h = [], 0.0
    for document, position in zip(held["ids"], held["positions"], strict=True):
        h = (np.exp(-DECAY) * h if position else 0.0) + (document > 0)
        state.append(h)
    np.testing.assert_allclose(held["state"], state, rtol=1e-3)
    enters = [0.0, *state[CHUNK - 1 : -1 : CHUNK]]
    np.testing.assert_allclose(held["enters"], enters, rtol=1e-3)
    ends = np.multiply(held["keeps"], enters) + held["adds"]
    np.testing.assert_allclose(ends, state[CHUNK - 1 :: CHUNK], rtol=2e-3)
    assert {bool(x) for x in held["keeps"]} == {False, True}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_what_a_page_names_exists(page: Path):
    text = page.read_text()
    settings = {path.replace("_", "-") for path, _, _ in leaves_of(Config())}
    named = {
        re.sub(r"\.no-(?=[^.]+$)", ".", x)
        for x in re.findall(r"--((?:mesh|data|model|adapt|train)\.[\w.-]+\w)", text)
    }
    assert named - settings == set()
    for module in re.findall(r"-m ((?:jaxthd|scripts)\.\w+)", text):
        assert importlib.util.find_spec(module), module
    for path in re.findall(r"`((?:jaxthd|tests|scripts|configs)/[\w/.]*)`", text):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([^)#]+)", text):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_the_examples_of_a_page_say_what_they_print(page: Path):
    flags = doctest.NORMALIZE_WHITESPACE
    failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=flags)
    assert failed == 0
