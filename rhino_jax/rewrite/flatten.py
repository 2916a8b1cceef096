"""Flatten a program: inline its calls, and pair every op with its equation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rhino_jax._compat import is_literal, jaxpr_consts, open_jaxpr
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.frontend.regions import (
    PLAIN_CALLS,
    REMATS,
    closed_region_jaxprs,
    ops_and_equations,
)
from rhino_jax.ir.program import Op, Program, Region, RegionKind
from rhino_jax.rewrite.flat import (
    NOTHING,
    FlatOp,
    FlatProgram,
    FlatRegion,
    holds_arrays,
)


def flatten(
    program: Program,
    closed: Any = None,
    entered: Callable[[Op], bool] | None = None,
    same: Mapping[int, int] = NOTHING,
    *,
    is_top_entered: bool = True,
) -> FlatProgram:
    """Inline the calls of a program.

    Rules of custom derivatives are dropped with their calls: a planned step is not
    differentiated again.

    Args:
      program: the program.
      closed: the closed jaxpr that it was imported from; None: ops have no equations.
      entered: whether the call of an op is inlined; None: as `plain_calls`.
      same: value id → id of an earlier, equal value that is read instead.
      is_top_entered: whether calls of the body are inlined, not only those in regions.
    """
    walk = _FlatWalk(program, entered or plain_calls(program), same)
    jaxpr = None if closed is None else open_jaxpr(closed)
    top = walk.region(program.body, jaxpr, (), (), is_entered=is_top_entered)
    return FlatProgram(program, top, walk.consts, walk.maker, walk.alias, walk.avals)


def flat_region(closed: Any) -> FlatRegion:
    """Return the equations of a closed jaxpr as ops: calls too, and constants bound."""
    top = flatten(import_jaxpr(closed, name=""), closed, is_top_entered=False).top
    return top.with_consts(jaxpr_consts(closed))


def plain_calls(
    program: Program, names: Collection[str] = PLAIN_CALLS
) -> Callable[[Op], bool]:
    """Return which calls to inline: those of some primitives that capture no arrays.

    Args:
      program: the program.
      names: names of the primitives.
    """

    def is_entered(op: Op) -> bool:
        if op.name not in names or op.call is None:
            return False
        is_call = op.call.kind is RegionKind.CALL
        return is_call and not holds_arrays(program, op.call.regions[0])

    return is_entered


def all_calls(opened: Collection[int] = ()) -> Callable[[Op], bool]:
    """Return which calls to inline: all but recomputed regions (`jax.checkpoint`).

    Args:
      opened: ids of recomputed regions to inline as well.
    """

    def is_entered(op: Op) -> bool:
        if op.call is None or op.call.kind is not RegionKind.CALL:
            return False
        return op.name not in REMATS or op.id in opened

    return is_entered


@dataclass(slots=True)
class _FlatWalk:
    """Flattens regions recursively; attributes as of `flatten` and `FlatProgram`."""

    program: Program
    entered: Callable[[Op], bool]
    same: Mapping[int, int]
    consts: dict[int, Any] = field(default_factory=dict)
    maker: dict[int, FlatOp] = field(default_factory=dict)
    alias: dict[int, int] = field(default_factory=dict)
    avals: dict[int, Any] = field(default_factory=dict)

    def region(
        self,
        region: Region,
        jaxpr: Any,
        consts: Sequence[Any],
        within: tuple[FlatOp, ...],
        *,
        is_entered: bool = True,
    ) -> FlatRegion:
        """Flatten a region; `consts` are arrays of its jaxpr's constants, if any."""
        found: list[FlatOp] = []
        pairs: Iterable[tuple[Op, Any]]
        if jaxpr is None:
            pairs = ((self.program.ops[i], None) for i in region.ops)
        else:
            held = dict(zip(jaxpr.constvars, consts, strict=False))
            inputs = (*jaxpr.invars, *jaxpr.constvars)
            self.typed(region.inputs, inputs[: len(region.inputs)])
            pairs = ops_and_equations(self.program, region, jaxpr)
        for op, eqn in pairs:
            if eqn is not None:
                self.note(eqn.invars, op.operands, held)
                self.typed(op.results, eqn.outvars)
            operands = self.named(op.operands)
            each = FlatOp(op, eqn, operands, op.results, within)
            found += self.op(each, is_entered=is_entered and self.entered(op))
        if jaxpr is not None:
            self.note(jaxpr.outvars, region.outputs, held)
        outputs = self.named(region.outputs)
        tables = self.alias, self.consts, self.avals
        return FlatRegion(region.inputs, tuple(found), outputs, *tables)

    def named(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return value ids after inlining."""
        return tuple(self.alias.get(v, v) for v in ids)

    def typed(self, ids: Sequence[int], atoms: Sequence[Any]) -> None:
        """Record the types of values."""
        self.avals.update((v, atom.aval) for v, atom in zip(ids, atoms, strict=True))

    def note(
        self, atoms: Sequence[Any], ids: Sequence[int], held: Mapping[Any, Any]
    ) -> None:
        """Record the arrays of literals and constants."""
        for atom, value in zip(atoms, ids, strict=True):
            if is_literal(atom):
                self.consts[value] = atom.val
            elif atom in held:
                self.consts[value] = held[atom]
            self.avals.setdefault(value, atom.aval)

    def op(self, each: FlatOp, *, is_entered: bool) -> Sequence[FlatOp]:
        """Return the flattened ops of an op: of its region if it is inlined, else
        itself."""
        op = each.op
        regions = op.call.regions if op.call is not None else ()
        bodies = [None] * len(regions)
        if regions and each.eqn is not None:
            bodies = [*closed_region_jaxprs(each.eqn)]
        if is_entered:
            (region,), (body,) = regions, bodies
            self.alias.update(zip(region.inputs, each.operands, strict=True))
            inner = self.inside(region, body, (*each.within, each))
            self.alias.update(zip(op.results, inner.outputs, strict=True))
            return inner.ops
        flat = tuple(
            self.inside(region, body, ())
            for body, region in zip(bodies, regions, strict=True)
        )
        each = replace(each, regions=flat)
        self.maker.update(dict.fromkeys(op.results, each))
        self.alias.update({v: self.same[v] for v in op.results if v in self.same})
        return [each]

    def inside(
        self, region: Region, body: Any, within: tuple[FlatOp, ...]
    ) -> FlatRegion:
        """Flatten a region of an op."""
        if body is None:
            return self.region(region, None, (), within)
        return self.region(region, open_jaxpr(body), jaxpr_consts(body), within)
