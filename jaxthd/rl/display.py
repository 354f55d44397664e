"""The display of a run that draws answers: rewards, answers, how drawing agrees with training, its time."""

from collections.abc import Sequence

from jaxthd.config import Config
from jaxthd.objectives.metric import VALIDATION, Curve, Metric, Panel
from jaxthd.rl.groups import TrainedGroup
from jaxthd.rl.held_out import HELD_OUT_METRICS
from jaxthd.rl.metrics import GRPO_METRICS, REWARD_METRICS
from jaxthd.rl.rewards.advantages import has_spread
from jaxthd.rl.rewards.registry import reward_settings
from jaxthd.run.display import OPTIMIZATION, QUALITY, Display
from jaxthd.run.metrics import STEP_METRICS, VALIDATION_METRICS
from jaxthd.run.report import SAMPLES, one_line
from jaxthd.steps.forward import objective_of

ANSWERS = Panel(
    "Answers",
    "tokens of an answer",
    (Curve("answer_tokens"),),
    "from zero",
    "share of answers, of groups",
    (Curve("cut_off", "cut off"), Curve("no_spread", "groups without spread")),
    "share",
)
RIGHT = QUALITY._replace(
    y="share of words, of prompts",
    curves=(
        Curve(f"{VALIDATION}wer", "word error rate"),
        Curve(f"{VALIDATION}pass_at_1", "right in one draw"),
        Curve(f"{VALIDATION}pass_at_k", "right in one of a group"),
    ),
)
AGREEMENT = Panel(
    "Drawing against training",
    "difference of log-probabilities, nats",
    (
        Curve("logprob_difference", "largest of a step", "largest"),
        Curve("logprob_difference_mean", "mean"),
    ),
    "log",
)
PARTS = ("resharding", "rollout", "reward", "scoring", "training")
"""Parts of a step's time, in their order. The first only where answers are drawn on another mesh."""
TIME = Panel(
    "Time",
    "seconds of a step",
    tuple(Curve(f"{part}_seconds", part) for part in PARTS),
    "stacked",
)


def of_function(name: str) -> Metric:
    """The metric of one reward function."""
    return Metric(f"reward_{name}", "", "mean of one function, not weighted", text="{:.3f}")


def drawing_display(config: Config) -> Display:
    """The display of a run that draws answers."""
    objective = objective_of(config)
    functions = [setting.name for setting in reward_settings(config)]
    own = [of_function(name) for name in functions]
    of_functions = [Curve(metric.name, name) for metric, name in zip(own, functions, strict=True)]
    rewards = Panel(
        "Reward",
        "mean over the answers drawn",
        (
            Curve("reward", "all, weighted" if len(functions) > 1 else "drawn"),
            *of_functions * (len(functions) > 1),
            Curve(f"{VALIDATION}reward", "held out, likeliest answers"),
        ),
    )
    panels = (rewards, ANSWERS, *objective.panels, RIGHT, OPTIMIZATION, AGREEMENT, TIME)
    of_steps = (*REWARD_METRICS, *own, *objective.metrics, *GRPO_METRICS, *STEP_METRICS)
    return Display(of_steps, (*VALIDATION_METRICS, *HELD_OUT_METRICS), panels)


def drawn_lines(drawn: Sequence[TrainedGroup]) -> list[str]:
    """The part of a report about what a step drew: of some prompts the best and the worst answer."""
    failed = sum(each.rewarded.rewards is None for each in drawn)
    apart = [each.rewarded for each in drawn if has_spread(each.rewarded.rewards)]
    found = ["\nDrawn in the last step (of a prompt the best answer and the worst, with their rewards)"]
    for each in apart[:SAMPLES]:
        answers = sorted(zip(each.rewards or (), each.group.answers, strict=True))
        found.append(f"  {one_line(each.group.reference or each.group.prompt, 90)}")
        for reward, text in (answers[-1], answers[0]):
            found.append(f"    {reward:.3f}  {one_line(text, 80) or '(nothing)'}")
    if failed:
        found.append(f"  {failed} of {len(drawn)} prompts have no rewards; failures.jsonl says why")
    if not apart:
        found.append("  the answers to each prompt have equal rewards, so nothing is learned from them")
    return found
