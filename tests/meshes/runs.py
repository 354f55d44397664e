"""The runs that are compared: which model on which mesh, with which schedule, exchange and layout."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from jaxthd.config import Config, DataConfig, LLMConfig, MeshConfig, TrainConfig
from tests.meshes.models import (
    ADAPTED,
    COMPUTE,
    MODEL,
    PREDICTING,
    UNEVEN,
    deepseek,
    falcon_h1,
    gpt_oss,
    granite4,
    kimi_linear,
    lfm2,
    olmo_hybrid,
    qwen3,
    qwen3_next,
    with_pattern,
)
from tests.meshes.models import mixed as with_all_blocks

Dtype = Literal["float32", "float64"]
Change = Callable[[LLMConfig], LLMConfig]
"""Gives the decoder other blocks."""
MICROBATCHES, MOST_DOCUMENTS = 4, 16
FILLED = DataConfig(max_documents=1)
"""Of runs in which each row is one document that fills the buffer."""


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
            sequence_sharded=mesh.tensor > 1,
            block_sizes=replace(plain.compute.blocks, expert_slots=0.6),
            remat="none",
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
    experts over data; 1F1B with a ring; gathered keys."""
    chosen = ((MeshConfig(2, 1, 2, 2), 1, 0), (MeshConfig(1, 2, 2, 1), 0, 0), (MeshConfig(1, 2, 1, 2), 1, 1))
    runs = [(variants(mesh, dtype)[variant], PREDICTING[number]) for mesh, variant, number in chosen]
    return [
        with_ctc(replace(run, model=replace(run.model, llm=with_pattern(run.model.llm, **settings))))
        for run, settings in runs
    ]


def without_query_latents(llm: LLMConfig) -> LLMConfig:
    """DeepSeek-V3's blocks without a latent for queries."""
    return deepseek(llm).with_settings("L", q_lora_rank=0)


FAMILIES: dict[str, tuple[Change, ...]] = {
    "qwen3": (qwen3,) * 3,
    "qwen3_next": (qwen3_next,) * 3,
    "gpt_oss": (gpt_oss,) * 3,
    "kimi_linear": (kimi_linear,) * 3,
    "deepseek": (deepseek, without_query_latents, deepseek),
    "granite4": (granite4,) * 3,
    "falcon_h1": (falcon_h1, partial(falcon_h1, norm="before_gate"), falcon_h1),
    "lfm2": (lfm2,) * 3,
    "olmo_hybrid": (olmo_hybrid,) * 3,
}
"""The change of the decoder in each run with a family's blocks."""
CHOSEN = ((MeshConfig(1, 2, 2, 2), 1), (MeshConfig(2, 2, 1, 2), 0), (MeshConfig(1, 4, 1, 2), 1))
"""(mesh, variant) of these runs. They cover interleaved, sequence-sharded stages and gathered keys;
experts over data and context with a ring; more context ranks. In the last one each of 4 context ranks has a
value head of Qwen3-Next of its own."""
REACHING = (CHOSEN[1], CHOSEN[0], (MeshConfig(1, 8, 1, 1), 0))
"""Blocks of GPT-OSS: more context ranks than a window reaches."""


def of_family(name: str, dtype: Dtype = "float32") -> list[Config]:
    """Runs with the blocks of a family."""
    chosen = REACHING if name == "gpt_oss" else CHOSEN
    return [
        replace(variants(mesh, dtype)[variant], model=replace(MODEL, llm=change(MODEL.llm)))
        for (mesh, variant), change in zip(chosen, FAMILIES[name], strict=True)
    ]


def whole(dtype: Dtype = "float32") -> list[Config]:
    """Runs under the layout "whole". They cover a ring over data ranks that have split documents or not; more
    context ranks with tensor ranks; interleaved and unlike stages; GPT-OSS blocks;
    future tokens with a CTC loss; Qwen3-Next blocks."""
    of_ring, of_gather = "ring", "all_gather"
    chosen: tuple[tuple[MeshConfig, int, Any, Change | None], ...] = (
        (MeshConfig(2, 2, 1, 2), 0, of_ring, None),
        (MeshConfig(1, 4, 1, 2), 1, of_ring, None),
        (MeshConfig(1, 2, 2, 2), 1, of_gather, None),
        (MeshConfig(1, 4, 2, 1), 0, of_ring, None),
        (MeshConfig(2, 4, 1, 1), 0, of_ring, gpt_oss),
        (MeshConfig(2, 2, 1, 1), 0, of_ring, partial(with_pattern, **PREDICTING[0])),
        (MeshConfig(2, 2, 1, 2), 0, of_ring, qwen3_next),
    )
    found = []
    for mesh, variant, exchange, change in chosen:
        run = variants(mesh, dtype)[variant]
        model = replace(MODEL, llm=change(run.model.llm) if change else run.model.llm)
        compute = replace(run.compute, context_layout="whole", context_exchange=exchange)
        run = replace(run, compute=compute, model=model)
        found.append(with_ctc(run) if run.model.llm.mtp_pattern else run)
    return [*found, *splitting(dtype)]


def splitting(dtype: Dtype = "float32") -> list[Config]:
    """Runs under the layout "whole" in which each row has no split document; one; three, the most; and one
    that fills the buffer. They cover all axes and both exchanges."""
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
    for mesh, variant, splits, fills in chosen:
        run = variants(mesh, dtype)[variant]
        compute = replace(run.compute, context_layout="whole", context_splits=splits)
        found.append(replace(run, compute=compute, data=FILLED if fills else run.data))
    return found


def unlike(dtype: Dtype = "float32") -> list[Config]:
    """Runs with stages that differ, whose keys are gathered. They cover tensor ranks; more
    context ranks; interleaved stages over data ranks; both layouts; all that a stage may recompute."""
    chosen: tuple[tuple[MeshConfig, str, dict[str, Any]], ...] = (
        (MeshConfig(1, 2, 2, 2), "ME*|-ME*-", {}),
        (MeshConfig(1, 4, 2, 1), "ME*-M|E*-", {"remat": "none"}),
        (MeshConfig(2, 2, 2, 1), "M|E*-M|E*|-", {"remat": "none"}),
        (MeshConfig(1, 4, 2, 1), "M|E*-M|E*|-", {"context_layout": "whole"}),
        (MeshConfig(1, 2, 4, 1), "M|E*-M|E*|-", {}),
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


def mixed(dtype: Dtype = "float32") -> list[Config]:
    """A run with the blocks of all families: experts over data and context, a ring."""
    model = replace(MODEL, llm=with_all_blocks(MODEL.llm))
    return [replace(variants(MeshConfig(2, 2, 1, 2), dtype)[0], model=model)]


def with_ctc(config: Config) -> Config:
    """Adds a CTC loss. It covers 16 of the 37 documents with audio."""
    train = replace(config.train, ctc_loss=0.3, ctc_max_labels=5)
    return replace(config, train=train, data=DataConfig(max_documents=MOST_DOCUMENTS))


def plain(dtype: Dtype = "float32") -> list[Config]:
    """All runs of the plain model: every mesh, in its variants."""
    return [config for mesh in meshes() for config in variants(mesh, dtype)]


KINDS: dict[str, Callable[[Dtype], list[Config]]] = {
    "plain": plain,
    "lora": adapted,
    "mtp": predicting,
    **{name: partial(of_family, name) for name in FAMILIES},
    "mixed": mixed,
    "whole": whole,
    "unlike": unlike,
}
"""All runs, by their kind."""
