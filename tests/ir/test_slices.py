"""Parts of programs, as programs of their own."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.ir.op import Output
from rhino_jax.ir.program import Program
from rhino_jax.ir.slices import Slice, slice_between, slice_of
from rhino_jax.ir.verifier import verify
from rhino_jax.models import registry
from rhino_jax.plan.decisions import in_whole
from rhino_jax.search.driver import make_plan
from rhino_jax.search.records import Request


def program_of(name: str) -> Program:
    work = registry.get(name)
    options: Any = {"donate_argnums": work.donate_argnums}
    return trace(work.step, work.abstract_args(), {}, **options).program


def chain(x: Any, w: Any) -> Any:
    a = jnp.tanh(x)
    b = a @ w
    c = jnp.exp(b)
    return c + a, b * 2.0


def chain_program() -> Program:
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 8), (8, 8))]
    return trace(chain, args, {}, donate_argnums=0).program


def test_a_slice_reads_and_gives_what_crosses_its_cuts() -> None:
    whole = chain_program()
    assert [op.name for op in whole.ops][:4] == ["tanh", "dot_general", "exp", "add"]
    found = slice_between(whole, 1, 3)
    part = found.program
    a, b, c = (whole.ops[i].results[0] for i in range(3))
    assert [op.name for op in part.ops] == ["dot_general", "exp"]
    assert [e.path for e in part.inputs] == ["w", f"cut[{a}]"]
    assert [e.path for e in part.outputs] == [f"cut[{b}]", f"cut[{c}]"]
    assert [found.values[e.value] for e in part.outputs] == [b, c]
    assert found.ops == (1, 2)
    assert part.ops[0].source == whole.ops[1].source
    assert "dot_general" in str(part) and "test_slices.py" in str(part)


def test_what_nobody_else_reads_is_donated() -> None:
    whole = chain_program()
    first, rest = slice_between(whole, 0, 1), slice_between(whole, 1, len(whole.ops))
    assert [e.is_donated for e in first.program.inputs] == [True]  # x
    donated = {e.path: e.is_donated for e in rest.program.inputs}
    assert donated == {"w": False, f"cut[{whole.ops[0].results[0]}]": True}
    middle = slice_between(whole, 1, 3).program
    assert not any(e.is_donated for e in middle.inputs)  # the sum reads it later


def test_what_would_have_to_run_in_between_is_refused() -> None:
    whole = chain_program()
    slice_of(whole, [0, 1])
    slice_of(whole, [0, 3, 2, 1])
    with pytest.raises(ValueError, match=r"dot_general #1 .* is not in it"):
        slice_of(whole, [0, 2])
    with pytest.raises(ValueError, match="exp #2"):
        slice_of(whole, [0, 1, 3])
    with pytest.raises(ValueError, match="not ops of its body"):
        slice_of(whole, [0, 99])


def test_state_is_tied_where_both_ends_are_in_the_slice() -> None:
    whole = chain_program()
    tied = replace(
        whole,
        outputs=tuple(
            Output(e.value, e.path, state_of=0) if k == 0 else e
            for k, e in enumerate(whole.outputs)
        ),
    )
    verify(tied)
    everything = slice_between(tied, 0, len(tied.body.ops)).program
    assert everything == tied
    late = slice_between(tied, 1, len(tied.body.ops)).program
    assert [e.state_of for e in late.outputs] == [None, None]


def cuts(whole: Program, count: int) -> list[Slice]:
    size = len(whole.body.ops)
    ends = [size * k // count for k in range(count + 1)]
    return [slice_between(whole, a, b) for a, b in pairwise(ends)]


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt-tiny-unrolled", "decode-tiny"])
def test_slices_put_together_are_the_program(name: str) -> None:
    whole = program_of(name)
    found = cuts(whole, 5)
    ops = [op for one in found for op in one.ops_of_whole()]
    assert replace(whole, ops=tuple(ops)) == whole
    given = {e.value for e in whole.inputs}
    for one in found:  # what is read was given or made before
        assert {one.values[e.value] for e in one.program.inputs} <= given
        given |= {one.values[e.value] for e in one.program.outputs}
    assert {e.value for e in whole.outputs} <= given
    assert found[0].program != whole
    (everything,) = cuts(whole, 1)
    assert everything.ops_of_whole() == whole.ops


def test_the_first_half_of_a_gpt_is_planned() -> None:
    whole = program_of("gpt-tiny-unrolled")
    half = slice_between(whole, 0, len(whole.body.ops) // 2)
    target, axes = load_target("v5e:2x4"), (("data", 4), ("model", 2))
    request = Request(memory_budget_bytes=target.hbm_bytes, pins={}, output_pins={})
    plan = make_plan(half.program, axes, target, request)
    every = make_plan(whole, axes, target, request)
    assert 0 < plan.predicted.step_time_s < every.predicted.step_time_s
    assert plan.search.gap < 0.02
    assert {leaf.path for leaf in plan.outputs} == {
        e.path for e in half.program.outputs
    }
    assert any(leaf.path.startswith("cut[") for leaf in plan.outputs)
    told = in_whole(plan.decisions, half.ops, half.values)
    for value, spec in told.values.items():
        assert len(spec) == whole.values[value].rank
    assert {op for op, _ in told.operands} <= set(half.ops)
    assert any(any(spec) for spec in told.values.values())
