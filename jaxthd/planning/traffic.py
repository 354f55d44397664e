"""Bytes that a device receives in a training step, by mesh axes, in closed form.

The usual ring algorithms are assumed: in a group of g ranks, a rank receives (g - 1) / g of the whole array
in all-gather and reduce-scatter, twice that in all-reduce, and the whole array in a send.
Legend: N tokens of a microbatch on a rank, n those of its residual stream, D model dim, a bytes of an
activation, w bytes of a number that is accumulated (float32, or float64).
"""

from collections import Counter
from typing import NamedTuple

from jaxthd.config import Config, EncoderConfig
from jaxthd.models.hybrid import repeated_units
from jaxthd.models.mixers import LAYER_KINDS
from jaxthd.ops.neighbours import received_frames
from jaxthd.packing.document import SUBSAMPLING
from jaxthd.parallel.mesh import AUDIO_AXES, AXES, CONTEXT, DATA, PIPELINE, TENSOR, ranks_of
from jaxthd.planning.layouts import delta_bytes, mamba_bytes
from jaxthd.planning.sizes import Number, Sizes, Weight

ByAxes = dict[tuple[str, ...], Number]
"""Bytes received, by the mesh axes in which the senders differ from the receiver."""

VOCABULARY = (PIPELINE, TENSOR)
"""The axes that divide embedding and head."""


def step_traffic(config: Config) -> ByAxes:
    """Bytes that the busiest device receives in a step.

    - FSDP, for each microbatch: a layer's weights are gathered for the forward and for the backward pass,
      matrices in the compute dtype; gradients are reduce-scattered once, in that of the parameters. Embedding
      and head are gathered once. Frozen weights have no gradients; a frozen encoder has no backward pass.
    - Gradients of replicated weights: all-reduced once a step.
    - Tensor: a sum of N D a for every layer, forward and backward; it is recomputed for all layers of a unit
      but the last. If sequence-sharded: a gather and a scatter of the same size instead.
    - Context: keys and values go around the ring forward and backward, and their gradients (w) return to
      their ranks; Mamba2's exchange is jaxthd.planning.layouts.mamba_bytes. Among pipeline stages keys and
      values, states and the convolution's halos of all ranks are gathered. Where answers continue a shared
      prompt, the states at the ends of all prompts that rows have room for are summed, forward and backward,
      and so are the convolution's last inputs.
    - Under the layout "whole": as if each row had as many cut documents as it may; with context_cuts 0, as in
      steps whose rows have none.
    - Experts: expert slots x width are sent to the experts and back in the forward pass, and twice there and
      once back in the backward pass; one round.
    - Vocabulary: the embeddings' sum and its gradient; three float32 numbers a token forward, one backward.
    - Pipeline: n D a sent up and down every tick; the last stage's output goes to all ranks.
    - Multi-token prediction: each depth costs as much as a stage run by all pipeline ranks, and adds its own
      embeddings and targets, and a sum of N D a for the projection; its weights are FSDP-sharded over the
      pipeline too. Weights that depths share are counted for each; a compiler may gather them once.
    - CTC loss: the head's rows for the labels of all documents are summed like embeddings, and the blank's
      scores like a target's. Six integers a token and the labels' log-probabilities of each frame go to all
      context ranks, the integers twice: they are counted before the microbatches.
    - Audio: every rank's frames are sent to all ranks of the row, and their gradients are sent back. It is
      assumed that encoder chunks are cut over these ranks in every microbatch: each block exchanges keys and
      values of a chunk's frames with its neighbours, and the convolution's halo, forward and backward.
    """
    sizes = Sizes(config)
    ranks = [_of_rank(sizes, rank) for rank in range(sizes.stages.ranks)]
    return {axes: max(r.get(axes, 0) for r in ranks) for axes in sorted({a for r in ranks for a in r})}


class _Received:
    """Adds up bytes by mesh axes, ignoring axes with a single rank."""

    def __init__(self, sizes: Sizes) -> None:
        self._mesh, self._live = sizes.mesh, sizes.live
        self.by_axes: ByAxes = {}

    def add(self, axes: tuple[str, ...], size: Number) -> None:
        live = tuple(axis for axis in self._live if axis in axes)
        if live and size:
            self.by_axes[live] = self.by_axes.get(live, 0) + size

    def gather(self, axes: tuple[str, ...], part: Number, times: Number) -> None:
        """Adds all-gathers of `part` bytes from each rank, or reduce-scatters of the same size."""
        self.add(axes, (ranks_of(self._mesh, axes) - 1) * part * times)

    def weight(self, weight: Weight, passes: Number, times: Number) -> None:
        """Adds `times` all-gathers of an FSDP-sharded weight for each of `passes`, and reduce-scatters of its
        gradient."""
        self.gather(weight.fsdp, weight.sent, times * passes)
        self.gather(weight.fsdp, weight.size, times * weight.trained)

    def sum(self, axes: tuple[str, ...], size: Number, times: Number) -> None:
        """Adds all-reduces of `size` bytes."""
        g = ranks_of(self._mesh, axes)
        self.add(axes, 2 * (g - 1) / g * size * times)


