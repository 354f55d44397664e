"""Sizes on the ranks of one configuration, from which memory and traffic are computed in closed form.

Legend: N tokens of a microbatch on a rank, D model dim, a bytes of an activation, w bytes of a number that is
accumulated (float32, or float64).
"""

import math
from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx

from jaxthd.config import Config
from jaxthd.models.hybrid import repeated_units
from jaxthd.objectives.answers import compares_answers
from jaxthd.packing.document import SUBSAMPLING, encoder_frames
from jaxthd.packing.fit import BufferLimits
from jaxthd.parallel.experts import expert_sharding
from jaxthd.parallel.mesh import AXES, ranks_of
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.forward import objective_of

Number = int | float


class Weight(NamedTuple):
    """A parameter as a rank holds it. If it is stacked over layers, one layer of it.

    size: bytes before it is gathered. layers: number of its layers on the rank. copies: mesh axes over which
    it is replicated. fsdp: axes over which it is gathered when used. trained: whether it has a gradient.
    sent: as `size`, of what is gathered: some are cast to the compute dtype before.
    """

    path: tuple[str, ...]
    size: int
    layers: int
    copies: tuple[str, ...]
    fsdp: tuple[str, ...]
    trained: bool
    sent: Number


class Unit(NamedTuple):
    """Blocks that a stage repeats. ends_stage: whether the stage ends with it."""

    letters: str
    repeats: int
    ends_stage: bool


