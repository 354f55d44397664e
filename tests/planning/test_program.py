"""Bytes on the wire, read from program texts written by hand."""

import pytest

from jaxthd.config import MeshConfig
from jaxthd.planning.program import received_bytes

CONTEXT = MeshConfig(context=4)
EVERY_FORM = [
    "  %a = bf16[8]{0} all-gather(%x), replica_groups={{0,1,2,3}}, dimensions={0}",  # 16 * 3/4
    "  %b = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), replica_groups=[1,4]<=[4], dimensions={0}",  # 24
    "  %c = f32[8]{0} all-gather-done(%b)",
    "  %d = (f32[], /*index=1*/f32[7]{0}) all-reduce(%x, %y), replica_groups={}, to_apply=%add",  # 48
    "  %e = f32[2]{0} reduce-scatter(%x), replica_groups=mesh['data'=1,'context'=4] {'context'}",  # 24
    "  ROOT %f = (f32[8]{0}, f32[8]{0}, u32[]) collective-permute-start(%x), "
    "source_target_pairs={{0,1},{2,3}}",
]


def text(**computations: list[str]) -> str:
    """Of a program; `main` is its entry."""
    blocks = []
    for name, lines in computations.items():
        blocks += [f"{'ENTRY ' if name == 'main' else ''}%{name} (x: f32[8]) -> f32[8] {{", *lines, "}"]
    return "\n".join(blocks)


def test_every_form_of_a_collective_is_read():
    received = received_bytes(text(main=EVERY_FORM), CONTEXT)
    assert {axes: of.tolist() for axes, of in received.items()} == {("context",): [108, 140, 108, 140]}


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("mesh['a'=2,'b'=4] {'a'}", ("data",)),
        ("[4,2]<=[8]", ("tensor",)),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("tensor",)),
        ("mesh['a'=4,'b'=2], device_ids=([2,2,2]T(2,0,1)) {'b'}", ("context",)),
        ("{{0,2,4,6},{1,3,5,7}}", ("data", "context")),
        ("[1,8]<=[8]", ("data", "context", "tensor")),
    ],
)
def test_a_group_belongs_to_the_axes_its_ranks_differ_in(groups: str, axes: tuple[str, ...]):
    line = f"  %a = f32[6]{{0}} all-to-all(%x), replica_groups={groups}, dimensions={{0}}"
    received = received_bytes(text(main=[line]), MeshConfig(data=2, context=2, tensor=2))
    g = 2 ** len(axes)
    assert {a: of.tolist() for a, of in received.items()} == {axes: pytest.approx([24 * (g - 1) / g] * 8)}


LOOP = "  %w = f32[8] while(%x), condition=%until, body=%{}, backend_config={{{}}}"
TIMES = '"known_trip_count":{{"n":"{}"}}'


def test_loops_count_as_often_as_they_run_one_in_another():
    program = text(
        inner=[EVERY_FORM[0]],
        outer=[
            LOOP.format("inner", TIMES.format(3)),
            EVERY_FORM[0],
            "  %k = f32[8] call(%x), to_apply=%inner",
        ],
        main=[LOOP.format("outer", TIMES.format(5)), EVERY_FORM[0]],
    )
    assert received_bytes(program, CONTEXT)["context",].tolist() == [12 * (5 * (3 + 1 + 1) + 1)] * 4


def test_a_branch_counts_as_often_as_told_and_the_dearest_is_taken():
    program = text(
        dear=[EVERY_FORM[0], EVERY_FORM[0]],
        cheap=[EVERY_FORM[0]],
        idle=[],
        main=[
            "  %b = f32[8] conditional(%i, %x, %x, %x), branch_computations={%idle, %cheap, %dear}, "
            'metadata={op_name="step/stage/cond"}',
            "  %t = f32[8] conditional(%p, %x, %x), true_computation=%cheap, false_computation=%idle",
            LOOP.format("cheap", ""),
            LOOP.format("idle", ""),
        ],
    )
    runs = {"step/stage/cond": 0.5, "": 3.0}
    assert received_bytes(program, CONTEXT, runs.__getitem__)["context",].tolist() == [12 + 36 + 36] * 4
    with pytest.raises(RuntimeError, match=r"conditional of main holds collectives"):
        received_bytes(program, CONTEXT)


def test_unknown_groups_are_refused():
    with pytest.raises(RuntimeError, match="unknown replica_groups"):
        received_bytes(text(main=["  %a = f32[6]{0} all-to-all(%x), replica_groups=new"]), CONTEXT)
