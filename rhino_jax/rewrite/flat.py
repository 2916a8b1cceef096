"""A flat program: calls inlined; loops, branches and other regions as regions.

Every op has its equation, so analyses and emitters see the same ops with the same value
ids: those of the `Program`, where an input of an inlined call has the id of its
argument, and a result that of the value inside of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rhino_jax._compat import (
    bind_eqn,
    eqn_context,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
    user_frames,
)
from rhino_jax.frontend.provenance import is_library_file
from rhino_jax.frontend.regions import (
    PLAIN_CALLS,
    REMATS,
    call_scope,
    closed_region_jaxprs,
    ops_and_equations,
)
from rhino_jax.ir.program import Op, Program, Region, RegionCall, RegionKind


@dataclass(frozen=True, slots=True, eq=False)
class FlatOp:
    """An op that runs in a region, or in a call that was inlined there.

    Attributes:
      op: the op in the program.
      eqn: its equation in the jaxpr; None where the program was flattened without one.
      operands, results: value ids, after inlining.
      within: the inlined calls around it in its region, outermost first.
      regions: its regions, of an op that is not inlined.
    """

    op: Op
    eqn: Any
    operands: tuple[int, ...]
    results: tuple[int, ...]
    within: tuple[FlatOp, ...] = ()
    regions: tuple[FlatRegion, ...] = ()

    @property
    def call(self) -> RegionCall:
        """Return how the op runs its regions, of an op that has some."""
        assert self.op.call is not None, self.op.label
        return self.op.call

    @property
    def is_scan(self) -> bool:
        """Whether the op is a scan."""
        return self.op.call is not None and self.op.call.kind is RegionKind.SCAN

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """Enter the name stack and source line of the op, enclosing calls included."""
        call = None
        with contextlib.ExitStack() as stack:
            for each in self.within:
                call = each.eqn if call is None else _at_user_line(each.eqn, call)
                stack.enter_context(eqn_context(call))
                stack.enter_context(call_scope(call))
            eqn = self.eqn if call is None else _at_user_line(self.eqn, call)
            stack.enter_context(eqn_context(eqn))
            yield

    def bind(self, operands: Sequence[Any]) -> list[Any]:
        """Bind the op's equation, unchanged, to new operands."""
        with self.context():
            return bind_eqn(self.eqn, operands, self.eqn.params)


def _at_user_line(eqn: Any, call: Any) -> Any:
    """Return an equation of an inlined call with a user source line.

    Code that a library traced earlier has none of its own: it gets that of its call.
    """
    if any(not is_library_file(file) for file, *_ in user_frames(eqn.source_info)):
        return eqn
    info = eqn.source_info.replace(traceback=call.source_info.traceback)
    return eqn.replace(source_info=info)


@dataclass(frozen=True, eq=False)
class FlatRegion:
    """A region as a flat list of ops.

    Attributes:
      inputs, outputs: value ids; for an output that an inlined call computes, the id
        inside of the call.
      ops: the ops, in order.
      alias: of the program; see `FlatProgram`.
    """

    inputs: tuple[int, ...]
    ops: tuple[FlatOp, ...]
    outputs: tuple[int, ...]
    alias: Mapping[int, int]

    @cached_property
    def maker(self) -> dict[int, int]:
        """Value id → position of the op that computes it."""
        return {v: k for k, each in enumerate(self.ops) for v in each.results}

    def named(self, value: int) -> int:
        """Return the id by which the region's ops refer to a value."""
        return self.alias.get(value, value)


@dataclass(frozen=True, slots=True, eq=False)
class FlatProgram:
    """A flattened program.

    Attributes:
      program: the program that ids refer to.
      top: its body.
      consts: value id of every literal and of captured constants of regions → its
        array; empty without a jaxpr.
      maker: value id → the op that computes it, in the body or in a region.
      alias: id of an input or result of an inlined call → id of the value that it is.
    """

    program: Program
    top: FlatRegion
    consts: dict[int, Any]
    maker: dict[int, FlatOp]
    alias: dict[int, int]

    def run(self, ops: Collection[int], env: dict[int, Any]) -> None:
        """Run some ops of the body, in its order.

        Args:
          ops: ids of the ops.
          env: value id → array; results are added where their value has no array.
        """
        for each in self.top.ops:
            if each.op.id in ops:
                results = each.bind([self.read(v, env) for v in each.operands])
                for value, array in zip(each.results, results, strict=True):
                    env.setdefault(value, array)

    def read(self, value: int, env: Mapping[int, Any]) -> Any:
        """Return the array of a value: of `env`, or a constant."""
        return env[value] if value in env else self.consts[value]

    def can_change(self, each: FlatOp) -> bool:
        """Whether an op is a scan that can be rewritten with other stacks."""
        return (
            each.is_scan
            and may_run_again(self.program, each.op)
            and not holds_arrays(self.program, each.call.regions[0])
        )

    def is_parameter(self, value: int) -> bool:
        """Whether a value is an input, possibly moved or converted."""
        while value in self.maker:
            made = self.maker[value]
            is_moved = made.op.traits.keeps_data and not made.regions
            if not is_moved or len(made.operands) != 1:
                return False
            (value,) = made.operands
        return value in self.top.inputs


NOTHING: Mapping[int, int] = {}
"""An empty mapping."""


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
    return FlatProgram(program, top, walk.consts, walk.maker, walk.alias)


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
            pairs = ops_and_equations(self.program, region, jaxpr)
        for op, eqn in pairs:
            if eqn is not None:
                self.note(eqn.invars, op.operands, held)
            operands = self.named(op.operands)
            each = FlatOp(op, eqn, operands, op.results, within)
            found += self.op(each, is_entered=is_entered and self.entered(op))
        if jaxpr is not None:
            self.note(jaxpr.outvars, region.outputs, held)
        outputs = self.named(region.outputs)
        return FlatRegion(region.inputs, tuple(found), outputs, self.alias)

    def named(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return value ids after inlining."""
        return tuple(self.alias.get(v, v) for v in ids)

    def note(
        self, atoms: Sequence[Any], ids: Sequence[int], held: Mapping[Any, Any]
    ) -> None:
        """Record the arrays of literals and constants."""
        for atom, value in zip(atoms, ids, strict=True):
            if is_literal(atom):
                self.consts[value] = atom.val
            elif atom in held:
                self.consts[value] = held[atom]

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
        each = FlatOp(op, each.eqn, each.operands, each.results, each.within, flat)
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


def holds_arrays(program: Program, region: Region) -> bool:
    """Whether a region, or one inside of it, captures arrays as constants."""
    for op_id in region.ops:
        op = program.ops[op_id]
        if any(_is_array(program, v) for v in op.operands):
            return True
        if op.call and any(holds_arrays(program, r) for r in op.call.regions):
            return True
    return any(_is_array(program, v) for v in region.outputs)


def _is_array(program: Program, value: int) -> bool:
    found = program.values[value]
    return found.is_literal and found.rank > 0


def may_run_again(program: Program, op: Op) -> bool:
    """Whether an op is pure: it may run twice with the same results."""
    if op.traits.has_effects:
        return False
    regions = op.call.regions if op.call is not None else ()
    return all(
        may_run_again(program, program.ops[inner]) for r in regions for inner in r.ops
    )
