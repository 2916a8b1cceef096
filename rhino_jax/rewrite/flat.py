"""A flat program: calls inlined; loops, branches and other regions as regions.

Every op has its equation, so analyses and emitters see the same ops with the same value
ids: those of the `Program`, where an input of an inlined call has the id of its
argument, and a result that of the value inside of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from rhino_jax._compat import (
    bind_eqn,
    eqn_context,
    hide_frames,
    tagged,
    user_frames,
)
from rhino_jax.frontend.provenance import is_library_file
from rhino_jax.frontend.regions import call_scope
from rhino_jax.ir.axes import AxisSpan, follow
from rhino_jax.ir.factor import Rule
from rhino_jax.ir.program import Op, Program, Region, RegionCall, RegionKind


hide_frames(__file__)

NOTHING: Mapping[int, Any] = {}
"""An empty mapping."""


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
    def rule(self) -> Rule:
        """Return the factors of the op, of an op that has some."""
        assert self.op.rule is not None, self.op.label
        return self.op.rule

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

    def renamed(self, of: Callable[[Iterable[int]], tuple[int, ...]]) -> FlatOp:
        """Return the op with the value ids that a function gives."""
        return replace(self, operands=of(self.operands), results=of(self.results))

    def bind(self, operands: Sequence[Any], params: Any = None) -> list[Any]:
        """Bind the op's equation to new operands.

        Args:
          operands: arrays.
          params: parameters of the equation; None: its own.
        """
        with self.context():
            params = self.eqn.params if params is None else params
            return bind_eqn(self.eqn, operands, params)


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
    """A region as a flat list of ops, which are referred to by their positions.

    Attributes:
      inputs, outputs: value ids; for an output that an inlined call computes, the id
        inside of the call.
      ops: the ops, in order.
      alias, consts, avals: of the program; see `FlatProgram`.
    """

    inputs: tuple[int, ...]
    ops: tuple[FlatOp, ...]
    outputs: tuple[int, ...]
    alias: Mapping[int, int]
    consts: Mapping[int, Any] = field(default_factory=dict)
    avals: Mapping[int, Any] = field(default_factory=dict)

    @cached_property
    def makes(self) -> tuple[tuple[int, ...], ...]:
        """Results of each op."""
        return tuple(each.results for each in self.ops)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Operands of each op that are no constants."""
        return tuple(
            tuple(v for v in each.operands if v not in self.consts) for each in self.ops
        )

    @cached_property
    def place(self) -> dict[int, int]:
        """Value id → its position among the inputs."""
        return {v: i for i, v in enumerate(self.inputs)}

    @cached_property
    def maker(self) -> dict[int, int]:
        """Value id → position of the op that computes it."""
        return {v: k for k, each in enumerate(self.ops) for v in each.results}

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Value id → positions of the ops that read it."""
        found: dict[int, list[int]] = {}
        for i, values in enumerate(self.reads):
            for v in dict.fromkeys(values):
                found.setdefault(v, []).append(i)
        return {v: tuple(readers) for v, readers in found.items()}

    def made_by(self, ops: Iterable[int]) -> set[int]:
        """Return the results of some ops."""
        return {v for i in ops for v in self.makes[i]}

    def read_by(self, ops: Iterable[int]) -> set[int]:
        """Return the operands of some ops that are no constants."""
        return {v for i in ops for v in self.reads[i]}

    def named(self, value: int) -> int:
        """Return the id by which the region's ops refer to a value."""
        return self.alias.get(value, value)

    def bytes(self, value: int) -> int:
        """Return the size of a value."""
        aval = self.avals[value]
        return int(getattr(aval, "size", 1)) * int(getattr(aval.dtype, "itemsize", 4))

    def with_consts(self, arrays: Sequence[Any]) -> FlatRegion:
        """Return the region with constants in place of its last inputs."""
        count = len(self.inputs) - len(arrays)
        consts = zip(self.inputs[count:], arrays, strict=True)
        return replace(
            self, inputs=self.inputs[:count], consts={**self.consts, **dict(consts)}
        )

    def renamed(self, ids: Mapping[int, int]) -> FlatRegion:
        """Return the region with other value ids; regions of its ops keep theirs.

        Args:
          ids: value id → its new id; other values get ids above all of these.
        """
        first = 1 + max(ids.values(), default=-1)

        def of(values: Iterable[int]) -> tuple[int, ...]:
            return tuple(ids.get(v, first + v) for v in values)

        return FlatRegion(
            of(self.inputs),
            tuple(each.renamed(of) for each in self.ops),
            of(self.outputs),
            NOTHING,
            dict(zip(of(self.consts), self.consts.values(), strict=True)),
            dict(zip(of(self.avals), self.avals.values(), strict=True)),
        )

    def needed(
        self, values: Iterable[int], known: Collection[int] = ()
    ) -> tuple[set[int], set[int]]:
        """Return the ops that compute some values from others.

        Args:
          values: ids of the values to compute.
          known: ids of values that are available.
        Returns:
          Positions of the ops; which of `known`, and of the region's inputs, they read
            or are wanted themselves.
        """

        def maker(value: int) -> int | None:
            return None if value in known else self.maker.get(value)

        found, read = trace_back(values, maker, self.reads.__getitem__)
        return found, read - self.consts.keys()

    def behind(self, values: Iterable[int]) -> set[int]:
        """Return the ops that depend on some values."""
        found, known = set[int](), set(values)
        for i, reads in enumerate(self.reads):
            if not known.isdisjoint(reads):
                found.add(i)
                known.update(self.makes[i])
        return found

    def late(self, ops: Iterable[int], again: Collection[int]) -> list[int]:
        """Return ops in an order in which recomputed ones run late.

        Those of `again` come just before the first other op that needs them: their
        results are not live before.
        """
        ordered = sorted(ops)
        needed: dict[int, int] = {}
        for i in reversed(ordered):
            at = needed.get(i, len(self.ops)) if i in again else i
            needed[i] = at
            for v in self.reads[i]:
                maker = self.maker.get(v)
                if maker is not None and maker in again:
                    needed[maker] = min(at, needed.get(maker, at))
        return sorted(ordered, key=lambda i: (needed[i], i not in again, i))

    def run(
        self,
        ops: Iterable[int],
        env: dict[int, Any],
        tags: Mapping[int, str] = NOTHING,
    ) -> None:
        """Run some ops, in this order.

        Args:
          ops: positions.
          env: known arrays, by value id; results are added.
          tags: of ops, for `_compat.untagged`.
        """
        for i in ops:
            mark = tagged(tags[i]) if i in tags else contextlib.nullcontext()
            with mark:
                results = self.ops[i].bind(self.arguments(i, env))
            env.update(zip(self.makes[i], results, strict=True))

    def arguments(self, op: int, env: Mapping[int, Any]) -> list[Any]:
        """Return the arrays that an op reads, constants too."""
        return [self.read(v, env) for v in self.ops[op].operands]

    def read(self, value: int, env: Mapping[int, Any]) -> Any:
        """Return the array of a value: of `env`, or a constant."""
        return env[value] if value in env else self.consts[value]

    def result(self, value: int, env: Mapping[int, Any]) -> Any:
        """Return the array of an output; that of a literal has the output's type."""
        found = self.read(value, env)
        is_array = value in env or jnp.ndim(found)
        return found if is_array else jnp.asarray(found, self.avals[value].dtype)


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
      avals: value id → abstract value of JAX; empty without a jaxpr.
    """

    program: Program
    top: FlatRegion
    consts: dict[int, Any]
    maker: dict[int, FlatOp]
    alias: dict[int, int]
    avals: dict[int, Any]

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
        return self.top.read(value, env)

    def can_change(self, each: FlatOp) -> bool:
        """Whether an op is a scan that can be rewritten with other stacks."""
        return (
            each.is_scan
            and may_run_again(self.program, each.op)
            and not holds_arrays(self.program, each.call.regions[0])
        )

    def is_parameter(self, value: int, span: AxisSpan | None = None) -> bool:
        """Whether a value is an input, possibly moved or converted.

        Args:
          value: its id.
          span: a dim that the input has to have as well: not one that it is broadcast
            along, as queries are along a batch.
        """
        while value in self.maker:
            made = self.maker[value]
            is_moved = made.op.traits.keeps_data and not made.regions
            if not is_moved or len(made.operands) != 1:
                return False
            rule = made.op.rule
            if span is not None and rule is not None:
                span = follow(rule, rule.results[0], span, rule.operands[0])
                if span is None:
                    return False
            (value,) = made.operands
        return value in self.top.inputs


def holds_arrays(program: Program, region: Region) -> bool:
    """Whether a region, or one inside of it, captures arrays as constants."""
    ops = [program.ops[i] for i in region.ops]
    read = [*region.outputs, *(v for op in ops for v in op.operands)]
    values = (program.values[v] for v in read)
    return any(value.is_literal and value.rank > 0 for value in values) or any(
        holds_arrays(program, r) for op in ops if op.call for r in op.call.regions
    )


def may_run_again(program: Program, op: Op) -> bool:
    """Whether an op is pure: it may run twice with the same results."""
    if op.traits.has_effects:
        return False
    regions = op.call.regions if op.call is not None else ()
    return all(
        may_run_again(program, program.ops[inner]) for r in regions for inner in r.ops
    )


def trace_back(
    values: Iterable[int],
    maker: Callable[[int], int | None],
    reads: Callable[[int], Iterable[int]],
) -> tuple[set[int], set[int]]:
    """Return the ops that values depend on.

    Args:
      values: ids of the values.
      maker: value id → position of the op to compute it; None: it is available.
      reads: position of an op → the values that it reads.
    Returns:
      Positions of the ops; the available values that they read or that are among
        `values`.
    """
    queue = list(values)
    ops: set[int] = set()
    read: set[int] = set()
    while queue:
        value = queue.pop()
        at = maker(value)
        if at is None:
            read.add(value)
        elif at not in ops:
            ops.add(at)
            queue += reads(at)
    return ops, read
