"""The training state: what it holds, where it lies on the mesh, and the form it is saved in.

On the mesh a rank holds its part of every parameter (parallel/params.py) and its pipeline stages' layers
(parallel/stages.py). Saved is the canonical form: the same arrays, names and shapes for every mesh.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxthd.config import AdaptConfig, Config, MeshConfig, TrainConfig
from jaxthd.models.adapt import add_lora, split, trained, use_fp8
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.parallel.mesh import PIPELINE
from jaxthd.parallel.params import (
    DECODER_FSDP,
    Buffer,
    Init,
    partition_spec,
    weight_decay_mask,
)
from jaxthd.parallel.stages import Stages, from_stages, to_stages

Tree = Any
"""A nested dict of arrays, by the names of the module tree."""


class TrainState(NamedTuple):
    """All that a step reads and writes; a checkpoint holds it whole.

    step: steps done, skipped ones included. skipped, skipped_in_a_row: steps whose update was left out since
    loss or gradient was not finite: of all, and of the last ones without a break.
    params: of the whole model. buffers: state that no gradient trains. opt_state: of the parameters that are
    trained (jaxthd/models/adapt.py).
    """

    step: Array
    skipped: Array
    skipped_in_a_row: Array
    params: Tree
    buffers: Tree
    opt_state: Any


def stages_of(config: Config) -> Stages:
    """The pipeline's. Raises ValueError where the pattern cannot be divided."""
    return Stages.of(config.model.llm, config.mesh)


def abstract_model(config: Config) -> SpeechLM:
    """The model as the mesh's ranks hold it, with global shapes and dtypes for arrays: no memory."""
    return nnx.eval_shape(lambda: _make_model(config, jax.random.key(0), config.mesh, stages_of(config)))


def model_graph(config: Config) -> nnx.GraphDef:
    """The model's structure: nnx.merge(graph, params, buffers) is the model, inside the mesh's shard_map."""
    return nnx.split(abstract_model(config), nnx.Param, Buffer)[0]


def _make_model(
    config: Config, key: Array, mesh: MeshConfig, stages: Stages | None = None, **options: Any
) -> SpeechLM:
    dtype = jnp.float64 if config.compute.dtype == "float64" else jnp.float32
    init, most = Init(key, dtype, mesh), config.data.max_documents
    model = SpeechLM(config.model, init, config.compute, stages, max_documents=most, **options)
    add_lora(model, config.adapt, key)
    use_fp8(model, config.compute.fp8)
    return model


def model_specs(model: SpeechLM) -> tuple[Tree, Tree]:
    """Where parameters and buffers lie: PartitionSpecs in the places of the arrays."""

    def specs(kind: type[nnx.Variable]) -> Tree:
        found = {path: partition_spec(v) for path, v in nnx.to_flat_state(nnx.state(model, kind))}
        return nnx.traversals.unflatten_mapping(found)

    return specs(nnx.Param), specs(Buffer)


def learning_rate_schedule(config: TrainConfig) -> optax.Schedule:
    """Steps done before -> learning rate: linear warm-up, the peak, a cosine to the minimum at the last step.

    The first step has one warm-up step's worth, not 0: none is wasted.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=max(config.steps, config.warmup_steps + 1),
        end_value=config.min_learning_rate,
    )
    return lambda steps_done: schedule(steps_done + 1)


def make_optimizer(config: Config) -> optax.GradientTransformation:
    """For the trained parameters: clipping by global norm, then AdamW, each part of the model at its learning
    rate; weight decay on the weight matrices.
    """
    train, model = config.train, abstract_model(config)
    decayed = weight_decay_mask(nnx.state(model, nnx.Param))
    transformations = [
        optax.clip_by_global_norm(train.clip_norm),
        optax.adamw(
            learning_rate_schedule(train),
            b1=train.beta1,
            b2=train.beta2,
            weight_decay=train.weight_decay,
            mask=split(decayed, trained(model, config.adapt))[0],
        ),
    ]
    return optax.chain(*transformations, *_scaled_by_part(config.adapt))


def _scaled_by_part(adapt: AdaptConfig) -> list[optax.GradientTransformation]:
    """After AdamW, whose update is proportional to the learning rate."""
    factors = {"encoder": adapt.encoder_lr_factor, "adapter": adapt.adapter_lr_factor}

    def scaled(updates: Tree, _: Tree) -> Tree:
        def times(factor: float, of_module: Tree) -> Tree:
            return jax.tree.map(lambda update: factor * update, of_module)

        return {name: times(factors.get(name, adapt.llm_lr_factor), u) for name, u in updates.items()}

    is_one = {*factors.values(), adapt.llm_lr_factor} == {1.0}
    return [] if is_one else [optax.stateless(scaled)]


def canonical_weights(config: Config) -> tuple[Tree, Tree]:
    """(parameters, buffers) in the canonical form, drawn from the config's seed."""
    model = _make_model(config, jax.random.key(config.train.seed), MeshConfig())
    params, buffers = (nnx.to_pure_dict(nnx.state(model, kind)) for kind in (nnx.Param, Buffer))
    return params, buffers


