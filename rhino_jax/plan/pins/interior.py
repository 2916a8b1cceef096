"""Pins on values inside the program: `rhino.pin`, source lines, scopes.

`"model.py:61"` pins the values that line 61 computes, `"encoder/layer_*/attn"` those of
these scopes (`jax.named_scope`, Flax modules): the arrays that an op outside of the
line or scope reads. Values of the backward pass are not pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rhino_jax.ir.places import in_scope, on_line
from rhino_jax.ir.program import Op, Program, RegionKind
from rhino_jax.ir.spec import OpenSpec


@dataclass(frozen=True, slots=True)
class ValuePin:
    """The pinned layout of one value, and its origin.

    Attributes:
      spec: the layout; None for dims left open.
      key: the user's key; for a `rhino.pin` in the program, its source line.
      is_in_program: whether it is a `rhino.pin`.
    """

    spec: OpenSpec
    key: str
    is_in_program: bool = False


@dataclass(frozen=True, slots=True)
class Places:
    """Producers and readers of a program's values.

    Attributes:
      program: the program.
      makers: value id → the op that computes it.
      readers: value id → the ops that read it; None stands for a result of a region or
        of the program.
      same: value id inside a call's region → the equal value outside: results of the
        call, and operands for the region's inputs.
    """

    program: Program
    makers: Mapping[int, Op]
    readers: Mapping[int, list[Op | None]]
    same: Mapping[int, int]

    @classmethod
    def of(cls, program: Program) -> Places:
        makers = {v: op for op in program.ops for v in op.results}
        readers: dict[int, list[Op | None]] = {v: [] for v in makers}
        same: dict[int, int] = {}
        for op in program.ops:
            is_call = op.call is not None and op.call.kind is RegionKind.CALL
            for v in op.operands:
                if not is_call and v in readers:
                    readers[v].append(op)
            for region in op.call.regions if op.call is not None else ():
                if is_call:
                    same.update(zip(op.results, region.outputs, strict=True))
                    same.update(zip(region.inputs, op.operands, strict=True))
                else:
                    for v in region.outputs:
                        readers.setdefault(v, []).append(None)
        for result in program.outputs:
            readers.setdefault(result.value, []).append(None)
        found = cls(program, makers, readers, same)
        # A call's operands and results are aliases of the values inside its region.
        for v in list(readers):
            root = found.root(v)
            if root != v:
                readers.setdefault(root, []).extend(readers[v])
        return found

    def root(self, value: int) -> int:
        """Return the representative of a value and its aliases across calls."""
        while value in self.same:
            value = self.same[value]
        return value

    def made(self, group_of: Callable[[Op], str | None]) -> list[int]:
        """Return the arrays that leave their group: an op outside the group reads them.

        Args:
          group_of: returns the group of an op; None if it is in none.
        """
        found: dict[int, None] = {}
        for value, op in self.makers.items():
            root = self.root(value)
            if not self.program.values[value].shape or root not in self.makers:
                continue
            group = None if op.source.is_backward else group_of(op)
            if group is None:
                continue
            readers = self.readers.get(value, [])
            if any(r is None or group_of(r) != group for r in readers):
                found[root] = None
        return list(found)


def values_of_key(key: str, places: Places) -> list[int]:
    """Return the values that a source line or glob over scopes matches; else empty."""
    is_on_line = on_line(key)
    if is_on_line is not None:
        return places.made(lambda op: key if is_on_line(op.source) else None)
    scope = in_scope(key)
    return places.made(lambda op: scope(op.source.scopes))
