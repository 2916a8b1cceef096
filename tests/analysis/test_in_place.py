"""Which updates are written into the buffer of the array that they update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.analysis.equivalence import passed_bytes
from rhino_jax.analysis.graph import NodeKind
from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target


ROWS = jax.ShapeDtypeStruct((64, 8), jnp.float32)
AT = jax.ShapeDtypeStruct((64,), jnp.int32)
TABLE = jax.ShapeDtypeStruct((4096, 8), jnp.float32)


def _count(fn: Any, *args: Any, donate: int | tuple[int, ...] = 0) -> int:
    program = trace(fn, args, {}, donate_argnums=donate).program
    return len(ProgramAnalysis.of(program, load_target("h100:8")).liveness.in_place)


def _in_a_scan(table: Any, at: Any, rows: Any) -> Any:
    def one(table: Any, x: Any) -> Any:
        return jax.lax.dynamic_update_slice(table, x[1][None], (x[0], 0)), None

    return jax.lax.scan(one, table, (at, rows))[0]


def _old_rows_after(table: Any, at: Any, rows: Any) -> Any:
    return table.at[at].add(rows), table[at].sum()


def _old_table_behind(table: Any, at: Any, rows: Any) -> Any:
    new = table.at[at].add(rows)
    return new, table @ new.sum(0)


UPDATES = {
    "set": lambda t, at, rows: t.at[at].set(rows),
    "chain": lambda t, at, rows: t.at[at].max(rows).at[at].multiply(2.0),
    "rows that were there": lambda t, at, rows: t.at[at].set(0.9 * t[at] + rows),
    "old rows read after": _old_rows_after,
    "in a scan": _in_a_scan,
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates_of_a_donated_array_are_in_place(name: str) -> None:
    expected = 2 if name == "chain" else 1
    assert _count(UPDATES[name], TABLE, AT, ROWS) == expected


def test_batched_updates_are_in_place() -> None:
    def one(cache: Any, at: Any, row: Any) -> Any:
        return jax.lax.dynamic_update_slice(cache, row[None], (at, 0))

    caches = jax.ShapeDtypeStruct((64, 128, 8), jnp.float32)
    assert _count(jax.vmap(one), caches, AT, ROWS) == 1


def test_arrays_that_are_needed_later_are_copied() -> None:
    assert _count(UPDATES["set"], TABLE, AT, ROWS, donate=()) == 0
    assert _count(_old_table_behind, TABLE, AT, ROWS) == 0


def test_one_of_two_updates_of_an_array_is_in_place() -> None:
    def fn(table: Any, at: Any, rows: Any) -> Any:
        return table.at[at].add(rows), table.at[at].max(rows)

    assert _count(fn, TABLE, AT, ROWS) == 1


def test_a_carry_that_is_read_after_its_update_is_copied() -> None:
    def fn(table: Any, at: Any, rows: Any) -> Any:
        def one(carry: Any, x: Any) -> Any:
            table, _ = carry
            new = table.at[x[0]].add(x[1])
            return (new, table + 0.0 * new[0, 0]), None

        return jax.lax.scan(one, (table, table), (at, rows))[0]

    assert _count(fn, TABLE, AT, ROWS) == 0


@pytest.mark.parametrize("donate", [(), (0,)])
def test_a_loop_copies_what_it_may_not_write(donate: tuple[int, ...]) -> None:
    args = (TABLE, AT, ROWS)
    program = trace(_in_a_scan, args, {}, donate_argnums=donate).program
    analysis = ProgramAnalysis.of(program, load_target("h100:8"))
    graph, liveness = analysis.graph, analysis.liveness
    (carry,) = [n for n in graph.nodes if n.kind is NodeKind.CARRY]
    copied = 0 if donate else 2 * program.values[carry.value].bytes
    assert passed_bytes(graph, liveness, carry) == copied


@pytest.mark.parametrize("donate", [(), (0,)])
def test_a_result_of_branches_is_copied_to_the_donated_buffer(
    donate: tuple[int, ...],
) -> None:
    def update(table: Any, rows: Any) -> Any:
        return jax.lax.dynamic_update_slice(table, rows, (3, 0))

    def passed(other: Any, hardware: str = "h100:8") -> int:
        def fn(table: Any, rows: Any, flag: Any) -> Any:
            return jax.lax.cond(flag, update, other, table, rows)

        flag = jax.ShapeDtypeStruct((), jnp.bool_)
        program = trace(fn, (TABLE, ROWS, flag), {}, donate_argnums=donate).program
        analysis = ProgramAnalysis.of(program, load_target(hardware))
        (join,) = [n for n in analysis.graph.nodes if n.kind is NodeKind.JOIN]
        return passed_bytes(analysis.graph, analysis.liveness, join)

    table_bytes = 4096 * 8 * 4
    assert passed(lambda table, rows: table) == (2 * table_bytes if donate else 0)
    assert passed(lambda table, rows: 2 * table) == 0
    assert passed(lambda table, rows: table, "v5e:2x4") == 0


def _branches(*others: Any) -> Any:
    """Return a function of which each branch adds rows, or is one of `others`."""

    def fn(table: Any, at: Any, rows: Any, which: Any) -> Any:
        add = lambda t: t.at[at].add(rows)  # noqa: E731
        return jax.lax.switch(which, [add, *others, add], table)

    return fn


def _in_place_in_branches(fn: Any, hardware: str) -> int:
    args = TABLE, AT, ROWS, jax.ShapeDtypeStruct((), jnp.int32)
    program = trace(fn, args, {}, donate_argnums=(0,)).program
    return len(ProgramAnalysis.of(program, load_target(hardware)).liveness.in_place)


@pytest.mark.parametrize("hardware", ["h100:8", "v5e:2x4"])
def test_updates_in_exclusive_branches_are_in_place(hardware: str) -> None:
    assert _in_place_in_branches(_branches(), hardware) == 2
    # A branch that returns the table copies it on GPU, and so do the others.
    returned = 0 if hardware == "h100:8" else 2
    assert _in_place_in_branches(_branches(lambda t: t), hardware) == returned
    # Both results are needed here, one after the other.
    fn = _branches()
    both = lambda t, *rest: (fn(t, *rest), t.at[0].set(1.0))  # noqa: E731
    assert _in_place_in_branches(both, hardware) <= 1
