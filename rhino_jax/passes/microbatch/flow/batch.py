"""Which inputs hold the batch."""

from __future__ import annotations

import re
from typing import NamedTuple

from rhino_jax.ir.program import Program, RegionKind
from rhino_jax.passes.microbatch.flow.blocks import Flat
from rhino_jax.passes.microbatch.flow.states import RowsState


Inputs = dict[int, RowsState]
"""Value id of an input → where it has the batch."""


def data_inputs(program: Program) -> list[int]:
    """Positions of the inputs that are neither state nor, it seems, parameters.

    Of a step that feeds nothing back, those are data that have the last argument's
    name: parameters come first.
    """
    fed_back = {o.state_of for o in program.outputs if o.state_of is not None}
    slots = [
        i
        for i, e in enumerate(program.inputs)
        if not e.is_const and program.values[e.value].rank
    ]
    if fed_back:
        return [
            i for i in slots if i not in fed_back and not program.inputs[i].is_donated
        ]
    roots = [re.split(r"[\[.]", program.inputs[i].path)[0] for i in slots]
    return [i for i, root in zip(slots, roots, strict=True) if root == roots[-1]]


def candidates(flat: Flat, least: int = 2) -> list[tuple[int, Inputs]]:
    """Sizes of the batch, from `least` on, likeliest first, and the inputs that would
    hold it.

    A dim that happens to have that size is no harm: it is read in full where it turns
    out to be another. Where a program takes a first dim apart, as one does that
    accumulates gradients itself, or maps over the batch some rows at a time, each part
    of it may be what is cut.
    """
    program = flat.program
    values = [program.values[program.inputs[i].value] for i in data_inputs(program)]
    found: dict[_Key, Inputs] = {}
    for value in values:
        key = _Key(value.shape[0])
        found.setdefault(key, {})[value.id] = RowsState(0, cheap=0)
    seconds = {v.shape[min(v.rank - 1, 1)] for v in values}
    if len(seconds) == 1:  # time first, in all of them
        key = _Key(seconds.pop(), dim=1)
        found[key] = {v.id: RowsState(min(v.rank - 1, 1), cheap=0) for v in values}
    for item in flat.top.items:
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
                rows = RowsState(0, key.outer, key.inner, cheap=0)
                found.setdefault(key, {})[value.id] = rows
    order = sorted(found, key=lambda k: (k.dim, k.rank, -len(found[k]), -k.rows))
    return [(key.rows, found[key]) for key in order if key.rows >= least]


class _Key(NamedTuple):
    """Where inputs have the batch: (outer, rows, inner) of a dim; `rank`: the first
    dim in one, then its part that is mapped over, then another."""

    rows: int
    rank: int = 0
    dim: int = 0
    outer: int = 1
    inner: int = 1


def _is_mapped(flat: Flat, value: int) -> bool:
    """Whether loops over the first dim of a value stack no less than they read of it,
    as those do that save residuals: fewer trips then save memory."""
    values = flat.program.values
    return any(
        sum(values[v].bytes for v in item.results[item.op.call.num_carry :])
        >= values[value].bytes
        for item in flat.top.items
        if item.op.call is not None
        and item.op.call.kind is RegionKind.SCAN
        and value in item.operands[item.op.call.num_consts + item.op.call.num_carry :]
    )


def moved(inputs: Inputs, before: Flat, after: Program) -> Inputs:
    """The same inputs of a program that was made into another."""
    ids = dict(zip(before.program.body.inputs, after.body.inputs, strict=True))
    return {ids[value]: rows for value, rows in inputs.items()}
