"""The metrics of every run: each is one entry in a table, with its name, its unit and how it is derived.

To add one, write a Metric and add it to STEP_METRICS or VALIDATION_METRICS: it is then in metrics.jsonl and
in TensorBoard. In a metrics line, names of validation metrics begin with "validation_". What an objective
measures is described there (Objective.metrics).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxthd.data.loader import BatchReport
from jaxthd.kernels.programs import ProgramCount
from jaxthd.objectives.metric import Metric, Number, measured


class StepFacts(NamedTuple):
    """The known facts of a step that is done.

    results: StepMetrics (jaxthd.steps.training) of Python numbers. report: what its batch held.
    seconds: wall time of the step.
    programs: those of the training step so far.
    skipped_documents: so far in the run.
    devices: of the mesh. flops: what the step's documents ask for (jaxthd.planning.model_flops), None where
    that is unknown. peak_flops: most that a device can do in a second, None where that is unknown.
    """

    step: int
    results: Any
    report: BatchReport
    seconds: float
    programs: ProgramCount
    skipped_documents: int
    devices: int = 1
    flops: float | None = None
    peak_flops: float | None = None


class ValidationFacts(NamedTuple):
    """The sums over a validation set.

    nll: negative log-likelihood in nats, summed over `tokens` supervised tokens, of which `correct` were the
    likeliest. documents: their number. hypotheses: see jaxthd.inference.evaluator.Hypothesis.
    word_error_rate: NaN where no reference has a word or nothing was decoded.
    """

    nll: float
    correct: float
    tokens: float
    documents: int
    hypotheses: Sequence[Any]
    word_error_rate: float


def _utilisation(x: StepFacts) -> float | None:
    if x.flops is None or x.peak_flops is None:
        return None
    return x.flops / (x.seconds * x.devices * x.peak_flops)


def _audio_padding(x: StepFacts) -> float | None:
    room = x.report.audio_slots_seconds
    return 1 - x.report.audio_seconds / room if room else None


STEP_METRICS: list[Metric] = [
    Metric(
        "loss",
        "",
        "the loss that trains: that of train.objective, see below",
        lambda x: x.results.loss,
        "{:.4f}",
    ),
    Metric(
        "grad_norm",
        "",
        "norm of the gradient over all trained parameters, before clipping",
        lambda x: x.results.grad_norm,
        odd="Far over train.clip_norm for long: lower train.learning_rate or raise "
        "train.warmup_steps. 0: nothing is supervised, or everything is frozen (jaxthd describe "
        "--names).",
    ),
    Metric(
        "learning_rate",
        "",
        "the optimizer's learning rate in this step",
        lambda x: x.results.learning_rate,
        odd="It is the base rate, before the factors of adapt.lr_factors. It follows train.schedule "
        "and train.steps: changes of these change it at once.",
    ),
    Metric(
        "skipped_updates",
        "steps",
        "updates skipped so far, since loss or gradient was not finite",
        lambda x: x.results.skipped,
        odd="More than a few: not_finite.jsonl lists their documents. Look for faulty audio; lower "
        "train.learning_rate.",
    ),
    Metric(
        "compilations",
        "programs",
        "programs made for the training step since the command started, those from the cache included; 1 is "
        "expected, and with jaxthd grpo several, in its first step alone",
        lambda x: x.programs.made,
        odd="More than that: batches have other shapes, which costs a compilation each.",
    ),
    Metric(
        "cached_compilations",
        "programs",
        "of these, those that were read from the cache on disk (JAX_COMPILATION_CACHE_DIR), not compiled",
        lambda x: x.programs.read,
        odd="0 where a run is continued on the same machine with the same settings: the cache's folder does "
        "not stay.",
    ),
    Metric(
        "skipped_documents",
        "documents",
        "documents and manifest lines skipped so far in the run; skipped.jsonl lists them",
        lambda x: x.skipped_documents,
        odd="skipped.jsonl has each with its reason. Raise the capacity that the reasons name, or "
        "correct the data.",
    ),
    Metric(
        "mtp_loss",
        "nats a target",
        "the same loss of multi-token prediction, the mean over its depths",
        lambda x: x.results.mtp_loss,
        "{:.4f}",
        odd="Above loss, and it falls more slowly: each depth has one more token to guess.",
    ),
    Metric(
        "ctc_loss",
        "nats a label",
        "mean negative log-likelihood of CTC over the labels that it covers",
        lambda x: x.results.ctc_loss,
        "{:.4f}",
        odd="If it stays where it began, look at ctc_uncovered: too few documents are aligned.",
    ),
    Metric(
        "ctc_uncovered",
        "share",
        "documents with audio that the CTC loss does not cover: without labels, with more than "
        "train.ctc_max_labels, or with more than their encoder frames can be aligned with",
        lambda x: x.results.ctc_uncovered,
        "{:.1%}",
        odd="Large: use a tokenizer with longer tokens, or raise train.ctc_max_labels.",
    ),
    Metric(
        "max_expert_load",
        "ratio",
        "tokens of the busiest expert over the mean of its layer; the largest of all layers",
        lambda x: x.results.max_expert_load,
        odd="Over 2 for long: raise train.router_bias_rate or train.aux_loss.",
    ),
    Metric(
        "aux_loss",
        "",
        "auxiliary loss that evens out the experts' load; 1 for an even load",
        lambda x: x.results.aux_loss,
        odd="Far over 1: experts are used unevenly; raise train.aux_loss.",
    ),
    Metric(
        "real_tokens",
        "tokens",
        "token slots that hold a document's token",
        lambda x: x.report.real_tokens,
    ),
    Metric(
        "padding_tokens",
        "slots",
        "token slots that hold padding",
        lambda x: x.report.capacity_tokens - x.report.real_tokens,
        odd="See padding_ratio.",
    ),
    Metric(
        "capacity_tokens",
        "slots",
        "token slots of the step's buffers",
        lambda x: x.report.capacity_tokens,
    ),
    Metric(
        "supervised_tokens",
        "tokens",
        "tokens that the loss is over",
        lambda x: x.report.supervised_tokens,
        odd="0 in a step: no document there has an answer. Its loss is 0 and it teaches nothing.",
    ),
    Metric(
        "documents",
        "documents",
        "documents of the step",
        lambda x: x.report.documents,
        odd="At data.max_documents in every buffer: raise that.",
    ),
    Metric(
        "audio_seconds",
        "s",
        "audio of the step",
        lambda x: x.report.audio_seconds,
    ),
    Metric(
        "imbalance",
        "ratio",
        "attention work of the busiest context rank over the mean; the largest of the step's buffers",
        lambda x: x.report.imbalance,
        odd="Over 1.2 with context ranks: raise data.max_documents, or compare compute.context_layout "
        "with jaxthd plan.",
    ),
    Metric(
        "padding_ratio",
        "share",
        "padding_tokens over capacity_tokens",
        lambda x: 1 - x.report.real_tokens / x.report.capacity_tokens,
        "{:.1%}",
        odd="Over 0.1: a line on the terminal says what fills the buffers instead; jaxthd plan "
        "proposes capacities.",
    ),
    Metric(
        "audio_padding_ratio",
        "share",
        "audio frames of the step's buffers that hold no audio, over all that they have room for; not "
        "without audio arrays",
        _audio_padding,
        "{:.1%}",
        odd="Over 0.3: lower data.audio_capacity (jaxthd plan compares sizes).",
    ),
    Metric(
        "target_to_input_ratio",
        "share",
        "supervised_tokens over capacity_tokens, as NeMo's speechlm2 reports it",
        lambda x: x.report.supervised_tokens / x.report.capacity_tokens,
        "{:.1%}",
        odd="Low is normal for speech: a word is one or two tokens, and its sound five frames.",
    ),
    Metric(
        "tokens_per_second",
        "tokens/s",
        "real_tokens over step_seconds",
        lambda x: x.report.real_tokens / x.seconds,
        "{:,.0f}",
        odd="Compare runs by this at equal padding only.",
    ),
    Metric(
        "device_tokens_per_second",
        "tokens/s",
        "tokens_per_second over the devices of the mesh",
        lambda x: x.report.real_tokens / x.seconds / x.devices,
        "{:,.0f}",
        odd="It falls as devices are added: jaxthd estimate says what they send to one another.",
    ),
    Metric(
        "model_flops_utilisation",
        "share",
        "operations that the documents ask for (products with weights, forward and backward; no padding, no "
        "recomputation) over what the devices can do in step_seconds; where the peak of the device in "
        "bfloat16 is known (jaxthd/kernels/machine.py), and compute.dtype is that",
        _utilisation,
        "{:.1%}",
        odd="Low: look at padding_ratio and data_wait_seconds first, then at a profile (train.profile).",
    ),
    Metric(
        "step_seconds",
        "s",
        "wall time of the step, its wait for the batch included",
        lambda x: x.seconds,
        odd="Uneven: the step waits for data. Raise data.workers (scripts/bench_loader.py).",
    ),
]
"""Metrics of every training step."""

_CAUSES = {
    "starting": (
        "starting the command: Python, devices, data sets, and everything else before the first step",
        "Often a slow file system, which a container image or a local copy of the environment avoids.",
    ),
    "restoring": (
        "reading a checkpoint, and checking it",
        "A slow file system: put the workdir on a faster one.",
    ),
    "stepping": ("the steps themselves; of jaxthd grpo scores and updates", ""),
    "drawing": (
        "drawing answers in jaxthd grpo; not in lines of runs that draw none",
        "More than stepping: raise rollout.answers_at_once, or draw on another mesh (rollout.mesh).",
    ),
    "compiling": (
        "tracing and compiling, of all programs, or reading them from the cache",
        "A large share: set JAX_COMPILATION_CACHE_DIR to a folder that stays.",
    ),
    "data_wait": (
        "devices without work, because their batch was not ready",
        "Raise data.workers (scripts/bench_loader.py).",
    ),
    "reward_wait": (
        "waiting for rewards after the last answer of a step; not in lines of runs that draw none",
        "Make the reward functions faster. They run on half of the machine's cores.",
    ),
    "validating": (
        "validation",
        "Raise train.validate_every; lower train.validation_batches or train.max_new_tokens.",
    ),
    "saving": ("waiting for checkpoints to be saved", "Raise train.checkpoint_every."),
    "lost": (
        "steps that ran, and run again, because a kill came before they were saved: their stepping_seconds, "
        "data_wait_seconds and validating_seconds",
        "Lower train.checkpoint_every; let SIGTERM or train.max_seconds stop the run, which saves.",
    ),
    "stalled": (
        "pauses in which nothing was done, far longer than any before",
        "The log names the process that held the run up, with its stack.",
    ),
    "other": ("all the rest; in older runs, starting and restoring", ""),
}
CAUSES = tuple(_CAUSES)
"""Names of the causes that a run's time goes to (jaxthd.run.goodput)."""
OF_DRAWING = ("drawing", "reward_wait")
"""Causes that only runs have which draw answers."""


