"""The pictures show what the run measured and what the batch holds."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from jaxthd.config import Config, RolloutConfig, TrainConfig
from jaxthd.draw import main
from jaxthd.errors import UserError
from jaxthd.figures.axes import HEIGHT
from jaxthd.figures.curves import ROW, run_figure
from jaxthd.files.run_folder import write_config
from jaxthd.objectives import DPO, SFT
from jaxthd.objectives.metric import Curve, Metric, Panel
from jaxthd.rl.display import PARTS, drawing_display
from jaxthd.run.display import display_of
from jaxthd.run.progress import summary

DISPLAY = display_of(SFT())
GRPO = Config(train=TrainConfig(objective="grpo"), rollout=RolloutConfig(rewards=("wer", "length=0.5")))
TIME_BAR = "Where the time went"


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
    axes = drawn(run_figure(lines, DISPLAY))
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
    assert legend(axes["Loss"]) == ["training", "validation: 6.0000 → 1.2500"]


def test_the_smoothed_curve_goes_through_the_means_of_stretches():
    lines = run_lines(100)
    x, y = drawn(run_figure(lines, DISPLAY))["Loss"].lines[1].get_data()
    loss = np.array([line["loss"] for line in lines]).reshape(50, 2)
    np.testing.assert_allclose(y, loss.mean(1))
    np.testing.assert_allclose(x, np.arange(1, 101).reshape(50, 2).mean(1))


def test_steps_that_are_not_finite_are_marked_and_leave_the_curve_whole():
    lines = run_lines(9)
    lines[3]["loss"] = math.nan
    lines[6]["grad_norm"] = math.inf
    axes = drawn(run_figure(lines, DISPLAY))["Loss"]
    assert list(axes.lines[0].get_xdata()) == [1, 2, 3, 5, 6, 7, 8, 9]
    assert list(axes.lines[-1].get_xdata()) == [4, 7]
    assert "2 step(s) not finite" in legend(axes)


@pytest.mark.parametrize(
    ("first", "last"), [(5.69, 9e-4), (5.6, 0.02), (5.6, 0.5), (4.8, 3.1), (1.9, 0.95), (11, 9.5), (3, 1e-9)]
)
def test_the_losses_labels_are_few_and_apart(first: float, last: float):
    losses = np.geomspace(first, last, 40)
    figure = run_figure([{"step": step, "loss": loss} for step, loss in enumerate(losses, 1)], DISPLAY)
    figure.draw_without_rendering()
    axes = drawn(figure)["Loss"]
    low, high = axes.get_ylim()
    ticks = [*axes.yaxis.get_major_ticks(), *axes.yaxis.get_minor_ticks()]
    labels = [x.label1 for x in ticks if low <= x.get_loc() <= high and x.label1.get_text()]
    assert 3 <= len(labels) <= 9
    boxes = sorted((label.get_window_extent() for label in labels), key=lambda box: box.y0)
    assert all(above.y0 - below.y1 > 4 for below, above in pairwise(boxes))


def test_what_was_not_measured_has_no_panel(tmp_path: Path):
    assert drawn(run_figure(run_lines(3), DISPLAY)).keys() == {
        "Loss", "Optimization", "learning rate", "Speed", "padding, share of token slots", TIME_BAR, ""
    }  # fmt: skip
    run_figure([{"step": 1, "loss": math.nan, "grad_norm": math.nan}], DISPLAY).savefig(tmp_path / "none.png")


def rollout_lines(parts: Mapping[str, float]) -> list[dict[str, Any]]:
    """A validation, and three steps that drew answers, with every field that begins as one of a reward."""
    line = {f"{name}_seconds": seconds for name, seconds in parts.items()}
    line |= {"step_seconds": sum(parts.values()), "reward": 1.0, "reward_wer": -0.5, "reward_length": 2.0}
    line |= {"reward_std": 7.0, "reward_spread": 7.0, "reward_failures": 7.0, "reward_wait_seconds": 7.0}
    return [{"step": 0, "validation_reward": 0.5}, *({"step": n, **line} for n in (1, 2, 3))]


@pytest.mark.parametrize("with_mesh", [True, False])
def test_the_parts_of_a_step_of_rollouts_are_stacked(with_mesh: bool):
    """Copying the weights to another mesh is a part where it happens; the first line is a validation's."""
    parts = dict.fromkeys(("rollout", "reward", "scoring", "training"), 1.0)
    parts |= {"resharding": 2.0} if with_mesh else {}
    axes = drawn(run_figure(rollout_lines(parts), drawing_display(GRPO)))["Time"]
    assert legend(axes) == [name for name in PARTS if name in parts]
    tops = [stack.get_paths()[0].get_extents().y1 for stack in axes.collections]
    assert tops == pytest.approx(np.cumsum([parts[name] for name in legend(axes)]))


