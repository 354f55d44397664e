"""Every mesh gives the same loss: compares the loss and every gradient on each mesh with one device.

    python scripts/check_meshes.py [--only mtp] [--sample N] [--dtype float64] [--out results.jsonl]
    python scripts/check_meshes.py --mesh 2 2 2 2 --dtype float64

The meshes are all ways to write 1, 2, 4 and 8 simulated devices as data x context x pipeline x tensor. Most
are run in two variants. The first has 1F1B, the ring (in pairs where stages differ), and whole residuals. The
second has interleaved or unevenly divided stages, all-gather, sequence-sharded residuals, sends to experts in
several rounds, and the layout by documents. A few more runs adapt the model by LoRA and frozen parameters.
They are compared with a dense model, which has neither: the gradient dW of the dense w + s a b gives those
of a and b as s dW b^T and s a^T dW. A few have multi-token prediction and a CTC loss, a few the blocks of
Qwen3, Qwen3-Next, GPT-OSS or DeepSeek-V3. Some keep documents whole on a context rank where they fit; in some
of these no document of a row is cut, one, the most, and one that fills the buffer. The last ones have stages
that differ, under each layout and with each choice of what a stage recomputes.

The model has all four mixers (two such units), experts over the data and context ranks, and audio. A batch is
32 ragged rows in 4 microbatches, one of which is all padding. A microbatch holds the same rows on every mesh,
so batch statistics and the auxiliary loss are the same too.

A row's error is the largest over all tensors, as scripts/comparison/errors.py defines it. Float64 runs are
compared with one device; the limit is 1e-10. Float32 runs are compared with float64 on one device; the limit
is 1e-5, or three times the error of one device in float32 where that is more. That error is 3e-6 to 2.7e-5,
over ORDERS orders of the same rows; the worst tensor is a bias of the tiny random encoder's attention.

Each row is appended to --out when it is done and is not repeated, so an interrupted check continues.
Exits 1 when a row fails. A row takes about 20 s on two cores, mostly compilation.
"""

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.comparison.quick_compilation import quick_on_devices

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Threads, four a device; see jaxthd.run.startup.simulate_devices.
os.environ.setdefault("PJRT_NPROC", "64" if "--mesh" in sys.argv else "32")
if __name__ == "__main__":
    _DEVICES = 16 if "--mesh" in sys.argv else 8
    os.environ["XLA_FLAGS"] = quick_on_devices(_DEVICES, stuck_seconds=300)

import jax
import numpy as np

from jaxthd.config import (
    AdaptConfig,
    ComputeConfig,
    Config,
    DataConfig,
    DeltaConfig,
    EncoderConfig,
    LatentAttentionConfig,
    LLMConfig,
    MeshConfig,
    ModelConfig,
    RopeConfig,
    TrainConfig,
)
from jaxthd.models.adapt import split
from jaxthd.models.stacks import from_stages, to_stages
from jaxthd.packing.assignment import Placement, Shares, Size
from jaxthd.packing.batch import Batch, concatenate_rows
from jaxthd.packing.document import Document
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.pack import pack_row
from jaxthd.parallel.mesh import make_mesh, put_batch
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import Gradient, loss_and_gradient
from jaxthd.terminal.tables import table
from scripts.comparison.errors import worst_error
from scripts.comparison.weights import random_state

Dtype = Literal["float32", "float64"]

