"""Validation during training: every set evaluated, its metrics named, its hypotheses written."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from itertools import chain, islice

from jax.sharding import Mesh

from jaxthd.config import ValidationSet
from jaxthd.data.dataset import SpeechData
from jaxthd.inference.evaluator import Evaluator
from jaxthd.inference.preference_evaluator import PreferenceEvaluator
from jaxthd.objectives.metric import VALIDATION
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import local_rows
from jaxthd.run.outputs import OutputFolder
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import TrainState, averaged


class Validation:
    """Evaluates a run's states on up to train.validation_batches batches of each validation set.

    Calling it rewrites hypotheses.jsonl with the hypotheses and references of all sets. All processes call
    it, and get the same.
    with_reference: adds the log-probabilities of a reference policy that the run does not hold to a host
        batch of preferences.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        mesh: Mesh,
        data: SpeechData,
        outputs: OutputFolder,
        with_reference: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self._with_reference = with_reference
        self._config, self._data, self._outputs = blueprint.config, data, outputs
        self._rows = local_rows(mesh, blueprint.config.data.rows)
        self._evaluate = Evaluator(blueprint, mesh, data.stop_ids)
        self._blueprint, self._mesh = blueprint, mesh

    def is_due(self, step: int) -> bool:
        """Whether to validate after this step: every train.validate_every steps, and at the end."""
        every = self._config.train.validate_every
        return bool(every and self._data.has_validation) and (
            step == self._config.train.steps or step % every == 0
        )

    def __call__(self, state: TrainState) -> dict[str, float]:
        """Returns the metrics in the form of a metrics line. state: in its device layout."""
        state = averaged(state) if self._config.train.validate_ema else state
        sets, scores, lines = self._config.data.validation_sets, [], []
        for each in sets:
            scores.append(self._preferences(state, each))
            if not self._data.validation_examples(each.name):  # it has preferences alone
                continue
            with closing(self._data.validation(self._rows, each.name)) as batches:
                found = self._evaluate(state, islice(batches, self._config.train.validation_batches))
            scores[-1] = found.scores | scores[-1]
            name = {"set": each.name} if each.is_named else {}
            lines += [name | hypothesis._asdict() for hypothesis in found.hypotheses]
        self._outputs.write_lines("hypotheses.jsonl", lines)
        return validation_metrics(sets, scores)

    @cached_property
    def _compare(self) -> PreferenceEvaluator:
        return PreferenceEvaluator(self._blueprint, self._mesh)

    def _preferences(self, state: TrainState, which: ValidationSet) -> dict[str, float]:
        """The scores of the set's preferences; {} where it has none."""
        batches = self._data.validation_preferences(self._rows, which.name)
        if batches is None:
            return {}
        with closing(batches):
            some = islice(batches, self._config.train.validation_batches)
            return self._compare(state, ((self._with_reference(batch), report) for batch, report in some))


def validation_metrics(
    sets: Sequence[ValidationSet], scores: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """The scores of all sets in the form of a metrics line.

    validation_NAME is the unweighted mean over the sets that have NAME; for documents it is the sum.
    A set with a name of its own also has validation_SET_NAME.
    """
    line = {}
    for name in dict.fromkeys(chain(*scores)):
        found = [of_set[name] for of_set in scores if name in of_set]
        line[VALIDATION + name] = sum(found) / (1 if name.endswith("documents") else len(found))
    for each, of_set in zip(sets, scores, strict=True):
        if each.is_named:
            line |= {f"{VALIDATION}{each.name}_{name}": score for name, score in of_set.items()}
    return line
