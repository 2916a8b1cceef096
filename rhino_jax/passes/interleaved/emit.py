"""Retrace a program with its inputs in interleaved storage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rhino_jax._compat import (
    bind_eqn,
    eqn_context,
    is_literal,
    jaxpr_consts,
    like_jaxpr,
    open_jaxpr,
    retrace,
    without_dead_code,
)
from rhino_jax.frontend.regions import (
    closed_region_jaxprs,
    ops_and_equations,
    with_jaxprs,
)
from rhino_jax.ir.blocks import InterleavedOrder, from_text
from rhino_jax.ir.program import Op, Program, Region
from rhino_jax.passes.interleaved.links import DimRef
from rhino_jax.passes.interleaved.moves import (
    Marks,
    pieces_in_blocks,
    regroup_of,
    run_move,
    run_regroup,
)
from rhino_jax.passes.interleaved.order import all_stored, all_written
from rhino_jax.passes.interleaved.reach import DimOrders, handled, reach
from rhino_jax.rewrite.retraced import retraced


def in_blocks(closed: Any, program: Program, choice: str) -> Any:
    """Rewrite a program for inputs in interleaved storage.

    The output that replaces such an input in the next call is stored as the input is;
    every other output is in logical order.

    Args:
      closed: a closed jaxpr.
      program: the program imported from it.
      choice: interleaved dims of inputs; see `rhino_jax.ir.blocks.as_text`.
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
    emitter = InterleavedEmitter(ops, marks)
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
        env = dict(zip(opened.constvars, entered[count:], strict=True))
        outs = emitter.region(program.body, opened, env, entered[:count])
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
        env: dict[Any, Any],
        args: Sequence[Any],
        consts: Mapping[Any, Any] = MappingProxyType({}),
    ) -> list[Any]:
        """Run all equations of a jaxpr and return its outputs.

        Args:
          region: the region of the program.
          jaxpr: the open jaxpr that the region was imported from.
          env: variable → array; filled by this.
          args: arrays of its inputs.
          consts: variables of its constants → arrays in logical order.
        """
        env.update(zip(jaxpr.invars, args, strict=True))

        def read(atom: Any, value: int) -> Any:
            if is_literal(atom):
                return self.taken(atom.val, (), self.dims(value))
            if atom in consts:
                return self.taken(consts[atom], (), self.dims(value))
            return env[atom]

        for op, eqn in ops_and_equations(self.ops.program, region, jaxpr):
            with eqn_context(eqn):
                operands = map(read, eqn.invars, op.operands)
                results = self.op(op, eqn, list(operands))
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars, region.outputs))

    def op(self, op: Op, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        """Run one equation: on interleaved dims where it can, else in logical order."""
        asks = handled(self.ops, op, self.marks)
        arrays = []
        for i, (x, v) in enumerate(zip(operands, op.operands, strict=True)):
            dims = self.dims(v)
            kept = [each for each in dims if (i, each[0]) in asks.operands]
            arrays.append(self.taken(x, dims, kept))
        results = []
        made = self.bound(op, eqn, arrays)
        for i, (x, v) in enumerate(zip(made, op.results, strict=True)):
            dims = self.dims(v)
            have = [each for each in dims if (i, each[0]) in asks.results]
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
        inner = open_jaxpr(jaxpr)
        consts = dict(zip(inner.constvars, jaxpr_consts(jaxpr), strict=True))
        new, gained = retrace(
            lambda *args: self.region(region, inner, {}, args, consts), inner
        )
        return like_jaxpr(jaxpr, new, gained)

    def changes(self, region: Region) -> bool:
        """Whether any value inside of a region is interleaved."""
        for op_id in region.ops:
            op = self.ops.program.ops[op_id]
            if any(map(self.dims, (*op.operands, *op.results))):
                return True
            if op.call is not None and any(map(self.changes, op.call.regions)):
                return True
        return False
