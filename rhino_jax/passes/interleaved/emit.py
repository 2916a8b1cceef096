"""Retrace a program with its inputs in interleaved storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
from rhino_jax.ir.transform import InterleavedOrder, Stored, from_text
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
from rhino_jax.passes.interleaved.reach import DimOrders, handled, reach
from rhino_jax.passes.interleaved.sites import joined_batches
from rhino_jax.rewrite.retraced import retraced


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
    return _interleaved(closed, InterleavedEmitter(ops, marks), stored)


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
    return _interleaved(closed, InterleavedEmitter(ops, marks), {})


def _interleaved(closed: Any, emitter: InterleavedEmitter, stored: Stored) -> Any:
    """Retrace a program with some of its inputs in interleaved storage."""
    program = emitter.ops.program
    opened = open_jaxpr(closed)
    held: list[list[tuple[int, InterleavedOrder]]] = [[] for _ in program.inputs]
    for (slot, dim), blocks in sorted(stored.items()):
        held[slot].append((dim, blocks))

    def run(*arrays: Any) -> list[Any]:
        entered = [
            emitter.taken(x, dims, emitter.dims(entry.value))
            for x, entry, dims in zip(arrays, program.inputs, held, strict=True)
        ]
        count = len(opened.invars)
        consts, args = entered[count:], entered[:count]
        outs = emitter.region(program.body, opened, consts, args, is_stored=True)
        return [
            emitter.taken(
                x,
                emitter.dims(out.value),
                held[out.state_of] if out.state_of is not None else (),
            )
            for x, out in zip(outs, program.outputs, strict=True)
        ]

    return without_dead_code(retraced(closed, run))


@dataclass(frozen=True, slots=True)
class InterleavedEmitter:
    """Emitter of a program's equations on interleaved values.

    Attributes:
      ops: the program, and how its ops order dims.
      marks: the interleaved dims.
    """

    ops: DimOrders
    marks: Marks

    def dims(self, value: int) -> list[tuple[int, InterleavedOrder]]:
        """Return the dims of a value that are interleaved, and how."""
        found = []
        for d in range(self.ops.program.values[value].rank):
            blocks = self.marks.get(DimRef(value, d))
            if blocks is not None:
                found.append((d, blocks))
        return found

    def taken(
        self,
        x: Any,
        have: Sequence[tuple[int, InterleavedOrder]],
        want: Sequence[tuple[int, InterleavedOrder]],
    ) -> Any:
        """Convert an array from one storage order to another.

        Args:
          x: the array.
          have: its interleaved dims, and how.
          want: the interleaved dims of the result, and how.
        """
        x = all_written(x, [each for each in have if each not in want])
        return all_stored(x, [each for each in want if each not in have])

    def region(
        self,
        region: Region,
        jaxpr: Any,
        consts: Sequence[Any],
        args: Sequence[Any],
        *,
        is_stored: bool = False,
    ) -> list[Any]:
        """Run all equations of a jaxpr and return its outputs.

        Args:
          region: the region of the program.
          jaxpr: the open jaxpr that the region was imported from.
          consts: arrays of its constants.
          args: arrays of its inputs.
          is_stored: whether constants are interleaved as the marks say, not in logical
            order.
        """
        logical = frozenset(() if is_stored else jaxpr.constvars)

        def entered(atom: Any, value: int, x: Any) -> Any:
            if is_literal(atom) or atom in logical:
                return self.taken(x, (), self.dims(value))
            return x

        def run(op: Op, eqn: Any, operands: Sequence[Any]) -> list[Any]:
            return self.op(op, eqn, [*map(entered, eqn.invars, op.operands, operands)])

        outs = evaluate_ops(self.ops.program, region, jaxpr, consts, args, run)
        return [*map(entered, jaxpr.outvars, region.outputs, outs)]

    def op(self, op: Op, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """Run one equation: on interleaved dims where it can, else in logical order."""
        reads, makes = handled(self.ops, op, self.marks)
        arrays = []
        for i, (x, v) in enumerate(zip(operands, op.operands, strict=True)):
            dims = self.dims(v)
            kept = [each for each in dims if (i, each[0]) in reads]
            arrays.append(self.taken(x, dims, kept))
        results = []
        made = self.bound(op, eqn, arrays)
        for i, (x, v) in enumerate(zip(made, op.results, strict=True)):
            dims = self.dims(v)
            have = [each for each in dims if (i, each[0]) in makes]
            results.append(self.taken(x, have, dims))
        return results

    def bound(self, op: Op, eqn: Any, arrays: Sequence[Any]) -> list[Any]:
        """Bind an equation to operands that are interleaved as it requires."""
        if op.call is not None:
            bodies = [
                self.body(region, jaxpr)
                for region, jaxpr in zip(
                    op.call.regions, closed_region_jaxprs(eqn), strict=True
                )
            ]
            return bind_eqn(eqn, arrays, with_jaxprs(eqn, bodies))
        move = self.ops.move(op)
        if move is not None and pieces_in_blocks(move, self.marks) is not None:
            count = self.marks[DimRef(move.whole, move.dim)].count
            return run_move(eqn, move, count, arrays)
        regroup = regroup_of(op, self.marks)
        if regroup is not None:
            value = op.operands[0] if regroup.is_split else op.results[0]
            count = self.marks[DimRef(value, regroup.dim)].count
            return [run_regroup(eqn, regroup, count, arrays[0])]
        return bind_eqn(eqn, arrays, eqn.params)

    def body(self, region: Region, jaxpr: Any) -> Any:
        """Return the jaxpr of a region, retraced if a value in it is interleaved."""
        if not self.changes(region):
            return jaxpr
        inner, consts = open_jaxpr(jaxpr), jaxpr_consts(jaxpr)
        return rebuild_jaxpr(
            lambda *args: self.region(region, inner, consts, args), jaxpr
        )

    def changes(self, region: Region) -> bool:
        """Whether any value inside of a region is interleaved."""
        for op_id in region.ops:
            op = self.ops.program.ops[op_id]
            if any(map(self.dims, (*op.operands, *op.results))):
                return True
            if op.call is not None and any(map(self.changes, op.call.regions)):
                return True
        return False