def test_the_rewards_that_are_drawn_are_those_of_the_settings():
    axes = drawn(run_figure(rollout_lines({"reward": 1.0}), drawing_display(GRPO)))["Reward"]
    assert legend(axes) == ["all, weighted", "wer", "length", "held out, likeliest answers: 0.500 → 0.500"]
    heights = [{*line.get_ydata()} for line in axes.lines]
    assert heights == [{1.0}, {1.0}, {-0.5}, {-0.5}, {2.0}, {2.0}, {0.5}]
    alone = replace(GRPO, rollout=replace(GRPO.rollout, rewards=("wer",)))
    axes = drawn(run_figure(rollout_lines({"reward": 1.0}), drawing_display(alone)))["Reward"]
    # The only function's mean is the reward, but for its weight.
    assert legend(axes) == ["drawn", "held out, likeliest answers: 0.500 → 0.500"]


def test_losses_that_are_not_the_same_quantity_do_not_share_an_axis():
    """DPO trains on a loss of pairs, with a share of a likelihood; validation has one of each."""
    of_step = {"loss": 3.0, "preference_loss": 0.6, "sft_loss": 2.4, "accuracy": 0.75, "margin": 0.2}
    of_step |= {"rewards_chosen": 0.1, "rewards_rejected": -0.1}
    held_out = {"loss": 2.0, "preference_loss": 0.7, "preference_accuracy": 0.5, "preference_margin": 0.15}
    lines = [{"step": n, **of_step} for n in (1, 2)]
    lines[1] |= {f"validation_{name}": value for name, value in held_out.items()}
    axes = drawn(run_figure(lines, display_of(DPO(sft_weight=1.0))))
    shown = {title: [set(line.get_ydata()) for line in each.lines[::2]] for title, each in axes.items()}
    assert {title: of for title, of in shown.items() if title != TIME_BAR} == {
        "Preference loss": [{0.6}, {0.7}],
        "Accuracy": [{0.75}, {0.5}],
        "Rewards": [{0.1}, {-0.1}, {0.2}, {0.15}],
        "Likelihood of answers": [{2.4}, {2.0}],
    } | ({"": []} if "" in shown else {})


@dataclass(frozen=True)
class Toy(SFT):
    """An objective from outside, with a metric and a panel of its own."""

    metrics = (*SFT.metrics, Metric("sureness", "share", "", text="{:.0%}", shown="progress"))
    panels = (*SFT.panels, Panel("How sure it is", "share", (Curve("sureness"),), "share"))


def test_an_objective_says_what_is_drawn_of_it():
    lines = [line | {"sureness": 0.5} for line in run_lines(4)]
    axes = drawn(run_figure(lines, display_of(Toy())))["How sure it is"]
    assert {*axes.lines[0].get_ydata()} == {0.5}
    assert "sureness 50% -> 50%" in summary(lines, display_of(Toy()))
    assert "How sure it is" not in drawn(run_figure(lines, DISPLAY))


@pytest.mark.parametrize("config", [None, Config(), GRPO], ids=["no config", "sft", "grpo"])
def test_the_command_draws_the_curves_of_a_workdir(
    config: Config | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(UserError, match=r"metrics\.jsonl does not exist"):
        main([str(tmp_path)])
    lines = "".join(json.dumps(line | {"reward": 1.0, "kl": 0.1}) + "\n" for line in run_lines(5))
    (tmp_path / "metrics.jsonl").write_text(lines)
    if config:
        write_config(tmp_path, config)
    main([str(tmp_path)])
    rows = 2  # loss, optimization, speed; of grpo rewards, policy, optimization
    assert imread(tmp_path / "curves.png").shape[:2] == (round(100 * (HEIGHT + rows * ROW)), 1200)
    assert ("panels are those of supervised training" in capsys.readouterr().err) == (config is None)
