"""Pins on values inside of the program: `rhino.pin`, source lines, scopes.

`"model.py:61"` pins what line 61 makes, `"encoder/layer_*/attn"` what these scopes
(`jax.named_scope`, modules of Flax) make: the arrays that something outside of the
line or scope reads. What the backward pass makes is not meant.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rhino_jax.ir.places import in_scope, on_line
from rhino_jax.ir.program import Op, Program, RegionKind
from rhino_jax.ir.spec import OpenSpec


@dataclass(frozen=True, slots=True)
class ValuePin:
    """The layout of one value, and how the user said it.

    Attributes:
      spec: the layout.
      key: as given; where it is a `rhino.pin` in the program, where that is.
      is_in_program: whether it is one.
    """

    spec: OpenSpec
    key: str
    is_in_program: bool = False


@dataclass(frozen=True, slots=True)
class Places:
    """Where a program's values are made.

    Attributes:
      program: the program.
      makers: value → the op that makes it.
      readers: value → the ops that read it, None for a result of a region or of the
        program.
      same: value inside of a call → the result of the call that it is, and back.
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
        # A call's operands and results are the values inside of it.
        for v in list(readers):
            root = found.root(v)
            if root != v:
                readers.setdefault(root, []).extend(readers[v])
        return found

    def root(self, value: int) -> int:
        """The value, where calls are entered."""
        while value in self.same:
            value = self.same[value]
        return value

    def made(self, group_of: Callable[[Op], str | None]) -> list[int]:
        """The arrays that leave their group: something reads them that is in another.

        Args:
          group_of: the group of an op; None where it is in none.
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
    """The values that a source line or a glob over scopes means; empty for neither."""
    is_on_line = on_line(key)
    if is_on_line is not None:
        return places.made(lambda op: key if is_on_line(op.source) else None)
    scope = in_scope(key)
    return places.made(lambda op: scope(op.source.scopes))