def _of_rank(sizes: Sizes, rank: int) -> ByAxes:
    received = _Received(sizes)
    for unit in sizes.units(rank):
        times = unit.repeats * sizes.stage_runs / sizes.schedule.chunks
        _layers(sizes, received, unit.letters, times)
    if sizes.depths:
        _mtp(sizes, received)
    _around_the_stages(sizes, received)
    if sizes.ctc_labels:
        _ctc(sizes, received)
    encoder = sizes.config.model.encoder
    if encoder and sizes.frames:
        _encoder(sizes, received, encoder)
    for weight in sizes.weights:
        received.sum(weight.copies, weight.size * weight.layers, int(weight.trained))
    return received.by_axes


def _around_the_stages(sizes: Sizes, received: _Received) -> None:
    """Embedding, loss, and what pipeline ranks send one another."""
    m, depths = sizes.schedule.microbatches, 1 + sizes.depths
    for weight in (*sizes.weights_of("embedding"), *sizes.weights_of(sizes.head)):
        received.gather(weight.fsdp, weight.size, (1 + weight.trained) * m)
    embeddings = sizes.tokens * sizes.config.model.llm.dim * sizes.a
    received.sum(VOCABULARY, embeddings, (1 + sizes.trains("embedding")) * m * depths)
    received.sum(VOCABULARY, sizes.tokens * sizes.w, 4 * m * depths)
    if sizes.is_pipelined:
        received.sum((PIPELINE,), sizes.stream, 2 * m)
        received.add((PIPELINE,), 2 * sizes.stream * sizes.schedule.ticks)
    if sizes.is_sequence_sharded:
        received.gather((TENSOR,), sizes.stream, 2 * m * depths)


def _layers(sizes: Sizes, received: _Received, letters: str, times: Number, module: str = "decoder") -> None:
    """Traffic of a unit's layers, `times` forward and backward."""
    remat = int(sizes.config.compute.remat_llm)
    for letter, count in Counter(letters).items():
        for weight in sizes.weights_of(module, "layers", LAYER_KINDS[letter].name):
            received.weight(weight, 2, times * count)
        is_stage = module == "decoder" and sizes.is_pipelined
        passes = _Passes(1 + remat, remat=bool(remat))
        _mixer(sizes, received, letter, times * count, passes, is_stage=is_stage)
    recomputed = remat * (len(letters) - 1)
    sums = 2 * len(letters) + recomputed
    if sizes.is_sequence_sharded:
        gathers = sums + (2 + remat) * len(letters)
        received.gather((TENSOR,), sizes.stream, times * gathers)
    else:
        received.sum((TENSOR,), sizes.stream, times * sums)


class _Passes(NamedTuple):
    """forward: passes for each backward one. remat: whether the last of them is part of the backward one."""

    forward: int
    remat: bool


def _mixer(
    sizes: Sizes, received: _Received, letter: str, times: Number, passes: _Passes, *, is_stage: bool
) -> None:
    """Traffic of a layer's mixer, for `times` backward passes.

    is_stage: whether it is in a pipeline stage, which other ranks may not run at the same time.
    """
    config, llm, forward = sizes.config, sizes.config.model.llm, passes.forward
    uniform_program = not (is_stage and sizes.is_pipelined)
    is_ring = config.compute.context_exchange == "ring" and uniform_program
    exchanges_any = config.compute.layout != "whole" or config.compute.context_cuts > 0
    match letter:
        case "*" | "W" | "L":
            kv = sizes.tokens * sizes.keys_and_values(letter) * exchanges_any
            if is_ring:
                again = _sent_again(sizes.mesh.context) if passes.remat else 1
                backward = sizes.w + sizes.a * again
                received.gather((CONTEXT,), kv * (forward * sizes.a + backward), times)
            else:
                received.gather((CONTEXT,), kv * sizes.a, times * (forward + 1))
        case "M":
            if uniform_program or config.compute.layout != "buffer":
                there_and_back = mamba_bytes(config) / sizes.schedule.microbatches
                received.add((CONTEXT,), there_and_back / 2 * times * (forward + 1))
            else:
                state = (sizes.inner * llm.mamba_state + sizes.mamba_heads) * sizes.w
                halo = (llm.mamba_conv - 1) * sizes.channels * sizes.a
                received.gather((CONTEXT,), 2 * sizes.rows * (state + halo), times * (forward + 1))
            if config.compute.layout == "buffer":
                _shared_prompts(sizes, received, times * (forward + 1))
        case "D":
            delta, heads = llm.delta, llm.delta.value_heads / sizes.mesh.tensor
            if uniform_program or config.compute.layout != "buffer":
                there_and_back = delta_bytes(config) / sizes.schedule.microbatches
                received.add((CONTEXT,), there_and_back / 2 * times * (forward + 1))
            else:
                maps = heads * delta.key_dim * (delta.key_dim + delta.value_dim) * sizes.w
                ends = (delta.conv - 1) * (delta.inner + 2 * delta.keys) / sizes.mesh.tensor * sizes.a
                received.gather((CONTEXT,), 2 * sizes.rows * (maps + ends), times * (forward + 1))
        case "E":
            row = (llm.latent_dim or llm.dim) * sizes.a
            share = 1 / ranks_of(sizes.mesh, sizes.owners)
            sent = forward * (2 * row + 4) + 3 * row + 4
            received.gather(sizes.owners, sizes.expert_slots * share * sent, times)
            received.sum((DATA, CONTEXT), (llm.experts + 1) * sizes.w, times * forward)


