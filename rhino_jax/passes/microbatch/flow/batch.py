"""Candidates for the batch: inputs that hold it, and its size."""

from __future__ import annotations

from typing import NamedTuple

from rhino_jax.ir.axes import AxisSpan
from rhino_jax.ir.program import Input, Program, RegionKind
from rhino_jax.passes.microbatch.flow.states import RowsState
from rhino_jax.rewrite.flat import FlatProgram


Inputs = dict[int, RowsState]
"""Value id of an input → position of the batch in it."""


def data_inputs(program: Program) -> list[int]:
    """Return positions of the inputs that are neither state nor, it seems, parameters.

    In a step that feeds nothing back, data are the inputs that belong to the last
    argument: parameters come first.
    """
    fed_back = {o.state_of for o in program.outputs if o.state_of is not None}
    arrays = _arrays(program)
    if fed_back:
        return [i for i, e in arrays.items() if i not in fed_back and not e.is_donated]
    last = [e.argument for e in arrays.values()][-1:]
    return [i for i, e in arrays.items() if e.argument in last]


def _arrays(program: Program) -> dict[int, Input]:
    """Return the arguments that are no scalars, by their position among the inputs."""
    return {
        i: e
        for i, e in enumerate(program.inputs)
        if not e.is_const and program.values[e.value].rank
    }


def _other_data(program: Program) -> list[int]:
    """Return positions of the inputs between the first argument and the last in a step
    that feeds nothing back: data, where the last are weights of classes, say."""
    if any(o.state_of is not None for o in program.outputs):
        return []
    names = {i: e.argument for i, e in _arrays(program).items()}
    ends = [*names.values()]
    return [i for i, name in names.items() if name not in (*ends[:1], *ends[-1:])]


def candidates(flat: FlatProgram, least: int = 2) -> list[tuple[int, Inputs]]:
    """Return candidate batch sizes with the inputs that hold it, likeliest first.

    A dim that happens to have that size mostly does no harm: it is read in full where
    it turns out to be no batch. It may where an argument's arrays lead with different
    sizes, as frozen weights whose layers are as many as the rows: such arguments count
    last, and a size that others share is also tried without them. Where a program
    splits a leading dim by a reshape, as one does that accumulates gradients itself, or
    maps over the batch some rows at a time, each factor of the dim is a candidate.

    Args:
      flat: the flattened program.
      least: minimum size of the batch.
    """
    program = flat.program
    data = {program.inputs[i].value: program.inputs[i] for i in data_inputs(program)}
    values = [program.values[value] for value in data]
    leads: dict[str, set[int]] = {}
    for value in values:
        leads.setdefault(data[value.id].argument, set()).add(value.shape[0])
    alike = {v for v, e in data.items() if len(leads[e.argument]) == 1}
    found: dict[_Key, Inputs] = {}
    for value in values:
        key = _Key(value.shape[0])
        found.setdefault(key, {})[value.id] = key.state()
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
    for i in _other_data(program):
        value = program.values[program.inputs[i].value]
        key = _Key(value.shape[0], _OTHER)
        own = found.get(_Key(key.rows), {})  # Those of the last argument hold it, too.
        found.setdefault(key, {**own})[value.id] = key.state()
    found = {key: inputs for key, inputs in found.items() if key.rows >= least}
    first = [key for key in found if not key.rank and not key.dim]
    parts = [(k, {v: s for v, s in found[k].items() if v in alike}) for k in first]
    fewer = [(k, part) for k, part in parts if 0 < len(part) < len(found[k])]
    order = sorted(
        found,
        key=lambda k: (
            k.rank == _OTHER, k.dim, k.rank, alike.isdisjoint(found[k]),
            -len(found[k]), -k.rows,
        ),
    )  # fmt: skip
    return [(k.rows, inputs) for k, inputs in [*((k, found[k]) for k in order), *fewer]]


_OTHER = 4


class _Key(NamedTuple):
    """Size and position of a candidate batch: (outer, rows, inner) of dim `dim`.

    Attributes:
      rows: size of the batch.
      rank: order among candidates: 0 for a whole leading dim, 1 for the factor of it
        that is mapped over, 2 and 3 for other factors, `_OTHER` for leading dims of
        arguments between the first and the last, with those of the last.
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
        sum(values[v].bytes for v in item.results[item.op.call.num_carry :])
        >= values[value].bytes
        for item in flat.top.ops
        if item.op.call is not None
        and item.op.call.kind is RegionKind.SCAN
        and value in item.operands[item.op.call.num_consts + item.op.call.num_carry :]
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
