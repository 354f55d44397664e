"""Memory, bytes and work of context parallelism, from compiled programs, for tests and bench_context."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

from jaxthd.config import ComputeConfig, Config, DataConfig, EncoderConfig, LLMConfig, MeshConfig, ModelConfig
from jaxthd.data.packer import PackDocuments
from jaxthd.models.blocks import MLP, Attention, Mamba2, MoE
from jaxthd.models.hybrid import Block as DecoderBlock
from jaxthd.ops.grouped_matmul import expert_layout
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import Document
from jaxthd.packing.intervals import usual_queries
from jaxthd.packing.layout import DualChunkSwap
from jaxthd.packing.pack import pack_row
from jaxthd.packing.segments import make_segments
from jaxthd.parallel.mesh import CONTEXT, make_mesh
from jaxthd.parallel.params import Buffer, Init
from jaxthd.planning import layouts
from jaxthd.planning.program import compiled, received_bytes
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.training import loss_and_gradient

TINY = ModelConfig(
    encoder=EncoderConfig(num_mels=8, layers=1, dim=8, heads=1, ffn_dim=8, subsampling_channels=8),
    llm=LLMConfig(
        pattern="M*-E",
        dim=64,
        blocks={
            "*": Attention(heads=4, kv_heads=2, head_dim=16),
            "-": MLP(inner=128),
            "M": Mamba2(heads=4, head_dim=16, state=16),
            "E": MoE(inner=32, shared_inner=64),
        },
    ),
)
COMPUTE = ComputeConfig()


def temporary_memory(
    context: int, tokens: int, model: ModelConfig = TINY, compute: ComputeConfig = COMPUTE
) -> int:
    """Bytes a device needs besides arguments and results, for loss + gradient of one text-only buffer."""
    config = Config(mesh=MeshConfig(context=context), model=model, compute=compute)
    mesh = make_mesh(config.mesh)
    _, *states = nnx.split(Blueprint(config).model, nnx.Param, Buffer)
    sizes: dict[str, Any] = {
        "audio_capacity": 0,
        "front_end": model.audio_encoder,
        "max_documents": 1,
    }
    batch, _ = pack_row([], capacity=tokens, context=context, **sizes)
    program = compiled(loss_and_gradient(Blueprint(config), mesh), *map(nnx.to_pure_dict, states), batch)
    return program.memory_analysis().temp_size_in_bytes


def layer_bytes(
    kind: str,
    context: int,
    tokens: int,
    llm: LLMConfig = TINY.llm,
    compute: ComputeConfig = COMPUTE,
    *,
    recompute: bool = False,
    width: int = 0,
    split: int = 0,
) -> int:
    """Bytes the busiest device receives in one block of the decoder, forward and backward.

    Every rank holds all parameters. Backward gives the gradients of input and parameters; summing the latter
    over the ranks is not included.
    recompute: the forward pass runs again before the backward one, as in training (compute.remat full).
    width, split: under the layout "whole", SplitDocuments.width (packing/split_documents.py) and the split
    documents of the buffer.
    """
    sizes = MeshConfig(context=context)
    mesh = make_mesh(sizes)
    block = nnx.eval_shape(lambda: DecoderBlock(kind, _with(kind, llm), Init(jax.random.key(0)), compute))
    graph, *states = nnx.split(block, nnx.Param, Buffer)

    def rank(params: Any, buffers: Any, x_ND: Any, ids: Any, positions: Any, splits: Any, dy_ND: Any) -> Any:
        more = {"splits_RK": splits} if compute.layout == "whole" else {}
        segments = make_segments(
            ids, positions, block=compute.blocks.attention, axis=CONTEXT, layout=compute.layout, **more
        )

        def forward(p: Any, x_ND: Any) -> Any:
            return nnx.merge(graph, p, buffers)(x_ND, segments)[0]

        y_ND, pull = jax.vjp(jax.checkpoint(forward) if recompute else forward, params, x_ND)
        return y_ND, *pull(dy_ND)

    everywhere, row, flat = PartitionSpec(), PartitionSpec(None, CONTEXT), PartitionSpec(CONTEXT)
    step = jax.shard_map(
        rank,
        mesh=mesh,
        in_specs=(everywhere, everywhere, flat, row, row, everywhere, flat),
        out_specs=(flat, everywhere, flat),
        check_vma=False,
    )
    x_ND = jax.ShapeDtypeStruct((tokens, llm.dim), jnp.float32)
    index = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    splits = jax.ShapeDtypeStruct((1, compute.context_splits), jnp.int32)
    program = compiled(step, *states, x_ND, index, index, splits, x_ND)
    received = received_bytes(
        program.as_text(), sizes, lambda name: float(split), lambda branches: min(width, branches - 1)
    )
    return int(sum(received.values(), np.zeros(context)).max())


def passed_bytes(kind: str, llm: LLMConfig, context: int, compute: ComputeConfig = COMPUTE) -> float:
    """Bytes that a rank receives in such a layer, which passes states, for one row, as the planner says."""
    mesh, data = MeshConfig(context=context), DataConfig(rows=1)
    llm = _with(kind, llm)
    return layouts.passed_bytes(
        Config(model=ModelConfig(None, llm), data=data, compute=compute, mesh=mesh), llm.blocks[kind]
    )


def _with(kind: str, llm: LLMConfig) -> LLMConfig:
    """The decoder with such a block, of the usual sizes if it has none."""
    return llm if kind in llm.blocks else replace(llm, pattern=llm.pattern + kind)


def executed_blocks(batch: Batch, context: int, block: int) -> np.ndarray:
    """Attention blocks that each rank visits at each ring step, int [context, context]; step 0 is local."""
    row = PartitionSpec(None, CONTEXT)

    def ranges(ids: Any, positions: Any) -> jax.Array:
        segments = make_segments(ids, positions, block=block, axis=CONTEXT)
        steps = segments.keys.by_step
        return jnp.stack([x.blocks.sum() for x in steps])[None]

    mesh = make_mesh(MeshConfig(context=context))
    count = jax.shard_map(
        ranges, mesh=mesh, in_specs=(row, row), out_specs=PartitionSpec(CONTEXT), check_vma=False
    )
    return np.asarray(compiled(count, batch.segment_ids, batch.positions)(batch.segment_ids, batch.positions))


def least_blocks(batch: Batch, context: int, block: int) -> np.ndarray:
    """The fewest blocks that cover the allowed pairs, in executed_blocks' form, from all pairs."""
    ids = batch.segment_ids[0].astype(np.int16).reshape(context, -1)
    index = DualChunkSwap(context).permutation(ids.size).reshape(context, -1)
    least = np.zeros((context, context), int)
    for rank in range(context):
        for step in range(context):
            source = (rank - step) % context
            allowed = (ids[rank][:, None] == ids[source]) & (ids[rank][:, None] > 0)
            least[rank, step] = fewest_blocks(allowed & (index[rank][:, None] >= index[source]), block)
    return least