def _of_cause(seconds: Mapping[str, float], cause: str) -> float | None:
    found = round(seconds.get(cause, 0.0), 3)
    return found if found or cause not in OF_DRAWING else None


TIME_METRICS: list[Metric] = [
    Metric(
        "goodput",
        "share",
        "stepping_seconds, and drawing_seconds, over the seconds of all causes",
        lambda x: (x["stepping"] + x.get("drawing", 0.0)) / max(sum(x.values()), 1e-9),
        "{:.1%}",
        odd="The largest of the other causes says what to change.",
    ),
    *(
        Metric(f"{cause}_seconds", "s", meaning, lambda x, cause=cause: _of_cause(x, cause), odd=odd)  # type: ignore[misc]
        for cause, (meaning, odd) in _CAUSES.items()
    ),
]
"""Metrics of every line: seconds since the run began, over all its commands, by cause; not those between."""


class PreferenceFacts(NamedTuple):
    """Means over the preferences of a validation set. loss: of the objective, over pairs or answers.
    accuracy, margin: means over pairs; None without any. documents: their number.
    """

    loss: float
    accuracy: float | None
    margin: float | None
    documents: int


PREFERENCE_METRICS: list[Metric] = [
    Metric(
        "preference_loss",
        "",
        "the objective's loss of the set's preferences, DPO's without its sft_weight",
        lambda x: x.loss,
        "{:.4f}",
        odd="It rises while loss falls: the training pairs are learned by heart. See train.best_by.",
        shown="summary",
    ),
    Metric(
        "preference_accuracy",
        "share",
        "pairs whose chosen answer gained more over the reference policy than the rejected one",
        lambda x: x.accuracy,
        "{:.1%}",
        odd="0 before training, where all rewards are equal.",
        shown="progress",
    ),
    Metric(
        "preference_margin",
        "nats",
        "mean of the chosen answer's reward less the rejected one's, both times beta",
        lambda x: x.margin,
        "{:.3f}",
        shown="summary",
    ),
    Metric(
        "preference_documents",
        "documents",
        "lines of the set with preferences",
        lambda x: float(x.documents),
        "{:,.0f}",
    ),
]
"""Metrics of the preferences of a validation set, in a run that compares answers (DPO, KTO)."""

