"""The layout "whole": attention, convolution, scan and delta rule equal those of documents on one device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jaxthd.ops.attention.ring import gather_in_order, packed_attention
from jaxthd.ops.conv import causal_conv
from jaxthd.ops.delta.rule import DeltaInputs
from jaxthd.ops.delta.split_documents import outputs_and_states
from jaxthd.ops.scan.backends import scan
from jaxthd.ops.scan.contract import ScanInputs
from jaxthd.packing.assignment import Placement, Shares
from jaxthd.packing.document import Document
from jaxthd.packing.layout import ContextLayout
from jaxthd.packing.pack import pack_row
from jaxthd.packing.segments import make_segments
from tests.helpers import assert_same, context_mesh

CAPACITY = {1: 128, 2: 128, 4: 128, 8: 256}
"""Of a buffer, by context ranks: a rank's share holds the longest document that is not split."""
EXCHANGES = "all_gather", "all_reduce", "all_to_all", "collective_permute", "reduce_scatter"
MOST, H, D, P, G, S, WINDOW = 3, 4, 6, 3, 2, 5, 19


FULL = 0
"""In a case: as many tokens as the buffer has slots."""
CASES = {
    "nothing is split": [([20, 9, 12, 3, 16, 30, 1, 7], ()), ([], ())],
    "one fills the buffer": [([FULL], (0,)), ([31, 5, 17, 2], ())],
    "most are split": [([33, 20, 41, 2, 5, 1], (2, 0, 1)), ([50, 8, 3, 9, 14], (0,))],
    "a split document shorter than its chunks": [([9, 20, 7], (0, 1)), ([100, 4], (0,))],
}
"""Of two rows: the documents, and which are split, in this order."""


def packed(lengths: list[int], split: tuple[int, ...], context: int) -> Any:
    """A row, laid out; documents that are not split are dealt to the ranks."""
    lengths = [n or CAPACITY[context] for n in lengths]
    documents = [
        Document(str(i), np.ones(n, np.int32), np.zeros(n, bool), np.ones(n, bool))
        for i, n in enumerate(lengths)
    ]
    shares = Shares(context, CAPACITY[context], MOST)
    rest = sorted(set(range(len(lengths))) - set(split), key=lambda i: -lengths[i])
    dealt: list[list[int]] = [[] for _ in range(context)]
    for i in rest:
        min(dealt, key=lambda on_rank: sum(lengths[j] for j in on_rank)).append(i)
    placement = Placement(split, tuple(map(tuple, dealt)))
    sizes: dict[str, Any] = {"audio_capacity": 0, "max_documents": 16}
    return pack_row(
        documents,
        capacity=CAPACITY[context],
        context=context,
        layout="whole",
        shares=shares,
        placement=placement,
        **sizes,
    )[0]


def mixers(params: Any, x: Any, segments: Any, exchange: str) -> Any:
    taps, bias, rates, sinks = params
    q, k, v, dt, b, c = x
    how: Any = {"scale": 0.4, "exchange": exchange, "backend": "xla"}
    attended = packed_attention(q, k, v, segments, **how)
    in_windows = packed_attention(q, k, v, segments, sink_H=sinks, in_window=True, **how)
    convolved = causal_conv(v.reshape(len(v), -1), taps, bias, segments, silu=True)
    scanned = scan(
        ScanInputs(v, jax.nn.softplus(dt), -jnp.exp(rates), b, c), segments, chunk=6, backend="xla"
    )
    # Keys are not longer than 1, as the rule expects them; else its states grow without bound.
    q, k = (x[:, :2] / (1 + jnp.square(x[:, :2]).sum(-1, keepdims=True)) for x in (q, k))
    decay, rate, nowhere = -jax.nn.softplus(dt), jax.nn.sigmoid(dt), jnp.zeros(0, jnp.int32)
    of_heads = DeltaInputs(q, k, v, decay, rate)
    of_features = of_heads._replace(decay=decay[..., None] * (1 + jnp.square(k[:, :1])))
    answered = (outputs_and_states(x, segments, nowhere, chunk=6)[0] for x in (of_heads, of_features))
    return attended, in_windows, convolved, scanned, *answered


