"""Rules about what the mesh divides over ranks: devices, buffers, heads, layers, vocabulary, experts."""

import math
from collections.abc import Iterator

from jaxthd.config import Config
from jaxthd.config.findings import Finding, divisors, multiples
from jaxthd.config.listing import value_at
from jaxthd.models.stacks import pipeline_stages
from jaxthd.packing.assignment import LEAST_CHUNK
from jaxthd.parallel.experts import expert_sharding
from jaxthd.parallel.schedule import make_schedule
from jaxthd.validate.rules import DeviceFacts


def _devices(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks that there is a device for each rank."""
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


def _buffers(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks what data and context ranks take of the buffers."""
    data, mesh, llm = config.data, config.mesh, config.model.llm
    rows, ranks, capacity, unit = data.rows, mesh.data, data.capacity, 2 * mesh.context
    if rows % ranks:
        yield Finding(
            f"data.rows is {rows} with mesh.data {ranks}",
            f"a multiple of {ranks}, because every data rank takes equally many buffers",
            f"set data.rows to {multiples(rows, ranks)}",
        )
    if unit == 2:
        return
    if capacity % unit:
        yield Finding(
            f"data.capacity is {capacity} with mesh.context {mesh.context}",
            f"a multiple of 2 * context = {unit}, because every context rank holds two equal context chunks",
            f"set data.capacity to {multiples(capacity, unit)}",
        )
    layout, splits = config.compute.layout, config.compute.context_splits
    for where, block in llm.each_block:
        taps = value_at(block, block.convolution) if block.convolution else 0
        if layout == "buffer" and capacity // unit < taps - 1:
            yield Finding(
                f"a context chunk, data.capacity / (2 * context), holds {capacity // unit} tokens",
                f"{taps - 1} or more, because {where} has a convolution of {taps} taps, which looks that far "
                "back",
                f"set data.capacity to {unit * (taps - 1)} or more, or lower mesh.context",
            )
        if layout == "whole" and splits > 0 and taps - 1 > LEAST_CHUNK:
            yield Finding(
                f'{where} has a convolution of {taps} taps with compute.context_layout "whole"',
                f"at most {LEAST_CHUNK + 1}, because a split document's context chunks may be as short as "
                f"{LEAST_CHUNK} tokens",
                "set compute.context_layout to buffer, or, if no document exceeds a context rank's share, "
                "compute.context_splits to 0",
            )
        if layout == "whole" and splits > 0 and not block.splits_documents:
            yield Finding(
                f'{where} is {block.title} with compute.context_layout "whole"',
                "blocks that take documents that context ranks share",
                "set compute.context_layout to buffer, or, if no document exceeds a context rank's share, "
                "compute.context_splits to 0",
            )


def _tensor_ranks(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks that tensor ranks take equal parts of the width of each kind of block."""
    llm, ranks = config.model.llm, config.mesh.tensor
    for where, block in llm.each_block:
        for name in block.equal_sizes:
            if (size := value_at(block, name)) % ranks:
                yield Finding(
                    f"mesh.tensor is {ranks} with {where}.{name} {size}",
                    f"a divisor of {size}, because every rank takes equally many",
                    f"set mesh.tensor to {divisors(size, ranks)}, or {where}.{name} to "
                    f"{multiples(size, ranks)}",
                )
        for name in block.shared_sizes:
            if (size := value_at(block, name)) % ranks and ranks % size:
                yield Finding(
                    f"mesh.tensor is {ranks} with {where}.{name} {size}",
                    f"a divisor or a multiple of {size}: each rank takes equally many, or equally many share "
                    "one",
                    f"set mesh.tensor to {divisors(size, ranks)} or {size * (ranks // size + 1)}",
                )
    data, context = config.data, config.mesh.context
    tokens = data.rows // config.mesh.data // config.train.microbatches * data.capacity // context
    if config.compute.sequence_sharded and tokens % ranks:
        yield Finding(
            f"compute.sequence_sharded with {tokens} tokens of a microbatch for {ranks} tensor ranks",
            f"a multiple of {ranks}, because every rank takes equally many",
            f"set data.capacity to {multiples(data.capacity, math.lcm(context * ranks, 2 * context))}",
        )


def _pipeline(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Checks the stages, how long ranks idle, and the vocabulary that they share."""
    mesh, llm, microbatches = config.mesh, config.model.llm, config.train.microbatches
    ranks, count = mesh.pipeline * mesh.tensor, mesh.pipeline * mesh.stages_per_rank
    if llm.vocab_size % ranks:
        yield Finding(
            f"model.llm.vocab_size is {llm.vocab_size} with {ranks} pipeline and tensor ranks",
            f"a multiple of {ranks}, because these ranks share the vocabulary",
            f"set model.llm.vocab_size to {llm.vocab_size + -llm.vocab_size % ranks} (entries beyond the "
            "tokenizer's are not used), or change mesh.pipeline or mesh.tensor",
        )
    if (times := config.model.marks.classes) and (llm.tied_embedding or times % ranks):
        yield Finding(
            f"model.marks.classes is {times} with {ranks} pipeline and tensor ranks and "
            f"model.llm.tied_embedding {llm.tied_embedding}",
            f"a multiple of {ranks}, because these ranks share the head, which is not the embedding",
            "change mesh.pipeline or mesh.tensor, or set model.llm.tied_embedding to False",
        )
    if mesh.pipeline == 1 and mesh.stages_per_rank > 1:
        found = f"mesh.stages_per_rank is {mesh.stages_per_rank} with mesh.pipeline 1"
        change = "set mesh.stages_per_rank to 1, or raise mesh.pipeline"
        yield Finding(found, "1, because there is no pipeline", change)
    if mesh.pipeline == 1:
        return
    try:
        if set(llm.letters) <= set(llm.blocks):
            pipeline_stages(llm, mesh)
    except ValueError as error:
        change = f"put {count - 1} or no | into model.llm.pattern, or lower mesh.pipeline"
        yield Finding(str(error), f"{count} stages of at least one layer", change)
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
            f"train.microbatches is {microbatches} on {mesh.pipeline} ranks of {mesh.stages_per_rank} stages",
            f"a multiple of {mesh.pipeline}, the group size of the interleaved schedule",
            f"set train.microbatches to {multiples(microbatches, mesh.pipeline)}",
            is_warning=True,
        )


def _experts(config: Config, device: DeviceFacts) -> Iterator[Finding]:
    """Warns of experts that the ranks cannot share."""
    ranks = config.mesh.data * config.mesh.context
    for where, block in config.model.llm.each_block:
        if ranks > 1 and block.experts_to_share % ranks:
            sharded = expert_sharding(block.experts_to_share, config.mesh)
            yield Finding(
                f"{where} has {block.experts_to_share} experts for {ranks} data and context ranks",
                f"a multiple of {ranks}: experts are sharded over the axes "
                f"{sharded.axes if sharded else '()'} only, the others gather their weights",
                "change mesh.data or mesh.context, unless they may be gathered",
                is_warning=True,
            )


RULES = (_devices, _buffers, _tensor_ranks, _pipeline, _experts)
