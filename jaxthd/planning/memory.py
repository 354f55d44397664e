"""Temporary memory of a device in a training step, in closed form, to compare with the compiler's figures.

Legend: N tokens of a microbatch on a rank, n those of its residual stream, D model dim, a bytes of an
activation, w bytes of a number that is accumulated (float32, or float64).
"""

import math
from dataclasses import dataclass, field

from jaxthd.config import Config, EncoderConfig
from jaxthd.models.ctc import FRAME_BLOCK
from jaxthd.models.encoder_attention import DENSE_FRAMES
from jaxthd.models.hybrid import repeated_units
from jaxthd.models.mixers import LAYER_KINDS
from jaxthd.models.subsampling import PIECE, piece_frames
from jaxthd.ops.attention.relative import width
from jaxthd.packing.document import SUBSAMPLING, encoder_frames
from jaxthd.parallel.mesh import PIPELINE, TENSOR, ranks_of
from jaxthd.planning.muon import muon_update
from jaxthd.planning.sizes import Number, Sizes


@dataclass
class Memory:
    """Bytes by name. kept: in memory during the whole step. phases: added to it, one phase at a time."""

    kept: dict[str, Number] = field(default_factory=dict)
    phases: dict[str, Number] = field(default_factory=dict)

    @property
    def most(self) -> Number:
        return sum(self.kept.values()) + max(self.phases.values())


def temporary_memory(config: Config) -> Memory:
    """Gradients and activations on the busiest device; a compiler may add to them, reuse memory, or copy.

    Kept through the step:
    - the gradients; with several microbatches or a pipeline also those of one microbatch beside their sum;
    - with a pipeline: what its slots hold (schedule.slots x n D a, where stages keep their inputs only; else
      what their layers keep, as without a pipeline, of the busiest rank for all) and as much once more, as
      it is put there; two arrays in transit between ranks; what the encoder keeps for each microbatch in
      flight;
    - without one: what the layers of decoder and encoder keep for the backward pass: with recomputation n D a
      for each iteration of a scan over repeated units, without it all activations of every layer;
    - with multi-token prediction: the embeddings of each depth, as many as inputs of stages; with a pipeline
      and the CTC loss the tokens' own embeddings too.
    These are added one at a time:
    - a unit's activations, its gathered weights, and the largest gradients of one of its layers;
    - a block of the loss; with multi-token prediction also its layers, and each depth's norms and states at
      the head;
    - the CTC loss: the head with its gradient, its labels' rows, states that enter the head, frames laid out
      by document, emissions and the states of its recursion;
    - an encoder block; a part of the subsampling;
    - the update by Muon (planning/muon.py).
    """
    sizes = Sizes(config)
    return max((_of_rank(sizes, rank) for rank in range(sizes.stages.ranks)), key=lambda m: m.most)


def _of_rank(sizes: Sizes, rank: int) -> Memory:
    memory, encoder = Memory(), sizes.config.model.encoder
    gradients = sum(w.size * w.layers for w in sizes.weights if w.trained)
    memory.kept["gradients"] = gradients
    if sizes.is_pipelined or sizes.schedule.microbatches > 1:
        memory.kept["gradients of a microbatch"] = gradients
    decoder, audio = _kept_by_decoder(sizes, rank), _kept_by_encoder(sizes, encoder)
    if sizes.depths:
        held = sizes.schedule.in_flight if sizes.is_pipelined else 1
        memory.kept["embeddings of future tokens"] = held * sizes.depths * sizes.stream
    if sizes.ctc_labels:
        memory.phases["CTC loss"] = _ctc(sizes)
        if sizes.is_pipelined:
            memory.kept["embeddings for the CTC loss"] = sizes.schedule.in_flight * sizes.stream
    if sizes.is_pipelined:
        _pipeline_slots(sizes, memory)
    else:
        memory.kept["decoder, between layers"] = decoder
        if encoder:
            memory.kept["encoder, between layers"] = audio
        decoder = audio = 0
    units = [_unit(sizes, unit.letters) for unit in sizes.units(rank)]
    memory.phases["one unit of the decoder"] = decoder + max(units)
    if sizes.config.train.optimizer == "muon":
        memory.phases["Muon"] = muon_update(sizes)
    memory.phases["loss"] = _loss(sizes) + _mtp(sizes)
    if encoder and sizes.frames:
        passes = 1 + sizes.trains("encoder")
        block = passes * _conformer(sizes, encoder) + _block_weights(sizes)
        memory.phases["one block of the encoder"] = audio + block
        memory.phases["subsampling"] = audio + _subsampling(sizes, encoder)
    return memory


