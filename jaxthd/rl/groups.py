"""The groups of a step: prompts, the answers drawn to them, their rewards and advantages."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float64

from jaxthd.config import Config
from jaxthd.data.prompts import Prompt, PromptStream
from jaxthd.data.text.answers import answer_form
from jaxthd.data.text.prompt import PromptTemplate, answer_of
from jaxthd.data.text.tokenizer import load_tokenizer
from jaxthd.objectives.grpo import ADVANTAGE, DRAWN, RECORDED
from jaxthd.packing.document import Document
from jaxthd.rl.rewards.advantages import advantages, has_spread
from jaxthd.rl.rewards.group import Group, Rewarded
from jaxthd.rl.rewards.rewarder import Rewarder
from jaxthd.rl.rollouts import Rollout, Rollouts
from jaxthd.steps.blueprint import Tree


class TrainedGroup(NamedTuple):
    """A prompt with its answers. advantages: of the answers; None where a reward function failed."""

    prompt: Prompt
    answers: tuple[Rollout, ...]
    rewarded: Rewarded
    advantages: Float64[np.ndarray, " G"] | None

    @property
    def document(self) -> Document:
        """The prompt with its answers, to be trained on."""
        assert self.advantages is not None
        lengths = [len(answer.tokens) for answer in self.answers]
        extras = {
            ADVANTAGE: [np.full(n, a) for n, a in zip(lengths, self.advantages, strict=True)],
            DRAWN: [answer.drawn_log_probs for answer in self.answers],
            RECORDED: [answer.log_probs for answer in self.answers],
        }
        return self.prompt.document.with_answers([answer.tokens for answer in self.answers], extras)

    def failure_line(self, step: int) -> dict[str, Any]:
        """The line of failures.jsonl, for a group without rewards."""
        failure = self.rewarded.failure
        return {"step": step, **(failure._asdict() if failure else {})}

    def lines(self, step: int) -> list[dict[str, Any]]:
        """Lines of rollouts.jsonl, one for each answer."""
        rewarded = self.rewarded
        found = []
        for number, (answer, text) in enumerate(zip(self.answers, rewarded.group.answers, strict=True)):
            line: dict[str, Any] = {"step": step, "key": rewarded.group.key, "answer": text}
            line |= {"reference": rewarded.group.reference, "tokens": len(answer.tokens)}
            line |= {"ended": answer.ended, "log_prob": float(np.sum(answer.log_probs))}
            if rewarded.rewards is not None and self.advantages is not None:
                own = {name: values[number] for name, values in rewarded.by_function.items()}
                line |= {"reward": rewarded.rewards[number], "rewards": own}
                line |= {"advantage": float(self.advantages[number])}
            else:
                line |= {"reward": None, "failure": rewarded.failure and rewarded.failure.reason}
            found.append(line)
        return found


class Collected(NamedTuple):
    """The draws of a step. groups: those to train on. drawn: all of them. rounds: how often it drew.

    seconds: of "resharding" the weights for another mesh, of "reading" prompts, of "rollout", which includes
    that, and of "reward", the waiting for rewards after the last answer.
    """

    groups: list[TrainedGroup]
    drawn: list[TrainedGroup]
    rounds: int
    seconds: dict[str, float]

    @property
    def failed(self) -> list[TrainedGroup]:
        """The groups without rewards."""
        return [group for group in self.drawn if group.rewarded.failure]


class Collector:
    """Draws, rewards and keeps the groups of a step. rollouts: the engine that it draws with."""

    def __init__(self, config: Config, mesh: Mesh, prompts: PromptStream, rewards: Rewarder) -> None:
        self._settings, self._seed = config.rollout, config.train.seed
        self._prompts, self._rewards = prompts, rewards
        self._placeholder = config.data.audio_placeholder
        self._tokenizer, self._form = load_tokenizer(config.data.tokenizer), answer_form(config.data.answer)
        self._stop_ids = PromptTemplate(config.data, self._tokenizer).stop_ids
        self.rollouts = Rollouts(config, mesh, stop_ids=self._stop_ids)

    def __call__(self, params: Tree, buffers: Tree, step: int) -> Collected:
        """The groups of a step. Draws depend on (train.seed, step, the prompt's key, the answer's number).

        With dynamic sampling, groups whose rewards are all equal are replaced by others, drawn to the next
        prompts, at most rollout.dynamic_sampling - 1 times.
        """
        wanted, most = self._settings.prompts, self._settings.dynamic_sampling
        kept: list[TrainedGroup] = []
        drawn: list[TrainedGroup] = []
        seconds = dict.fromkeys(("reading", "rollout", "reward"), 0.0)
        if self.rollouts.has_own_mesh:
            start = time.perf_counter()
            params, buffers = self.rollouts.on_own_mesh(params, buffers)
            seconds["resharding"] = time.perf_counter() - start
        rounds = 0
        times: Counter[str] = Counter()
        while len(kept) < wanted and rounds < most:
            found = self._draw(params, buffers, step, wanted - len(kept), times, seconds)
            rounds += 1
            drawn += found
            kept += [
                each
                for each in found
                if each.advantages is not None and (most == 1 or has_spread(each.rewarded.rewards))
            ]
        return Collected(kept, drawn, rounds, seconds)

    def _draw(
        self,
        params: Tree,
        buffers: Tree,
        step: int,
        count: int,
        times: Counter[str],
        seconds: dict[str, float],
    ) -> list[TrainedGroup]:
        """times: how often each prompt has been drawn to in this step. seconds: added to."""
        start = time.perf_counter()
        prompts = self._prompts.take(count)
        seconds["reading"] += time.perf_counter() - start
        documents = [_again(prompt.document, times) for prompt in prompts]
        answers: dict[int, tuple[Rollout, ...]] = {}
        stream = self.rollouts.stream(params, buffers, documents, seed=self._seed, step=step)
        for number, of_prompt in stream:  # rewards are computed while others are drawn
            answers[number] = tuple(of_prompt)
            self._rewards.submit(number, self.as_group(prompts[number], of_prompt))
        ended = time.perf_counter()
        rewarded = self._rewards.collect()
        found = advantages(
            [each.rewards for each in rewarded],
            leave_one_out=self._settings.advantages.startswith("leave_one_out"),
            normalise=self._settings.advantages.endswith("normalised"),
        )
        seconds["rollout"] += ended - start
        seconds["reward"] += time.perf_counter() - ended
        return [
            TrainedGroup(prompt, answers[number], rewarded[number], found[number])
            for number, prompt in enumerate(prompts)
        ]

    def as_group(self, prompt: Prompt, answers: Sequence[Rollout]) -> Group:
        """The group that reward functions get: a prompt and the answers drawn to it, as texts."""
        parts = [part for turn in prompt.question for part in turn.parts]
        texts = (answer_of(answer.tokens.tolist(), self._stop_ids)[0] for answer in answers)
        return Group(
            key=prompt.example.key,
            prompt=" ".join(part if isinstance(part, str) else self._placeholder for part in parts),
            reference=prompt.reference,
            fields=prompt.example.fields,
            answers=tuple(self._form.read(self._tokenizer.decode(text)) for text in texts),
            tokens=tuple(len(answer.tokens) for answer in answers),
            ended=tuple(answer.ended for answer in answers),
        )


def _again(prompt: Document, times: Counter[str]) -> Document:
    """The prompt, with another key where its step has drawn to it before: its draws depend on the key."""
    times[prompt.key] += 1
    number = times[prompt.key]
    return prompt if number == 1 else replace(prompt, key=f"{prompt.key}#{number}")
