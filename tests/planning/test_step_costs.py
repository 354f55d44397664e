"""The cost of a compiled step, on programs whose counts are known by hand."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxthd.planning.hlo import Frame, Program, Shape, parse
from jaxthd.planning.kernel_costs import Cost, Costs, Device
from jaxthd.planning.step_costs import StepCosts, by, part_of, place_of, step_costs
from jaxthd.planning.thunks import recorded

DEVICE = Device("a device", {"bf16": 1e12, "": 1e11}, 1e12, 1e10, 1e8, 4, 64, 1e-6, 4e-6, 8e-6, 3e-6, 2e-5)


def of_function(function: Any, *arguments: Any, often: float | None = None) -> tuple[Program, StepCosts]:
    program = parse(jax.jit(function).lower(*arguments).compile().as_text())
    return program, step_costs(program, DEVICE, lambda part, name: often)


def products(costs: StepCosts) -> tuple[float, float]:
    """(launches, operations) of matrix products in a step."""
    found = dict(by(costs, lambda k: k.kind))["product"]
    return found.times, found.flops


@pytest.fixture
def frames() -> Iterator[None]:
    """Lets programs name the calls that made them, which the other tests do without."""
    old = jax.config.jax_traceback_in_locations_limit  # type: ignore[attr-defined]
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", old)


@pytest.mark.usefixtures("frames")
def test_a_scan_counts_its_trips() -> None:
    def scan(w: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0]

    program, costs = of_function(scan, jnp.ones((64, 32)) @ jnp.ones((32, 64)), jnp.ones((8, 64)))
    assert products(costs) == (7, 7 * 2 * 8 * 64 * 64)
    (loop,) = costs.loops
    assert (loop.entries, loop.trips, loop.known, loop.by_host) == (1, 7, True, True)
    product = next(k for k in costs.kernels if k.kind == "product")
    assert product.place.startswith("test_step_costs.py:")
    assert "scan" in product.place
    # x is read and written, w is read; 8 of 4 cores' worth of tiles: all cores work.
    assert product.roofline == max(2 * 8 * 64 * 64 / 1e11, 4 * (64 * 64 + 2 * 8 * 64) / 1e10)
    assert set(program.computations) > {program.entry}


@pytest.mark.parametrize(("often", "trips"), [(5.0, 5), (None, 1)])
def test_trips_that_only_the_data_knows_are_asked_for(often: float | None, trips: int) -> None:
    def steps(w: Any, x: Any, n: Any) -> Any:
        return jax.lax.fori_loop(0, n, lambda i, x: jnp.tanh(x @ w), x)

    _, costs = of_function(steps, jnp.ones((64, 64)), jnp.ones((8, 64)), 3, often=often)
    (loop,) = costs.loops
    assert (loop.trips, loop.known, loop.assumed) == (trips, False, often is None)
    assert loop.seconds == trips * DEVICE.read
    assert products(costs) == (trips, trips * 2 * 8 * 64 * 64)


def test_the_dearest_branch_counts() -> None:
    def choice(n: Any, w: Any, x: Any) -> Any:
        return jax.lax.cond(n > 2, lambda x: jnp.tanh(x @ w) @ w, lambda x: x @ w, x)

    _, costs = of_function(choice, 3, jnp.ones((64, 64)), jnp.ones((8, 64)))
    assert products(costs) == (2, 2 * 2 * 8 * 64 * 64)


PROGRAM = """
HloModule m

%update (p0: f32[16,8], p1: f32[1,8], p2: s32[]) -> f32[16,8] {
  %p0 = f32[16,8]{1,0} parameter(0)
  %p1 = f32[1,8]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %old = f32[1,8]{1,0} dynamic-slice(%p0, %p2, %zero), dynamic_slice_sizes={1,8}
  %sum = f32[1,8]{1,0} add(%old, %p1)
  ROOT %set = f32[16,8]{1,0} dynamic-update-slice(%p0, %sum, %p2, %zero)
}