def _pipeline_slots(sizes: Sizes, memory: Memory) -> None:
    """What is kept between the ticks of a pipeline."""
    slots, in_flight = sizes.schedule.slots, sizes.schedule.in_flight
    of_stage = max(_kept_by_decoder(sizes, rank) for rank in range(sizes.stages.ranks))
    memory.kept["pipeline slots"] = (slots + 1) * of_stage + 2 * sizes.stream
    encoder = sizes.config.model.encoder
    if encoder and sizes.frames and (sizes.trains("encoder") or sizes.trains("adapter")):
        of_blocks = _kept_by_blocks(sizes, encoder) if sizes.trains("encoder") else 0.0
        mels = sizes.frames * SUBSAMPLING * encoder.num_mels * sizes.a
        memory.kept["encoder, in flight"] = (in_flight + 1) * (of_blocks + mels)


def _kept_by_decoder(sizes: Sizes, rank: int) -> Number:
    """Bytes that the layers of a stage keep, for the rank's largest stage; where they keep products as many
    as without recomputation, an upper bound."""
    compute = sizes.config.compute
    remat = compute.remat_llm and compute.remat_keep != "products"
    stage, most = 0.0, 0.0
    for unit in sizes.units(rank):
        inputs = len(unit.letters) if compute.remat_keep == "layers" else 1
        kept = inputs * sizes.stream if remat else sum(_layer(sizes, letter) for letter in unit.letters)
        stage += unit.repeats * kept
        if unit.ends_stage:
            most, stage = max(most, stage), 0.0
    return most


def _kept_by_encoder(sizes: Sizes, encoder: EncoderConfig | None) -> Number:
    """Bytes that its layers keep, and the gathered frames of all ranks of the row."""
    if not encoder or not sizes.frames:
        return 0.0
    gathered = sizes.frames * sizes.mesh.audio_ranks * sizes.config.model.llm.dim * sizes.a
    return (_kept_by_blocks(sizes, encoder) if sizes.trains("encoder") else 0.0) + gathered


def _kept_by_blocks(sizes: Sizes, encoder: EncoderConfig) -> Number:
    compute = sizes.config.compute
    remat = compute.remat_encoder and compute.remat_keep != "products"
    kept = sizes.frames * encoder.dim * sizes.a if remat else _conformer(sizes, encoder)
    return encoder.layers * kept


def _mtp(sizes: Sizes) -> Number:
    """Multi-token prediction's layers, norms and states."""
    if not sizes.depths:
        return 0
    llm, a, w = sizes.config.model.llm, sizes.a, sizes.w
    units = repeated_units(llm.mtp_pattern)
    around = sizes.stream / a * (4 * a + 3 * w) + sizes.tokens * llm.dim * (4 * a + w)
    if sizes.config.compute.remat_llm:
        layers = sizes.stream * sum(repeats for _, repeats in units)
    else:
        layers = sum(_layer(sizes, letter) for letter in llm.mtp_pattern)
    return sizes.depths * (around + layers) + max(_unit(sizes, unit, "mtp") for unit, _ in units)


def _unit(sizes: Sizes, letters: str, module: str = "decoder") -> Number:
    """An iteration of the scan over repeated units, in the backward pass."""
    kinds = set(letters)
    weights = {k: sizes.gathered(module, "layers", LAYER_KINDS[k].name) for k in kinds}
    gradients = {k: sizes.gathered(module, "layers", LAYER_KINDS[k].name, trained=True) for k in kinds}
    activations = {k: _layer(sizes, k) for k in kinds}
    used = sum(weights[k] * sizes.a / sizes.parameter for k in letters)
    remat = sizes.config.compute.remat_llm
    recomputed = sum(activations[k] for k in letters) if remat else 0
    return used + recomputed + max(activations[k] + gradients[k] for k in letters)


