"""Retrace a program with its inputs in interleaved storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from rhino_jax._compat import (
    bind_eqn,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
    without_dead_code,
)
from rhino_jax.frontend.regions import (
    closed_region_jaxprs,
    evaluate_ops,
    rebuild_jaxpr,
    with_jaxprs,
)
from rhino_jax.ir.program import Op, Program, Region
from rhino_jax.ir.traits import OpKind
from rhino_jax.ir.transform import (
    BLOCKS,
    JOINED,
    InterleavedOrder,
    Stored,
    from_text,
)
from rhino_jax.passes.interleaved.moves import (
    DimRef,
    Marks,
    all_stored,
    all_written,
    pieces_in_blocks,
    regroup_of,
    run_move,
    run_regroup,
)
from rhino_jax.passes.interleaved.sites import (
    DimOrders,
    batch_choices,
    handled,
    joined_batches,
    reach,
    storage_choices,
)
from rhino_jax.passes.program_pass import Gain, ProgramPass, Trial, TrialKind
from rhino_jax.rewrite.retraced import retraced


Dims = list[tuple[int, InterleavedOrder]]
"""Interleaved dims of a value, and how."""


def interleave(closed: Any, program: Program, choice: str) -> Any:
    """Rewrite a program for inputs in interleaved storage.

    The output that replaces such an input in the next call is stored as the input is;
    every other output is in logical order.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      choice: interleaved dims of inputs; see `rhino_jax.ir.transform.as_text`.
    Returns:
      A closed jaxpr of arguments, constants and results of the same shapes.
    """
    ops, stored = DimOrders.of(closed, program), from_text(choice)
    seeds = {
        DimRef(program.inputs[slot].value, dim): blocks
        for (slot, dim), blocks in stored.items()
    }
    marks = reach(ops, seeds)
    assert marks is not None, "inputs are stored in blocks of two kinds"
    return _interleaved(closed, ops, marks, stored)


def interleave_batches(closed: Any, program: Program, choice: str) -> Any:
    """Rewrite a program to interleave the batches that it concatenates.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      choice: an empty table.
    Returns:
      A closed jaxpr of the same arguments, constants and results.
    """
    marks = joined_batches(closed, program)
    ops = DimOrders.of(closed, program)
    return _interleaved(closed, ops, marks, {})


def _interleaved(closed: Any, ops: DimOrders, marks: Marks, stored: Stored) -> Any:
    """Retrace a program with some of its inputs in interleaved storage."""
    program, opened = ops.program, open_jaxpr(closed)
    held: list[Dims] = [[] for _ in program.inputs]
    for (slot, dim), blocks in sorted(stored.items()):
        held[slot].append((dim, blocks))

    def dims(value: int) -> Dims:
        """Return the dims of a value that are interleaved, and how."""
        every = range(program.values[value].rank)
        found = ((d, marks.get(DimRef(value, d))) for d in every)
        return [(d, blocks) for d, blocks in found if blocks is not None]

    def changes(region: Region) -> bool:
        """Whether any value inside of a region is interleaved."""
        inner = [program.ops[op] for op in region.ops]
        return any(
            any(map(dims, (*op.operands, *op.results)))
            or (op.call is not None and any(map(changes, op.call.regions)))
            for op in inner
        )

    def run_all(
        region: Region,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Any],
        *,
        is_stored: bool = False,
    ) -> list[Any]:
        """Run all equations of the open jaxpr that a region was imported from, and
        return its outputs; `is_stored`: its constants are interleaved as the marks
        say, not in logical order."""
        logical = frozenset(() if is_stored else jaxpr.constvars)

        def entered(atom: Any, value: int, x: Any) -> Any:
            is_logical = is_literal(atom) or atom in logical
            return _taken(x, (), dims(value)) if is_logical else x

        def run(op: Op, eqn: Any, operands: Sequence[Any]) -> list[Any]:
            """Run one equation: on interleaved dims where it can, else in logical
            order."""
            is_iota = op.traits.kind is OpKind.GENERATOR and "dimension" in eqn.params
            if is_iota and (orders := dims(*op.results)):
                return [_positions(eqn, orders)]
            reads, makes = handled(ops, op, marks)
            given = map(entered, eqn.invars, op.operands, operands)
            arrays = []
            for i, (v, x) in enumerate(zip(op.operands, [*given], strict=True)):
                kept = [each for each in dims(v) if (i, each[0]) in reads]
                arrays.append(_taken(x, dims(v), kept))
            results, made = [], bound(op, eqn, arrays)
            for i, (v, x) in enumerate(zip(op.results, made, strict=True)):
                have = [each for each in dims(v) if (i, each[0]) in makes]
                results.append(_taken(x, have, dims(v)))
            return results

        outs = evaluate_ops(program, region, jaxpr, consts, args, run)
        return [*map(entered, jaxpr.outvars, region.outputs, outs)]

    def bound(op: Op, eqn: Any, arrays: Sequence[Any]) -> list[Any]:
        """Bind an equation to operands that are interleaved as it requires."""
        if op.call is None:
            return _moved(ops, op, eqn, marks, arrays)
        bodies = map(body, op.call.regions, closed_region_jaxprs(eqn))
        return bind_eqn(eqn, arrays, with_jaxprs(eqn, [*bodies]))

    def body(region: Region, jaxpr: Any) -> Any:
        """Return the jaxpr of a region, retraced if a value in it is interleaved."""
        if not changes(region):
            return jaxpr
        inner, consts = open_jaxpr(jaxpr), jaxpr_consts(jaxpr)
        return rebuild_jaxpr(lambda *args: run_all(region, inner, consts, args), jaxpr)

    def run(*arrays: Any) -> list[Any]:
        entered = [
            _taken(x, own, dims(entry.value))
            for x, entry, own in zip(arrays, program.inputs, held, strict=True)
        ]
        count = len(opened.invars)
        args = entered[count:], entered[:count]
        outs = run_all(program.body, opened, *args, is_stored=True)
        return [
            _taken(
                x,
                dims(out.value),
                held[out.state_of] if out.state_of is not None else (),
            )
            for x, out in zip(outs, program.outputs, strict=True)
        ]

    return without_dead_code(retraced(closed, run))


def _positions(eqn: Any, orders: Dims) -> Any:
    """Return an iota in interleaved order. Its positions alone are reordered: of the
    whole array, the compilers would compute and transpose every shard on all devices.
    """
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    line = lax.iota(eqn.params["dtype"], shape[dim])
    line = all_stored(line, [(0, order) for d, order in orders if d == dim])
    return lax.broadcast_in_dim(line, shape, (dim,))


def _taken(x: Any, have: Dims | tuple[()], want: Dims | tuple[()]) -> Any:
    """Convert an array from one storage order to another.

    Args:
      x: the array.
      have: its interleaved dims, and how.
      want: the interleaved dims of the result, and how.
    """
    x = all_written(x, [each for each in have if each not in want])
    return all_stored(x, [each for each in want if each not in have])


def _moved(
    ops: DimOrders, op: Op, eqn: Any, marks: Marks, arrays: Sequence[Any]
) -> list[Any]:
    """Bind an equation without regions, in each block where it moves parts of a dim."""
    move = ops.move(op)
    if move is not None and pieces_in_blocks(move, marks) is not None:
        return run_move(eqn, move, marks[DimRef(move.whole, move.dim)].count, arrays)
    regroup = regroup_of(op, marks)
    if regroup is None:
        return bind_eqn(eqn, arrays, eqn.params)
    value = op.operands[0] if regroup.is_split else op.results[0]
    count = marks[DimRef(value, regroup.dim)].count
    return [run_regroup(eqn, regroup, count, arrays[0])]


PASS = ProgramPass(BLOCKS, interleave, storage_choices)
BATCHES = ProgramPass(
    JOINED,
    interleave_batches,
    batch_choices,
    Trial(TrialKind.WHILE_BETTER, lambda choice: JOINED, None, JOINED, gain=Gain.TIME),
)
