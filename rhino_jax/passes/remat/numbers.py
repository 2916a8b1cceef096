"""Value numbering across regions: values with the same number are equal.

A value in a loop's body is one value at every step; for two loops of one length, values
of the same step are compared. A slice of what another loop stacked has the number of
the value that was stacked.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rhino_jax._compat import is_jaxpr, open_jaxpr
from rhino_jax.passes.remat.equations import Equations
from rhino_jax.passes.remat.regions import (
    FlatRegion,
    FlatRegions,
    RegionOp,
    may_run_again,
)
from rhino_jax.passes.remat.residual_stacks import call_of, can_be_changed


BODY = "call_jaxpr"


@dataclass(slots=True, eq=False)
class ValueNumbers:
    """Value numbers of a program.

    Attributes:
      blocks, equations: of the program.
      of: value id → number, for the top region and the bodies of loops that may be
        changed.
    """

    blocks: FlatRegions
    equations: Equations
    of: dict[int, int] = field(default_factory=dict)
    _known: dict[Hashable, int] = field(default_factory=dict)
    _stacked: dict[tuple[int, int], int] = field(default_factory=dict)
    _texts: dict[int, str] = field(default_factory=dict)
    _new: int = 0

    def __post_init__(self) -> None:
        for v in self.blocks.top.inputs:
            self.of[v] = self._fresh()
        self._block(self.blocks.top)

    def _fresh(self) -> int:
        self._new += 1
        return self._new

    def _same(self, key: Hashable) -> int:
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._fresh()
        return found

    def number(self, value: int) -> int:
        """Return the number of a value; a new one if it has none."""
        found = self.of.get(value)
        if found is None:
            literal = self.equations.literals.get(value)
            info = self.blocks.program.values[value]
            if literal is not None and not info.shape:
                found = self._same(("literal", info.dtype, _exactly(literal)))
            else:
                found = self._fresh()
            self.of[value] = found
        return found

    def _block(self, block: FlatRegion) -> None:
        for line in block.lines:
            if can_be_changed(self.blocks, line):
                self._loop(line)
            else:
                self._line(line)

    def _line(self, line: RegionOp) -> None:
        call = line.op.call
        is_plain = call is None or line.op.name.startswith("custom_")
        if not is_plain or not may_run_again(self.blocks.program, line.op):
            self.of.update((v, self._fresh()) for v in line.makes)
            return
        eqn = self.equations.of[line.op.id]
        reads = tuple(self.number(v) for v in line.reads)
        key = line.op.name, self._params(eqn), reads
        for k, v in enumerate(line.makes):
            self.of[v] = self._same((key, k))

    def _loop(self, line: RegionOp) -> None:
        call, body = call_of(line), self.blocks.of(line.op)
        length = call.trip_count
        first = call.num_consts + call.num_carry
        for k, (inner, outer) in enumerate(zip(body.inputs, line.reads, strict=True)):
            number = self.number(outer)
            if k < call.num_consts:
                self.of[inner] = number
            elif k < first:
                self.of[inner] = self._fresh()
            else:
                stacked = self._stacked.get((number, length))
                self.of[inner] = (
                    self._same(("slice", number, length))
                    if stacked is None
                    else stacked
                )
        self._block(body)
        for k, v in enumerate(line.makes):
            self.of[v] = self._fresh()
            if k >= call.num_carry:
                inside = self.number(body.outputs[k])
                self.of[v] = self._same(("stack", inside, length))
                self._stacked[self.of[v], length] = inside

    def _params(self, eqn: Any) -> Hashable:
        keys: Any = eqn.params
        if eqn.primitive.name.startswith("custom_"):
            keys = [BODY]  # its derivatives say nothing of what it gives
        return tuple((k, self._param(eqn.params[k])) for k in sorted(keys))

    def _param(self, value: Any) -> Hashable:
        if is_jaxpr(value):
            if id(value) not in self._texts:
                self._texts[id(value)] = str(open_jaxpr(value))
            return self._texts[id(value)]
        if isinstance(value, list | tuple):
            return tuple(self._param(x) for x in value)
        try:
            hash(value)
        except TypeError:
            return ("object", id(value))
        return type(value).__name__, value


def _exactly(scalar: Any) -> Hashable:
    """Return a key that distinguishes scalars of one type; zeros by sign, too."""
    array = np.asarray(scalar)
    return repr(scalar) if array.dtype.hasobject else array.tobytes()
