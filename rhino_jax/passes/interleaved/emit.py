"""Retrace a program with its inputs in interleaved storage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from jax import lax

from rhino_jax._compat import bind_eqn, without_dead_code
from rhino_jax.ir.program import Op, Program
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
from rhino_jax.passes.region_walk import run_region, run_regions
from rhino_jax.rewrite.flat import FlatOp, FlatRegion
from rhino_jax.rewrite.flatten import flatten
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
    program = ops.program
    flat = flatten(program, closed, lambda op: False)
    held, dims = _dims_of(stored), _dims_of(marks).__getitem__
    env: dict[int, Any] = {}

    def changes(region: FlatRegion) -> bool:
        """Whether any value inside of a region is interleaved."""
        return any(
            any(map(dims, (*item.operands, *item.results)))
            or any(map(changes, item.regions))
            for item in region.ops
        )

    def read(value: int) -> Any:
        """Return a value in the order that the marks say; constants are in logical
        order."""
        if value in env:
            return env[value]
        return _taken(flat.consts[value], [], dims(value))

    def block(region: FlatRegion, inputs: Sequence[Any]) -> list[Any]:
        """Run the ops of a region, and return its outputs."""
        run_region(region, inputs, env, run_op)
        return [*map(read, region.outputs)]

    def run_op(item: FlatOp) -> list[Any]:
        """Run an op: on interleaved dims where it can, else in logical order."""
        op, eqn = item.op, item.eqn
        is_iota = op.traits.kind is OpKind.GENERATOR and "dimension" in eqn.params
        if is_iota and (orders := dims(*item.results)):
            return [_positions(eqn, orders)]
        reads, makes = handled(ops, op, marks)
        arrays = []
        for i, v in enumerate(item.operands):
            kept = [each for each in dims(v) if (i, each[0]) in reads]
            arrays.append(_taken(read(v), dims(v), kept))
        if any(map(changes, item.regions)):
            made = run_regions(item, arrays, block)
        else:
            made = _moved(ops, op, eqn, marks, arrays)
        results = []
        for i, (v, x) in enumerate(zip(item.results, made, strict=True)):
            have = [each for each in dims(v) if (i, each[0]) in makes]
            results.append(_taken(x, have, dims(v)))
        return results

    def run(*arrays: Any) -> list[Any]:
        ends = enumerate(program.inputs)
        inputs = [_taken(arrays[i], held[i], dims(end.value)) for i, end in ends]
        return [
            _taken(x, dims(out.value), held[out.state_of])
            for x, out in zip(block(flat.top, inputs), program.outputs, strict=True)
        ]

    return without_dead_code(retraced(closed, run))


def _dims_of(orders: Stored | Marks) -> defaultdict[int | None, Dims]:
    """Return the interleaved dims of every value, or position of an input."""
    found = defaultdict[int | None, Dims](list)
    for (at, dim), blocks in sorted(orders.items()):
        found[at].append((dim, blocks))
    return found


def _positions(eqn: Any, orders: Dims) -> Any:
    """Return an iota in interleaved order. Its positions alone are reordered: of the
    whole array, the compilers would compute and transpose every shard on all devices.
    """
    shape, dim = eqn.params["shape"], eqn.params["dimension"]
    line = lax.iota(eqn.params["dtype"], shape[dim])
    line = all_stored(line, [(0, order) for d, order in orders if d == dim])
    return lax.broadcast_in_dim(line, shape, (dim,))


def _taken(x: Any, have: Dims, want: Dims) -> Any:
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