def _sent_again(context: int) -> float:
    """The share of a ring's sends that the backward pass repeats after a forward pass that is part of it.
    The compiler merges the others: those outside the loop of ops/attention/exchange.py, which a ring has from
    4 ranks on."""
    return (context - 2) / (context - 1) if context > 3 else 0.0


def _shared_prompts(sizes: Sizes, received: _Received, times: Number) -> None:
    """What a Mamba2 layer exchanges for answers that continue a prompt: its state, its last inputs, and how
    much the answer's tokens keep of it (ops/scan/prefixes.py).
    """
    llm = sizes.config.model.llm
    state = sizes.inner * llm.mamba_state * sizes.w
    last_inputs = (llm.mamba_conv - 1) * sizes.channels * sizes.a
    received.sum((CONTEXT,), sizes.prefixes * (state + last_inputs), times)
    if sizes.prefixes:
        received.gather((CONTEXT,), 2 * sizes.rows * 2 * sizes.mamba_heads * sizes.w, times)


def _mtp(sizes: Sizes, received: _Received) -> None:
    times = sizes.schedule.microbatches * sizes.depths
    for letters, repeats in repeated_units(sizes.config.model.llm.mtp_pattern):
        _layers(sizes, received, letters, times * repeats, "mtp")
    for weight in sizes.weights_of("mtp", "depths"):
        received.weight(weight, 1, times)
    if sizes.is_sequence_sharded:
        received.gather((TENSOR,), sizes.stream, times * 2 * (2 + 1))
    else:
        received.sum((TENSOR,), sizes.stream, times * 2)


def _ctc(sizes: Sizes, received: _Received) -> None:
    m, dim = sizes.schedule.microbatches, sizes.config.model.llm.dim
    received.sum(VOCABULARY, (sizes.ctc_labels + 1) * dim * sizes.a, (1 + sizes.trains(sizes.head)) * m)
    received.sum(VOCABULARY, sizes.tokens * sizes.w, 4 * m)
    if sizes.is_sequence_sharded:
        received.gather((TENSOR,), sizes.stream, 2 * m)
    received.gather((CONTEXT,), sizes.tokens * (1 + sizes.config.train.ctc_max_labels) * sizes.w, 2 * m)
    # A compiler finds that one microbatch is the whole batch.
    counted_again = int(sizes.is_pipelined or m > 1)
    received.gather((CONTEXT,), sizes.tokens * 6 * 4, (1 + counted_again) * m)


def _encoder(sizes: Sizes, received: _Received, encoder: EncoderConfig) -> None:
    """Encoder and adapter."""
    m, backward = sizes.schedule.microbatches, int(sizes.trains("encoder"))
    is_differentiated = sizes.trains("encoder") or sizes.trains("adapter")
    for weight in (*sizes.weights_of("encoder"), *sizes.weights_of("adapter")):
        of_blocks = "blocks" in weight.path
        gathered_again = int(sizes.is_pipelined and is_differentiated and not of_blocks)
        passes = 1 + gathered_again + of_blocks * backward
        received.weight(weight, passes, m * weight.layers)
    if sizes.trains("encoder", "blocks", "conv", "norm"):
        statistics, remat = 2 * encoder.dim * sizes.w, int(sizes.config.compute.remat_encoder)
        received.sum(AXES, statistics, m * encoder.layers * (2 + remat))
    _cut_chunks(sizes, received, encoder, m, backward)
    gathers = m * (1 + is_differentiated)
    received.gather(AUDIO_AXES, sizes.frames * sizes.config.model.llm.dim * sizes.a, gathers)


def _cut_chunks(sizes: Sizes, received: _Received, encoder: EncoderConfig, m: int, backward: int) -> None:
    """What the encoder exchanges for chunks that are cut over ranks (ops/neighbours.py).

    m, backward: microbatches; backward passes of a microbatch.
    """
    frames, ranks, half = sizes.row_frames, sizes.mesh.audio_ranks, encoder.conv_kernel // 2
    keys = 2 * received_frames(sizes.reach, sizes.reach, frames, ranks) * encoder.dim * sizes.a
    halo = received_frames(half, half, frames, ranks) * encoder.dim * sizes.a
    passes = 1 + backward * (1 + sizes.config.compute.remat_encoder)
    received.add(AUDIO_AXES, sizes.rows * (keys + halo) * encoder.layers * passes * m)
    ids = 2 * received_frames(sizes.reach, sizes.reach, frames, ranks) * 4
    mels = received_frames(SUBSAMPLING, 0, SUBSAMPLING * frames, ranks) * encoder.num_mels * sizes.a
    received.add(AUDIO_AXES, sizes.rows * (ids + mels) * m)
