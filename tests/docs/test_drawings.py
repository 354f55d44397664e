"""The figures of the guide are of the present code, and they can be read."""

import json
import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.axis import Axis
from matplotlib.patches import Polygon
from matplotlib.text import Text

from scripts.draw_guide import DRAWINGS, OUT, svg
from scripts.guide_numbers import CHUNK, DECAY

DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


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
    """Words and colours of a figure, without their positions, which depend on matplotlib's version."""
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
    """Labels of ticks beyond the axis, and all labels of an axis that is switched off."""
    low, high = sorted(axis.get_view_interval())
    for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
        if not (axis.axes.axison and low <= tick.get_loc() <= high and tick.label1.get_visible()):
            yield tick.label1
        if not tick.label2.get_visible():
            yield tick.label2


def test_the_ring_draws_every_pair_of_a_document_once(numbers: dict[str, Any]):
    held = numbers["ring"]
    figure = DRAWINGS["ring"].draw(held)
    lengths = np.bincount(np.ravel(held["ids"]))[1:]
    drawn = [sum(map(area, (x for x in axes.patches if isinstance(x, Polygon)))) for axes in figure.axes]
    written = [int(axes.get_xlabel().split()[-2].replace(",", "")) for axes in figure.axes]
    assert drawn == written
    assert sum(written) == (lengths * (lengths + 1) // 2).sum()
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
