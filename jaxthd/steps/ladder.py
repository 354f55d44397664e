"""The training step at every rung of a ladder of buffer sizes: a program each, of one state.

What a step computes does not depend on the rung: padding slots change no loss, no gradient and no statistic.
"""

from typing import Any

from jax.sharding import Mesh

from jaxthd.config import Config
from jaxthd.packing.batch import Batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.reference_scores import make_with_scores
from jaxthd.steps.state import TrainState
from jaxthd.steps.training import StepMetrics, make_train_step


class LadderStep:
    """(rung, state, batch) -> (state, metrics): make_train_step's of that rung, with the log-probabilities
    that the objective reads. A rung's program is compiled when its first batch comes; the old state's memory
    is reused.
    """

    def __init__(self, blueprint: Blueprint, mesh: Mesh) -> None:
        blueprints = rung_blueprints(blueprint)
        self._steps: list[Any] = [make_train_step(each, mesh) for each in blueprints]
        self._with_scores = [make_with_scores(each, mesh) for each in blueprints]

    def __call__(self, rung: int, state: TrainState, batch: Batch) -> tuple[TrainState, StepMetrics]:
        stepped: tuple[TrainState, StepMetrics] = self._steps[rung](
            state, self._with_scores[rung](state, batch)
        )
        return stepped

    @property
    def compilations(self) -> int:
        """Programs compiled so far for the steps themselves: one for each rung that was used."""
        return sum(step._cache_size() for step in self._steps)


def rung_blueprints(blueprint: Blueprint) -> list[Blueprint]:
    """Those of all rungs. The largest is the given one; parameters and stages are the same for all."""
    return [*map(Blueprint, rung_configs(blueprint.config)[:-1]), blueprint]


def rung_configs(config: Config) -> list[Config]:
    """The config at every rung: with buffers of one size."""
    return [config.at(rung) for rung in config.data.ladder]