ROWS, MICROBATCHES, CAPACITY, AUDIO, MELS, VOCAB, MOST_DOCUMENTS = 32, 4, 64, 512, 8, 56, 16
MODEL = ModelConfig(
    encoder=EncoderConfig(
        num_mels=MELS, layers=1, dim=16, heads=2, ffn_dim=24, subsampling_channels=4, conv_kernel=5
    ),
    llm=LLMConfig(
        pattern="ME*-ME*-",
        vocab_size=VOCAB,
        dim=32,
        q_heads=8,
        kv_heads=2,
        head_dim=8,
        ffn_dim=32,
        mamba_heads=8,
        mamba_head_dim=8,
        mamba_state=8,
        mamba_groups=2,
        experts=8,
        experts_per_token=2,
        expert_dim=16,
        shared_expert_dim=16,
        router_scale=2.5,
    ),
    adapter_dim=16,
)
COMPUTE = ComputeConfig(scan_chunk=6, attention_block=8, loss_block=16, vocab_block=20, expert_block=8)
UNEVEN = {2: "ME*|-ME*-", 4: "M|E*-M|E*|-", 8: "M|E|*|-|M|E|*|-"}
"""Uneven divisions into stages, by the number of stages."""
FILLED = DataConfig(max_documents=1)
"""Of runs in which each row is one document that fills the buffer."""
PLAIN = AdaptConfig()
ORDERS = 24
ADAPTED = AdaptConfig(
    freeze=("encoder.blocks.conv.norm.*", "adapter.up.w"),
    unfreeze=("decoder.*.norm.weight", "head", "encoder.subsampling.*"),
    lora_rank=3,
    lora_alpha=4.5,
    lora_targets=("decoder.*", "encoder.blocks.attention.*"),
)
PREDICTING: tuple[dict[str, Any], ...] = (
    {"pattern": "MEME", "mtp_pattern": "*E", "mtp_depths": 2},
    {"pattern": "M*", "mtp_pattern": "M*", "mtp_depths": 2, "mtp_shared": False},
)
"""Decoders with multi-token prediction."""
QWEN3: dict[str, Any] = {
    "pattern": "*E*-*E*-",
    "rope": RopeConfig(theta=100.0),
    "qk_norm": True,
    "ffn_form": "swiglu",
    "tied_embedding": True,
    "router": "softmax",
    "router_scale": 1.0,
    "shared_expert_dim": 0,
}
"""A decoder with Qwen3's blocks."""
QWEN3_NEXT: dict[str, Any] = {
    **QWEN3,
    "pattern": "DE*-DE*-",
    "rope": RopeConfig(theta=100.0, fraction=0.5),
    "tied_embedding": False,
    "norm_zero_centred": True,
    "attention_gate": True,
    "delta": DeltaConfig(key_heads=4, value_heads=8, key_dim=6, value_dim=5),
    "shared_expert_dim": 24,
    "shared_expert_gate": True,
}
"""A decoder with Qwen3-Next's blocks."""
GPT_OSS: dict[str, Any] = {
    "pattern": "WE*-WE*-",
    "window": 5,
    "attention_sinks": True,
    "attention_bias": True,
    "rope": RopeConfig(theta=100.0, scaling="yarn", factor=4.0, original_positions=16, truncate=False),
    "ffn_form": "clamped_swiglu",
    "swiglu_limit": 0.8,
    "ffn_bias": True,
    "router": "softmax",
    "router_bias": True,
    "router_scale": 1.0,
    "shared_expert_dim": 0,
}
"""A decoder with GPT-OSS's blocks, and MLPs of its form."""
DEEPSEEK: dict[str, Any] = {
    "pattern": "L-LEL-LE",
    "rope": RopeConfig(
        theta=100.0, scaling="yarn", factor=4.0, original_positions=8, mscale=1.0, mscale_all_dim=0.7
    ),
    "ffn_form": "swiglu",
    "experts": 8,
    "experts_per_token": 3,
    "router_groups": 4,
    "router_groups_per_token": 2,
    "latent_attention": LatentAttentionConfig(
        q_lora_rank=9, kv_lora_rank=10, qk_nope_head_dim=5, qk_rope_head_dim=6, v_head_dim=7
    ),
}
"""A decoder with DeepSeek-V3's blocks."""
MIXED: dict[str, Any] = {
    **QWEN3_NEXT,
    **GPT_OSS,
    **DEEPSEEK,
    "pattern": "DLWE*-",
    "shared_expert_dim": 24,
    "rope": replace(DEEPSEEK["rope"], fraction=0.5),
    "ffn_form": "clamped_swiglu",
    "router": "sigmoid",
}
"""A decoder with all of these families' blocks and options, each once."""
LONGEST_UNIT = 16
"""The longest unit, 2 * context: the layout by documents rounds lengths up to multiples of it."""


