"""Mixers and decoder: packed equals each document alone, on every context size, by ring and by all-gather."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxthd.config import BlockSizes, ComputeConfig, LLMConfig
from jaxthd.models.blocks import MLP, Attention, Mamba2, MoE, Router
from jaxthd.models.hybrid import Block, HybridDecoder, repeated_units
from jaxthd.packing.segments import make_segments
from jaxthd.parallel.params import Init
from tests.helpers import CAPACITY, CASES, assert_same, on_context, row_arrays, spans, top_k_margins
from tests.weights import random_state

NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
DIM = 32
LLM = LLMConfig(
    pattern="ME*-M",
    dim=DIM,
    blocks={
        "*": Attention(heads=4, kv_heads=2, head_dim=6),
        "-": MLP(inner=24),
        "M": Mamba2(heads=4, head_dim=16, state=8, groups=2),
        "E": MoE(experts=5, experts_per_token=2, inner=7, shared_inner=9, router=Router(scale=2.5)),
    },
)
LATENT = LLM.with_settings("E", latent=10, experts_per_token=3)
PADDING = 30.0
"""Size of values in padding, against 1 in documents, so that a leak shows."""


def computing(exchange: str) -> ComputeConfig:
    return ComputeConfig(
        context_exchange=exchange,  # type: ignore[arg-type]
        block_sizes=BlockSizes(scan=6, attention=8, experts=4),
    )


@functools.cache
def models(exchange: str) -> dict[str, tuple[nnx.GraphDef, Any, Any]]:
    """Name -> (structure, parameters, buffers) of every mixer and of a decoder with all of them."""
    compute = computing(exchange)
    makers = {
        **{x: lambda init, x=x: LLM.blocks[x].build(LLM, init, compute) for x in "M*-E"},
        "E latent": lambda init: LATENT.blocks["E"].build(LATENT, init, compute),
        "ME*-M": lambda init: HybridDecoder(LLM, init, compute),
    }
    made = {}
    for seed, (name, make) in enumerate(makers.items()):
        abstract = nnx.eval_shape(lambda make=make: make(Init(jax.random.key(0))))
        made[name] = random_state(abstract, seed)
    return made


NAMES = ("M", "*", "-", "E", "E latent", "ME*-M")


def output(model: nnx.Module, x: Any, segments: Any) -> Any:
    """The output of a mixer, or of a decoder with its final norm."""
    return model.norm(model(x, segments)[0]) if isinstance(model, HybridDecoder) else model(x, segments)


@functools.cache
def packed(context: int, exchange: str, dtype: str, names: tuple[str, ...] = NAMES) -> Any:
    """All models in one program, each with its own input; called like on_context's, without params."""
    made = models(exchange)
    state = {name: jax.tree.map(lambda x: x.astype(dtype), made[name][1:]) for name in names}

    def apply(params: Any, x: Any, segments: Any) -> Any:
        buffers = {name: jax.tree.map(jnp.asarray, state[name][1]) for name in names}
        return {n: output(nnx.merge(made[n][0], params[n], buffers[n]), x[n], segments) for n in names}

    run = on_context(apply, context, block=8)
    return functools.partial(run, {name: state[name][0] for name in names})


