"""A flattened program: calls inlined, loops, conditionals and recomputed regions kept.

Values have their ids in the `Program`. Loops, conditionals and recomputed regions keep
their blocks; all other calls are inlined, and rules of custom derivatives dropped with
them: a planned step is not differentiated again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from rhino_jax._compat import eqn_context, is_literal, jaxpr_consts, open_jaxpr
from rhino_jax.frontend.regions import REMATS, closed_region_jaxprs, ops_and_equations
from rhino_jax.ir.program import Op, Program, Region, RegionKind


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """One op.

    Attributes:
      op: the op in the program.
      eqn: its equation in the jaxpr.
      operands, results: value ids, after inlining.
      around: the equations of the inlined calls around it, outermost first.
      blocks: its regions.
    """

    op: Op
    eqn: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    around: tuple[Any, ...]
    blocks: tuple[FlatBlock, ...] = ()

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Enter the name stack and source line of the op, for binding it."""
        with contextlib.ExitStack() as stack:
            for eqn in self.around:
                stack.enter_context(eqn_context(eqn))
                if eqn.params.get("name"):
                    stack.enter_context(jax.named_scope(str(eqn.params["name"])))
            stack.enter_context(eqn_context(self.eqn))
            yield


@dataclass(frozen=True, slots=True, eq=False)
class FlatBlock:
    """Ops of a region, in order, with the value ids of its inputs and outputs."""

    inputs: tuple[int, ...]
    items: tuple[Item, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Flat:
    """A flattened program.

    Attributes:
      program: the program that ids refer to.
      top: its body.
      consts: value id of every literal and of captured constants of regions → its
        array.
      maker: value id → the op that computes it, in the body or in a region.
    """

    program: Program
    top: FlatBlock
    consts: dict[int, Any]
    maker: dict[int, Item]


NOTHING: Mapping[int, int] = {}
"""An empty mapping."""


def flatten(
    closed: Any,
    program: Program,
    opened: Collection[int] = (),
    same: Mapping[int, int] = NOTHING,
) -> Flat:
    """Inline the calls of a program.

    Args:
      closed: the closed jaxpr.
      program: the program imported from it.
      opened: ids of recomputed regions to inline as well.
      same: value id → id of an earlier, equal value that is read instead.
    """
    walk = _FlatWalk(program, frozenset(opened), same)
    top = walk.block(open_jaxpr(closed), (), program.body, ())
    return Flat(program, top, walk.consts, walk.maker)


def is_parameter(flat: Flat, value: int) -> bool:
    """Whether a value is an input, possibly moved or converted."""
    while value in flat.maker:
        item = flat.maker[value]
        if item.blocks or not item.op.traits.keeps_data or len(item.operands) != 1:
            return False
        (value,) = item.operands
    return value in flat.top.inputs


@dataclass(slots=True)
class _FlatWalk:
    """Flattens regions recursively.

    Attributes:
      program: the program.
      opened: ids of recomputed regions to inline.
      same: value id → id of an earlier, equal value.
      consts, maker: see `Flat`.
      alias: value id → id of the value that it equals after inlining.
    """

    program: Program
    opened: frozenset[int]
    same: Mapping[int, int]
    consts: dict[int, Any] = field(default_factory=dict)
    maker: dict[int, Item] = field(default_factory=dict)
    alias: dict[int, int] = field(default_factory=dict)

    def block(
        self, jaxpr: Any, consts: Sequence[Any], region: Region, around: tuple[Any, ...]
    ) -> FlatBlock:
        """Flatten a region."""
        held = dict(zip(jaxpr.constvars, consts, strict=False))
        items: list[Item] = []
        for op, eqn in ops_and_equations(self.program, region, jaxpr):
            operands = self.values(eqn.invars, op.operands, held)
            items += self.op(eqn, op, operands, around)
        outputs = self.values(jaxpr.outvars, region.outputs, held)
        return FlatBlock(region.inputs, tuple(items), outputs)

    def values(
        self, atoms: Sequence[Any], ids: Sequence[int], held: dict[Any, Any]
    ) -> tuple[int, ...]:
        """Return value ids after inlining, and record those of literals and
        constants."""
        for atom, value in zip(atoms, ids, strict=True):
            if is_literal(atom):
                self.consts[value] = atom.val
            elif atom in held:
                self.consts[value] = held[atom]
        return tuple(self.alias.get(v, v) for v in ids)

    def op(
        self, eqn: Any, op: Op, operands: tuple[int, ...], around: tuple[Any, ...]
    ) -> list[Item]:
        """Return the flattened ops of an op: of its region if it is inlined, else
        itself."""
        bodies = closed_region_jaxprs(eqn)
        if self.is_opened(op):
            assert op.call is not None
            (region,) = op.call.regions
            self.alias.update(zip(region.inputs, operands, strict=True))
            inner = self.block(
                open_jaxpr(bodies[0]), jaxpr_consts(bodies[0]), region, (*around, eqn)
            )
            self.alias.update(zip(op.results, inner.outputs, strict=True))
            return list(inner.items)
        regions = op.call.regions if op.call is not None else ()
        blocks = tuple(
            self.block(open_jaxpr(body), jaxpr_consts(body), region, ())
            for body, region in zip(bodies, regions, strict=True)
        )
        item = Item(op, eqn, operands, op.results, around, blocks)
        self.maker.update(dict.fromkeys(op.results, item))
        self.alias.update({v: self.same[v] for v in op.results if v in self.same})
        return [item]

    def is_opened(self, op: Op) -> bool:
        """Whether an op's region is inlined."""
        if op.call is None or op.call.kind is not RegionKind.CALL:
            return False
        return op.name not in REMATS or op.id in self.opened
