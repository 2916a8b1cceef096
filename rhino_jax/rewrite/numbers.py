"""Value numbering (Cocke 1970): values with the same number are equal.

Equal equations on equal operands compute equal values. A value in a loop's body is one
value at every step; for two loops of one length, values of the same step are compared.
A slice of what another loop stacked has the number of the value that was stacked.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rhino_jax._compat import is_jaxpr, jaxpr_consts, open_jaxpr
from rhino_jax.rewrite.flat import FlatOp, FlatProgram, FlatRegion, may_run_again


BODY = "call_jaxpr"


@dataclass(slots=True, eq=False)
class NumberTable:
    """Numbers of all that was computed so far, in one program or several."""

    _known: dict[Hashable, int] = field(default_factory=dict)
    _texts: dict[int, tuple[Any, Hashable]] = field(default_factory=dict)
    _count: int = 0

    def fresh(self) -> int:
        """Return a number that no other value has."""
        self._count += 1
        return self._count

    def same(self, key: Hashable) -> int:
        """Return the number of all values with a key."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self.fresh()
        return found

    def constant(self, array: Any, dtype: Any) -> int:
        """Return the number of a literal: scalars of one type are equal if their bits
        are, other arrays if they are one object."""
        if np.ndim(array) or str(dtype).startswith("key<"):
            return self.same(("array", id(array)))
        scalar = np.asarray(array)
        bits = repr(array) if scalar.dtype.hasobject else scalar.tobytes()
        return self.same(("literal", str(dtype), bits))

    def results(self, eqn: Any, operands: Sequence[int]) -> list[int]:
        """Return the numbers of an equation's results, given those of its operands."""
        if eqn.effects:
            return [self.fresh() for _ in eqn.outvars]
        keys: Any = eqn.params
        if eqn.primitive.name.startswith("custom_") and BODY in eqn.params:
            keys = [BODY]  # its derivatives say nothing of what it gives
        params = tuple((k, self._param(eqn.params[k])) for k in sorted(keys))
        key = eqn.primitive.name, params, tuple(operands)
        return [self.same((key, k)) for k in range(len(eqn.outvars))]

    def _param(self, value: Any) -> Hashable:
        if is_jaxpr(value):
            if id(value) not in self._texts:
                captured = tuple(id(x) for x in jaxpr_consts(value))
                self._texts[id(value)] = value, (str(open_jaxpr(value)), captured)
            return self._texts[id(value)][1]
        if isinstance(value, Mapping):
            return tuple((k, self._param(value[k])) for k in sorted(value, key=str))
        if type(value) in (list, tuple):
            return tuple(self._param(x) for x in value)
        try:
            hash(value)
        except TypeError:
            return ("object", id(value))
        return type(value).__name__, value


@dataclass(slots=True, eq=False)
class ValueNumbers:
    """Value numbers of a program.

    Attributes:
      flat: the program, with its equations.
      of: value id → number, for the top region and the bodies of loops that may be
        changed; numbers of inputs that are given stay.
      table: of values that are numbered already.
      is_deep: whether values in loops are numbered, too. Else a loop is an op like any
        other.
    """

    flat: FlatProgram
    of: dict[int, int] = field(default_factory=dict)
    table: NumberTable = field(default_factory=NumberTable)
    is_deep: bool = True
    _stacked: dict[tuple[int, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for v in self.flat.top.inputs:
            self.number(v)
        self._region(self.flat.top)

    def number(self, value: int) -> int:
        """Return the number of a value; a new one if it has none."""
        found = self.of.get(value)
        if found is None:
            if value in self.flat.consts:
                dtype = self.flat.program.values[value].dtype
                found = self.table.constant(self.flat.consts[value], dtype)
            else:
                found = self.table.fresh()
            self.of[value] = found
        return found

    def _region(self, region: FlatRegion) -> None:
        for each in region.ops:
            if self.is_deep and self.flat.can_change(each):
                self._loop(each)
            else:
                name = each.op.name
                is_plain = each.op.call is None or name.startswith("custom_")
                is_equal = is_plain or not self.is_deep
                if is_equal and may_run_again(self.flat.program, each.op):
                    operands = [self.number(v) for v in each.operands]
                    numbers = self.table.results(each.eqn, operands)
                else:
                    numbers = [self.table.fresh() for _ in each.results]
                self.of.update(zip(each.results, numbers, strict=True))

    def _loop(self, each: FlatOp) -> None:
        call, (body,), same = each.call, each.regions, self.table.same
        length = call.trip_count
        pairs = zip(body.inputs, each.operands, strict=True)
        for k, (inner, outer) in enumerate(pairs):
            number = self.number(outer)
            if k < call.num_consts:
                self.of[inner] = number
            elif k < call.first_slice:
                self.of[inner] = self.table.fresh()
            else:
                stacked = self._stacked.get((number, length))
                self.of[inner] = (
                    same(("slice", number, length)) if stacked is None else stacked
                )
        self._region(body)
        for k, v in enumerate(each.results):
            self.of[v] = self.table.fresh()
            if k >= call.num_carry:
                inside = self.number(body.outputs[k])
                self.of[v] = same(("stack", inside, length))
                self._stacked[self.of[v], length] = inside
