"""Segments that continue others: every mixer computes what it computes for each one behind its own copy of
the prefix, forward and backward, on every context size."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jaxthd.ops.attention.ring import packed_attention
from jaxthd.ops.conv import causal_conv
from jaxthd.ops.delta.rule import DeltaInputs, gated_delta_rule
from jaxthd.ops.scan import state_passing
from jaxthd.ops.scan.backends import scan
from jaxthd.ops.scan.contract import ScanInputs
from tests.helpers import assert_same, on_context, row_arrays, spans
from tests.ops import fake_kernels

H, K, D, V, G, S, TAPS = 4, 2, 8, 6, 4, 5, 4
CAPACITY, SEGMENTS, WINDOW = 64, 16, 7
DECAYS = np.array([1e-3, 0.5, 20.0, 1000.0])


class Group(NamedTuple):
    """Tokens of a prefix and of the segments that continue it. 0: the segments stand alone."""

    prefix: int
    segments: tuple[int, ...]


CASES: dict[str, list[Group]] = {
    "ragged": [Group(9, (3, 1, 4)), Group(0, (6,)), Group(1, (2, 5)), Group(2, (1,)), Group(3, (1, 7))],
    "a prefix on several ranks": [Group(0, (5,)), Group(30, (10, 12, 3))],
    "segments on several ranks": [Group(4, (38, 9)), Group(0, (1,)), Group(2, (8, 2))],
    "the row is full": [Group(20, (1, 2, 3)), Group(3, (17, 18))],
    "nothing continues": [Group(0, (20, 13))],
}


class Row(NamedTuple):
    """A shared row: lengths of its segments, and which of them (from 1) each continues; 0 for none."""

    lengths: list[int]
    prefixes: list[int]


def shared(groups: list[Group]) -> Row:
    row = Row([], [])
    for prefix, segments in groups:
        if prefix:
            row.lengths.append(prefix)
            row.prefixes.append(0)
        number = len(row.lengths) * bool(prefix)
        row.lengths.extend(segments)
        row.prefixes.extend([number] * len(segments))
    return row


def written_out(row: Row) -> tuple[list[int], np.ndarray, np.ndarray]:
    """(lengths of documents, the slot of the shared row that each token is a copy of, whether it is the first
    copy): every segment is a document, with a copy of its prefix before it."""
    slots, sources, is_own = spans(row.lengths), [], []
    for own, prefix in zip(slots, row.prefixes, strict=True):
        copied = [*range(slots[prefix - 1].start, slots[prefix - 1].stop)] if prefix else []
        sources.append([*copied, *range(own.start, own.stop)])
        is_own += [False] * len(copied) + [True] * (own.stop - own.start)
    return [len(x) for x in sources], np.concatenate(sources), np.array(is_own)


def attend(exchange: str, backend: str = "xla", *, in_window: bool = False) -> Callable[..., Any]:
    """With a sink if there is a parameter."""

    def mixer(sink: Any, qkv: Any, segments: Any) -> Any:
        sizes: Any = {"scale": D**-0.5, "exchange": exchange, "backend": backend}
        return packed_attention(*qkv, segments, sink_H=sink, in_window=in_window, **sizes)

    return mixer


def convolved(params: Any, x_NHP: Any, segments: Any) -> Any:
    taps_KHP, bias_HP = params
    given = (v.reshape(len(v), -1) for v in (x_NHP, taps_KHP))
    return causal_conv(*given, bias_HP.reshape(-1), segments, silu=True).reshape(x_NHP.shape)


def scanned(a: Any, inputs: Any, segments: Any, chunk: int = 6, backend: str = "xla") -> Any:
    x, dt, b, c = inputs
    return scan(ScanInputs(x, dt, a, b, c), segments, chunk=chunk, backend=backend)


def by_delta(_: Any, inputs: Any, segments: Any) -> Any:
    return gated_delta_rule(DeltaInputs(*inputs), segments, chunk=6)[0]


def inputs_of(
    name: str, rng: np.random.Generator, capacity: int, dim: int = 3
) -> tuple[Any, Any, np.ndarray]:
    """(parameters, inputs, the outputs' cotangent). dim: of the scan's heads, and the least of its state."""

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=(capacity, *shape))

    if name in ("attention", "attention in a window"):
        sink = None if name == "attention" else rng.normal(size=H)
        return sink, (normal(H, D), normal(K, D), normal(K, V)), normal(H, V)
    if name == "convolution":
        return (rng.normal(size=(TAPS, H, 3)), rng.normal(size=(H, 3))), normal(H, 3), normal(H, 3)
    dt = rng.uniform(0.001, 1.0, size=(capacity, H))
    if name.startswith("delta"):
        q, k = normal(G, D), normal(G, D)
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        rates = rng.uniform(size=(capacity, H))
        decay = -dt * DECAYS[::-1]
        if name == "delta of features":
            decay = decay[..., None] * rng.uniform(size=(capacity, H, D))
        return None, (q, k, normal(H, V), decay, rates), normal(H, V)
    state = max(S, dim)
    return -DECAYS, (normal(H, dim), dt, normal(G, state), normal(G, state)), normal(H, dim)


MIXERS = {
    "attention": attend("ring"),
    "attention in a window": attend("ring", in_window=True),
    "convolution": convolved,
    "scan": scanned,
    "delta": by_delta,
    "delta of features": by_delta,
}
MESHES = [
    *(("attention", context, "ring") for context in (1, 4)),
    ("attention", 4, "all_gather"),
    *(("attention in a window", context, "ring") for context in (1, 4)),
    ("attention in a window", 4, "all_gather"),
    *(("convolution", context, "") for context in (1, 4)),
    *(("scan", context, "") for context in (1, 2, 4)),
    ("scan", 4, "in steps"),
    *(("delta", context, "") for context in (1, 2, 4)),
    # 4 are more than there are key heads.
    ("delta", 4, "in steps"),
    *(("delta of features", context, "") for context in (1, 2, 4)),
]
TYPICAL = [
    ("attention in a window", 4, "ring"),
    ("attention", 4, "ring"),
    ("convolution", 4, ""),
    ("scan", 2, ""),
    ("delta", 2, ""),
    ("delta of features", 2, ""),
]


@pytest.mark.parametrize(
    ("name", "context", "exchange"),
    [mesh if mesh in TYPICAL else pytest.param(*mesh, marks=pytest.mark.exhaustive) for mesh in MESHES],
)
def test_a_shared_prefix_equals_a_copy_before_each_segment(name, context, exchange, monkeypatch):
    rng, alone = np.random.default_rng(0), MIXERS[name]
    if exchange == "in steps":
        monkeypatch.setattr(state_passing, "GATHER_UP_TO", 1)
    is_attention = name.startswith("attention")
    mixer = attend(exchange, in_window=name != "attention") if is_attention else alone
    with jax.enable_x64(True):
        sizes: Any = {"block": 8, "documents": SEGMENTS, "window": WINDOW if is_attention else None}
        run = on_context(mixer, context, **sizes)
        reference = on_context(alone, 1, **sizes)
        for groups in CASES.values():
            row = shared(groups)
            ids, positions = row_arrays(row.lengths)
            prefixes = np.array([0, *row.prefixes], np.int32)[ids]
            params, x, dy = inputs_of(name, rng, CAPACITY)
            dy[ids == 0] = 0
            y, dparams, dx = run(params, x, ids, positions, dy, prefixes)
            lengths, sources, is_own = written_out(row)
            room = 4 * CAPACITY - len(sources)
            taken = np.pad(sources, (0, room))
            copies = jax.tree.map(lambda x, taken=taken: x[taken], x)
            own_dy = np.where(np.pad(is_own, (0, room)).reshape(-1, *[1] * (dy.ndim - 1)), dy[taken], 0)
            want, want_dparams, d_copies = reference(
                params, copies, *row_arrays(lengths, 4 * CAPACITY), own_dy
            )

            def summed(d: np.ndarray, sources: np.ndarray = sources) -> np.ndarray:
                total = np.zeros((CAPACITY, *d.shape[1:]))
                np.add.at(total, sources, d[: len(sources)])
                return total

            want_y = summed(np.where(own_dy.any(tuple(range(1, dy.ndim)), keepdims=True), want, 0))
            got_y = np.where((ids > 0).reshape(-1, *[1] * (dy.ndim - 1)), y, 0)
            assert_same((got_y, dparams, dx), (want_y, want_dparams, jax.tree.map(summed, d_copies)), 1e-10)


@pytest.mark.parametrize("context", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_fused_attention_may_compute_what_segments_see_of_themselves(context, monkeypatch):
    """The blockwise back-end adds what they see of their prefixes."""
    fake_kernels.install_te(monkeypatch)
    compare(lambda backend: attend("ring", backend), "attention", "te", context)


@pytest.mark.exhaustive
@pytest.mark.parametrize("context", [1, 2])
def test_the_scan_kernels_may_compute_segments_alone(context):
    compare(lambda backend: partial(scanned, chunk=16, backend=backend), "scan", "pallas", context)


def compare(mixer: Callable[[str], Any], name: str, backend: str, context: int) -> None:
    """The back-end with "xla", in float32, on shared rows."""
    rng = np.random.default_rng(1)
    runs = [on_context(mixer(each), context, block=8, documents=SEGMENTS) for each in (backend, "xla")]
    for groups in CASES.values():
        row = shared(groups)
        ids, positions = row_arrays(row.lengths)
        params, x, dy = jax.tree.map(np.float32, inputs_of(name, rng, CAPACITY, 16 if name == "scan" else 3))
        dy[ids == 0] = 0
        given = params, x, ids, positions, dy, np.array([0, *row.prefixes], np.int32)[ids]
        (y, *gradients), (want, *wanted) = (run(*given) for run in runs)
        assert_same((y[ids > 0], *gradients), (want[ids > 0], *wanted), 1e-5)
