"""What a training step needs and sends, in closed form: to hold against what the compiler says.

All figures are of the busiest device. Legend: t, c, P, M, V tensor and context ranks, pipeline ranks,
microbatches, stages of a rank; N tokens of a microbatch on a rank, n those of its residual stream, D model
dim, e encoder frames on a rank, a bytes of an activation, w of what is accumulated (float32).
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from flax import nnx

from jaxthd.config import Config
from jaxthd.models.adapt import trained
from jaxthd.models.fastconformer import PIECE
from jaxthd.models.hybrid import repeated_units
from jaxthd.models.mixers import LAYER_KINDS
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.parallel.experts import expert_sharding
from jaxthd.parallel.mesh import AUDIO_AXES, AXES, CONTEXT, DATA, PIPELINE, TENSOR, ranks_of
from jaxthd.parallel.schedule import Schedule, make_schedule
from jaxthd.parallel.stages import Stages
from jaxthd.planning.layouts import mamba_bytes
from jaxthd.steps.blueprint import Blueprint

Number = int | float
Traffic = dict[tuple[str, ...], Number]
"""Bytes received, by the mesh axes along which the senders differ."""


def stage_runs(config: Config, stages: Stages, schedule: Schedule) -> int:
    """How often a rank goes forward through a stage in a step; backward as often. In uniform_program, which a ring
    needs, idle ranks compute with the others.
    """
    is_ring = config.mesh.context > 1 and config.compute.context_exchange == "ring"
    if is_ring and stages.are_equal:
        return int(schedule.forward.busy.sum())
    return schedule.microbatches * schedule.chunks


class Weight(NamedTuple):
    """A parameter on a rank, for stacked ones that of one layer. size: its bytes, before anything is
    gathered. copies: axes whose ranks hold the same. fsdp: axes over which it is gathered for use.
    trained: else frozen, without a gradient.
    """

    path: tuple[str, ...]
    size: int
    layers: int
    copies: tuple[str, ...]
    fsdp: tuple[str, ...]
    trained: bool


@dataclass
class Memory:
    """kept: what lies in memory through the step. phases: what comes on top at one time or another."""

    kept: dict[str, Number] = field(default_factory=dict)
    phases: dict[str, Number] = field(default_factory=dict)

    @property
    def most(self) -> Number:
        return sum(self.kept.values()) + max(self.phases.values())


class Costs:
    """Closed forms for one configuration, from its sizes alone."""

    def __init__(self, config: Config) -> None:
        self._config, self._mesh, llm = config, config.mesh, config.model.llm
        mesh, compute = config.mesh, config.compute
        self._a = {"bfloat16": 2, "float32": 4, "float64": 8}[compute.dtype]
        self._w = max(self._a, 4)
        self._stages = Blueprint(config).stages
        self._schedule = make_schedule(config.train.microbatches, mesh.pipeline, mesh.stages_per_rank)
        self._pipelined = len(self._stages.patterns) > 1
        self._rows = config.data.rows / mesh.data / config.train.microbatches
        self._tokens = self._rows * config.data.capacity / mesh.context
        sharded = compute.sequence_sharded and mesh.tensor > 1
        self._stream = self._tokens / (mesh.tensor if sharded else 1) * llm.dim * self._a
        self._depths = config.depths_trained
        self._is_sharded = sharded
        self._frames = self._rows * config.data.audio_capacity / SUBSAMPLING / mesh.audio_ranks
        ranks = {axis: ranks_of(mesh, (axis,)) for axis in AXES}
        self._live = tuple(axis for axis, size in ranks.items() if size > 1)
        t = mesh.tensor
        self._heads, self._kv_heads = llm.q_heads // t, max(llm.kv_heads // t, 1)
        self._mamba_heads, self._groups = llm.mamba_heads // t, max(llm.mamba_groups // t, 1)
        self._inner = self._mamba_heads * llm.mamba_head_dim
        self._channels = self._inner + 2 * self._groups * llm.mamba_state
        owners = expert_sharding(llm.experts, mesh) if compute.expert_parallel else None
        self._owners = owners.axes if owners else ()
        chosen = self._tokens * llm.experts_per_token
        self._places = chosen
        if self._owners:
            r = ranks_of(mesh, self._owners)
            most = self._tokens * min(llm.experts_per_token, llm.experts // r)
            self._places = r * min(math.ceil(compute.expert_capacity * chosen / r), most)

    @cached_property
    def _weights(self) -> list[Weight]:
        found, model = [], Blueprint(self._config).model
        is_trained = nnx.traversals.flatten_mapping(trained(model, self._config.adapt))
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            mesh_axes = variable.get_metadata("mesh_axes")
            is_stacked = bool({"layers", "blocks", "depths"} & set(path))
            layers = variable.shape[0] // ranks_of(self._mesh, mesh_axes[0]) if is_stacked else 1
            shape = zip(variable.shape[is_stacked:], mesh_axes[is_stacked:], strict=False)
            size = math.prod(n // ranks_of(self._mesh, axes) for n, axes in shape) * variable.dtype.itemsize
            sharded = {axis for axes in mesh_axes for axis in axes}
            copies = tuple(axis for axis in self._live if axis not in sharded)
            fsdp = variable.get_metadata("fsdp")[1]
            found.append(Weight(tuple(map(str, path)), size, layers, copies, fsdp, is_trained[path]))
        return found

    def _trains(self, *path: str) -> bool:
        return any(weight.trained for weight in self._of(*path))

    def _of(self, *path: str) -> list[Weight]:
        return [w for w in self._weights if w.path[: len(path)] == path]

    def _gathered(self, *path: str, trained: bool = False) -> Number:
        """Bytes of parameters as computation takes them. trained: of those only."""
        weights = (w for w in self._of(*path) if w.trained or not trained)
        return sum(w.size * ranks_of(self._mesh, w.fsdp) for w in weights)

    def _units(self, rank: int) -> Iterator[tuple[str, int, bool]]:
        """Repeated units of the rank's stages, how often each comes, and whether it ends its stage."""
        for pattern in self._stages.patterns[rank :: self._stages.ranks]:
            *others, last = repeated_units(pattern)
            yield from ((*unit, False) for unit in others)
            yield (*last, True)

    # --- memory ---

    def memory(self) -> Memory:
        """Temporary memory: gradients and activations, less what a compiler may add, reuse or copy.

        Kept are a microbatch's gradients beside their sum, if there are several or a pipeline; with a
        pipeline the inputs in its slots (make_schedule(...).slots x n D a) and the two on their way; else
        what the layers keep for the backward pass: with recomputation n D a for each turn of a scan over
        repeated units, without it all activations of every layer. So for the encoder.
        One at a time come on top: a unit's activations and the dearest of its layers' gradients, with the
        unit's weights gathered; a block of the loss; an encoder block; a piece of the subsampling. With
        multi-token prediction the embeddings of each depth are kept as the stages' inputs are, and on top of
        the loss come its layers, as the decoder's, and each depth's norms and states at the head.
        """
        ranks = range(self._stages.ranks)
        return max((self._memory_of(rank) for rank in ranks), key=lambda memory: memory.most)

    def _memory_of(self, rank: int) -> Memory:
        model, memory = self._config.model, Memory()
        gradients = sum(w.size * w.layers for w in self._weights if w.trained)
        memory.kept["gradients"] = gradients
        if self._pipelined or self._schedule.microbatches > 1:
            memory.kept["gradients of a microbatch"] = gradients
        stage, decoder, audio = 0.0, 0.0, 0.0
        for unit, repeats, ends in self._units(rank):
            stage += repeats * (
                self._stream if self._config.compute.remat_llm else sum(map(self._layer, unit))
            )
            decoder, stage = (max(decoder, stage), 0) if ends else (decoder, stage)
        if self._frames:
            layers = model.audio_encoder.layers
            kept = (
                self._frames * model.audio_encoder.dim * self._a
                if self._config.compute.remat_encoder
                else self._conformer
            )
            audio = layers * kept if self._trains("encoder") else 0.0
            audio += self._frames * self._mesh.audio_ranks * model.llm.dim * self._a
        if self._depths:
            held = self._schedule.in_flight if self._pipelined else 1
            memory.kept["embeddings ahead"] = held * self._depths * self._stream
        if self._pipelined:
            memory.kept["pipeline slots"] = (self._schedule.slots + 2) * self._stream
        else:
            memory.kept |= {"decoder, between layers": decoder, "encoder, between layers": audio}
            decoder = audio = 0
        memory.phases["one unit of the decoder"] = decoder + max(
            self._unit(unit) for unit, _, _ in self._units(rank)
        )
        memory.phases["loss"] = (
            (0 if self._pipelined else decoder) * bool(self._depths) + self._loss + self._mtp
        )
        if self._frames:
            passes = 1 + self._trains("encoder")
            memory.phases["one block of the encoder"] = audio + passes * self._conformer + self._block_weights
            memory.phases["subsampling"] = audio + self._subsampling
        return memory

    @property
    def _mtp(self) -> Number:
        """Of multi-token prediction."""
        if not self._depths:
            return 0
        llm, units = self._config.model.llm, repeated_units(self._config.model.llm.mtp_pattern)
        share = self._stream / self._a
        around = share * (4 * self._a + 3 * self._w) + self._tokens * llm.dim * (4 * self._a + self._w)
        if self._config.compute.remat_llm:
            layers = self._stream * sum(repeats for _, repeats in units)
        else:
            layers = sum(map(self._layer, llm.mtp_pattern))
        return self._depths * (around + layers) + max(self._unit(unit, "mtp") for unit, _ in units)

    def _unit(self, unit: str, module: str = "decoder") -> Number:
        """A turn of the scan in the backward pass."""
        weights = {k: self._gathered(module, "layers", LAYER_KINDS[k].name) for k in set(unit)}
        gradients = {
            k: self._gathered(module, "layers", LAYER_KINDS[k].name, trained=True) for k in set(unit)
        }
        activations = {k: self._layer(k) for k in set(unit)}
        used = sum(weights[k] * self._a / self._itemsize for k in unit)
        recomputed = sum(activations[k] for k in unit) if self._config.compute.remat_llm else 0
        return used + recomputed + max(activations[k] + gradients[k] for k in unit)

    @property
    def _itemsize(self) -> int:
        return 8 if self._config.compute.dtype == "float64" else 4

    def _layer(self, letter: str) -> Number:
        """Activations that a layer's backward pass needs."""
        llm, a, w, n = self._config.model.llm, self._a, self._w, self._tokens
        normed = n * llm.dim * (2 * a + w)
        match letter:
            case "*":
                q, kv = self._heads * llm.head_dim, 2 * self._kv_heads * llm.head_dim
                gathers = self._config.compute.context_exchange == "all_gather"
                keys = kv * (self._mesh.context if gathers else 1)
                return normed + n * (a * (2 * q + kv + keys) + w * (q + self._heads))
            case "M":
                chunk = min(self._config.compute.scan_chunk, self._config.data.capacity)
                states = 2 * self._inner * llm.mamba_state / chunk
                inner = a * (4 * self._inner + 2 * self._channels) + w * 3 * self._inner
                if self._config.compute.scan_backend == "pallas":
                    return normed + n * (inner + a * (states + self._groups * chunk))
                pairs = (2 * self._mamba_heads + self._groups) * chunk
                return normed + n * (inner + w * (states + pairs) + a * self._mamba_heads * chunk)
            case "-":
                return normed + n * a * 3 * llm.ffn_dim / self._mesh.tensor
            case _:
                width, t = llm.latent_dim or llm.dim, self._mesh.tensor
                layout = self._places + llm.experts / ranks_of(self._mesh, self._owners) * (
                    self._config.compute.expert_block
                )
                routed = a * (layout * (2 * width + 3 * llm.expert_dim / t) + self._places * 2 * width)
                shared = n * a * 3 * llm.shared_expert_dim / t
                return normed + routed + shared + n * w * 3 * llm.experts

    @property
    def _loss(self) -> Number:
        model, llm = self._config.model, self._config.model.llm
        entries = llm.vocab_size / ranks_of(self._mesh, (PIPELINE, TENSOR))
        head = entries * llm.dim
        logits = self._config.compute.loss_block * min(self._config.compute.vocab_block, entries)
        states = self._tokens * llm.dim * (3 * self._a + self._w)
        gradient = head * self._w if self._trains("head") else 0
        return head * self._a + gradient + 3 * logits * self._w + states

    @property
    def _conformer(self) -> Number:
        """Activations of an encoder block."""
        encoder = self._config.model.audio_encoder
        norms = 5 * encoder.dim * (self._a + self._w)
        attention = (
            self._a * (2 * encoder.heads + 6) * encoder.dim + 3 * self._w * encoder.heads * encoder.dim
        )
        others = self._a * (6 * encoder.ffn_dim + 8 * encoder.dim)
        return self._frames * (norms + attention + others)

    @property
    def _block_weights(self) -> Number:
        blocks = ("encoder", "blocks")
        return self._gathered(*blocks, trained=True) + self._gathered(*blocks) * self._a / self._itemsize

    @property
    def _subsampling(self) -> Number:
        encoder = self._config.model.audio_encoder
        outputs = (min(PIECE, self._frames) + 1) * 2 * encoder.num_mels
        # First convolution: its nine inputs and its outputs; the second and third have 1/4 and 1/16 as many.
        return outputs * self._a * (9 + encoder.subsampling_channels * (2 + 12 * (1 / 4 + 1 / 16)))

    # --- bytes on the wire ---

    def traffic(self) -> Traffic:
        """Bytes received in a step, with the usual ring algorithms: of a group of g, all-gather and
        reduce-scatter (g - 1) / g of the whole, all-reduce twice that, a send the whole.

        - FSDP, each microbatch: a layer's weights gathered for forward and backward, and in a pipeline once
          more for the forward pass that the backward one starts with; gradients scattered once. Embedding
          and head are gathered once. Frozen weights have no gradients, and the encoder no backward pass if
          it is frozen whole.
        - Gradients of what ranks hold alike: all-reduced once a step.
        - Tensor: a sum of N D a for every layer forward and backward; recomputed for all layers of a unit
          but the last. Sequence-sharded: a gather and a scatter of as much.
        - Context: keys and values around forward and backward, their gradients (w) home; Mamba's exchange
          (jaxthd/planning/layouts.py; where stages differ, states and the convolution's halos of all ranks). Stages in
          uniform_program exchange while idle, too.
        - Experts: places x width there and back, forward; there twice and back once, backward. One round.
        - Vocabulary: the embeddings' sum and its gradient; three float32 numbers a token forward, one
          backward. Pipeline: a send of n D a up and down every tick; the last stage's output to all.
        - Multi-token prediction: each depth as a stage that all ranks of a pipeline run, its embeddings and
          its targets as the decoder's, and a sum of N D a for the projection; its weights are FSDP-sharded
          over the pipeline too. A compiler may gather what depths share once, which here each gathers.
        - Audio: every rank's frames to all ranks of the row, and their gradients home.
        """
        ranks = [self._traffic_of(rank) for rank in range(self._stages.ranks)]
        return {axes: max(r.get(axes, 0) for r in ranks) for axes in sorted({a for r in ranks for a in r})}

    def _traffic_of(self, rank: int) -> Traffic:
        config, llm, found = self._config, self._config.model.llm, _Found(self)
        m, n, remat = self._schedule.microbatches, self._tokens, int(config.compute.remat_llm)
        for unit, repeats, ends in self._units(rank):
            # A scan of one turn is no loop: where it ends the stage, nobody asks for what it returns.
            again = int(self._pipelined and not (remat and ends and repeats == 1))
            times = repeats * stage_runs(config, self._stages, self._schedule) / self._schedule.chunks
            self._layers(found, unit, times, again)
        self._mtp_traffic(found)
        vocabulary, depths = (PIPELINE, TENSOR), 1 + self._depths
        for weight in (*self._of("embedding"), *self._of("head")):
            found.gather(weight.fsdp, weight.size, (1 + weight.trained) * m)
        found.sum(vocabulary, n * llm.dim * self._a, (1 + self._trains("embedding")) * m * depths)
        found.sum(vocabulary, n * self._w, 4 * m * depths)
        if self._pipelined:
            found.sum((PIPELINE,), self._stream, 2 * m)
            found.add((PIPELINE,), 2 * self._stream * self._schedule.ticks)
        if self._is_sharded:
            found.gather((TENSOR,), self._stream, 2 * m * depths)
        if self._frames:
            self._encoder(found)
        for weight in self._weights:
            found.sum(weight.copies, weight.size * weight.layers, int(weight.trained))
        return found.traffic

    def _layers(self, found: "_Found", unit: str, times: Number, again: int, module: str = "decoder") -> None:
        """Of a unit, `times` forward and backward."""
        remat = int(self._config.compute.remat_llm)
        for letter, count in Counter(unit).items():
            for weight in self._of(module, "layers", LAYER_KINDS[letter].name):
                found.gather(weight.fsdp, weight.size, times * count * (2 + again + weight.trained))
            self._mixer(letter, found, times * count, remat, again, apart=module == "decoder")
        recomputed = remat * (len(unit) - 1)
        parts = (1 + again) * len(unit) + recomputed + len(unit)
        if self._is_sharded:
            parts += (1 + again + remat + 1) * len(unit)
            found.gather((TENSOR,), self._stream, times * parts)
        else:
            found.sum((TENSOR,), self._stream, times * parts)

    def _mtp_traffic(self, found: "_Found") -> None:
        times = self._schedule.microbatches * self._depths
        if not times:
            return
        for unit, repeats in repeated_units(self._config.model.llm.mtp_pattern):
            self._layers(found, unit, times * repeats, 0, "mtp")
        for weight in self._of("mtp", "depths"):
            found.gather(weight.fsdp, weight.size, times * (1 + weight.trained))
        if self._is_sharded:
            found.gather((TENSOR,), self._stream, times * 2 * (2 + 1))
        else:
            found.sum((TENSOR,), self._stream, times * 2)

    def _mixer(
        self, letter: str, found: "_Found", times: Number, remat: int, again: int, *, apart: bool
    ) -> None:
        """What a layer's mixer exchanges in `times` forward and backward passes. apart: in a stage, which
        other ranks may not run at the same time.
        """
        llm, model, n = self._config.model.llm, self._config.model, self._tokens
        forward = 1 + again + remat
        is_stage = apart and self._pipelined
        uniform_program = not is_stage or (
            self._stages.are_equal and self._config.compute.context_exchange == "ring"
        )
        match letter:
            case "*":
                kv = n * 2 * self._kv_heads * llm.head_dim
                if self._config.compute.context_exchange == "ring":
                    backward = self._w + (0 if remat else self._a)
                    found.gather((CONTEXT,), kv * (forward * self._a + backward), times)
                else:
                    found.gather((CONTEXT,), kv * self._a, times * (forward + 1))
            case "M":
                if uniform_program or self._config.compute.context_layout == "document":
                    there_and_back = mamba_bytes(self._config) / self._schedule.microbatches
                    found.add((CONTEXT,), there_and_back / 2 * times * (forward + 1))
                else:
                    state = (self._inner * llm.mamba_state + self._mamba_heads) * self._w
                    halo = (llm.mamba_conv - 1) * self._channels * self._a
                    found.gather((CONTEXT,), 2 * self._rows * (state + halo), times * (forward + 1))
            case "E":
                row = (llm.latent_dim or llm.dim) * self._a
                share = 1 / ranks_of(self._mesh, self._owners)
                passes = forward * (2 * row + 4) + 3 * row + 4
                found.gather(self._owners, self._places * share * passes, times)
                found.sum((DATA, CONTEXT), (llm.experts + 1) * self._w, times * forward)

    def _encoder(self, found: "_Found") -> None:
        config, m, layers = self._config, self._schedule.microbatches, self._config.model.audio_encoder.layers
        backward = int(self._trains("encoder"))
        is_differentiated = self._trains("encoder") or self._trains("adapter")
        again = int(self._pipelined and is_differentiated)
        for weight in (*self._of("encoder"), *self._of("adapter")):
            passes = 1 + again + weight.trained + ("blocks" in weight.path) * backward
            found.gather(weight.fsdp, weight.size * weight.layers, m * passes)
        if self._trains("encoder", "blocks", "conv", "norm"):
            statistics = 2 * config.model.audio_encoder.dim * self._w
            found.sum(AXES, statistics, m * layers * (2 + again + int(config.compute.remat_encoder)))
        gathers = m * (1 + is_differentiated)
        found.gather(AUDIO_AXES, self._frames * config.model.llm.dim * self._a, gathers)


class _Found:
    """Adds up traffic by the axes that have several ranks."""

    def __init__(self, costs: Costs) -> None:
        self._mesh, self._live = costs._mesh, costs._live
        self.traffic: Traffic = {}

    def add(self, axes: tuple[str, ...], size: Number) -> None:
        live = tuple(axis for axis in self._live if axis in axes)
        if live and size:
            self.traffic[live] = self.traffic.get(live, 0) + size

    def gather(self, axes: tuple[str, ...], part: Number, times: Number) -> None:
        """All-gather of `part` bytes of each rank, or the reduce-scatter that brings as much."""
        self.add(axes, (ranks_of(self._mesh, axes) - 1) * part * times)

    def sum(self, axes: tuple[str, ...], size: Number, times: Number) -> None:
        g = ranks_of(self._mesh, axes)
        self.add(axes, 2 * (g - 1) / g * size * times)
