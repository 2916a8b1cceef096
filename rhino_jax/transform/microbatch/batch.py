"""Which inputs hold the batch."""

from __future__ import annotations

import re

from rhino_jax.ir.program import Program
from rhino_jax.transform.microbatch.states import Rows


Inputs = dict[int, Rows]
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


def candidates(program: Program) -> list[tuple[int, Inputs]]:
    """Sizes of the batch, likeliest first, and the inputs that would hold it.

    A dim that happens to have that size is no harm: it is read in full where it turns
    out to be another.
    """
    values = [program.values[program.inputs[i].value] for i in data_inputs(program)]
    found: dict[tuple[int, int], Inputs] = {}
    for value in values:
        for dim in range(min(value.rank, 2)):
            size = value.shape[dim]
            if size > 1:
                inputs = found.setdefault((dim, size), {})
                inputs[value.id] = Rows(dim, cheap=0)
    order = sorted(found, key=lambda key: (key[0], -len(found[key]), -key[1]))
    return [(key[1], found[key]) for key in order]