@functools.cache
def inputs(case: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(x, cotangent) for every model: float32 numbers stored in float64, so both dtypes get the same
    values."""
    rng = np.random.default_rng([1, list(CASES).index(case)])
    x, dy = ({n: rng.normal(size=(CAPACITY, DIM)).astype(np.float32) for n in NAMES} for _ in range(2))
    real = sum(CASES[case])
    for name in NAMES:
        x[name][real:] *= PADDING
        dy[name][real:] = 0
    return x, dy


def cast(tree: Any, dtype: str) -> Any:
    return jax.tree.map(lambda a: a.astype(dtype), tree)


@functools.cache
def each_document_alone(case: str) -> tuple[Any, Any, Any]:
    """(y, dparams, dx) in float64; every document is computed alone in a buffer that is otherwise padding."""
    x, dy = inputs(case)
    y, dx = ({n: np.zeros((CAPACITY, DIM)) for n in NAMES} for _ in range(2))
    total = None
    for span in spans(CASES[case]):
        length = span.stop - span.start
        alone = [{n: np.full((CAPACITY, DIM), fill) for n in NAMES} for fill in (PADDING, 0.0)]
        for whole, part in zip(alone, (x, dy), strict=True):
            for name in NAMES:
                whole[name][:length] = part[name][span]
        with jax.enable_x64(True):
            run = packed(1, "ring", "float64")
            one_y, one_dparams, one_dx = run(alone[0], *row_arrays([length]), alone[1])
        for whole, part in ((y, one_y), (dx, one_dx)):
            for name in NAMES:
                whole[name][span] = part[name][:length]
        one_dparams = jax.tree.map(np.asarray, one_dparams)
        total = one_dparams if total is None else jax.tree.map(np.add, total, one_dparams)
    return y, total, dx


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("context", "exchange", "dtype"),
    [(4, "ring", "float64"), (2, "all_gather", "float64"), (4, "ring", "float32"), (1, "ring", "float64")],
)
def test_packed_equals_each_document_alone(context, exchange, dtype):
    """Outputs and gradients of inputs and of all parameters, for M * - E and the decoder; |A| up to 1000.

    Both dtypes are compared with float64.
    """
    for case, lengths in CASES.items():
        x, dy = inputs(case)
        with jax.enable_x64(dtype == "float64"):
            run = packed(context, exchange, dtype)
            y, dparams, dx = run(cast(x, dtype), *row_arrays(lengths), cast(dy, dtype))
        real = sum(lengths)
        want_y, want_dparams, want_dx = each_document_alone(case)
        for name in NAMES:
            assert y[name].dtype == dtype
            got = (y[name][:real], dparams[name], dx[name])
            want = (want_y[name][:real], want_dparams[name], want_dx[name])
            for part, reference in zip(got, want, strict=True):
                assert_same(part, reference, 1e-10 if dtype == "float64" else 1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("context", "exchange"), [(4, "ring"), (2, "all_gather")])
def test_two_rows_equal_two_separate_rows(context, exchange):
    """The rows hold different documents on the same ranks; only Mamba and attention depend on rows."""
    names = ("M", "*")
    for cases in zip(CASES, reversed(CASES), strict=True):
        given = [tuple({n: t[n] for n in names} for t in inputs(case)) for case in cases]
        x, dy = cast(jax.tree.map(lambda *rows: np.stack(rows), *given), "float64")
        ids, positions = (np.stack(rows) for rows in zip(*(row_arrays(CASES[c]) for c in cases), strict=True))
        with jax.enable_x64(True):
            y, dparams, dx = packed(context, exchange, "float64", names)(x, ids, positions, dy)
        want = [each_document_alone(case) for case in cases]
        for name in names:
            for row, case in enumerate(cases):
                real = sum(CASES[case])
                assert_same(y[name][row, :real], want[row][0][name][:real], 1e-10)
                assert_same(dx[name][row], want[row][2][name], 1e-10)
            assert_same(dparams[name], jax.tree.map(np.add, want[0][1][name], want[1][1][name]), 1e-10)


@pytest.mark.exhaustive
def test_rounding_flips_no_choice_of_experts():
    """The float32 comparison above needs this: a top-k margin above 1e-4 in every layer for every token."""
    names = ("E", "E latent", "ME*-M")
    run = packed.__wrapped__(1, "ring", "float64", names)
    with top_k_margins() as margins, jax.enable_x64(True):
        for case, lengths in CASES.items():
            x, dy = ({n: t[n] for n in names} for t in cast(inputs(case), "float64"))
            run(x, *row_arrays(lengths), dy)
        jax.effects_barrier()
    assert len(margins) >= len(names) * len(CASES)
    assert min(margins) > 1e-4


@pytest.mark.parametrize("context", [1, 4])
def test_padding_reaches_no_expert(context):
    """For any cotangent of padding's outputs, router and routed experts get no gradient from it."""
    case = "mostly padding"
    x, dy = cast(inputs(case), "float64")
    noisy = {n: d + np.where(row_arrays(CASES[case])[0] == 0, PADDING, 0)[:, None] for n, d in dy.items()}
    with jax.enable_x64(True):
        run = packed(context, "ring", "float64")
        quiet, loud = (run(x, *row_arrays(CASES[case]), d)[1] for d in (dy, noisy))
    for name in ("E", "E latent"):
        for part in ("router", "up", "down"):
            assert_same(loud[name][part], quiet[name][part], 0)
        assert np.any(loud[name]["shared"]["up"]["w"] != quiet[name]["shared"]["up"]["w"])


def test_nano_is_traced_as_few_letters():
    """14 of its 52 letters are traced; what does not repeat stays one unit."""
    assert repeated_units(NANO) == [("MEMEM*E", 5), ("ME", 3), ("M*E", 1), ("ME", 4)]
    assert repeated_units("ME*-M") == [("ME*-M", 1)]


def test_units_are_the_pattern_in_the_fewest_letters():
    """Compared with exhaustive search, for random patterns."""

    @functools.cache
    def fewest(pattern: str) -> int:
        if not pattern:
            return 0
        options = []
        for size in range(1, len(pattern) + 1):
            rest = pattern
            while rest.startswith(pattern[:size]):
                rest = rest[size:]
                options.append(size + fewest(rest))
        return min(options)

    rng = np.random.default_rng(0)
    for _ in range(200):
        letters = "M*-E"[: rng.integers(1, 5)]
        pattern = "".join(rng.choice(list(letters), size=rng.integers(1, 13)))
        units = repeated_units(pattern)
        assert "".join(unit * repeats for unit, repeats in units) == pattern
        assert sum(len(unit) for unit, _ in units) == fewest(pattern)


def test_stacked_units_apply_their_blocks_in_the_order_of_the_pattern():
    """Compared with applying block after block by hand; outputs and gradients, float64."""
    pattern = "*-*----"
    assert repeated_units(pattern) == [("*-", 2), ("-", 3)]
    llm, compute = replace(LLM, pattern=pattern), computing("ring")
    init = Init(jax.random.key(0))
    abstract = nnx.eval_shape(lambda: HybridDecoder(llm, init, compute))
    graph, params, _ = random_state(abstract)
    blocks = {
        kind: nnx.graphdef(nnx.eval_shape(lambda kind=kind: Block(kind, llm, init, compute))) for kind in "*-"
    }
    ids, positions = (jnp.asarray(a)[None] for a in row_arrays(CASES["ragged"]))
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, CAPACITY, DIM))

    def by_hand(params, x, segments):
        for number, kind in enumerate(pattern):
            layer = pattern[:number].count(kind)
            stacked = params["layers"]["attention" if kind == "*" else "mlp"]
            x, _ = nnx.merge(blocks[kind], jax.tree.map(lambda w, i=layer: w[i], stacked))(x, segments)
        weight = params["norm"]["weight"]
        return weight * x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + LLM.norm_eps)

    def value_and_gradients(apply):
        segments = make_segments(ids, positions, block=8, axis=None)
        y, pull = jax.vjp(lambda params, x: apply(params, x, segments), params, jnp.asarray(x))
        return y, *pull(jnp.asarray(dy))

    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, params)
        whole = jax.jit(lambda: value_and_gradients(lambda p, x, s: output(nnx.merge(graph, p), x, s)))()
        one_by_one = jax.jit(lambda: value_and_gradients(by_hand))()
        for got, want in zip(whole, one_by_one, strict=True):
            assert_same(got, want, 1e-10)


def test_an_unknown_letter_is_refused():
    llm, compute = replace(LLM, pattern="MX"), computing("ring")
    with pytest.raises(ValueError, match=r"model\.llm\.pattern has X"):
        nnx.eval_shape(lambda: HybridDecoder(llm, Init(jax.random.key(0)), compute))
