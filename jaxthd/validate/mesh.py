"""Rules about what the mesh divides over ranks: devices, buffers, heads, layers, vocabulary, experts."""

import math
from collections.abc import Iterator
from operator import attrgetter

from jaxthd.config import Config
from jaxthd.models.mixers import LAYER_KINDS
from jaxthd.models.stacks import pipeline_stages
from jaxthd.packing.assignment import LEAST_CHUNK
from jaxthd.parallel.experts import expert_sharding
from jaxthd.parallel.schedule import make_schedule
from jaxthd.validate.rules import DeviceFacts, Finding, Group, divisors, multiples

RULES = Group()


# --- the mesh and the machine ---


@RULES.rule
def _devices(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    need = config.mesh.devices
    if device.platform == "cpu":  # simulated: as many as the mesh asks for
        return
    found = f"{device.devices} devices ({device.kind}) for a mesh of {need}"
    if device.devices < need:
        yield Finding(found, "a device for each rank of the mesh", "lower mesh.data or mesh.context")
    elif device.devices > need:
        change = (
            f"raise mesh.data or mesh.context, or ignore this if the other {device.devices - need} may idle"
        )
        yield Finding(found, "all devices in use", change, is_warning=True)


@RULES.rule
def _rows_over_data(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    rows, ranks = config.data.rows, config.mesh.data
    if rows % ranks:
        yield Finding(
            f"data.rows is {rows} with mesh.data {ranks}",
            f"a multiple of {ranks}, because every data rank takes equally many buffers",
            f"set data.rows to {multiples(rows, ranks)}",
        )


@RULES.rule
def _capacity_over_context(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    capacity, unit = config.data.capacity, 2 * config.mesh.context
    if unit > 2 and capacity % unit:
        yield Finding(
            f"data.capacity is {capacity} with mesh.context {config.mesh.context}",
            f"a multiple of 2 * context = {unit}, because every context rank holds two equal context chunks",
            f"set data.capacity to {multiples(capacity, unit)}",
        )


@RULES.rule
def _chunk_holds_convolution(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    llm, unit, whole = config.model.llm, 2 * config.mesh.context, config.compute.layout == "buffer"
    chunk = config.data.capacity // unit
    for letter, whose, taps in (("M", "Mamba2's", llm.mamba_conv), ("D", "the delta rule's", llm.delta.conv)):
        if whole and unit > 2 and letter in llm.kinds and chunk < taps - 1:
            yield Finding(
                f"a context chunk, data.capacity / (2 * context), holds {chunk} tokens",
                f"{taps - 1} or more, because {whose} convolution of {taps} taps looks that far back",
                f"set data.capacity to {unit * (taps - 1)} or more, or lower mesh.context",
            )


@RULES.rule
def _cut_chunk_holds_convolution(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    llm = config.model.llm
    cuts = config.compute.layout == "whole" and config.mesh.context > 1 and config.compute.context_cuts > 0
    for letter, name, taps in (("M", "mamba_conv", llm.mamba_conv), ("D", "delta.conv", llm.delta.conv)):
        if not cuts or letter not in llm.kinds or taps - 1 <= LEAST_CHUNK:
            continue
        yield Finding(
            f'model.llm.{name} is {taps} with compute.context_layout "whole"',
            f"at most {LEAST_CHUNK + 1}, because a cut document's context chunks may be as short as "
            f"{LEAST_CHUNK} tokens",
            "set compute.context_layout to buffer, or, if no document exceeds a context rank's share, "
            "compute.context_cuts to 0",
        )


# --- what tensor and pipeline ranks share ---


@RULES.rule
def _width_over_tensor(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    llm, ranks = config.model.llm, config.mesh.tensor
    for letters, name in (
        ("*WL", "q_heads"),
        ("M", "mamba_heads"),
        ("D", "delta.value_heads"),
        ("-", "ffn_dim"),
        ("E", "expert_dim"),
        ("E", "shared_expert_dim"),
    ):
        size = attrgetter(name)(llm)
        if set(letters) & set(llm.kinds) and size % ranks:
            yield Finding(
                f"mesh.tensor is {ranks} with model.llm.{name} {size}",
                f"a divisor of {size}, because every rank takes equally many",
                f"set mesh.tensor to {divisors(size, ranks)}, or model.llm.{name} to "
                f"{multiples(size, ranks)}",
            )
    for letters, name in (("*W", "kv_heads"), ("M", "mamba_groups"), ("D", "delta.key_heads")):
        size = attrgetter(name)(llm)
        if set(letters) & set(llm.kinds) and size % ranks and ranks % size:
            yield Finding(
                f"mesh.tensor is {ranks} with model.llm.{name} {size}",
                f"a divisor or a multiple of {size}: each rank takes equally many, or equally many share one",
                f"set mesh.tensor to {divisors(size, ranks)} or {size * (ranks // size + 1)}",
            )


@RULES.rule
def _vocabulary_over_ranks(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    entries, ranks = config.model.llm.vocab_size, config.mesh.pipeline * config.mesh.tensor
    if entries % ranks:
        yield Finding(
            f"model.llm.vocab_size is {entries} with {ranks} pipeline and tensor ranks",
            f"a multiple of {ranks}, because these ranks share the vocabulary",
            f"set model.llm.vocab_size to {entries + -entries % ranks} (entries beyond the tokenizer's are "
            "not used), or change mesh.pipeline or mesh.tensor",
        )


@RULES.rule
def _pipeline(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    mesh, llm = config.mesh, config.model.llm
    if mesh.pipeline == 1 and mesh.stages_per_rank > 1:
        found = f"mesh.stages_per_rank is {mesh.stages_per_rank} with mesh.pipeline 1"
        change = "set mesh.stages_per_rank to 1, or raise mesh.pipeline"
        yield Finding(found, "1, because there is no pipeline", change)
        return
    if set(llm.pattern) - {*LAYER_KINDS, "|"}:
        return
    try:
        pipeline_stages(llm, mesh)
    except ValueError as error:
        count = mesh.pipeline * mesh.stages_per_rank
        change = f"put {count - 1} or no | into model.llm.pattern, or lower mesh.pipeline"
        yield Finding(str(error), f"{count} stages of at least one layer", change)
        return


@RULES.rule
def _bubble(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    mesh, microbatches = config.mesh, config.train.microbatches
    if mesh.pipeline > 1:
        bubble = make_schedule(microbatches, mesh.pipeline, mesh.stages_per_rank).bubble
        if bubble > 0.5:
            yield Finding(
                f"train.microbatches is {microbatches} on {mesh.pipeline} pipeline ranks, which idle "
                f"{bubble:.0%} of the time",
                f"more microbatches, such as {2 * mesh.pipeline}",
                "raise train.microbatches (and data.rows, a multiple of mesh.data times it)",
                is_warning=True,
            )
        elif mesh.stages_per_rank > 1 and microbatches % mesh.pipeline:
            yield Finding(
                f"train.microbatches is {microbatches} on {mesh.pipeline} ranks of {mesh.stages_per_rank} "
                "stages",
                f"a multiple of {mesh.pipeline}, the group size of the interleaved schedule",
                f"set train.microbatches to {multiples(microbatches, mesh.pipeline)}",
                is_warning=True,
            )


@RULES.rule
def _tokens_over_tensor(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    data, mesh = config.data, config.mesh
    tokens = data.rows // mesh.data // config.train.microbatches * data.capacity // mesh.context
    if config.compute.sequence_sharded and tokens % mesh.tensor:
        unit = mesh.context * mesh.tensor
        yield Finding(
            f"compute.sequence_sharded with {tokens} tokens of a microbatch for {mesh.tensor} tensor ranks",
            f"a multiple of {mesh.tensor}, because every rank takes equally many",
            f"set data.capacity to {multiples(data.capacity, math.lcm(unit, 2 * mesh.context))}",
        )


@RULES.rule
def _experts_over_ranks(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    llm, ranks = config.model.llm, config.mesh.data * config.mesh.context
    if "E" in llm.kinds and ranks > 1 and llm.experts % ranks:
        sharded = expert_sharding(llm.experts, config.mesh)
        yield Finding(
            f"model.llm.experts is {llm.experts} for {ranks} data and context ranks",
            f"a multiple of {ranks}: experts are sharded over the axes {sharded.axes if sharded else '()'} "
            "only, the others gather their weights",
            "change mesh.data or mesh.context, unless they may be gathered",
            is_warning=True,
        )
