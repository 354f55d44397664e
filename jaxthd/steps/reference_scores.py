"""The programs of the reference policy: the log-probabilities that it gives, and a new copy of the policy.

steps/reference.py says what the reference is.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
from jax import Array
from jax.sharding import Mesh

from jaxthd.models.adapt import join, without_lora
from jaxthd.objectives.objective import OLD, REFERENCE
from jaxthd.packing.batch import Batch
from jaxthd.steps.blueprint import Blueprint, Tree
from jaxthd.steps.forward import objective_of, policy_temperature
from jaxthd.steps.reference import has_reference, is_base, is_cached, reference_of
from jaxthd.steps.scoring import shared_scoring_step
from jaxthd.steps.state import TrainState, state_shardings


def make_reference_scores(blueprint: Blueprint, mesh: Mesh) -> Callable[[Tree, Tree, Tree, Batch], Array]:
    """(params, TrainState.reference, buffers, batch) -> the reference's log-probability of every supervised
    position's target, [R, T], 0 elsewhere. One compiled program. The arrays are in their device layout.
    """
    config = blueprint.config
    by_base = is_base(config)
    if by_base:
        blueprint = Blueprint(replace(config, adapt=replace(config.adapt, lora_rank=0, dora=False)))
    scores = shared_scoring_step(blueprint, mesh, policy_temperature(config))

    def run(params: Tree, reference: Tree, buffers: Tree, batch: Batch) -> Array:
        """Log-probabilities of the batch's tokens by the reference."""
        own = params if reference is None else join(reference, params)
        return scores(without_lora(own) if by_base else own, buffers, batch).log_probs

    return run


def make_with_scores(blueprint: Blueprint, mesh: Mesh) -> Callable[[TrainState, Batch], Batch]:
    """(state, batch) -> the batch with the log-probabilities that the objective reads: those of the
    reference, unless it is cached, and those of the policy before the update (Objective.scored).
    """
    config, scored = blueprint.config, objective_of(blueprint.config).scored
    programs: dict[str, Callable[[TrainState, Batch], Array]] = {}
    if has_reference(config) and not is_cached(config):
        reference = make_reference_scores(blueprint, mesh)
        programs[REFERENCE] = lambda state, batch: reference(
            state.params, state.reference, state.buffers, batch
        )
    if OLD in scored:
        own = shared_scoring_step(blueprint, mesh, policy_temperature(config))
        programs[OLD] = lambda state, batch: own(state.params, state.buffers, batch).log_probs

    def with_scores(state: TrainState, batch: Batch) -> Batch:
        """The batch with the scores that it lacks."""
        missing = [name for name in programs if name not in batch.extras]
        found = {name: programs[name](state, batch) for name in missing}
        return batch._replace(extras={**batch.extras, **found}) if found else batch

    return with_scores


def make_refresh(blueprint: Blueprint, mesh: Mesh) -> Callable[[TrainState], TrainState]:
    """(state) -> the state whose reference policy is its policy."""
    on = state_shardings(blueprint, mesh).reference
    copy = jax.jit(partial(reference_of, blueprint), out_shardings=on)
    return lambda state: state._replace(reference=copy(state.params))
