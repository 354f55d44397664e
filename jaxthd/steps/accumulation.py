"""An update whose batch fills as many buffers as it needs: gradients are added up, batch by batch.

The counts of all batches come first, so every gradient is a share of the whole and the result does not depend
on how the documents lie in buffers.
"""

from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthd.kernels.programs import ProgramCount, together
from jaxthd.kernels.xla_options import jit_for
from jaxthd.packing.batch import Batch
from jaxthd.parallel.mesh import batch_specs, on_ranks
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.forward import Counts, count
from jaxthd.steps.state import TrainState, state_shardings
from jaxthd.steps.training import (
    Gradient,
    StepMetrics,
    gradient_specs,
    loss_and_gradient,
    make_update,
)


class AccumulatedStep:
    """(state, batches) -> (state, StepMetrics): one update from several batches on the mesh.

    Three programs, whatever the number of batches. The state is donated; the batches are not.
    """

    def __init__(self, blueprint: Blueprint, mesh: Mesh) -> None:
        config = blueprint.config
        everywhere: Any = PartitionSpec()
        counts = on_ranks(partial(count, config=config), mesh, (batch_specs(),), everywhere)
        # Two programs know its shapes, and it is traced once for both.
        gradient = jax.jit(loss_and_gradient(blueprint, mesh, counted=True), inline=True)
        update = make_update(blueprint, mesh)
        on = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec),
            gradient_specs(blueprint),
            is_leaf=lambda x: isinstance(x, PartitionSpec),
        )

        self._on = on

        def add(total: Gradient | None, state: TrainState, batch: Batch, counts: Counts) -> Gradient:
            """The sum of the gradients so far and a batch's; extremes are the largest."""
            found = gradient(state.params, state.buffers, batch, counts)
            if total is None:
                return found
            # Statistics are no sums: they stay as they are where an objective may be accumulated.
            largest = jax.tree.map(jnp.maximum, total.extremes, found.extremes)
            return jax.tree.map(jnp.add, total, found)._replace(buffers=found.buffers, extremes=largest)

        def zeros(state: TrainState, batch: Batch, counts: Counts) -> Gradient:
            """A gradient to begin the sum with, shaped as a batch's."""
            like = jax.eval_shape(partial(add, None), state, batch, counts)
            none = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
            return none._replace(extremes=jax.tree.map(lambda x: x - jnp.inf, none.extremes))

        self._count = jit_for(config, mesh, counts)
        self._zeros = jit_for(config, mesh, zeros, out_shardings=on)
        self._add = jit_for(config, mesh, add, donate_argnums=0, out_shardings=on)
        self._next = jax.jit(lambda step: step + 1, out_shardings=NamedSharding(mesh, everywhere))
        after = state_shardings(blueprint, mesh), NamedSharding(mesh, everywhere)
        self._update = jit_for(config, mesh, update, donate_argnums=0, out_shardings=after)

    def __call__(self, state: TrainState, batches: list[Batch]) -> tuple[TrainState, StepMetrics]:
        counts = reduce(partial(jax.tree.map, jnp.add), map(self._count, batches))
        total = self._zeros(state, batches[0], counts)
        for batch in batches:
            total = self._add(total, state, batch, counts)
        updated: tuple[TrainState, StepMetrics] = self._update(state, total)
        return updated

    def nothing(self, state: TrainState) -> TrainState:
        """The state after an update without a document: its step is counted, and no weight moves."""
        return state._replace(step=self._next(state.step))

    def lowered(self, state: TrainState, batch: Batch) -> dict[str, Any]:
        """The programs "gradient" (of one batch, added to those before) and "update", lowered. state, batch:
        shapes and shardings are enough."""
        programs: Any = self._count, self._zeros, self._add, self._update
        count, zeros, add, update = programs
        counts = jax.eval_shape(count, batch)
        total = jax.tree.map(
            lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on),
            jax.eval_shape(zeros, state, batch, counts),
            jax.tree.broadcast(self._on, jax.eval_shape(zeros, state, batch, counts)),
        )
        return {"gradient": add.lower(total, state, batch, counts), "update": update.lower(state, total)}

    @property
    def programs(self) -> ProgramCount:
        """The programs so far."""
        return together(each.count for each in (self._count, self._zeros, self._add, self._update))
