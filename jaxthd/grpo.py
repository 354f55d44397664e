"""Trains by reinforcement learning: draws answers, rewards them, and trains on both (GRPO).

    jaxthd grpo configs/grpo.py                      starts runs/grpo, or continues it
    jaxthd grpo runs/grpo --train.steps 400          continues it with its own settings but that

Each step draws rollout.group_size answers to each of rollout.prompts prompts of the training data, rewards
them with rollout.rewards, and makes rollout.epochs x rollout.updates updates from them. A workdir that holds
a checkpoint is continued, on any mesh. It receives
    metrics.jsonl      a JSON object for each step; the same for the trackers: TensorBoard in tensorboard/
    rollouts.jsonl     every answer that was drawn, with its rewards
    curves.png         reward, length, KL, word error rate over the steps
    hypotheses.jsonl   hypotheses and references of the last validation
    skipped.jsonl      every prompt that was skipped, with the reason
    failures.jsonl     every reward that a function failed to give, with its prompt
    checkpoints/       parameters, optimizer state, reference policy, position in the prompts
    config.json        the settings of the run; changes.jsonl, tokenizer/ as for jaxthd train

Several processes can train together, as with jaxthd train. Each computes the rewards of a share of the
groups.
"""

import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.config import Config
from jaxthd.data.dataset import SpeechData
from jaxthd.errors import readable_errors
from jaxthd.figures.curves import draw_curves
from jaxthd.inference.validation import Validation
from jaxthd.parallel.mesh import make_mesh
from jaxthd.parallel.processes import is_first, require_same
from jaxthd.planning.layout_choice import keep_layout, with_layout
from jaxthd.posttraining.groups import Collected, Collector
from jaxthd.posttraining.held_out import HeldOut
from jaxthd.posttraining.metrics import GRPOFacts, grpo_line
from jaxthd.posttraining.shared_rewards import SharedRewards
from jaxthd.posttraining.updates import Update, UpdateMaker
from jaxthd.rewards.rewarder import Rewarder
from jaxthd.run.before import run_before
from jaxthd.run.continuing import OPTIONS, changed_settings, newest_state, require_objective, workdir_of
from jaxthd.run.goodput import TimeAccount, stored_seconds
from jaxthd.run.measured_by import measured_by
from jaxthd.run.metrics import time_line
from jaxthd.run.metrics_file import open_metrics, read_metrics
from jaxthd.run.nonfinite import NonFiniteSteps
from jaxthd.run.outputs import OutputFolder
from jaxthd.run.profile import profiled
from jaxthd.run.signals import StopRequests
from jaxthd.run.startup import devices_ready, prepared
from jaxthd.run.workdir import OpenedRun, opened
from jaxthd.steps.accumulation import AccumulatedStep
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.reference_scores import make_refresh
from jaxthd.steps.state import TrainState, canonical_form
from jaxthd.terminal.arguments import parse_command_line
from jaxthd.terminal.leaving import ends_in_time


def main(argv: list[str] | None = None) -> None:
    line = parse_command_line("grpo", argv, OPTIONS, __doc__)
    workdir = workdir_of(line)
    require_objective(line.config, draws=True)
    run_before(line, workdir)
    with devices_ready(line.config.mesh, line.options):
        grpo(line.config, workdir, changes=line.given)


def grpo(config: Config, workdir: Path, changes: Collection[str] = ()) -> None:
    """Runs, or continues, the training in `workdir` up to config.train.steps, or until a signal
    asks it to stop (jaxthd.run.signals).

    changes, and several processes: as for jaxthd.train.train. Raises UserError as that does, for reward
    functions that cannot be used or fail too often, and where drawing and training disagree
    (rollout.max_logprob_difference).
    """
    require_objective(config, draws=True)
    given, start = config, time.monotonic()
    config = prepared(with_layout(config, workdir))
    with ExitStack() as stack:
        held = stack.enter_context(opened(workdir, given, changes))
        account = stack.enter_context(TimeAccount(workdir, start))
        require_same("the configuration", asdict(config))
        keep_layout(given, config, workdir)
        outputs = OutputFolder(workdir)
        data = stack.enter_context(closing(SpeechData(config, workdir)))
        rewarder = stack.enter_context(Rewarder.of(config))
        for warning in rewarder.warnings:
            print(f"warning: the reward function {warning.function}, {warning.key}: {warning.reason}")
        stopping = stack.enter_context(StopRequests(config.train.max_seconds, account.began))
        folder, keep, best_by = workdir / "checkpoints", config.train.keep_checkpoints, config.train.best_by
        checkpoints = stack.enter_context(Checkpoints(folder, keep, best_by, measured_by(config, data)))
        rewards = SharedRewards(rewarder)
        steps_done = _train(config, held, outputs, data, rewards, checkpoints, account, stopping)
        account.switch("saving")  # the last checkpoint is written while all is closed
    if steps_done and is_first():
        draw_curves(read_metrics(workdir), workdir / "curves.png", stored_seconds(workdir))


