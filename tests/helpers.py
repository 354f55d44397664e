"""Ragged documents, their rows on context ranks, and the comparison of results."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxthd.checkpoints.checkpoint import Checkpoints
from jaxthd.checkpoints.weights import Weights
from jaxthd.config import Config
from jaxthd.files.run_folder import write_config
from jaxthd.models.blocks import MoEMixer
from jaxthd.models.front_ends import FastConformer
from jaxthd.models.stacks import to_stages
from jaxthd.packing.batch import Batch
from jaxthd.packing.document import Document
from jaxthd.packing.layout import DualChunkSwap, inverse_permutation
from jaxthd.packing.pack import pack_row
from jaxthd.packing.segments import Segments, make_segments
from jaxthd.parallel.mesh import make_mesh
from jaxthd.steps.blueprint import Blueprint
from jaxthd.steps.state import TrainState, abstract_state, checkpoint_layout, state_shardings
from tests.clips import clip_of
from tests.errors import relative_errors
from tests.weights import random_state

CAPACITY = 64
CASES: dict[str, list[int]] = {
    "one token documents": [1, 1, 5, 1, 30, 1, 1, 2, 1],
    "ends on chunk edges at context 2 and 4": [16, 8, 8, 24, 8],
    "one document fills the buffer": [64],
    "mostly padding": [3, 4],
    "spans more than half the ranks": [7, 50, 3],
    "ragged": [13, 2, 21, 9, 11],
    "ragged with padding": [5, 17, 1, 29],
}


def row_arrays(lengths: Sequence[int], capacity: int = CAPACITY) -> tuple[np.ndarray, np.ndarray]:
    """(segment ids, positions) [capacity] of documents packed back to back, with padding at the end."""
    ids, positions = np.zeros(capacity, np.int32), np.zeros(capacity, np.int32)
    for number, span in enumerate(spans(lengths), 1):
        ids[span] = number
        positions[span] = np.arange(span.stop - span.start)
    return ids, positions


def spans(lengths: Sequence[int]) -> list[slice]:
    """The slots of each document in its row."""
    starts = np.cumsum(lengths, dtype=int) - lengths
    return [slice(int(s), int(s + n)) for s, n in zip(starts, lengths, strict=True)]


def batch_of(lengths: Sequence[int], context: int) -> Batch:
    """A row of documents with those numbers of text tokens, all supervised. Every other document begins with
    a clip of as many encoder frames; 16 mel bands.
    """
    rng = np.random.default_rng(0)
    documents = []
    for i, n in enumerate(lengths):
        clips = [[rng.normal(size=(8 * n, 16)).astype(np.float32)]] if i % 2 == 0 else []
        tokens = [*[3] * len(clips), *rng.integers(4, 260, n).tolist()]
        supervised = [False] * len(clips) + [True] * n
        documents.append(Document.splice(str(i), tokens, supervised, [clip_of(clip) for clip in clips], 3))
    sizes: dict[str, Any] = {
        "capacity": 128,
        "audio_capacity": 512,
        "front_end": FastConformer(num_mels=16),
        "max_documents": 8,
    }
    return pack_row(documents, **sizes, context=context, audio_ranks=context)[0]


def filled_state(blueprint: Blueprint, mesh: Mesh) -> TrainState:
    """A state before the first step, with random weights, on the placement that training has. Unlike
    init_state's program, which takes as long as a small step's, nothing is compiled.
    """

    def value(path: tuple[Any, ...], x: np.ndarray, zero: np.ndarray) -> np.ndarray:
        return zero if "correction_bias" in jax.tree_util.keystr(path) else x.astype(zero.dtype)

    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract_state(blueprint))
    weights = random_state(blueprint.canonical_model)[1:]
    params, buffers = jax.tree_util.tree_map_with_path(value, weights, (zeros.params, zeros.buffers))
    filled = to_stages(zeros._replace(params=params, buffers=buffers), blueprint.stages)
    return jax.device_put(filled, state_shardings(blueprint, mesh))


def save_run(config: Config, workdir: Path, step: int = 0, weights: Weights | None = None) -> None:
    """Makes a run's workdir whose one checkpoint holds these weights, in the checkpoint layout; None: random
    ones (filled_state)."""
    blueprint, mesh = Blueprint(config), make_mesh(config.mesh)
    state = checkpoint_layout(filled_state(blueprint, mesh), blueprint, mesh)
    if weights is not None:
        state = state._replace(params=weights.params, buffers=weights.buffers)
    workdir.mkdir(parents=True)
    write_config(workdir, config)
    with Checkpoints(workdir / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(step, state, position={})


def context_mesh(context: int) -> Mesh:
    return jax.make_mesh(
        (context,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:context]
    )


def on_context(
    mixer: Callable[..., Any],
    context: int,
    *,
    block: int,
    documents: int | None = None,
    window: int | None = None,
    uniform_program: bool = True,
) -> Callable[..., tuple[Any, Any, Any]]:
    """A jitted (params, x [T, ...], ids [T], positions [T], cotangent, prefixes [T] or None) -> (y, dparams,
    dx) in document order.

    mixer: (params, x_N.., segments) -> y_N... The row is laid out over `context` simulated devices. x, y and
    the cotangent may be trees of such arrays. All may have a leading dim of rows if ids [R, T] has it.
    documents: as in Segments. window, uniform_program: as make_segments takes them.
    """
    spec = PartitionSpec(None, "context")

    def rank(
        params: Any, x: Any, ids: Any, positions: Any, cotangent: Any, prefixes: Any
    ) -> tuple[Any, Any, Any]:
        segments: Segments = make_segments(
            ids,
            positions,
            prefixes,
            block=block,
            axis="context",
            documents=documents,
            window=window,
            uniform_program=uniform_program,
        )
        flat_x, flat_cotangent = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (x, cotangent))
        y, pull = jax.vjp(lambda params, x: mixer(params, x, segments), params, flat_x)
        dparams, dx = pull(flat_cotangent)
        y, dx = jax.tree.map(lambda a: a.reshape(*ids.shape, *a.shape[1:]), (y, dx))
        return y, jax.lax.psum(dparams, "context"), dx

    mapped = jax.jit(
        jax.shard_map(
            rank,
            mesh=context_mesh(context),
            in_specs=(PartitionSpec(), spec, spec, spec, spec, spec),
            out_specs=(spec, PartitionSpec(), spec),
            check_vma=False,
        )
    )

    def run(
        params: Any, x: Any, ids: Any, positions: Any, cotangent: Any, prefixes: Any = None
    ) -> tuple[Any, Any, Any]:
        order = DualChunkSwap(context).permutation(ids.shape[-1])
        back = inverse_permutation(order)

        def in_layout(a: np.ndarray) -> np.ndarray:
            return a.reshape(-1, len(order), *a.shape[ids.ndim :])[:, order]

        def in_document_order(a: jax.Array) -> np.ndarray:
            return np.asarray(a)[:, back].reshape(*ids.shape, *a.shape[2:])

        y, dparams, dx = mapped(params, *jax.tree.map(in_layout, (x, ids, positions, cotangent, prefixes)))
        return jax.tree.map(in_document_order, y), dparams, jax.tree.map(in_document_order, dx)

    return run


@contextmanager
def top_k_margins() -> Iterator[list[float]]:
    """Yields a list to which every run of an MoE layer in programs traced inside appends its smallest top-k
    margin: the least gap, over real tokens, between the biased scores of the last chosen and the first other
    expert."""
    original, margins = MoEMixer._experts, []

    def experts(self: MoEMixer, x: Any, routed: Any) -> Any:
        assert self.correction_bias is not None
        scores = jax.nn.sigmoid(self.router(x)) + self.correction_bias[...]
        ranked = -jnp.sort(-scores, axis=-1)
        gap = ranked[:, self.per_token - 1] - ranked[:, self.per_token]
        jax.debug.callback(lambda g: margins.append(float(g)), jnp.where(routed, gap, jnp.inf).min())
        return original(self, x, routed)

    MoEMixer._experts = experts  # type: ignore[method-assign, assignment]
    try:
        yield margins
    finally:
        MoEMixer._experts = original  # type: ignore[method-assign]


def assert_same(got: Any, want: Any, tolerance: float) -> None:
    """Every tensor's relative error is at most `tolerance`."""
    for name, error in relative_errors(got, want).items():
        assert error <= tolerance, f"{name}: relative error {error:.2e} > {tolerance:.0e}"