def _fresh(config: Config, params: Tree, buffers: Tree) -> TrainState:
    """Before the first step."""
    own, _ = split(params, trained(abstract_model(config), config.adapt))
    zero = jnp.zeros((), jnp.int32)
    return TrainState(zero, zero, zero, params, buffers, make_optimizer(config).init(own))


def _canonical_state(config: Config) -> TrainState:
    return _fresh(config, *canonical_weights(config))


def abstract_state(config: Config) -> TrainState:
    """A run's state in the canonical form, with shapes and dtypes for arrays: no memory, nothing compiled."""
    return jax.eval_shape(lambda: _canonical_state(config))


def state_shardings(config: Config, mesh: Mesh) -> TrainState:
    """Where a run's state lies while it trains."""
    return _shardings(config, mesh, abstract_model(config))


def canonical_shardings(config: Config, mesh: Mesh) -> TrainState:
    """Where the canonical form lies. No rank holds more of it than of the other form, or hardly more: what
    the pipeline divides by layers is FSDP-sharded over its ranks.
    """
    fsdp = (PIPELINE, *DECODER_FSDP)
    model = nnx.eval_shape(lambda: _make_model(config, jax.random.key(0), config.mesh, decoder_fsdp=fsdp))
    return _shardings(config, mesh, model)


def _shardings(config: Config, mesh: Mesh, model: SpeechLM) -> TrainState:
    params, buffers = model_specs(model)
    everywhere: Any = PartitionSpec()
    moments = optax.tree.map_params(
        make_optimizer(config),
        lambda _, spec: spec,
        abstract_state(config).opt_state,
        split(params, trained(model, config.adapt))[0],
        transform_non_params=lambda _: everywhere,
    )
    specs = TrainState(everywhere, everywhere, everywhere, params, buffers, moments)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def _once() -> Any:
    """Options for a program that runs once: on a CPU compiling is most of its time, and halves without the
    compiler's optimizations.
    """
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def init_state(config: Config, mesh: Mesh) -> TrainState:
    """A new run's state, on its final sharding (a step that moved it would compile twice)."""
    stages = stages_of(config)
    return jax.jit(
        lambda: to_stages(_canonical_state(config), stages),
        out_shardings=state_shardings(config, mesh),
        compiler_options=_once(),
    )()


def new_state(weights: tuple[Tree, Tree], config: Config, mesh: Mesh) -> TrainState:
    """A new run's state that starts from these, (parameters, buffers) in the canonical form: on the mesh, in
    the training form. The weights are donated.
    """
    canonical = jax.jit(
        lambda params, buffers: _fresh(config, params, buffers),
        out_shardings=canonical_shardings(config, mesh),
        compiler_options=_once(),
        donate_argnums=(0, 1),
    )(*weights)
    return training_form(canonical, config, mesh)


def canonical_form(state: TrainState, config: Config, mesh: Mesh) -> TrainState:
    """The state as it is saved."""
    return state if config.mesh.pipeline == 1 else _to_canonical(config, mesh)(state)


def training_form(state: TrainState, config: Config, mesh: Mesh) -> TrainState:
    """The inverse of canonical_form."""
    if config.mesh.pipeline == 1:
        return state
    stages = stages_of(config)
    return jax.jit(lambda state: to_stages(state, stages), out_shardings=state_shardings(config, mesh))(state)


@functools.cache
def _to_canonical(config: Config, mesh: Mesh) -> Callable[[TrainState], TrainState]:
    """Made once: each save calls it, and a function made anew would be compiled anew."""
    stages = stages_of(config)
    return jax.jit(lambda state: from_stages(state, stages), out_shardings=canonical_shardings(config, mesh))