def meshes(devices: Sequence[int] = (1, 2, 4, 8)) -> list[MeshConfig]:
    """All ordered factorisations of each device count into four sizes."""
    sizes = [1, 2, 4, 8]
    return [
        MeshConfig(d, c, p, t)
        for n in devices
        for d in sizes
        for c in sizes
        for p in sizes
        for t in sizes
        if d * c * p * t == n
    ]


def variants(mesh: MeshConfig, dtype: Dtype = "float32") -> list[Config]:
    """The runs on a mesh: one, or two where the mesh allows a second variant."""
    train = TrainConfig(microbatches=MICROBATCHES, aux_loss=0.1)
    plain = Config(mesh=mesh, model=MODEL, compute=replace(COMPUTE, dtype=dtype), train=train)
    several = 2 if mesh.pipeline == 2 else 1
    other = replace(
        plain,
        mesh=replace(mesh, stages_per_rank=several),
        compute=replace(
            plain.compute,
            context_exchange="all_gather",
            context_layout="document" if mesh.context > 1 else "buffer",
            sequence_sharded=mesh.tensor > 1,
            expert_capacity=0.6,
            remat_llm=False,
        ),
        model=replace(
            MODEL,
            llm=replace(MODEL.llm, pattern=UNEVEN[mesh.pipeline] if mesh.pipeline > 2 else MODEL.llm.pattern),
        ),
    )
    return [plain] if mesh.devices == 1 else [plain, other]


def adapted(dtype: Dtype = "float32") -> list[Config]:
    """Runs that adapt the model. They cover interleaved stages with experts over data; 1F1B with a ring;
    sequence-sharded residuals with fewer key heads than ranks."""
    chosen = ((MeshConfig(2, 1, 2, 1), 1), (MeshConfig(1, 2, 2, 2), 0), (MeshConfig(1, 2, 1, 4), 1))
    return [replace(variants(mesh, dtype)[variant], adapt=ADAPTED) for mesh, variant in chosen]


def predicting(dtype: Dtype = "float32") -> list[Config]:
    """Runs with multi-token prediction and a CTC loss. They cover interleaved, sequence-sharded stages with
    experts over data; 1F1B with a ring; the layout by documents."""
    chosen = ((MeshConfig(2, 1, 2, 2), 1, 0), (MeshConfig(1, 2, 2, 1), 0, 0), (MeshConfig(1, 2, 1, 2), 1, 1))
    runs = [(variants(mesh, dtype)[variant], PREDICTING[number]) for mesh, variant, number in chosen]
    return [
        with_ctc(replace(run, model=replace(run.model, llm=replace(run.model.llm, **settings))))
        for run, settings in runs
    ]


def qwen3(dtype: Dtype = "float32") -> list[Config]:
    """Runs with Qwen3's blocks. They cover interleaved, sequence-sharded stages and the layout by documents;
    experts over data and context with a ring; more context ranks."""
    chosen = ((MeshConfig(1, 2, 2, 2), 1), (MeshConfig(2, 2, 1, 2), 0), (MeshConfig(1, 4, 1, 2), 1))
    llm = replace(MODEL.llm, **QWEN3)
    return [
        replace(variants(mesh, dtype)[variant], model=replace(MODEL, llm=llm)) for mesh, variant in chosen
    ]


def qwen3_next(dtype: Dtype = "float32") -> list[Config]:
    """Runs with Qwen3-Next's blocks, as those of qwen3. In the last one each of 4 context ranks has a value
    head of its own."""
    llm = replace(MODEL.llm, **QWEN3_NEXT)
    return [replace(run, model=replace(MODEL, llm=llm)) for run in qwen3(dtype)]