%batched (q0: bf16[4,8,16], q1: bf16[4,16,32]) -> (f32[4,8,32], f32[4]) {
  %q0 = bf16[4,8,16]{2,1,0} parameter(0)
  %q1 = bf16[4,16,32]{2,1,0} parameter(1)
  %dot = f32[4,8,32]{2,1,0} dot(%q0, %q1), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
  %r = f32[4]{0} constant({1, 2, 3, 4})
  ROOT %both = (f32[4,8,32]{2,1,0}, f32[4]{0}) tuple(%dot, %r)
}

ENTRY %main (a: f32[16,8], b: f32[1,8], n: s32[], q: bf16[4,8,16], k: bf16[4,16,32]) -> f32[16,8] {
  %a = f32[16,8]{1,0} parameter(0)
  %b = f32[1,8]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %q = bf16[4,8,16]{2,1,0} parameter(3)
  %k = bf16[4,16,32]{2,1,0} parameter(4)
  %fused.1 = (f32[4,8,32]{2,1,0}, /*index=1*/f32[4]{0}) fusion(%q, %k), kind=kCustom, calls=%batched
  %gemm = (bf16[8,32]{1,0}, s8[1024]{0}) custom-call(%q.1, %k), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %q.1 = bf16[8,64]{1,0} bitcast(%q)
  %copied = f32[4]{0} copy(%fused.1#1)
  ROOT %update.1 = f32[16,8]{1,0} fusion(%a, %b, %n), kind=kLoop, calls=%update, metadata={op_name="jit(f)/set" stack_frame_id=2}
}
"""  # noqa: E501  XLA's lines
COSTS = {
    # The slice is read and replaced; so are its place in the array and what is added.
    "update.1": Cost(0, 32 + 32 + 32 + 4, 100 / 1e10),
    "fused.1": Cost(2 * 4 * 8 * 32 * 16, 2 * (512 + 2048) + 4 * (1024 + 4), 9232 / 1e10),
    # The second result is workspace.
    "gemm": Cost(2 * 8 * 32 * 64, 2 * (512 + 2048 + 256), 5632 / 1e10),
    "copied": Cost(0, 2 * 16, 32 / 1e10),
}


@pytest.mark.parametrize("name", COSTS)
def test_costs_of_a_kernel(name: str) -> None:
    program = parse(PROGRAM)
    inside = program.computations[program.entry]
    found = Costs(program, DEVICE).of(inside[name], inside)
    assert found == pytest.approx(COSTS[name])


EXCHANGES = """
HloModule m

ENTRY %main (a: f32[16,8], b: f32[1,8]) -> f32[1,8] {
  %a = f32[16,8]{1,0} parameter(0)
  %b = f32[1,8]{1,0} parameter(1)
  %gathered = f32[2,8]{1,0} all-gather(%b), replica_groups={{0,1},{2,3}}, dimensions={0}
  %summed = f32[1,8]{1,0} all-reduce-start(%b), replica_groups=[2,4]<=[8], to_apply=%update
  %scattered = f32[8,8]{1,0} reduce-scatter(%a), replica_groups=mesh['data'=2,'tensor'=4] {'data'}, to_apply=%update
  %sent = f32[1,8]{1,0} collective-permute(%b), source_target_pairs={{0,1}}
  ROOT %added = f32[1,8]{1,0} add(%b, %b)
}
"""  # noqa: E501  XLA's lines
RECEIVED = {"gathered": 32, "summed": 2 * 0.75 * 32, "scattered": 256, "sent": 32}
"""Bytes from the other ranks of a group: of two, of four, of two, of one."""


def test_exchange_goes_on_beside_the_kernels() -> None:
    """Other kernels take longer than the exchange, or it takes longer than they do."""
    program = parse(EXCHANGES)
    inside = program.computations[program.entry]
    slow = DEVICE._replace(links=1e6)
    for name, received in RECEIVED.items():
        assert Costs(program, slow).of(inside[name], inside) == (0, received, received / 1e6)
    exchange = sum(RECEIVED.values()) / 1e6
    costs = step_costs(program, slow, lambda part, name: None)
    assert (costs.exchange, costs.seconds) == pytest.approx((exchange, exchange))
    assert costs.in_turn == pytest.approx(exchange + DEVICE.launch)
    costs = step_costs(program, slow._replace(launch=1.0), lambda part, name: None)
    assert (costs.seconds, costs.in_turn) == pytest.approx((4.0, 5.0))


ELEMENTS = """
HloModule m

%fused (x: f32[64,32]) -> f32[64] {
  %x = f32[64,32]{1,0} parameter(0)
  %e = f32[64,32]{1,0} exponential(%x)
  %y = f32[64,32]{1,0} multiply(%e, %x)
  %zero = f32[] constant(0)
  ROOT %r = f32[64]{0} reduce(%y, %zero), dimensions={1}, to_apply=%add
}

ENTRY %main (x: f32[64,32]) -> f32[64] {
  %x = f32[64,32]{1,0} parameter(0)
  ROOT %fusion = f32[64]{0} fusion(%x), kind=kInput, calls=%fused
}
"""


def test_operations_on_elements_are_a_bound_too() -> None:
    """An exponential counts as eight, a sum one for each element that it reads."""
    program = parse(ELEMENTS)
    inside = program.computations[program.entry]
    slow = DEVICE._replace(elements=1.0)
    assert Costs(program, slow).of(inside["fusion"], inside).seconds == 64 * 32 * (8 + 1 + 1)
    assert Costs(program, DEVICE).of(inside["fusion"], inside).seconds == (64 * 32 + 64) * 4 / 1e10


def test_few_tiles_leave_cores_idle() -> None:
    program = parse(PROGRAM)
    inside = program.computations[program.entry]
    slow = DEVICE._replace(bandwidth=1e30, tile=1024)  # one tile for four cores
    assert Costs(program, slow).of(inside["fused.1"], inside).seconds == 2 * 4 * 8 * 32 * 16 / (1e12 / 4)
    assert inside["fused.1"].results == ((Shape("f32", (4, 8, 32)),), (Shape("f32", (4,)),))


SEQUENCE = """
000: kCommandBuffer [source       | next=003 (1)]
    001: kCustomKernel [source        | next=002 (1)] fused_1 grid: [1, 1, 1]
    002: kGemm         [prev=001 (1)  | sink        ]
003: kCustomKernel [prev=000 (1) | next=004 (1)] update_1
004: kWhile         [prev=003 (1) | sink]
condition:
    005: kCustomKernel [source | sink] compare
  body:
    000: kCommandBuffer [source | sink]
        006: kCopy [source | sink]
"""
METADATA = "".join(
    f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {n}\n  }}\n}}\n'
    for n, name in enumerate(("fused.1", "gemm", "update.1", "while.1", "compare.1", "copied"), 1)
)


def test_a_graph_costs_one_launch() -> None:
    graphs = recorded(SEQUENCE, METADATA)
    assert graphs == {"fused.1", "gemm", "copied"}
    costs = step_costs(parse(PROGRAM), DEVICE, lambda part, name: None, graphs)
    assert [(k.name, k.by_host) for k in costs.kernels] == [
        ("fused.1", False),
        ("gemm", False),
        ("copied", False),
        ("update.1", True),
    ]
    assert costs.graphs == 1
    least = [DEVICE.kernel, DEVICE.kernel, DEVICE.kernel, DEVICE.launch]
    bounds = [max(a, COSTS[k.name].seconds) for a, k in zip(least, costs.kernels, strict=True)]
    assert costs.seconds == pytest.approx(sum(bounds) + DEVICE.graph)


def test_parts_and_places_come_from_the_calls() -> None:
    linear = Frame("/x/jaxthd/models/layers.py", "Linear.__call__", 9)
    encoder = Frame("/x/jaxthd/models/fastconformer.py", "ConformerBlock.__call__", 5)
    attention = Frame("/x/jaxthd/models/encoder_attention.py", "RelativeAttention.__call__", 7)
    assert part_of([linear, attention, encoder]) == "encoder attention"
    assert part_of([linear, encoder]) == "encoder"
    assert part_of([linear]) == "other"
    assert place_of([linear, attention]) == "models/encoder_attention.py:7 RelativeAttention.__call__"
    assert place_of([]) == "?"


def test_text_that_is_no_program() -> None:
    with pytest.raises(ValueError, match="ENTRY"):
        parse("HloModule m\n")