def _train(
    config: Config,
    held: OpenedRun,
    outputs: OutputFolder,
    data: SpeechData,
    rewards: SharedRewards,
    checkpoints: Checkpoints,
    account: TimeAccount,
    stopping: StopRequests,
) -> int:
    """Returns the number of steps that it has trained."""
    # --- the model on the mesh, and the programs ---
    blueprint, mesh = Blueprint(config), make_mesh(config.mesh)
    make_updates, update = UpdateMaker(blueprint, mesh), AccumulatedStep(blueprint, mesh)
    refresh, refresh_every = make_refresh(blueprint, mesh), config.posttraining.reference_every
    validation = Validation(blueprint, mesh, data, outputs)
    prompts = data.prompts()
    collect = Collector(config, mesh, prompts, rewards)
    held_out = HeldOut(config, data, collect, rewards, outputs)
    validate = account.timed("validating", lambda state, step: validation(state) | held_out(state, step))
    save = account.timed("saving", checkpoints.save)
    with ExitStack() as stack:
        # --- the newest checkpoint, or a new run ---
        state = newest_state(blueprint, mesh, checkpoints, prompts)
        first, steps = int(state.step) // config.updates_of_a_step, config.train.steps
        if first:
            print(f"continuing from step {first} in {outputs.path}")
        if first >= steps:
            print(f"{outputs.path} already holds step {first} of {steps}: nothing to do")
            return 0
        changed = changed_settings(held.keep(first), first)
        for name in ("rollouts.jsonl", "failures.jsonl"):
            outputs.keep_lines(name, lambda line: line["step"] <= first)
        metrics = stack.enter_context(open_metrics(outputs.path, first, config, account))
        non_finite = NonFiniteSteps(outputs, first, config.updates_of_a_step, metrics.say)
        stopping.listen()
        if first == 0 and validation.is_due(0):
            metrics.step({"step": 0, **validate(state, 0), **time_line(account.seconds)})
        account.switch("stepping")
        wanted, path = range(first + 1, steps + 1), outputs.path
        numbers = profiled(wanted, config.train, path, metrics.say, account.during)
        for step in stack.enter_context(numbers):
            began = time.perf_counter()
            # --- draw and reward ---
            collected = _collected(collect, state, step, account)
            _record(outputs, collected, step)

            # --- pack, with the log-probabilities of the policy that drew, and of the reference ---
            scoring = time.perf_counter()
            updates = make_updates(state, [group.document for group in collected.groups])

            # --- train ---
            training = time.perf_counter()
            state, results = _updated(state, update, updates * config.rollout.epochs)
            if refresh_every and step % refresh_every == 0:
                state = refresh(state)

            # --- measure, validate, save ---
            ended = time.perf_counter()
            seconds = {"scoring": training - scoring, "training": ended - training, "step": ended - began}
            programs = sum(x.compilations for x in (collect.rollouts, make_updates, update))
            times, skipped = collected.seconds | seconds, data.skipped.total
            facts = GRPOFacts(step, collected, updates, results, times, programs, skipped, mesh.size)
            stopped = stopping()
            last = bool(stopped) or step == steps
            validated = validate(state, step) if validation.is_due(step) else {}
            line = grpo_line(facts) | time_line(account.seconds)
            metrics.step(line | validated | (changed if step == first + 1 else {}))
            data.watch(metrics.say)
            in_a_row = max((x.skipped_in_a_row for x in results), default=0)
            if in_a_row:
                non_finite.add(line, [group.prompt.example.key for group in collected.groups], in_a_row)
            if last or validated or step % config.train.checkpoint_every == 0:
                save(step, canonical_form(state, blueprint, mesh), prompts.get_state(), validated)
            if last:
                break
        if step < steps:
            metrics.say(f"stopped {stopped} after step {step}, which is saved: the same command continues")
    return step - first


def _collected(collect: Collector, state: TrainState, step: int, account: TimeAccount) -> Collected:
    """The groups of a step. What that takes is drawing, and waiting for prompts and rewards."""
    with account.during("drawing"):
        collected = collect(state.params, state.buffers, step)
        account.move(collected.seconds["reading"], "data_wait")
        account.move(collected.seconds["reward"], "reward_wait")
    return collected


def _record(outputs: OutputFolder, collected: Collected, step: int) -> None:
    """Appends what a step drew, and the rewards that it did not get."""
    outputs.append_lines("rollouts.jsonl", (x for group in collected.drawn for x in group.lines(step)))
    outputs.append_lines("failures.jsonl", (group.failure_line(step) for group in collected.failed))


def _updated(
    state: TrainState, update: AccumulatedStep, updates: Sequence[Update]
) -> tuple[TrainState, list[Any]]:
    """The state after the updates, and the StepMetrics of each as Python numbers; of those that train."""
    results = []
    for each in updates:
        if each.is_empty:
            state = update.nothing(state)
            continue
        state, on_device = update(state, each.batches)
        results.append(jax.tree.map(lambda x: x.item(), on_device))
    return state, results


if __name__ == "__main__":
    with ends_in_time(), readable_errors():
        main()