def whole(dtype: Dtype = "float32") -> list[Config]:
    """Runs under the layout "whole". They cover a ring over data ranks that have cut documents or not; more
    context ranks with tensor ranks; interleaved and unlike stages, by a ring in pairs too; GPT-OSS blocks;
    future tokens with a CTC loss; Qwen3-Next blocks."""
    of_ring, of_gather = "ring", "all_gather"
    chosen: tuple[tuple[MeshConfig, int, Any, dict[str, Any]], ...] = (
        (MeshConfig(2, 2, 1, 2), 0, of_ring, {}),
        (MeshConfig(1, 4, 1, 2), 1, of_ring, {}),
        (MeshConfig(1, 2, 2, 2), 1, of_gather, {}),
        (MeshConfig(1, 4, 2, 1), 0, of_ring, {}),
        (MeshConfig(2, 4, 1, 1), 0, of_ring, GPT_OSS),
        (MeshConfig(2, 2, 1, 1), 0, of_ring, PREDICTING[0]),
        (MeshConfig(2, 2, 1, 2), 0, of_ring, QWEN3_NEXT),
    )
    found = []
    for mesh, variant, exchange, llm in chosen:
        run = variants(mesh, dtype)[variant]
        model = replace(MODEL, llm=replace(run.model.llm, **llm))
        compute = replace(run.compute, context_layout="whole", context_exchange=exchange)
        run = replace(run, compute=compute, model=model)
        found.append(with_ctc(run) if run.model.llm.mtp_pattern else run)
    return [*found, *cutting(dtype)]


def cutting(dtype: Dtype = "float32") -> list[Config]:
    """Runs under the layout "whole" in which each row has no cut document; one; three, the most; and one that
    fills the buffer. They cover all axes, both exchanges, and the ring in pairs."""
    chosen: tuple[tuple[MeshConfig, int, int, bool], ...] = (
        (MeshConfig(1, 2, 2, 2), 0, 0, False),
        (MeshConfig(2, 4, 1, 1), 0, 0, False),
        (MeshConfig(1, 2, 2, 2), 0, 1, False),
        (MeshConfig(2, 2, 2, 1), 1, 1, False),
        (MeshConfig(2, 2, 1, 2), 1, 3, False),
        (MeshConfig(1, 4, 2, 1), 0, 3, False),
        (MeshConfig(1, 4, 1, 2), 0, 1, True),
        (MeshConfig(2, 2, 2, 1), 0, 1, True),
    )
    found = []
    for mesh, variant, cuts, fills in chosen:
        run = variants(mesh, dtype)[variant]
        compute = replace(run.compute, context_layout="whole", context_cuts=cuts)
        found.append(replace(run, compute=compute, data=FILLED if fills else run.data))
    return found


def unlike(dtype: Dtype = "float32") -> list[Config]:
    """Runs with stages that differ and a ring, which is then one of pairs. They cover tensor ranks; more
    context ranks; interleaved stages over data ranks; the three layouts; all that a stage may recompute."""
    chosen: tuple[tuple[MeshConfig, str, dict[str, Any]], ...] = (
        (MeshConfig(1, 2, 2, 2), "ME*|-ME*-", {"remat_stage": "blocks"}),
        (MeshConfig(1, 4, 2, 1), "ME*-M|E*-", {"remat_stage": "nothing", "context_layout": "document"}),
        (MeshConfig(2, 2, 2, 1), "M|E*-M|E*|-", {"remat_stage": "nothing"}),
        (MeshConfig(1, 4, 2, 1), "M|E*-M|E*|-", {"remat_stage": "blocks", "context_layout": "whole"}),
        (MeshConfig(1, 2, 4, 1), "M|E*-M|E*|-", {"remat_stage": "stage"}),
    )
    found = []
    for mesh, pattern, compute in chosen:
        run = variants(mesh, dtype)[0]
        stages_per_rank = (pattern.count("|") + 1) // mesh.pipeline
        llm = replace(run.model.llm, pattern=pattern)
        found.append(
            replace(
                run,
                mesh=replace(mesh, stages_per_rank=stages_per_rank),
                model=replace(run.model, llm=llm),
                compute=replace(run.compute, **compute),
            )
        )
    return found