def _layer(sizes: Sizes, letter: str) -> Number:
    """Activations that a layer's backward pass needs, including those of its norm."""
    normed = sizes.tokens * sizes.config.model.llm.dim * 2 * sizes.a
    mixers = {
        "*": _attention,
        "W": _attention,
        "L": _latent_attention,
        "M": _mamba,
        "D": _delta,
        "-": _mlp,
        "E": _experts,
    }
    return normed + mixers[letter](sizes)


def _attention(sizes: Sizes) -> Number:
    llm = sizes.config.model.llm
    q, kv = sizes.heads * llm.head_dim, 2 * sizes.kv_heads * llm.head_dim
    gathers = sizes.config.compute.context_exchange == "all_gather"
    others = sizes.mesh.context if gathers else 1  # whose keys and values are held beside its own
    keys = kv * others if sizes.mesh.context > 1 else 0
    return sizes.tokens * (sizes.a * (2 * q + kv + keys) + sizes.w * (q + sizes.heads))


def _latent_attention(sizes: Sizes) -> Number:
    """Queries, expanded keys and values, what they are expanded from, and outputs."""
    llm, a, w = sizes.config.model.llm, sizes.a, sizes.w
    latent = llm.latent_attention
    q, v = sizes.heads * latent.qk_head_dim, sizes.heads * latent.v_head_dim
    gathers = sizes.config.compute.context_exchange == "all_gather"
    keys = (q + v) * (sizes.mesh.context if gathers else 1)
    low = (latent.kept + latent.q_lora_rank) * (2 * a + w)
    return sizes.tokens * (a * (q + v + keys) + w * (v + sizes.heads) + low)


def _mamba(sizes: Sizes) -> Number:
    llm, compute, a, w = sizes.config.model.llm, sizes.config.compute, sizes.a, sizes.w
    chunk = min(compute.scan_chunk, sizes.config.data.capacity)
    states = 2 * sizes.inner * llm.mamba_state / chunk
    inner = a * 2 * (sizes.inner + sizes.channels)
    if compute.scan_backend == "pallas":
        return sizes.tokens * (inner + a * (states + sizes.groups * chunk))
    pairs = (2 * sizes.mamba_heads + sizes.groups) * chunk
    return sizes.tokens * (inner + w * (states + pairs) + a * sizes.mamba_heads * chunk)


def _delta(sizes: Sizes) -> Number:
    """Inputs, gates and outputs; the pairs of tokens of a scan chunk: decays, the system, scores; what is
    written and read; and the states, with the map of a context chunk where there are several.
    """
    delta, a, w, t = sizes.config.model.llm.delta, sizes.a, sizes.w, sizes.mesh.tensor
    chunk = min(sizes.config.compute.scan_chunk, sizes.config.data.capacity)
    heads, inner, keys = delta.value_heads / t, delta.inner / t, delta.keys / t
    own = a * (4 * inner + 2 * (inner + 2 * keys)) + w * 4 * inner
    columns = delta.value_dim + (delta.key_dim if sizes.mesh.context > 1 else 0)
    states = 2 * heads * delta.key_dim * columns / chunk
    solved = heads * (2 * delta.key_dim + 3 * delta.value_dim)
    return sizes.tokens * (own + w * (states + solved + 4 * heads * chunk))


def _inner(sizes: Sizes) -> int:
    """Arrays of an MLP's inner dim: before and after the activation; with a gate three more, and what was
    clamped.
    """
    return {"relu2": 2, "swiglu": 5, "clamped_swiglu": 9}[sizes.config.model.llm.ffn_form]


def _mlp(sizes: Sizes) -> Number:
    return sizes.tokens * sizes.a * _inner(sizes) * sizes.config.model.llm.ffn_dim / sizes.mesh.tensor


def _experts(sizes: Sizes) -> Number:
    llm, a, t, n = sizes.config.model.llm, sizes.a, sizes.mesh.tensor, sizes.tokens
    width = llm.latent_dim or llm.dim
    own_experts = llm.experts / ranks_of(sizes.mesh, sizes.owners)
    rounded = sizes.expert_slots + own_experts * sizes.config.compute.expert_block
    routed = a * (rounded * (2 * width + _inner(sizes) * llm.expert_dim / t) + sizes.expert_slots * 2 * width)
    shared = n * a * _inner(sizes) * llm.shared_expert_dim / t
    return routed + shared + n * sizes.w * 3 * llm.experts


