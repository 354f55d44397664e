"""The training state: what it holds, where it lies on the mesh, and the form it is saved in.

While a run trains, each rank holds its shard of every parameter (parallel/params.py) and the layers of its
pipeline stages (parallel/stages.py): the device layout. A checkpoint holds the checkpoint layout: the same
arrays, names and shapes whatever the mesh is.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthd.models.adapt import join, split
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.models.stacks import from_stages, to_stages
from jaxthd.steps.blueprint import Blueprint, Tree, specs_of
from jaxthd.steps.optimizer import make_optimizer
from jaxthd.steps.reference import copied, reference_of


class TrainState(NamedTuple):
    """All that a step reads and writes; a checkpoint holds all of it.

    step: steps done, skipped ones included; int32 []. skipped, skipped_in_a_row: steps whose update was
    skipped because loss or gradient was not finite: in the whole run, and the latest ones without a break.
    params: of the whole model. buffers: state that no gradient trains. opt_state: of the parameters that
    train (models/adapt.py). reference: what the reference policy has of its own (steps/reference.py).
    ema: averages of the parameters that train, None for the others; None without train.ema_decay.
    """

    step: Array
    skipped: Array
    skipped_in_a_row: Array
    params: Tree
    buffers: Tree
    opt_state: Any
    reference: Tree = None
    ema: Tree = None


def _fresh(blueprint: Blueprint, params: Tree, buffers: Tree) -> TrainState:
    """The state before the first step."""
    own, _ = split(params, blueprint.trained)
    zero = jnp.zeros((), jnp.int32)
    opt_state = make_optimizer(blueprint).init(own)
    ema = own if blueprint.config.train.ema_decay else None
    return TrainState(zero, zero, zero, params, buffers, opt_state, reference_of(blueprint, params), ema)


def averaged(state: TrainState) -> TrainState:
    """The state with the averages in place of the parameters that train."""
    return state._replace(params=join(state.ema, state.params))


def abstract_state(blueprint: Blueprint) -> TrainState:
    """A run's state in the checkpoint layout, with shapes and dtypes for arrays; nothing is compiled."""
    return jax.eval_shape(lambda *weights: _fresh(blueprint, *weights), *blueprint.abstract_weights)


def state_shardings(blueprint: Blueprint, mesh: Mesh) -> TrainState:
    """NamedShardings of the device layout, in the places of the arrays."""
    return _shardings(blueprint, mesh, blueprint.model)


def canonical_shardings(blueprint: Blueprint, mesh: Mesh) -> TrainState:
    """NamedShardings of the checkpoint layout, in the places of the arrays."""
    return _shardings(blueprint, mesh, blueprint.canonical_model)


def _shardings(blueprint: Blueprint, mesh: Mesh, model: SpeechLM) -> TrainState:
    params, buffers = specs_of(model)
    everywhere: Any = PartitionSpec()
    state = abstract_state(blueprint)
    moments = moment_specs(state.opt_state, state.params, params)
    is_copied = copied(blueprint)
    reference = split(params, is_copied)[0] if any(jax.tree.leaves(is_copied)) else None
    ema = split(params, blueprint.trained)[0] if blueprint.config.train.ema_decay else None
    specs = TrainState(everywhere, everywhere, everywhere, params, buffers, moments, reference, ema)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def moment_specs(opt_state: Any, params: Tree, specs: Tree) -> Any:
    """PartitionSpecs of the optimizer's state, in the places of its arrays.

    params: those of the model, in the same form as opt_state. specs: their PartitionSpecs. A moment is
    sharded as its parameter is; a mean over one dim (Adafactor's v_row and v_col) as the other dims are.
    """
    shapes = {path: x.shape for path, x in _flat(params)}
    spec_of = dict(_flat(specs))

    def spec(path: tuple[Any, ...], x: Any) -> PartitionSpec:
        """The partition spec of a leaf of the optimizer's state: its parameter's, where the shapes agree."""
        names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        while names and names not in shapes:  # optax's own names come first
            names = names[1:]
        if not names:
            return PartitionSpec()
        shape = shapes[names]
        axes = [*spec_of[names], *[None] * (len(shape) - len(spec_of[names]))]
        if x.shape == shape:
            return spec_of[names]
        last_two = range(max(len(shape) - 2, 0), len(shape))
        missing = [d for d in last_two if x.shape == (*shape[:d], *shape[d + 1 :])]
        if not missing:  # a placeholder for each parameter of a stack
            return PartitionSpec(*axes[: x.ndim - 1])
        # Of a square matrix v_row has the rows; optax calls the larger dim the columns.
        dim = missing[-1] if path[-len(names) - 1].name == "v_row" else missing[0]
        return PartitionSpec(*axes[:dim], *axes[dim + 1 :])

    return jax.tree_util.tree_map_with_path(spec, opt_state)


def _flat(tree: Tree) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(names, leaf) of a nested dict."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return ((tuple(key.key for key in path), leaf) for path, leaf in leaves)


def _options_of_one_run() -> Any:
    """Compiler options of a program that runs once: on a CPU compiling takes most of its time, and half as
    long without the compiler's optimizations.
    """
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def init_state(blueprint: Blueprint, mesh: Mesh) -> TrainState:
    """A new run's state on its final shardings: were it moved by the first step, that would compile twice."""
    return jax.jit(
        lambda: to_stages(_fresh(blueprint, *blueprint.initial_weights()), blueprint.stages),
        out_shardings=state_shardings(blueprint, mesh),
        compiler_options=_options_of_one_run(),
    )()


def new_state(weights: tuple[Tree, Tree], blueprint: Blueprint, mesh: Mesh) -> TrainState:
    """A new run's state, in the device layout on the mesh, that starts from these weights.

    weights: (parameters, buffers) in the checkpoint layout. They are donated.
    """
    canonical = jax.jit(
        lambda params, buffers: _fresh(blueprint, params, buffers),
        out_shardings=canonical_shardings(blueprint, mesh),
        compiler_options=_options_of_one_run(),
        donate_argnums=(0, 1),
    )(*weights)
    return device_layout(canonical, blueprint, mesh)


def checkpoint_layout(state: TrainState, blueprint: Blueprint, mesh: Mesh) -> TrainState:
    """The state as it is saved."""
    return state if blueprint.config.mesh.pipeline == 1 else _to_canonical(blueprint, mesh)(state)


def device_layout(state: TrainState, blueprint: Blueprint, mesh: Mesh) -> TrainState:
    """The inverse of checkpoint_layout."""
    if blueprint.config.mesh.pipeline == 1:
        return state
    return jax.jit(
        lambda state: to_stages(state, blueprint.stages), out_shardings=state_shardings(blueprint, mesh)
    )(state)


@functools.cache
def _to_canonical(blueprint: Blueprint, mesh: Mesh) -> Callable[[TrainState], TrainState]:
    """Made once: every save calls it, and a new function would be compiled anew."""
    return jax.jit(
        lambda state: from_stages(state, blueprint.stages), out_shardings=canonical_shardings(blueprint, mesh)
    )