class Sizes:
    """Sizes on a rank.

    a, w: bytes, see the legend. parameter: bytes of one number of a parameter.
    rows, tokens, frames: counts in a microbatch (frames of the encoder; 0 for a text-only model).
    ctc_labels: labels of a microbatch that the CTC loss has room for; 0 without it.
    prefixes: prompts of a microbatch that answers can share (packing/prefixes.py); 0 where none are shared.
    stream: bytes of a microbatch's residual stream: N D a, divided by the tensor ranks if sequence-sharded.
    heads, kv_heads, mamba_heads, groups, inner, channels: counts in a layer, on a tensor rank.
    owners: axes that the experts are sharded over. expert_slots: token slots in a layer's expert exchange.
    live: axes with several ranks. head: the parameter that is the head.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.mesh = config, config.mesh
        mesh, compute, llm = config.mesh, config.compute, config.model.llm
        self.a = jnp.dtype(compute.dtype).itemsize
        self.w = max(self.a, 4)
        self.parameter = 8 if compute.dtype == "float64" else 4
        self._blueprint = Blueprint(config)
        self.stages, self.schedule = self._blueprint.stages, self._blueprint.schedule
        self.is_pipelined = len(self.stages.patterns) > 1
        self.live = tuple(axis for axis in AXES if ranks_of(mesh, (axis,)) > 1)
        self.depths = config.depths_trained
        self.head = "embedding" if llm.tied_embedding else "head"

        self.rows = config.data.rows / mesh.data / config.train.microbatches
        self.tokens = self.rows * config.data.capacity / mesh.context
        self.is_sequence_sharded = compute.sequence_sharded and mesh.tensor > 1
        shards = mesh.tensor if self.is_sequence_sharded else 1
        self.stream = self.tokens / shards * llm.dim * self.a
        audio = BufferLimits.of(config).array_frames
        self.frames = self.rows * audio / SUBSAMPLING / mesh.audio_ranks
        self.row_frames = audio // SUBSAMPLING // mesh.audio_ranks
        longest = encoder_frames(config.model.encoder.chunk_frames) if config.model.encoder else 1
        self.reach = min(longest - 1, self.row_frames * (mesh.audio_ranks - 1))

        documents = self.rows * config.data.max_documents if config.train.ctc_loss and audio else 0
        self.ctc_labels = documents * config.train.ctc_max_labels

        has_prefixes = compares_answers(objective_of(config)) and config.posttraining.share_prompts
        self.prefixes = self.rows * max(1, config.data.max_documents // 2) * has_prefixes

        t = mesh.tensor
        self.heads, self.kv_heads = llm.q_heads // t, max(llm.kv_heads // t, 1)
        self.mamba_heads, self.groups = llm.mamba_heads // t, max(llm.mamba_groups // t, 1)
        self.inner = self.mamba_heads * llm.mamba_head_dim
        self.channels = self.inner + 2 * self.groups * llm.mamba_state

        sharding = expert_sharding(llm.experts, mesh) if compute.expert_parallel else None
        self.owners = sharding.axes if sharding else ()
        self.expert_slots: Number = self.tokens * llm.experts_per_token
        if self.owners:
            r = ranks_of(mesh, self.owners)
            most = self.tokens * min(llm.experts_per_token, llm.experts // r)
            self.expert_slots = r * min(math.ceil(compute.expert_capacity * self.expert_slots / r), most)

    @cached_property
    def weights(self) -> list[Weight]:
        found, model = [], self._blueprint.model
        is_trained = nnx.traversals.flatten_mapping(self._blueprint.trained)
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            mesh_axes = variable.get_metadata("mesh_axes")
            is_stacked = bool({"layers", "blocks", "depths"} & set(path))
            layers = variable.shape[0] // ranks_of(self.mesh, mesh_axes[0]) if is_stacked else 1
            shape = zip(variable.shape[is_stacked:], mesh_axes[is_stacked:], strict=False)
            size = math.prod(n // ranks_of(self.mesh, axes) for n, axes in shape) * variable.dtype.itemsize
            sharded = {axis for axes in mesh_axes for axis in axes}
            copies = tuple(axis for axis in self.live if axis not in sharded)
            fsdp = variable.get_metadata("fsdp")[1]
            sent = size * self.a / self.parameter if variable.get_metadata("cast") else size
            found.append(Weight(tuple(map(str, path)), size, layers, copies, fsdp, is_trained[path], sent))
        return found

    def weights_of(self, *path: str) -> list[Weight]:
        """The weights whose paths begin with these names."""
        return [w for w in self.weights if w.path[: len(path)] == path]

    def trains(self, *path: str) -> bool:
        """Whether any of weights_of(path) is trained."""
        return any(weight.trained for weight in self.weights_of(*path))

    def gathered(self, *path: str, trained: bool = False) -> Number:
        """Bytes of weights_of(path) once they are gathered. trained: of the trained ones only, in their own
        dtype, as gradients are."""
        weights = [w for w in self.weights_of(*path) if w.trained or not trained]
        return sum((w.size if trained else w.sent) * ranks_of(self.mesh, w.fsdp) for w in weights)

    def keys_and_values(self, letter: str) -> int:
        """Numbers of a token's keys and values in a layer of attention, or of what they are expanded from, as
        ranks exchange them."""
        llm = self.config.model.llm
        if letter != "L":
            return 2 * self.kv_heads * llm.head_dim
        compute, latent = self.config.compute, llm.latent_attention
        if (compute.context_exchange == "all_gather" or self.is_pipelined) and compute.layout != "whole":
            return latent.kept
        fused = compute.attention_backend not in ("xla", "auto")
        dims = 2 * latent.kernel_head_dim if fused else latent.qk_head_dim + latent.v_head_dim
        return self.heads * dims

    def units(self, rank: int) -> Iterator[Unit]:
        """The repeated units of the stages of a pipeline rank, in order."""
        for pattern in self.stages.patterns[rank :: self.stages.ranks]:
            *others, last = repeated_units(pattern)
            yield from (Unit(*unit, ends_stage=False) for unit in others)
            yield Unit(*last, ends_stage=True)

    @property
    def stage_runs(self) -> int:
        """How often a rank runs a stage's forward pass in a step, and equally often the backward pass."""
        return self.schedule.microbatches * self.schedule.chunks