def gpt_oss(dtype: Dtype = "float32") -> list[Config]:
    """Runs with GPT-OSS's blocks. They cover a ring with experts over data and context; interleaved,
    sequence-sharded stages and the layout by documents; more context ranks than a window reaches."""
    chosen = ((MeshConfig(2, 2, 1, 2), 0), (MeshConfig(1, 2, 2, 2), 1), (MeshConfig(1, 8, 1, 1), 0))
    llm = replace(MODEL.llm, **GPT_OSS)
    return [
        replace(variants(mesh, dtype)[variant], model=replace(MODEL, llm=llm)) for mesh, variant in chosen
    ]


def deepseek(dtype: Dtype = "float32") -> list[Config]:
    """Runs with DeepSeek-V3's blocks, as those of qwen3. The second one has no latent for queries."""
    latent = replace(DEEPSEEK["latent_attention"], q_lora_rank=0)
    settings = (DEEPSEEK, DEEPSEEK | {"latent_attention": latent}, DEEPSEEK)
    return [
        replace(run, model=replace(MODEL, llm=replace(MODEL.llm, **one)))
        for run, one in zip(qwen3(dtype), settings, strict=True)
    ]


def mixed(dtype: Dtype = "float32") -> list[Config]:
    """A run with the blocks of all families: experts over data and context, a ring."""
    llm = replace(MODEL.llm, **MIXED)
    return [replace(variants(MeshConfig(2, 2, 1, 2), dtype)[0], model=replace(MODEL, llm=llm))]


def with_ctc(config: Config) -> Config:
    """Adds a CTC loss. It covers 16 of the 37 documents with audio."""
    train = replace(config.train, ctc_loss=0.3, ctc_max_labels=5)
    return replace(config, train=train, data=DataConfig(max_documents=MOST_DOCUMENTS))