VALIDATION_METRICS: list[Metric] = [
    Metric(
        "loss",
        "nats a supervised token",
        "mean negative log-likelihood of the set's supervised tokens",
        lambda x: x.nll / x.tokens,
        "{:.4f}",
        odd="It rises while the training loss falls: the model learns the training set by heart. "
        "Stop, or use more data, data.spec_augment, or a lower rate.",
        shown="summary",
    ),
    Metric(
        "accuracy",
        "share",
        "supervised tokens that are the likeliest given the true tokens before them",
        lambda x: x.correct / x.tokens,
        "{:.1%}",
        odd="It is given the true tokens before, so it can be high while wer is bad: answers drift or "
        "do not end.",
        shown="summary",
    ),
    Metric(
        "documents",
        "documents",
        "documents of the set",
        lambda x: float(x.documents),
        "{:,.0f}",
        odd="Fewer than the set has: train.validation_batches bounds them, or some are skipped.",
    ),
    Metric(
        "wer",
        "share of words",
        "word error rate of the decoded answers: substitutions, deletions and insertions over words of the "
        "references, after train.normaliser",
        lambda x: None if math.isnan(x.word_error_rate) else x.word_error_rate,
        "{:.1%}",
        odd="Over 1: answers are longer than the references; see hypotheses.jsonl.",
        shown="summary",
    ),
    Metric(
        "cut_off",
        "share",
        "decoded answers that did not end within train.max_new_tokens: wer is that of cut answers",
        lambda x: sum(not h.ended for h in x.hypotheses) / len(x.hypotheses) if x.hypotheses else None,
        "{:.1%}",
        odd="Many before a model has learned to end its answers. Later: raise train.max_new_tokens.",
    ),
]
"""Metrics of every validation set, and of all of them: means over the sets, for documents the sum."""


def metrics_line(facts: StepFacts) -> dict[str, Any]:
    """A step's line of metrics.jsonl; the objective's own quotients come last, by their names."""
    return {"step": facts.step, **measured(STEP_METRICS, facts), **facts.results.objective}


def time_line(seconds: Mapping[str, float]) -> dict[str, Any]:
    """The fields of a line about the run's time. seconds: of each of CAUSES."""
    return measured(TIME_METRICS, seconds)


def values(lines: Iterable[Mapping[str, Any]], name: str) -> list[tuple[int, Number]]:
    """(step, value) of each line in which the metric is, and is finite."""
    return [(x["step"], x[name]) for x in lines if math.isfinite(x.get(name, math.nan))]