def fewest_blocks(allowed: np.ndarray, block: int, query_block: int | None = None) -> int:
    """Blocks of keys, from any key on, that the blocks of queries need to see all they may: bool [N, S]."""
    edges = np.arange(0, len(allowed), query_block or usual_queries(block))
    count = 0
    for keys in map(np.flatnonzero, np.logical_or.reduceat(allowed, edges)):
        count += -(-(keys[-1] + 1 - keys[0]) // block) if len(keys) else 0
    return count


def buffers(lengths: Sequence[int], capacity: int, count: int) -> list[list[Document]]:
    """The first buffers that the loader's packer fills from an endless shuffled stream of such documents.

    Each buffer's documents are in order of arrival.
    """
    pack = PackDocuments(capacity=capacity, audio_capacity=8, max_documents=capacity)
    fitting = [n for n in lengths if n <= capacity]
    times = math.ceil((pack.packing_bins + count) * capacity / sum(fitting))
    stream = np.random.default_rng(0).permutation(np.tile(fitting, times))
    documents = [
        Document(str(i), np.zeros(n, np.int32), np.zeros(n, bool), np.ones(n, bool))
        for i, n in enumerate(stream)
    ]
    rows = grain.MapDataset.source(documents).pipe(pack)
    return [[documents[i] for i in sorted(map(int, row.report.keys))] for row in islice(rows, count)]


def layout_row(documents: Sequence[Document], capacity: int, context: int, *, ordered: bool) -> Batch:
    sizes: dict[str, Any] = {"audio_capacity": 0, "max_documents": len(documents)}
    seed = 0 if ordered else None
    return pack_row(documents, capacity=capacity, context=context, order_seed=seed, **sizes)[0]


def expert_flops(experts: int, per_token: int, *, tokens: int, block: int, dim: int, inner: int) -> int:
    """Forward flops of the experts with random routing: two products per executed block."""
    chosen = np.random.default_rng(0).random((tokens, experts)).argsort(axis=1)[:, :per_token]
    layout = expert_layout(jnp.asarray(chosen, jnp.int32), jnp.ones(tokens, bool), experts, block)
    return int(layout.used) * block * 2 * dim * inner * 2