@functools.cache
def program(context: int, exchange: str) -> Any:
    """(params, x, ids, positions, splits, cotangents) -> (outputs, gradients, keys in document order)."""
    axis = "context" if context > 1 else None

    def rank(params: Any, x: Any, ids: Any, positions: Any, splits: Any, dy: Any) -> Any:
        segments = make_segments(
            ids,
            positions,
            block=8,
            axis=axis,
            layout="whole",
            documents=16,
            splits_RK=splits,
            window=WINDOW,
            uniform_program=exchange != "in a stage",
        )
        flat_x, flat_dy = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), (x, dy))
        asked = "ring" if exchange == "in a stage" else exchange
        y, pull = jax.vjp(lambda p, x: mixers(p, x, segments, asked), params, flat_x)
        dparams, dx = pull(flat_dy)
        keys = gather_in_order(flat_x[1], segments)
        y, dx = jax.tree.map(lambda a: a.reshape(*ids.shape, *a.shape[1:]), (y, dx))
        return y, (jax.lax.psum(dparams, axis) if axis else dparams), dx, keys

    if axis is None:
        return jax.jit(rank)
    whole, tokens = PartitionSpec(), PartitionSpec(None, "context")
    return jax.jit(
        jax.shard_map(
            rank,
            mesh=context_mesh(context),
            in_specs=(whole, tokens, tokens, tokens, whole, tokens),
            out_specs=(tokens, whole, tokens, whole),
            check_vma=False,
        )
    )


@pytest.mark.parametrize(
    ("context", "exchange"),
    [
        (4, "ring"),
        pytest.param(2, "all_gather", marks=pytest.mark.exhaustive),
        pytest.param(4, "in a stage", marks=pytest.mark.exhaustive),
        pytest.param(8, "ring", marks=pytest.mark.exhaustive),
    ],
)
def test_mixers_equal_those_on_one_device(context: int, exchange: str):
    """All outputs and gradients in float64. The last case's documents end before their last chunks."""
    with jax.enable_x64(True):
        for case in CASES.values():
            compare([packed(*row, context) for row in case], context, exchange)


def test_rows_that_split_nothing_equal_those_on_one_device_without_any_exchange():
    """compute.context_splits 0. The keys in document order are gathered by the test itself."""
    with jax.enable_x64(True):
        rows = [packed([20, 9, 12, 3, 16, 30, 1, 7], (), 4), packed([31, 5], (), 4)]
        arguments = compare(rows, 4, "ring", no_splits=True)
        text = program(4, "ring").lower(*arguments).as_text()
        exchanges = [name for name in EXCHANGES if f"stablehlo.{name}" in text]
        assert exchanges == ["all_gather", "all_reduce"], "of keys and of the parameters' gradients"
        assert text.count("stablehlo.all_gather") == 1


def compare(rows: list[Any], context: int, exchange: str, *, no_splits: bool = False) -> Any:
    """Returns the arguments of the program on the context ranks. no_splits: it is not given which are
    split."""
    rng, names = np.random.default_rng(0), ("segment_ids", "positions", "splits")
    ids, positions, splits = (np.concatenate([getattr(row, name) for row in rows]) for name in names)
    layout = ContextLayout("whole", context)
    orders = [layout.permutation(*row) for row in zip(ids, splits, strict=True)]
    backs = [np.argsort(order) for order in orders]

    def rows_by(tree: Any, by: Any) -> Any:
        return jax.tree.map(lambda a: np.stack([x[n] for x, n in zip(np.asarray(a), by, strict=True)]), tree)

    in_order = rows_by((ids, positions), backs)
    real = in_order[0] > 0
    shapes: tuple[tuple[int, ...], ...] = (H, D), (2, D), (2, P), (2,), (G, S), (G, S)
    x = tuple(rng.normal(size=(2, CAPACITY[context], *shape)) for shape in shapes)
    params = rng.normal(size=(4, 2 * P)), rng.normal(size=2 * P), rng.normal(size=2), rng.normal(size=H)
    shapes = (H, P), (H, P), (2 * P,), (2, P), (2, P), (2, P)
    dy = tuple(rng.normal(size=(2, CAPACITY[context], *shape)) for shape in shapes)
    dy = jax.tree.map(lambda a: a * real.reshape(2, -1, *[1] * (a.ndim - 2)), dy)
    want = program(1, "ring")(params, x, *in_order, None, dy)
    x, dy = rows_by((x, dy), orders)
    arguments = params, x, ids, positions, None if no_splits else splits, dy
    y, dparams, dx, keys = program(context, exchange)(*arguments)

    def of_tokens(tree: Any) -> Any:
        """Padding's outputs and gradients are not read."""
        return jax.tree.map(lambda a: np.asarray(a)[real], tree)

    assert_same(of_tokens(rows_by((y, dx), backs)), of_tokens((want[0], want[2])), 1e-10)
    assert_same((dparams, keys), (want[1], want[3]), 1e-10)
    return arguments


