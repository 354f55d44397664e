"""The pictures show what the run measured and what the batch holds."""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from jaxthd.draw import main
from jaxthd.errors import UserError
from jaxthd.figures.curves import PARTS, curves_figure, rollout_figure

CAPACITY, AUDIO = 256, 2560


def run_lines(steps: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": 5 / step,
            "grad_norm": 1 + step % 3,
            "learning_rate": step * 1e-3,
            "tokens_per_second": 6000.0 + step,
            "padding_ratio": 0.02 * (step % 2),
        }
        for step in range(1, steps + 1)
    ]


def drawn(figure: Figure) -> dict[str, Axes]:
    """The axes by title, those of a second scale by the label of their y axis."""
    return {axes.get_title(loc="left") or axes.get_ylabel(): axes for axes in figure.axes}


def legend(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_curves_show_every_step_and_every_validation():
    lines = [{"step": 0, "validation_wer": 3.0, "validation_loss": 6.0}, *run_lines(130)]
    lines[40] |= {"validation_wer": 0.5, "validation_accuracy": 0.25, "validation_loss": 2.5}
    lines[130] |= {"validation_wer": 0.125, "validation_accuracy": 0.75, "validation_loss": 1.25}
    axes = drawn(curves_figure(lines))
    for name, key in (("Loss", "loss"), ("Optimization", "grad_norm"), ("Speed", "tokens_per_second")):
        x, y = axes[name].lines[0].get_data()
        np.testing.assert_array_equal(x, range(1, 131))
        np.testing.assert_array_equal(y, [line[key] for line in lines[1:]])
    for name, key in (("learning rate", "learning_rate"), ("padding, share of token slots", "padding_ratio")):
        np.testing.assert_array_equal(axes[name].lines[0].get_ydata(), [line[key] for line in lines[1:]])
    wer, accuracy = axes["Validation"].lines
    assert list(zip(*wer.get_data(), strict=True)) == [(0, 3.0), (40, 0.5), (130, 0.125)]
    assert list(zip(*accuracy.get_data(), strict=True)) == [(40, 0.25), (130, 0.75)]
    assert legend(axes["Validation"]) == [
        "word error rate: 300.0% → 12.5%",
        "accuracy of the next token: 25.0% → 75.0%",
    ]
    assert legend(axes["Loss"]) == ["training", "validation: 6.00 → 1.25"]


def test_the_smoothed_curve_goes_through_the_means_of_stretches():
    lines = run_lines(100)
    x, y = drawn(curves_figure(lines))["Loss"].lines[1].get_data()
    loss = np.array([line["loss"] for line in lines]).reshape(50, 2)
    np.testing.assert_allclose(y, loss.mean(1))
    np.testing.assert_allclose(x, np.arange(1, 101).reshape(50, 2).mean(1))


def test_steps_that_are_not_finite_are_marked_and_leave_the_curve_whole():
    lines = run_lines(9)
    lines[3]["loss"] = math.nan
    lines[6]["grad_norm"] = math.inf
    axes = drawn(curves_figure(lines))["Loss"]
    assert list(axes.lines[0].get_xdata()) == [1, 2, 3, 5, 6, 7, 8, 9]
    assert list(axes.lines[-1].get_xdata()) == [4, 7]
    assert "2 step(s) not finite" in legend(axes)


@pytest.mark.parametrize(
    ("first", "last"), [(5.69, 9e-4), (5.6, 0.02), (5.6, 0.5), (4.8, 3.1), (1.9, 0.95), (11, 9.5), (3, 1e-9)]
)
def test_the_losses_labels_are_few_and_apart(first: float, last: float):
    losses = np.geomspace(first, last, 40)
    figure = curves_figure([{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)])
    figure.draw_without_rendering()
    axes = drawn(figure)["Loss"]
    low, high = axes.get_ylim()
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    labels = [x.label1 for x in ticks if low <= x.get_loc() <= high and x.label1.get_text()]
    assert 3 <= len(labels) <= 9
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
    assert all(above.y0 - below.y1 > 4 for below, above in pairwise(boxes))


def test_a_run_without_validation_or_without_a_finite_step_can_be_drawn(tmp_path: Path):
    axes = drawn(curves_figure(run_lines(3)))["Validation"]
    assert [text.get_text() for text in axes.texts] == ["not measured"]
    curves_figure([{"step": 1, "loss": math.nan, "grad_norm": math.nan}]).savefig(tmp_path / "none.png")


@pytest.mark.parametrize("with_mesh", [True, False])
def test_the_parts_of_a_step_of_rollouts_are_stacked(with_mesh: bool):
    """Copying the weights to another mesh is a part where it happens; the first line is a validation's."""
    parts = dict.fromkeys(("rollout", "reward", "scoring", "training"), 1.0)
    parts |= {"resharding": 2.0} if with_mesh else {}
    line = {f"{name}_seconds": seconds for name, seconds in parts.items()}
    line |= {"step_seconds": sum(parts.values()), "reward": 1.0}
    lines = [{"step": 0, "validation_reward": 1.0}, *({"step": n, **line} for n in (1, 2, 3))]
    [axes] = [x for x in rollout_figure(lines).axes if x.get_title(loc="left").startswith("Time")]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == [name for name in PARTS if name in parts]
    tops = [stack.get_paths()[0].get_extents().y1 for stack in axes.collections]
    assert tops == pytest.approx(np.cumsum([parts[name] for name in names]))


def test_the_command_draws_the_curves_of_a_workdir(tmp_path: Path):
    with pytest.raises(UserError, match=r"metrics\.jsonl does not exist"):
        main([str(tmp_path)])
    lines = "".join(json.dumps(line) + "\n" for line in run_lines(5))
    (tmp_path / "metrics.jsonl").write_text(lines)
    main([str(tmp_path)])
    assert imread(tmp_path / "curves.png").shape[:2] == (920, 1200)