def _loss(sizes: Sizes) -> Number:
    """The head with its gradient, a block of logits, and the states that enter the head."""
    llm, compute, a, w = sizes.config.model.llm, sizes.config.compute, sizes.a, sizes.w
    entries = llm.vocab_size / ranks_of(sizes.mesh, (PIPELINE, TENSOR))
    head = entries * llm.dim
    logits = compute.loss_block * min(compute.vocab_block, entries)
    states = sizes.tokens * llm.dim * (3 * a + w)
    gradient = head * w if sizes.trains(sizes.head) else 0
    return head * a + gradient + 3 * logits * w + states


def _ctc(sizes: Sizes) -> Number:
    """The head, states, rows and blocks of the loss; and for each slot of whole rows its labels' emissions,
    passed to all context ranks, the posteriors and the recursion's states in both directions.
    """
    w, dim, most = sizes.w, sizes.config.model.llm.dim, sizes.config.train.ctc_max_labels
    documents = sizes.ctc_labels / most
    laid_out = (sizes.tokens + FRAME_BLOCK * documents) * dim * 2 * w
    rows = sizes.ctc_labels * dim * 2 * (sizes.a + w)
    emissions = (sizes.tokens + sizes.mesh.context * sizes.tokens) * (1 + most) * 2 * w
    recursion = sizes.mesh.context * sizes.tokens * most * 3 * w
    return _loss(sizes) + laid_out + rows + emissions + recursion


def _conformer(sizes: Sizes, encoder: EncoderConfig) -> Number:
    """Activations of an encoder block."""
    a, w = sizes.a, sizes.w
    norms = 10 * encoder.dim * a
    rotated, row = 3 * w * encoder.heads * encoder.dim, sizes.row_frames
    around = 2 * sizes.reach  # frames of neighbours, whose keys and values attention has beside its own
    attention: Number
    if row <= DENSE_FRAMES:  # the pairs of frames: weights, and their gradients before and after the softmax
        pairs = 3 * w * encoder.heads * (row + around)
        attention, keys = a * (encoder.heads + 7) * encoder.dim + rotated + pairs, 5 * a * encoder.dim
    else:
        attention = a * (2 * encoder.heads + 6) * encoder.dim + rotated
        keys = a * (encoder.heads + 5) * encoder.dim
    if sizes.config.compute.encoder_attention == "pallas":
        # Queries by content and by position, keys, values, outputs and their gradients; and the bias: its
        # values in the forward pass, again in the backward pass, and their gradients. Where clips may be cut
        # over ranks, the step holds another form too, and one of both runs: in long rows the kernels over all
        # of the window.
        bias = 3 * a * encoder.heads * width(encoder_frames(encoder.chunk_frames))
        own = 12 * a * encoder.dim + bias
        in_window = attention if row <= DENSE_FRAMES else own * (1 + around / row)
        attention = max(own, in_window) if around else own
    others = a * (6 * encoder.ffn_dim + 8 * encoder.dim)
    return sizes.frames * (norms + attention + others) + sizes.rows * around * keys


def _block_weights(sizes: Sizes) -> Number:
    """An encoder block's gathered weights and their gradients."""
    blocks = ("encoder", "blocks")
    return sizes.gathered(*blocks, trained=True) + sizes.gathered(*blocks)


def _subsampling(sizes: Sizes, encoder: EncoderConfig) -> Number:
    compute = sizes.config.compute
    piece = compute.subsampling_frames or PIECE
    held = piece_frames(math.ceil(sizes.frames), piece) if compute.remat_encoder else sizes.frames
    outputs = (held + 1) * 2 * encoder.num_mels
    # The first convolution: nine inputs for each output, and the outputs. The others have 1/4 and 1/16.
    return outputs * sizes.a * (9 + encoder.subsampling_channels * (2 + 12 * (1 / 4 + 1 / 16)))