def scanned(dtype: Any, context: int, backend: str) -> Any:
    """(inputs, ids, positions, splits, cotangent) -> (output, gradients of the inputs), of the scan alone."""
    axis = "context" if context > 1 else None

    def rank(inputs: Any, ids: Any, positions: Any, splits: Any, dy: Any) -> Any:
        segments = make_segments(
            ids, positions, block=8, axis=axis, layout="whole", documents=16, splits_RK=splits
        )
        rates, *of_tokens = inputs
        flat = [jnp.asarray(a, dtype).reshape(-1, *a.shape[2:]) for a in of_tokens]

        def run(rates: Any, v: Any, dt: Any, b: Any, c: Any) -> Any:
            given = ScanInputs(v, jax.nn.softplus(dt), -jnp.exp(rates), b, c)
            return scan(given, segments, chunk=16, backend=backend)

        y, pull = jax.vjp(run, jnp.asarray(rates, dtype), *flat)
        drates, *dflat = pull(dy.reshape(y.shape).astype(y.dtype))
        by_row = jax.tree.map(lambda a: a.reshape(*ids.shape, *a.shape[1:]), (y, dflat))
        return by_row, (jax.lax.psum(drates, axis) if axis else drates)

    if axis is None:
        return jax.jit(rank)
    whole, tokens = PartitionSpec(), PartitionSpec(None, "context")
    return jax.jit(
        jax.shard_map(
            rank,
            mesh=context_mesh(context),
            in_specs=((whole, *[tokens] * 4), tokens, tokens, whole, tokens),
            out_specs=(tokens, whole),
            check_vma=False,
        )
    )


def scan_case(case: str, context: int) -> tuple[Any, ...]:
    """(inputs in the layout's order, in document order; ids, positions, splits; the orders; real tokens)."""
    rows = [packed(*row, context) for row in CASES[case]]
    ids, positions, splits = (
        np.concatenate([getattr(row, name) for row in rows])
        for name in ("segment_ids", "positions", "splits")
    )
    layout, rng = ContextLayout("whole", context), np.random.default_rng(0)
    orders = [layout.permutation(*row) for row in zip(ids, splits, strict=True)]
    shapes: tuple[tuple[int, ...], ...] = (4, 16), (4,), (2, 16), (2, 16), (4, 16)
    drawn = [rng.normal(size=(2, CAPACITY[context], *shape)) for shape in shapes]
    return rng.normal(size=4), drawn, ids, positions, splits, orders


@pytest.mark.parametrize("case", ["one fills the buffer", "most are split"])
def test_the_kernels_scan_split_documents_as_one_device_does(case: str):
    """Interpreted, in float32, against the scan of whole documents in float64: outputs and gradients."""
    rates, drawn, ids, positions, splits, orders = scan_case(case, 4)
    backs = [np.argsort(order) for order in orders]

    def by(order: Any, tree: Any) -> Any:
        return jax.tree.map(
            lambda a: np.stack([x[n] for x, n in zip(np.asarray(a), order, strict=True)]), tree
        )

    real = by(backs, ids) > 0
    drawn[-1] *= real[..., None, None]
    with jax.enable_x64(True):
        of_documents = (rates, *drawn[:-1]), *by(backs, (ids, positions)), None, drawn[-1]
        want, want_rates = scanned(np.float64, 1, "xla")(*of_documents)
    laid = by(orders, drawn)
    got, got_rates = scanned(np.float32, 4, "pallas")((rates, *laid[:-1]), ids, positions, splits, laid[-1])

    def of_tokens(tree: Any) -> Any:
        return jax.tree.map(lambda a: np.asarray(a)[real], tree)

    assert_same(of_tokens(by(backs, got)), of_tokens(want), 2e-5)
    assert_same(got_rates, want_rates, 2e-5)


def test_what_enters_split_documents_is_computed_without_a_loop_over_documents():
    """A GPU's host drives a loop in which ranks exchange: it had 12,652 trips in a step of 4B parameters.
    Two all-to-alls a pass are left, and the loop over scan chunks, whose trips the compiler knows."""
    rates, drawn, ids, positions, splits, _ = scan_case("most are split", 4)
    program = scanned(np.float32, 4, "xla")
    text = program.lower((rates, *drawn[:-1]), ids, positions, splits, drawn[-1]).compile().as_text()
    loops = [line for line in text.splitlines() if " while(" in line]
    assert loops
    assert all('"known_trip_count"' in line for line in loops)
    assert sum(" all-to-all(" in line for line in text.splitlines()) == 4
