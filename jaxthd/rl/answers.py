"""Supplies a run's steps with answers that the policy draws: they are rewarded, packed, and trained on."""

import time
from collections.abc import Sequence
from typing import Any

import jax

from jaxthd.config import Config
from jaxthd.kernels.programs import together
from jaxthd.rl.display import drawing_display, drawn_lines
from jaxthd.rl.groups import Collected, Collector, TrainedGroup
from jaxthd.rl.held_out import HeldOut
from jaxthd.rl.metrics import GRPOFacts, combined, grpo_line
from jaxthd.rl.rewards.rewarder import Rewarder
from jaxthd.rl.updates import Update, UpdateMaker
from jaxthd.run.display import Display
from jaxthd.run.metrics import StepFacts
from jaxthd.run.supplier import Run, Say, Stepped, Supplier
from jaxthd.steps.accumulation import AccumulatedStep
from jaxthd.steps.state import TrainState


class AnswerSupplier(Supplier):
    """Each step draws answers to the next prompts, rewards them, and makes rollout.epochs x rollout.updates
    updates of them.

    Raises UserError for reward functions that cannot be used.
    """

    def __init__(self, run: Run) -> None:
        self._run, config = run, run.config
        self._rewarder = Rewarder.of(config)
        for warning in self._rewarder.warnings:
            print(f"warning: the reward function {warning.function}, {warning.key}: {warning.reason}")
        self._make_updates = UpdateMaker(run.blueprint, run.mesh)
        self._update = AccumulatedStep(run.blueprint, run.mesh)
        self._prompts = run.data.prompts()
        self._collect = Collector(config, run.mesh, self._prompts, self._rewarder)
        self._drawn: list[TrainedGroup] = []  # in the latest step
        self._held_out = HeldOut(config, run.data, self._collect, self._rewarder, run.outputs)

    @staticmethod
    def display(config: Config) -> Display:
        """The display of rewards and answers."""
        return drawing_display(config)

    def get_state(self) -> dict[str, Any]:
        """The position in the prompts."""
        return self._prompts.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on at that position in the prompts."""
        self._prompts.set_state(state)

    def begin(self, state: TrainState, first: int, say: Say) -> None:
        """Removes the lines of steps that run again from rollouts.jsonl and failures.jsonl."""
        for name in ("rollouts.jsonl", "failures.jsonl"):
            self._run.outputs.keep_lines(name, lambda line: line["step"] <= first)

    def step(self, state: TrainState, step: int) -> tuple[TrainState, Stepped]:
        """Draws, rewards, packs and trains."""
        began, run = time.perf_counter(), self._run
        # --- draw and reward ---
        collected = self._collected(state, step)

        # --- pack, with the log-probabilities of the policy that drew, and of the reference ---
        scoring = time.perf_counter()
        updates = self._make_updates(state, [group.document for group in collected.groups])

        # --- train ---
        training = time.perf_counter()
        state, results = self._updated(state, updates * run.config.rollout.epochs)

        # --- measure ---
        ended = time.perf_counter()
        seconds = collected.seconds | {"scoring": training - scoring, "training": ended - training}
        programs = together(x.programs for x in (self._collect.rollouts, self._make_updates, self._update))
        skipped = run.data.skipped.total
        facts = StepFacts(step, None, combined(updates), ended - began, programs, skipped, run.mesh.size)
        line = grpo_line(GRPOFacts(collected, updates, seconds), results, facts)
        in_a_row = max((x.skipped_in_a_row for x in results), default=0)
        keys = [group.prompt.example.key for group in collected.groups]
        return state, Stepped(line, lambda: keys, in_a_row)

    def held_out(self, state: TrainState, step: int) -> dict[str, float]:
        """The metrics of HeldOut."""
        return self._held_out(state, step)

    def end(self) -> list[str]:
        """Answers of the last step, for the report."""
        return drawn_lines(self._drawn)

    def close(self) -> None:
        """Ends the processes that compute rewards."""
        self._rewarder.close()

    def _collected(self, state: TrainState, step: int) -> Collected:
        """The groups of a step. Their time is that of drawing, and of waiting for prompts and rewards."""
        account, outputs = self._run.account, self._run.outputs
        with account.during("drawing"):
            collected = self._collect(state.params, state.buffers, step)
            account.move(collected.seconds["reading"], "data_wait")
            account.move(collected.seconds["reward"], "reward_wait")
        outputs.append_lines("rollouts.jsonl", (x for group in collected.drawn for x in group.lines(step)))
        outputs.append_lines("failures.jsonl", (group.failure_line(step) for group in collected.failed))
        self._drawn = collected.drawn
        return collected

    def _updated(self, state: TrainState, updates: Sequence[Update]) -> tuple[TrainState, list[Any]]:
        """The state after the updates, and the StepMetrics of those that train, as Python numbers."""
        results = []
        for each in updates:
            if each.is_empty:
                state = self._update.nothing(state)
                continue
            state, on_device = self._update(state, each.batches)
            results.append(jax.tree.map(lambda x: x.item(), on_device))
        return state, results
