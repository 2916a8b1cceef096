"""Candidates for the batch: inputs that hold it, and its size."""

from __future__ import annotations

from typing import NamedTuple

from rhino_jax.analysis.roles import data_inputs
from rhino_jax.ir.axes import AxisSpan
from rhino_jax.ir.program import Program
from rhino_jax.passes.microbatch.flow.states import RowsState
from rhino_jax.rewrite.flat import FlatProgram


Inputs = dict[int, RowsState]
"""Value id of an input → position of the batch in it."""


def candidates(flat: FlatProgram, least: int = 2) -> list[tuple[int, Inputs]]:
    """Return candidate batch sizes with the inputs that hold it, likeliest first.

    A dim that happens to have that size mostly does no harm: it is read in full where
    it turns out to be no batch. It may where rows of one array meet those of another:
    of several dim classes of one size, each alone is a candidate, too. Where a program
    splits a leading dim by a reshape, as one does that accumulates gradients itself, or
    maps over the batch some rows at a time, each factor of the dim is a candidate.

    Args:
      flat: the flattened program.
      least: minimum size of the batch.
    """
    program = flat.program
    dims = data_inputs(program).items()
    data = {program.inputs[i].value: at for i, at in dims if at is not None}
    values = [program.values[value] for value in data]
    found: dict[_Key, Inputs] = {}
    of_class: dict[tuple[_Key, int | None], Inputs] = {}
    for value in values:
        dim, dim_class = data[value.id]
        key = _Key(value.shape[dim])
        found.setdefault(key, {})[value.id] = key.state(dim)
        of_class.setdefault((key, dim_class), {})[value.id] = key.state(dim)
    seconds = {v.shape[min(v.rank - 1, 1)] for v in values}
    if len(seconds) == 1:  # time-major data: [time, batch, …] in all inputs
        key = _Key(seconds.pop(), dim=1)
        found[key] = {v.id: key.state(min(v.rank - 1, 1)) for v in values}
    for item in flat.top.ops:
        if item.op.name != "reshape":
            continue
        value = program.values[item.operands[0]]
        if value not in values:
            continue
        made = program.values[item.results[0]].shape
        if len(made) > 1 and made[0] * made[1] == value.shape[0]:
            is_mapped = _is_mapped(flat, item.results[0])
            for key in (
                _Key(made[0], 1 if is_mapped else 3, inner=made[1]),
                _Key(made[1], 2, outer=made[0]),
            ):
                found.setdefault(key, {})[value.id] = key.state()
    order = sorted(found, key=lambda k: (k.dim, k.rank, -len(found[k]), -k.rows))
    every = [(k.rows, found[k]) for k in order]
    every += [(k.rows, a) for (k, _), a in of_class.items() if len(a) < len(found[k])]
    return [(rows, inputs) for rows, inputs in every if rows >= least]


class _Key(NamedTuple):
    """Size and position of a candidate batch: (outer, rows, inner) of dim `dim`.

    Attributes:
      rows: size of the batch.
      rank: order among candidates: 0 for a whole leading dim, 1 for the factor of it
        that is mapped over, 2 and 3 for other factors.
      dim: the dim that holds the batch.
      outer, inner: sizes of its major and minor factors next to the batch.
    """

    rows: int
    rank: int = 0
    dim: int = 0
    outer: int = 1
    inner: int = 1

    def state(self, dim: int = 0) -> RowsState:
        """Return the state of an input that holds the batch in a dim."""
        return RowsState(AxisSpan(dim, self.rows, self.outer, self.inner), cheap=0)


def _is_mapped(flat: FlatProgram, value: int) -> bool:
    """Whether scans over the first dim of a value stack at least as many bytes as it
    has, as those that save residuals do: fewer iterations then save memory."""
    values = flat.program.values
    return any(
        sum(values[v].bytes for v in item.call.stacked(item.results))
        >= values[value].bytes
        for item in flat.top.ops
        if item.is_scan and value in item.call.sliced(item.operands)
    )


def moved(inputs: Inputs, before: FlatProgram, after: Program) -> Inputs:
    """Map the inputs of a program to those of its rewritten program.

    Args:
      inputs: position of the batch by value id of the original program.
      before: the flattened original program.
      after: the rewritten program, with as many inputs.
    """
    ids = dict(zip(before.program.body.inputs, after.body.inputs, strict=True))
    return {ids[value]: rows for value, rows in inputs.items()}
