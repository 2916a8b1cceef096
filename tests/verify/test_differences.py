"""Each cause of a difference, alone and in a program of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from rhino_jax.plan.records import Collective
from rhino_jax.verify.hlo.records import CompiledCollective
from rhino_jax.verify.matching.ledger import Evidence, evidence_of
from rhino_jax.verify.matching.matcher import Difference
from rhino_jax.verify.verdict import unexplained_bytes
from rhino_jax.verify.verification import differences_of
from tests.frontend.imported import program_of


AXES = (("x", 2), ("y", 4))
LINE = "model.py:10 (mlp)"


def planned(
    kind: str,
    axes: str,
    size: int,
    count: int = 1,
    line: str = LINE,
    seconds: float | None = None,
) -> Collective:
    """`size` bytes on the wire in one run, at a nanosecond a byte."""
    seconds = size * count * 1e-9 if seconds is None else seconds
    return Collective(
        kind, tuple(axes), size * count, count, seconds, "dot_general #1", line
    )


def made(
    kind: str,
    axes: str,
    size: int,
    count: int = 1,
    line: str = LINE,
    op: str = "jit(f)/dot_general",
    reason: str = "",
) -> CompiledCollective:
    return CompiledCollective(
        kind, tuple(axes), size * count, count, size * count * 1e-9, op, line, reason
    )


def compare(
    a: list[Collective], b: list[CompiledCollective], platform: str = "tpu", **kw: Any
) -> tuple[Difference, ...]:
    found = differences_of(a, b, AXES, platform=platform, **kw)
    # Whatever is said of single differences, together they are the whole difference.
    for name in ("bytes", "seconds"):
        whole = sum(getattr(c, name) for c in b) - sum(getattr(c, name) for c in a)
        assert sum(getattr(d, name) for d in found) == pytest.approx(whole, abs=1e-12)
    runs = sum(c.count for c in b) - sum(c.count for c in a)
    assert sum(d.compiled.count - d.predicted.count for d in found) == runs
    return found


def only(found: tuple[Difference, ...]) -> Difference:
    assert len(found) == 1, found
    return found[0]


def test_equal_programs_do_not_differ() -> None:
    a = [planned("all-reduce", "x", 100, 4), planned("all-gather", "y", 300)]
    b = [made("all-gather", "y", 300), made("all-reduce", "x", 100, 4)]
    assert compare(a, b) == ()


def test_one_record_in_a_loop_equals_several_unrolled() -> None:
    a = [planned("all-reduce", "x", 100, 4)]
    assert compare(a, [made("all-reduce", "x", 100)] * 4) == ()


def test_combined_into_one_is_harmless_and_keeps_its_lines() -> None:
    a = [
        planned("all-reduce", "x", 100, line="m.py:1 (f)"),
        planned("all-reduce", "x", 300, line="m.py:2 (f)"),
    ]
    d = only(compare(a, [made("all-reduce", "x", 400, line="m.py:1 (f)")]))
    assert d.label == "combined"
    assert (d.predicted.count, d.compiled.count, d.bytes) == (2, 1, 0)
    assert d.cause == "combined: 2 planned run as 1, the same bytes"
    assert d.sources == ("m.py:1 (f)", "m.py:2 (f)")
    assert d.is_harmless


def test_more_bytes_than_were_combined_are_not_called_combined() -> None:
    a = [planned("all-reduce", "x", 100), planned("all-reduce", "x", 300)]
    found = compare(a, [made("all-reduce", "x", 500)])
    assert "combined" not in {d.label for d in found}
    assert unexplained_bytes(found) == 100


def test_hoisted_out_of_a_loop_runs_once_instead_of_every_trip() -> None:
    d = only(
        compare([planned("all-gather", "y", 300, 12)], [made("all-gather", "y", 300)])
    )
    assert d.label == "hoisted out of a loop"
    assert (d.predicted.count, d.compiled.count) == (12, 1)
    assert d.bytes == -11 * 300 and d.is_harmless
    assert "12x" in d.cause


@pytest.mark.parametrize(
    "b",
    [
        made("all-gather", "y", 300, 5),  # 12 is no multiple of 5
        made("all-gather", "y", 290),  # other bytes
        made("all-gather", "y", 300, line="other.py:1 (g)"),  # another line
        made("all-gather", "x", 300),  # another axis
    ],
)
def test_what_is_no_trip_count_smaller_was_not_hoisted(b: CompiledCollective) -> None:
    found = compare([planned("all-gather", "y", 300, 12)], [b])
    assert "hoisted out of a loop" not in {d.label for d in found}
    assert unexplained_bytes(found) > 0


def test_half_of_equal_collectives_are_eliminated_not_hoisted() -> None:
    a = [planned("all-gather", "y", 300, 12)] * 2
    d = only(compare(a, [made("all-gather", "y", 300, 12)]))
    assert d.label == "eliminated" and not d.is_harmless
    assert (d.predicted.count, d.compiled.count) == (12, 0)


def test_a_reduce_scatter_as_an_all_reduce_is_harmless_on_cpu_alone() -> None:
    a = [planned("reduce-scatter", "y", 300)]
    b = [made("all-reduce", "y", 600)]
    d = only(compare(a, b, "cpu"))
    assert d.label == "decomposed" and d.is_harmless
    assert d.became == (("all-reduce", ("y",)),)
    assert "twice the bytes" in d.cause
    assert not only(compare(a, b, "tpu")).is_harmless


def test_more_than_twice_the_bytes_are_not_all_explained() -> None:
    a = [planned("reduce-scatter", "y", 300)]
    found = compare(a, [made("all-reduce", "y", 700)], "cpu")
    assert unexplained_bytes(found) == 100


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    a = [planned("all-reduce", "y", 600)]
    b = [made("reduce-scatter", "y", 300), made("all-gather", "y", 300)]
    d = only(compare(a, b))
    assert d.label == "decomposed" and d.is_harmless
    assert set(d.became) == {("reduce-scatter", ("y",)), ("all-gather", ("y",))}


def test_a_reduce_scatter_and_an_all_gather_become_one_all_reduce() -> None:
    a = [planned("reduce-scatter", "y", 300), planned("all-gather", "y", 300)]
    d = only(compare(a, [made("all-reduce", "y", 600)]))
    assert d.label == "decomposed" and d.is_harmless and d.bytes == 0


def test_of_two_readings_that_which_explains_more_is_taken() -> None:
    """Both reduce-scatters are all-reduces; the gather over the other line stays."""
    a = [
        planned("reduce-scatter", "y", 300),
        planned("reduce-scatter", "y", 300),
        planned("all-gather", "y", 300, line="other.py:1 (g)"),
    ]
    b = [
        made("all-reduce", "y", 1200),
        made("all-gather", "x", 300, line="third.py:1 (h)"),
    ]
    found = compare(a, b, "cpu")
    assert unexplained_bytes(found) == 0
    assert {d.label for d in found} == {"decomposed", "in another order"}


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-to-all"])
def test_steps_of_permutes_are_the_collective_that_they_make_up(kind: str) -> None:
    d = only(
        compare([planned(kind, "y", 300)], [made("collective-permute", "y", 100, 3)])
    )
    assert d.label == "decomposed" and d.is_harmless
    assert d.bytes == 0 and d.compiled.count == 3


def test_permutes_over_another_axis_are_not_that_collective() -> None:
    found = compare(
        [planned("all-gather", "y", 300)], [made("collective-permute", "x", 100, 3)]
    )
    assert unexplained_bytes(found) == 600


def test_a_gather_over_two_axes_is_two_gathers() -> None:
    """Of 800 bytes over 2 x 4: y first moves 300 (of 400), then x 400; or x, then y."""
    whole, parts = [planned("all-gather", "xy", 700)], (300, 400)
    b = [made("all-gather", "y", parts[0]), made("all-gather", "x", parts[1])]
    d = only(compare(whole, b))
    assert d.label == "over other axes" and d.is_harmless


def test_the_two_axes_of_a_gather_in_another_order_move_as_much() -> None:
    a = [planned("all-gather", "y", 300), planned("all-gather", "x", 400)]
    b = [made("all-gather", "x", 100), made("all-gather", "y", 600)]
    d = only(compare(a, b))
    assert d.label == "in another order" and d.is_harmless and d.bytes == 0


def test_one_all_reduce_over_both_axes_for_a_scatter_and_a_reduce() -> None:
    """800 bytes: scattered over y 600, reduced over x 2 x 1/2 x 200, both 2 x 7/8."""
    a = [planned("reduce-scatter", "y", 600), planned("all-reduce", "x", 200)]
    b = [made("all-reduce", "xy", 1400)]
    d = only(compare(a, b, "cpu"))
    assert d.label == "over other axes" and d.is_harmless
    assert not only(compare(a, b, "gpu")).is_harmless


def test_what_xla_drops_is_eliminated() -> None:
    a = [planned("all-reduce", "x", 100), planned("all-gather", "y", 300)]
    d = only(compare(a, [made("all-reduce", "x", 100)]))
    assert (d.label, d.kind, d.bytes) == ("eliminated", "all-gather", -300)
    assert not d.is_harmless


def test_what_the_plan_does_not_have_names_the_op_and_line() -> None:
    d = only(compare([], [made("all-gather", "y", 300, op="jit(f)/scatter-add")]))
    assert d.label == "not in the plan" and not d.is_harmless
    assert "scatter-add" in d.cause and d.sources == (LINE,)


def test_a_run_again_is_repeated() -> None:
    a, b = planned("all-to-all", "y", 300), made("all-to-all", "y", 300)
    d = only(compare([a], [b, b]))
    assert d.label == "repeated" and d.bytes == 300 and not d.is_harmless


def test_the_same_runs_in_a_smaller_type_are_harmless_in_a_larger_not() -> None:
    a = [planned("all-gather", "y", 300, 4)]
    smaller = only(compare(a, [made("all-gather", "y", 150, 4)]))
    assert smaller.label == "another type" and smaller.is_harmless
    assert "0.5x" in smaller.cause
    larger = only(compare(a, [made("all-gather", "y", 600, 4)]))
    assert larger.label == "another type" and not larger.is_harmless
    third = compare(a, [made("all-gather", "y", 100, 4)])
    assert "another type" not in {d.label for d in third}


def test_what_shard_map_holds_is_the_users() -> None:
    b = made("all-reduce", "y", 300, op="jit(f)/shard_map/psum")
    d = only(compare([], [b]))
    assert d.label == "written by hand" and d.is_harmless


def test_of_stages_in_one_program_shard_map_is_the_plans() -> None:
    own = Evidence(in_stages=True)
    b = made("all-reduce", "y", 300, op="jit(f)/shard_map/psum")
    d = only(compare([], [b], evidence=own))
    assert d.label == "not in the plan" and not d.is_harmless
    inner = replace(b, op="jit(f)/shard_map/while/shard_map/psum")
    assert only(compare([], [inner], evidence=own)).label == "written by hand"


def test_pieces_beside_their_product_are_harmless() -> None:
    """As XLA:TPU has a reduce-scatter over four: five pieces both ways round, for the
    three of one way."""
    reason = "decomposed into a windowed loop of 5 permutes"
    a = [planned("reduce-scatter", "y", 300, 18)]
    b = made("reduce-scatter", "y", 500, 18, reason=reason)
    d = only(compare(a, [replace(b, is_async=True)]))
    assert d.label == "windowed" and d.is_harmless and d.bytes == 18 * 200
    assert "5 pieces" in d.cause and "takes 3" in d.cause
    assert not only(compare(a, [b])).is_harmless  # nothing runs beside it
    for other in (replace(b, bytes=450 * 18), replace(b, reason="")):
        assert "windowed" not in {d.label for d in compare(a, [other])}


def test_part_of_an_axis_is_named() -> None:
    b = made("all-reduce", "y", 300, reason="over groups of 2")
    d = only(compare([], [b]))
    assert d.label == "part of an axis" and "groups of 2" in d.cause


def test_without_a_rule_the_op_is_named() -> None:
    evidence = Evidence(unknown=frozenset({"my_kernel"}))
    b = made("all-gather", "y", 300, op="jit(f)/my_kernel")
    d = only(compare([], [b], evidence=evidence))
    assert d.label == "no rule"
    assert "my_kernel" in d.cause and "register_rule" in d.cause
    other = replace(b, op="jit(f)/dot_general")
    assert only(compare([], [other], evidence=evidence)).label == "not in the plan"


def test_what_does_not_divide_is_named() -> None:
    said = ("add of float32[17]", frozenset({"y"}))
    evidence = Evidence(uneven={LINE: (said,)})
    d = only(compare([], [made("all-gather", "y", 300)], evidence=evidence))
    assert d.label == "not divisible" and "add of float32[17]" in d.cause
    other_axis = compare([], [made("all-gather", "x", 300)], evidence=evidence)
    assert only(other_axis).label == "not in the plan"


REMAT = (
    "The compiler cannot go from sharding {devices=[8,1,1]<=[8]} to"
    " {devices=[1,4,2]<=[2,2,2]T(1,0,2)} efficiently for HLO operation %add.3 ="
    " f32[1,8,64]{2,1,0} add(%cos.0), sharding={devices=[8,1,1]<=[8]},"
    ' metadata={op_name="jit(f)/add" source_file="/home/me/model.py" source_line=10}.'
)


@pytest.mark.parametrize(
    ("op", "line"), [("jit(f)/add", "?"), ("jit(f)/mul", "model.py:10 (mlp)")]
)
def test_involuntary_rematerialisation_is_found_by_op_or_line(
    op: str, line: str
) -> None:
    evidence = Evidence(rematerialised=(REMAT,))
    b = made("all-gather", "xy", 700, op=op, line=line)
    d = only(compare([], [b], evidence=evidence))
    assert d.label == "involuntary rematerialisation" and "%add.3" in d.cause
    elsewhere = replace(b, op="jit(f)/mul", source="model.py:100 (mlp)")
    assert only(compare([], [elsewhere], evidence=evidence)).label == "not in the plan"


def test_another_collective_on_the_line_of_a_planned_one() -> None:
    a, b = [planned("all-to-all", "y", 100)], [made("all-gather", "y", 400)]
    d = only(compare(a, b))
    assert d.label == "another collective" and not d.is_harmless
    assert d.became == (("all-gather", ("y",)),) and d.bytes == 300


def test_differences_are_ranked_by_seconds_saved_or_lost() -> None:
    a = [planned("all-gather", "y", 300, line="a.py:1 (f)")]
    b = [
        made("all-reduce", "x", 100, line="b.py:1 (f)"),
        made("all-to-all", "y", 200, line="c.py:1 (f)"),
    ]
    found = compare(a, b)
    assert [abs(d.bytes) for d in found] == [300, 200, 100]


def test_sums_that_a_shard_map_asks_for_are_known_by_line() -> None:
    # JAX 0.12 makes Explicit axes where nothing is said.
    types = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.sharding.AbstractMesh((2, 4), ("x", "y"), axis_types=types)

    def fn(a: Any) -> Any:
        def body(a: Any) -> Any:
            return jax.lax.psum(jax.lax.pmax(a, "y"), "x")

        given = dict(in_specs=jax.P("x", "y"), out_specs=jax.P(), check_vma=False)
        return jax.shard_map(body, mesh=mesh, **given)(a)

    program, _ = program_of(fn, np.ones((8, 8), np.float32))
    written = evidence_of((), program).written
    assert written is not None
    ((line, axes),) = written.items()
    assert "test_differences.py" in line and axes == frozenset("xy")
