"""The blueprint of a run: everything about its model that follows from the config alone.

Nothing here holds an array or needs a device: shapes, dtypes and shardings are computed by tracing.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from jaxthd.config import Config, MeshConfig
from jaxthd.errors import UserError
from jaxthd.models.adapt import add_lora, trained, use_fp8
from jaxthd.models.speech_lm import SpeechLM
from jaxthd.models.stacks import pipeline_stages
from jaxthd.parallel.mesh import PIPELINE
from jaxthd.parallel.params import (
    DECODER_FSDP,
    Buffer,
    Init,
    metadata,
    parameter_dtype,
    partition_spec,
)
from jaxthd.parallel.schedule import Schedule, make_schedule
from jaxthd.parallel.stages import Stages

WRITTEN_LAYERS = 16
"""The most layers of one kind that are written out where nothing is said: each takes time to compile."""
Tree = Any
"""A nested dict of arrays, by the names of the module tree."""


@dataclass(frozen=True)
class Blueprint:
    """The structure of a run's model, its shardings, what trains, its pipeline stages and their schedule.

    Make one for a run and pass it on: every property is computed once, at its first use.
    A property raises ValueError where the model cannot be built or divided as the config says.
    """

    config: Config

    @cached_property
    def model(self) -> SpeechLM:
        """The model as the mesh's ranks hold it, with global shapes and dtypes for arrays: no memory."""
        return nnx.eval_shape(
            lambda: self._make(jax.random.key(0), self.config.mesh, self.stages, draws=False)
        )

    @cached_property
    def canonical_model(self) -> SpeechLM:
        """This model in the checkpoint layout, whose layers are not divided into stages (steps/state.py).

        What a pipeline divides by layers is FSDP-sharded over its ranks too, so that no rank holds more of
        the checkpoint layout than of the other, or hardly more.
        """
        fsdp = (PIPELINE, *DECODER_FSDP)
        return nnx.eval_shape(
            lambda: self._make(jax.random.key(0), self.config.mesh, draws=False, decoder_fsdp=fsdp)
        )

    @cached_property
    def graph(self) -> nnx.GraphDef:
        """The structure: nnx.merge(graph, params, buffers) is the model, inside the mesh's shard_map."""
        return nnx.split(self.model, nnx.Param, Buffer)[0]

    @cached_property
    def specs(self) -> tuple[Tree, Tree]:
        """PartitionSpecs of (parameters, buffers), in the places of the arrays."""
        return specs_of(self.model)

    @cached_property
    def trained(self) -> Tree:
        """A bool for every parameter: whether it trains (models/adapt.py)."""
        return trained(self.model, self.config.adapt)

    @cached_property
    def used_dtypes(self) -> Tree:
        """For every parameter the dtype in which the model uses it: the compute dtype for weight matrices,
        the parameter's own for all others (norms, biases, Mamba2's numbers for each head) and for routers.
        DoRA's magnitudes are relative to matrices in their own dtype. A front end may be wider.
        """
        encoder = self.config.model.encoder
        wide = ("encoder", "adapter") if encoder is not None and encoder.is_wide else ()
        params, dtype = nnx.state(self.model, nnx.Param), jnp.dtype(self.config.compute.dtype)

        def used(path: tuple[Any, ...], is_matrix: bool, x: Any) -> Any:
            """The dtype in which a parameter is used: the compute dtype for matrices but routers."""
            names = [getattr(key, "key", None) for key in path]
            is_wide = "router" in names or names[0] in wide or self.config.adapt.dora
            return dtype if is_matrix and not is_wide else x.dtype

        return jax.tree_util.tree_map_with_path(used, metadata(params, "decayed"), nnx.to_pure_dict(params))

    def writes_layers(self, mesh: Mesh) -> bool:
        """Whether layers are written out (compute.unroll_layers) where nothing is said: on one CPU device, if
        there are at most WRITTEN_LAYERS of each kind. Nothing is copied into the stacks of loops then, and
        out of them.
        """
        if mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
            return False
        params = nnx.state(self.model, nnx.Param)
        stacked, shapes = metadata(params, "stacked"), nnx.to_pure_dict(params)
        lengths = jax.tree.map(lambda dims, x: x.shape[0] if dims else 1, stacked, shapes)
        return max(jax.tree.leaves(lengths)) <= WRITTEN_LAYERS

    @cached_property
    def stages(self) -> Stages:
        """The pipeline's stages."""
        return pipeline_stages(self.config.model.llm, self.config.mesh)

    @cached_property
    def schedule(self) -> Schedule:
        """The schedule of microbatches on each pipeline rank, forward and backward."""
        return self._schedule(backward=True)

    @cached_property
    def forward_schedule(self) -> Schedule:
        """The schedule of the forward pass alone."""
        return self._schedule(backward=False)

    def initial_weights(self) -> tuple[Tree, Tree]:
        """(parameters, buffers) in the checkpoint layout, drawn from the config's seed. Raises UserError
        for one of more than 32 bits.
        """
        seed = self.config.train.seed
        if not 0 <= seed < 2**32:
            raise UserError(f"train.seed is {seed}; expected 0 to {2**32 - 1}: correct train.seed")
        with jax.ensure_compile_time_eval():
            key = jax.random.key(seed)
        return _arrays_of(self._make(key, MeshConfig()))

    @cached_property
    def abstract_weights(self) -> tuple[Tree, Tree]:
        """initial_weights with shapes and dtypes for arrays."""
        return jax.eval_shape(lambda: _arrays_of(self._make(jax.random.key(0), MeshConfig(), draws=False)))

    def _schedule(self, *, backward: bool) -> Schedule:
        config = self.config
        return make_schedule(
            config.train.microbatches, config.mesh.pipeline, config.mesh.stages_per_rank, backward=backward
        )

    def _make(
        self,
        key: Array,
        mesh: MeshConfig,
        stages: Stages | None = None,
        *,
        draws: bool = True,
        **options: Any,
    ) -> SpeechLM:
        config = self.config
        init = Init(key, parameter_dtype(config.compute), mesh, draws=draws)
        options |= {
            "max_documents": config.data.max_documents,
            "lora_documents": config.adapt.lora_documents if config.adapt.lora_rank else "all",
        }
        model = SpeechLM(config.model, init, config.compute, stages, **options)
        add_lora(model, config.adapt, key)
        use_fp8(model, config.compute.fp8_projections)
        return model


def _arrays_of(model: SpeechLM) -> tuple[Tree, Tree]:
    """(parameters, buffers)."""
    params, buffers = (nnx.to_pure_dict(nnx.state(model, kind)) for kind in (nnx.Param, Buffer))
    return params, buffers


def specs_of(model: SpeechLM) -> tuple[Tree, Tree]:
    """PartitionSpecs of a model's (parameters, buffers), in the places of the arrays."""

    def specs(kind: type[nnx.Variable]) -> Tree:
        """Partition specs of all variables of a kind, by path."""
        found = {path: partition_spec(v) for path, v in nnx.to_flat_state(nnx.state(model, kind))}
        return nnx.traversals.unflatten_mapping(found)

    return specs(nnx.Param), specs(Buffer)
