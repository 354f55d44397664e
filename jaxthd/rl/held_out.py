"""Measures a policy on held-out prompts: rewards of its answers, and how often it can be right."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData
from jaxthd.inference.wer import make_normaliser
from jaxthd.objectives.metric import VALIDATION, Metric, measured
from jaxthd.rl.groups import Collector
from jaxthd.rl.rewards.group import Rewarded
from jaxthd.rl.rewards.rewarder import Rewarder
from jaxthd.run.outputs import OutputFolder
from jaxthd.steps.blueprint import Tree
from jaxthd.steps.state import TrainState, averaged

VALIDATION_STEP = 0
"""The step that validation's draws depend on: the random numbers are the same at every validation."""


class HeldOutFacts(NamedTuple):
    """The draws of a validation. greedy: groups of one answer each, the likeliest tokens. drawn: groups of
    rollout.group_size answers, in the same order. right: of each prompt with a reference, which of its drawn
    answers are equal to it.
    """

    greedy: Sequence[Rewarded]
    drawn: Sequence[Rewarded]
    right: Sequence[Sequence[bool]]


def _mean_reward(groups: Sequence[Rewarded], *, best: bool = False) -> float | None:
    """The mean over groups of the mean reward, or of the best. Groups without rewards are left out."""
    rewards = [each.rewards for each in groups if each.rewards]
    return float(np.mean([max(x) if best else np.mean(x) for x in rewards])) if rewards else None


HELD_OUT_METRICS: list[Metric] = [
    Metric(
        "reward",
        "",
        "mean reward of the likeliest answers to the first rollout.validation_prompts held-out prompts",
        lambda x: _mean_reward(x.greedy),
        "{:.3f}",
        odd="It falls while reward rises: the policy learns the training prompts by heart, or the draws. "
        "train.best_by reward keeps the best checkpoint.",
        shown="progress",
    ),
    Metric(
        "reward_drawn",
        "",
        "mean reward of rollout.group_size answers that are drawn to each of these prompts",
        lambda x: _mean_reward(x.drawn),
        "{:.3f}",
    ),
    Metric(
        "reward_best",
        "",
        "mean over these prompts of the best reward in the group",
        lambda x: _mean_reward(x.drawn, best=True),
        "{:.3f}",
        odd="Close to reward_drawn: all answers to a prompt are alike, and teach little.",
    ),
    Metric(
        "reward_failures",
        "prompts",
        "of these prompts, those without rewards; they are left out of the means",
        lambda x: float(len({y.group.key for y in chain(x.greedy, x.drawn) if y.rewards is None})),
        "{:,.0f}",
        odd="failures.jsonl lists them with their reasons.",
    ),
    Metric(
        "pass_at_1",
        "share",
        "drawn answers that equal the reference after train.normaliser, over the prompts that have one",
        lambda x: float(np.mean(x.right)) if len(x.right) else None,
        "{:.1%}",
        shown="summary",
    ),
    Metric(
        "pass_at_k",
        "share",
        "prompts that have a reference and to which one of the group's answers equals it",
        lambda x: float(np.any(x.right, axis=1).mean()) if len(x.right) else None,
        "{:.1%}",
        odd="Close to pass_at_1: nothing is left to find by drawing.",
        shown="summary",
    ),
]
"""Metrics of the validation of jaxthd grpo, where rollout.validation_prompts is not 0."""


class HeldOut:
    """Draws answers to the first rollout.validation_prompts items of the first validation set, and rewards
    them: the likeliest answer, and rollout.group_size others. It draws with the collector's engine, so no
    program is added.
    """

    def __init__(
        self,
        config: Config,
        data: SpeechData,
        collector: Collector,
        rewards: Rewarder,
        outputs: OutputFolder,
    ) -> None:
        self._collector, self._rewards, self._outputs = collector, rewards, outputs
        self._seed, self._of_averages = config.train.seed, config.train.validate_ema
        self._normalise = make_normaliser(config.train.normaliser)
        self._prompts = data.validation_prompts(config.rollout.validation_prompts)

    def __call__(self, state: TrainState, step: int) -> dict[str, float]:
        """HELD_OUT_METRICS in the form of a metrics line; {} where no prompt is wanted.

        Rewards that could not be computed are added to failures.jsonl, as of this step.
        """
        if not self._prompts:
            return {}
        state = averaged(state) if self._of_averages else state
        weights = self._collector.rollouts.on_own_mesh(state.params, state.buffers)
        greedy = self._rewarded(*weights, group_size=1, temperature=0.0)
        drawn = self._rewarded(*weights)
        failures = [each.failure for each in (*greedy, *drawn) if each.failure]
        self._outputs.append_lines(
            "failures.jsonl", ({"step": step, "validation": True, **x._asdict()} for x in failures)
        )
        groups = [each.group for each in drawn]
        right = [
            [self._normalise(answer) == self._normalise(group.reference) for answer in group.answers]
            for group in groups
            if group.reference is not None
        ]
        found = measured(HELD_OUT_METRICS, HeldOutFacts(greedy, drawn, right))
        return {VALIDATION + name: float(value) for name, value in found.items()}

    def _rewarded(self, params: Tree, buffers: Tree, **how: Any) -> list[Rewarded]:
        """how: as for Rollouts.stream."""
        documents = [prompt.document for prompt in self._prompts]
        groups = self._collector.rollouts.draw(
            params, buffers, documents, seed=self._seed, step=VALIDATION_STEP, **how
        )
        for number, (prompt, answers) in enumerate(zip(self._prompts, groups, strict=True)):
            self._rewards.submit(number, self._collector.as_group(prompt, answers))
        return self._rewards.collect(are_counted=False)