@functools.cache
def documents(seed: int = 0, *, fills: bool = False) -> list[list[Document]]:
    """Ragged documents of each row; some have audio, half of their text is supervised. The last microbatch is
    empty. fills: each other row is one document that fills the buffer."""
    if fills:
        return [[one_of(row, f"{number}")] if row else [] for number, row in enumerate(documents(seed))]
    rng = np.random.default_rng(seed)
    rows: list[list[Document]] = []
    for row in range(ROWS - ROWS // MICROBATCHES):
        rows.append([])
        room = CAPACITY
        while room > 8:
            text, clip = int(rng.integers(1, 20)), int(rng.integers(0, 60)) if rng.random() < 0.5 else 0
            slots = -(-clip // 8)
            rounded = -(-(text + slots) // LONGEST_UNIT) * LONGEST_UNIT
            if rounded > room:
                break
            room -= rounded
            tokens = rng.integers(1, VOCAB - 1, text).tolist()
            supervised = (rng.random(text) < 0.5).tolist()
            mels = [[rng.normal(size=(clip, MELS)).astype(np.float32)]] if clip else []
            if clip:
                tokens, supervised = [VOCAB - 1, *tokens], [False, *supervised]
            rows[-1].append(Document.splice(f"{row}.{len(rows[-1])}", tokens, supervised, mels, VOCAB - 1))
    return rows + [[] for _ in range(ROWS - len(rows))]


def one_of(documents: Sequence[Document], key: str) -> Document:
    """The documents one after the other, and as many tokens more as the buffer has room for."""
    more = CAPACITY - sum(map(len, documents))

    def joined(name: str, fill: int) -> np.ndarray:
        arrays = [getattr(document, name) for document in documents]
        return np.concatenate([*arrays, np.full(more, fill, arrays[0].dtype)])

    chunks = tuple(chunk for document in documents for chunk in document.chunks)
    return Document(key, joined("tokens", 1), joined("is_audio", 0), joined("supervised", 1), chunks)


def batch_for(config: Config, capacity: int = CAPACITY, order: int = 0) -> Batch:
    """Orders the rows so that each microbatch, over all data ranks, holds the same rows on every mesh.

    order: any number but 0 also permutes the rows inside the microbatches.
    """
    fills, most_cut = config.data == FILLED, config.compute.context_cuts
    mesh, layout, rows = config.mesh, config.compute.layout, documents(fills=fills)
    microbatches = np.arange(ROWS).reshape(MICROBATCHES, -1)
    if order:
        microbatches = np.random.default_rng(order).permuted(microbatches, axis=1)
    numbers = microbatches.reshape(MICROBATCHES, mesh.data, -1).swapaxes(0, 1).ravel()
    shares = None
    if ContextLayout.of(config).keeps_documents:
        given = most_cut <= 3
        capacity *= 1 if fills else 4 if given else 2
        shares = Shares(mesh.context, capacity, min(most_cut, 3))
        place = partial(cutting_placement, cut=most_cut) if given else even_placement
    packed = [
        pack_row(
            rows[i],
            capacity=capacity,
            audio_capacity=AUDIO,
            num_mels=MELS,
            max_documents=MOST_DOCUMENTS,
            context=mesh.context,
            audio_ranks=mesh.audio_ranks,
            layout=layout,
            round_to=LONGEST_UNIT if layout == "document" else 1,
            depths=config.depths_trained,
            shares=shares,
            placement=place(rows[i], shares) if shares else None,
        )[0]
        for i in numbers
    ]
    return concatenate_rows(packed)


def even_placement(documents: Sequence[Document], shares: Shares) -> Placement | None:
    """One that divides attention evenly, which cuts documents in most rows."""
    sizes = [Size(n, n * (n + 1) // 2) for n in map(len, documents)]
    rows = shares.rows(sizes, range(len(sizes)), [], range(shares.most_cut + 1)) if sizes else ()
    placed = shares.best(sizes, rows)
    return placed if placed and len(placed.order) == len(sizes) else None


def cutting_placement(documents: Sequence[Document], shares: Shares, cut: int) -> Placement | None:
    """One that cuts so many documents, or as many as there are."""
    sizes = [Size(n, n * (n + 1) // 2) for n in map(len, documents)]
    numbers = range(min(cut, len(sizes)), -1, -1)
    rows = shares.rows(sizes, range(len(sizes)), [], numbers) if sizes else ()
    return next((placed for placed in rows if len(placed.order) == len(sizes)), None)


@functools.cache
def canonical_state(dtype: str, adapt: AdaptConfig = PLAIN, llm: LLMConfig = MODEL.llm) -> tuple[Any, Any]:
    """(parameters, buffers); no value would hide an error."""
    filled = random_state(Blueprint(Config(model=replace(MODEL, llm=llm), adapt=adapt)).model)[1:]
    return jax.tree.map(lambda x: x.astype(dtype), filled)


@functools.lru_cache(maxsize=1)
def program(config: Config) -> Any:
    """The jitted loss and gradient of one config; the last one is cached, for several batches."""
    return jax.jit(loss_and_gradient(Blueprint(config), make_mesh(config.mesh)))


def evaluate(config: Config, state: tuple[Any, Any] | None = None, order: int = 0) -> tuple[Gradient, float]:
    """(loss, gradients and the rest in canonical form, seconds to compile and run). order: see batch_for."""
    dtype = config.compute.dtype
    with jax.enable_x64(dtype == "float64"):
        mesh, stages = make_mesh(config.mesh), Blueprint(config).stages
        canonical = state or canonical_state(
            dtype, config.adapt, replace(config.model.llm, pattern=config.model.llm.letters)
        )
        params, buffers = to_stages(canonical, stages)
        batch = put_batch(batch_for(config, order=order), mesh)
        start = time.perf_counter()
        # Moved to the host first: the rest is no work for all devices.
        found: Gradient = jax.tree.map(np.asarray, program(config)(params, buffers, batch))
        seconds = time.perf_counter() - start
        routing = from_stages({"layers": {"moe": found.routing}}, stages)["layers"]["moe"]
        gradients, buffers = from_stages((found.gradients, found.buffers), stages)
        return found._replace(gradients=gradients, buffers=buffers, routing=routing), seconds


@functools.cache
def one_device(
    dtype: Dtype,
    adapt: AdaptConfig = PLAIN,
    order: int = 0,
    llm: LLMConfig = MODEL.llm,
    *,
    fills: bool = False,
) -> Gradient:
    """One device's results. For an adapted model, LoRA's gradients are derived from the dense model's."""
    config = variants(MeshConfig(), dtype)[0]
    config = replace(config, data=FILLED) if fills else config
    config = replace(config, model=replace(config.model, llm=llm))
    config = with_ctc(config) if llm.mtp_pattern else config
    if adapt == PLAIN:
        return evaluate(config, order=order)[0]
    params, buffers = canonical_state(dtype, adapt)
    scale = adapt.lora_alpha / adapt.lora_rank
    stored_statistics = replace(config, adapt=AdaptConfig(freeze=("encoder.blocks.conv.norm.*",)))
    found, _ = evaluate(stored_statistics, (without_lora(params, scale), buffers), order)
    is_trained = Blueprint(Config(model=MODEL, adapt=adapt)).trained
    own, _ = split(of_lora(found.gradients, params, scale), is_trained)
    return found._replace(gradients=own)


def without_lora(params: Any, scale: float) -> Any:
    """The parameters with each pair of low-rank matrices merged into its w."""
    if not isinstance(params, dict):
        return params
    plain = {name: without_lora(child, scale) for name, child in params.items() if name != "lora"}
    if "lora" in params:
        plain["w"] = plain["w"] + scale * params["lora"]["a"] @ params["lora"]["b"]
    return plain


def of_lora(gradients: Any, params: Any, scale: float) -> Any:
    """Gradients of parameters with low-rank matrices, derived from those of the dense model."""
    if not isinstance(params, dict):
        return gradients
    found = {name: of_lora(gradients[name], child, scale) for name, child in params.items() if name != "lora"}
    if "lora" in params:
        dw, a, b = gradients["w"], params["lora"]["a"], params["lora"]["b"]
        found["lora"] = {"a": scale * dw @ b.swapaxes(-1, -2), "b": scale * a.swapaxes(-1, -2) @ dw}
    return found


def worst_of(got: Gradient, want: Gradient) -> tuple[float, str]:
    """(the largest error of a tensor, its name), over loss, gradients, statistics and routing. Each of these
    has its own typical norm. want: in float64.
    """
    parts = zip(Gradient._fields, got, want, strict=True)
    return max((error, f"{part}{name}") for part, g, w in parts for error, name in [worst_error(g, w)])


def of_decoder(gradient: Gradient) -> Gradient:
    """Without the gradients of the encoder's parameters."""
    return gradient._replace(gradients={k: v for k, v in gradient.gradients.items() if k != "encoder"})


Which = Callable[[Gradient], Gradient]
"""What of a gradient is compared."""


@functools.cache
def own_errors(adapt: AdaptConfig, llm: LLMConfig, which: Which, *, fills: bool = False) -> list[float]:
    """The errors of one device in float32, over several orders of the same rows."""
    truth = which(one_device("float64", adapt, 0, llm, fills=fills))
    each = (one_device("float32", adapt, order, llm, fills=fills) for order in range(ORDERS))
    return [worst_of(which(found), truth)[0] for found in each]


def everything(gradient: Gradient) -> Gradient:
    return gradient


def check(config: Config, which: Which = everything) -> dict[str, Any]:
    """Runs one config; returns its row of the table. which: what is compared."""
    got, seconds = evaluate(config)
    llm = replace(config.model.llm, pattern=config.model.llm.letters)
    fills = config.data == FILLED
    error, tensor = worst_of(which(got), which(one_device("float64", config.adapt, 0, llm, fills=fills)))
    allowed = 1e-10
    if config.compute.dtype != "float64":
        allowed = max(1e-5, 3 * max(own_errors(config.adapt, llm, which, fills=fills)))
    return {
        "mesh": "x".join(map(str, config.mesh.sizes)),
        "stages": "|".join(Blueprint(config).stages.patterns),
        "exchange": config.compute.context_exchange if config.mesh.context > 1 else "",
        "layout": config.compute.layout if config.mesh.context > 1 else "",
        "cut": cut_documents(config),
        "residual": "sharded" if config.compute.sequence_sharded else "",
        "adapted": "LoRA" if config.adapt.lora_rank else "",
        "mtp": llm.mtp_modules * llm.mtp_pattern,
        "dtype": config.compute.dtype,
        "loss": float(got.loss),
        "error": error,
        "allowed": allowed,
        "tensor": tensor,
        "seconds": round(seconds, 1),
    }


def cut_documents(config: Config) -> str:
    """Under the layout "whole": how many documents of a row are cut, least and most of the filled rows."""
    batch = batch_for(config)
    if batch.cuts is None:
        return "0" if ContextLayout.of(config).keeps_documents else ""
    cut = (batch.cuts > 0).sum(1)[(batch.segment_ids > 0).any(1)]
    text = f"{cut.min()} to {cut.max()}" if cut.min() < cut.max() else f"{cut.min()}"
    return text + ", filling the buffer" * (config.data == FILLED)


def show(rows: Sequence[dict[str, Any]]) -> str:
    columns = "|stages|exchange|layout|cut|residual|adapted|MTP|loss|error|at most|seconds"
    cells = [
        [
            r["mesh"],
            r["stages"],
            r["exchange"],
            r["layout"],
            r["cut"],
            r["residual"],
            r["adapted"],
            r["mtp"],
            f"{r['loss']:.7f}",
            f"{r['error']:.1e}" + ("" if r["error"] <= r["allowed"] else " FAILS"),
            f"{r['allowed']:.1e}",
            f"{r['seconds']:.0f}",
        ]
        for r in rows
    ]
    return table("data x context x pipeline x tensor", columns, cells)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    families = ("qwen3", "qwen3_next", "gpt_oss", "deepseek")
    names = ("plain", "lora", "mtp", *families, "mixed", "whole", "unlike")
    parser.add_argument("--only", choices=names, help="one kind of rows")
    parser.add_argument("--mesh", type=int, nargs=4, help="plain rows of this mesh alone, as 2 2 2 2")
    parser.add_argument("--sample", type=int, default=0, help="only as many rows, drawn at random (seed 0)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--out", type=Path, default=Path("runs/check_meshes.jsonl"))
    options = parser.parse_args(argv)

    kinds = {
        "plain": [config for mesh in meshes() for config in variants(mesh, options.dtype)],
        "lora": adapted(options.dtype),
        "mtp": predicting(options.dtype),
        "qwen3": qwen3(options.dtype),
        "qwen3_next": qwen3_next(options.dtype),
        "gpt_oss": gpt_oss(options.dtype),
        "deepseek": deepseek(options.dtype),
        "mixed": mixed(options.dtype),
        "whole": whole(options.dtype),
        "unlike": unlike(options.dtype),
    }
    runs = kinds[options.only] if options.only else list(chain(*kinds.values()))
    if options.mesh:
        runs = variants(MeshConfig(*options.mesh), options.dtype)
    if options.sample:
        chosen = np.random.default_rng(0).permutation(len(runs))[: options.sample]
        runs = [runs[i] for i in sorted(chosen)]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.touch()
    done = {row["config"]: row for row in map(json.loads, options.out.read_text().splitlines())}
    rows = []
    for config in runs:
        name = json.dumps(asdict(config))
        if name not in done:
            done[name] = {"config": name, **check(config)}
            with options.out.open("a") as file:
                file.write(json.dumps(done[name]) + "\n")
        rows.append(done[name])
        line = rows[-1]
        print(
            f"{len(rows)}/{len(runs)}  {line['mesh']}  {line['stages']}  error {line['error']:.1e}",
            flush=True,
        )
    print(f"\n{show(rows)}")
    if options.dtype == "float32" and not (options.only or options.mesh):
        own = own_errors(PLAIN, MODEL.llm, everything)
        print(f"\none device, {ORDERS} orders of its rows: {min(own):.1e} to {max(own):.1e}")
        shares = [row["error"] / row["allowed"] for row in rows]
        print(f"errors over what is allowed: median {np.median(shares):.2f}, largest {max(shares):.2f}")
    failed = sum(row["error"] > row["allowed"] for row in rows)
    print(f"\n{len(rows) - failed} of {len(rows)} hold")
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
