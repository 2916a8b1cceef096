"""Evaluate a traced function with the plan's sharding constraints in it.

The walk is the importer's: `region.ops[i]` is `jaxpr.eqns[i]`, so every equation finds
its op, and every op its specs. Names and source lines of the equations stay, so the
compiled program still points at the user's code.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rhino_jax._compat import (
    bind_eqn,
    eqn_context,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
)
from rhino_jax.frontend.regions import (
    closed_region_jaxprs,
    evaluate_ops,
    rebuild_jaxpr,
    with_jaxprs,
)
from rhino_jax.ir.factor import Dim, FactorKind, Layout, Rule
from rhino_jax.ir.program import USERS_CONSTRAINT, Op, Program, Region, RegionKind
from rhino_jax.ir.spec import Spec, num_shards
from rhino_jax.plan.decisions import Decisions, held_specs
from rhino_jax.runtime.constraints import Constraints, auto_mesh
from rhino_jax.runtime.indexing import (
    concatenated,
    with_clamped_starts,
    with_shards_made,
)
from rhino_jax.runtime.meshes import check_devices_of
from rhino_jax.runtime.ops_on_shards import run_each_part, run_on_shards


Copies = dict[tuple[int, Spec], tuple[Any, Any]]
"""Resharded operands that several ops of a region share.

(id of an array, spec) → (the array, its copy); the array keeps its id from being
reused.
"""


def constrained(
    closed_jaxpr: Any, program: Program, decisions: Decisions, mesh: Any
) -> Callable[..., list[Any]]:
    """Return the function of a jaxpr, with sharding constraints by `decisions`.

    Args:
      closed_jaxpr: the jaxpr that `program` was imported from.
      program: the program.
      decisions: specs of the program's values.
      mesh: the mesh; Explicit axes are taken as Auto.
    Returns:
      A function of the program's inputs (arguments, then captured constants), flat,
      to the list of its results.
    """
    constraints = Constraints(auto_mesh(mesh), decisions.lowering)
    walk = _Interpretation(program, decisions, constraints)
    jaxpr = open_jaxpr(closed_jaxpr)

    def run(*arrays: Any) -> list[Any]:
        placed = [
            walk.mesh.place(x, decisions.values.get(i.value))
            for x, i in zip(arrays, program.inputs, strict=True)
        ]
        args, consts = placed[: len(jaxpr.invars)], placed[len(jaxpr.invars) :]
        outs = walk.region(program.body, jaxpr, consts, args)
        specs: Sequence[Spec | None] = decisions.outputs or (None,) * len(outs)
        return walk.leave(jaxpr, outs, [o.value for o in program.outputs], specs)

    return run


def constrained_call(
    closed_jaxpr: Any,
    program: Program,
    decisions: Decisions,
    mesh: Any,
    position: int,
) -> Callable[..., list[Any]]:
    """Return the function of one equation of a jaxpr, with constraints by `decisions`.

    Args:
      closed_jaxpr, program, decisions, mesh: as for `constrained`.
      position: position of the equation in the jaxpr.
    Returns:
      A function of the arrays that the equation reads (without literals), in the specs
      of `decisions.values`.
    """
    walk = _Interpretation(
        program, decisions, Constraints(auto_mesh(mesh), decisions.lowering)
    )
    eqn = open_jaxpr(closed_jaxpr).eqns[position]
    op = program.ops[program.body.ops[position]]

    def run(*arrays: Any) -> list[Any]:
        given = iter(arrays)
        args = [v.val if is_literal(v) else next(given) for v in eqn.invars]
        placed = [
            walk.mesh.place(x, decisions.values.get(v))
            for x, v in zip(args, op.operands, strict=True)
        ]
        with eqn_context(eqn):
            return walk.op(op, eqn, placed, {})

    return run


@dataclass(frozen=True, slots=True)
class _Interpretation:
    """The evaluation of program and jaxpr in lockstep."""

    program: Program
    decisions: Decisions
    mesh: Constraints

    def region(
        self, region: Region, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]
    ) -> list[Any]:
        """Run all equations of a jaxpr and return its results."""
        copies: Copies = {}

        def run(op: Op, eqn: Any, operands: Sequence[Any]) -> list[Any]:
            return self.op(op, eqn, operands, copies)

        return evaluate_ops(self.program, region, jaxpr, consts, args, run)

    def op(self, op: Op, eqn: Any, args: Sequence[Any], copies: Copies) -> list[Any]:
        """Run one equation, with constraints on its operands and results."""
        operands = [self.operand(x, op, i, copies) for i, x in enumerate(args)]
        specs, mesh = held_specs(op, self.decisions), self.mesh.mesh
        on_shards = run_on_shards(eqn, specs, operands, mesh)
        if on_shards is not None:
            return self.made(op, on_shards)
        waypoints, values = self.decisions.waypoints, self.decisions.values
        parts = run_each_part(
            op,
            eqn,
            specs,
            operands,
            mesh,
            waypoints.get(op.results[0], ()) if op.results else (),
            tiles_groups=self.decisions.lowering.tiles_groups,
        )
        if parts is not None:
            return [
                self.mesh.travel(x, spec, values.get(v))
                for (x, spec), v in zip(parts, op.results, strict=True)
            ]
        whole = without_whole(op, specs, mesh.axis_sizes)
        operands = list(map(self.mesh.place, operands, whole))
        if op.name == USERS_CONSTRAINT:
            return self.made(op, operands)
        params = eqn.params
        if op.call is not None:
            jaxprs = enumerate(closed_region_jaxprs(eqn))
            bodies = [
                rebuild_jaxpr(self.body(op, i, jaxpr), jaxpr) for i, jaxpr in jaxprs
            ]
            params = with_jaxprs(eqn, bodies)
        if op.name == "shard_map":
            check_devices_of(eqn, str(op.source), mesh)
        sizes = mesh.axis_sizes
        joined = concatenated(op, operands, params, specs, sizes, self.mesh.place)
        if joined is not None:
            return self.made(op, [joined])
        count = len(operands)
        operands = with_clamped_starts(op, operands, specs)
        operands = with_shards_made(op, operands, specs, sizes)
        if op.traits.is_elementwise:
            shape = eqn.outvars[0].aval.shape
            operands = [self.mesh.broadcast(x, shape, specs[-1]) for x in operands]
        return self.made(op, bind_eqn(eqn, operands, params), whole[count:])

    def operand(self, x: Any, op: Op, position: int, copies: Copies) -> Any:
        """Reshard an operand to the spec in which an op reads it."""
        held = self.decisions.values.get(op.operands[position])
        for spec in self.decisions.through.get((op.id, position), ()):
            key = id(x), spec
            if key not in copies:
                copies[key] = x, self.mesh.travel(x, held, spec)
            x, held = copies[key][1], spec
        wanted = self.decisions.operands.get((op.id, position))
        return self.mesh.travel(x, held, wanted)

    def made(
        self, op: Op, results: Sequence[Any], whole: Sequence[Spec | None] = ()
    ) -> list[Any]:
        """Reshard the results of an op to the specs of its values.

        Args:
          op: the op.
          results: its results.
          whole: specs that they are resharded to before; empty: none.
        """
        found = []
        whole = whole or [None] * len(op.results)
        for x, v, first in zip(results, op.results, whole, strict=True):
            for waypoint in self.decisions.waypoints.get(v, ()):
                x = self.mesh.place(x, waypoint)
            x = self.mesh.place(x, first)
            found.append(self.mesh.travel(x, first, self.decisions.values.get(v)))
        return found

    def body(self, op: Op, position: int, jaxpr: Any) -> Callable[..., list[Any]]:
        """Return one region of an op as a function of its inputs."""
        assert op.call is not None
        region = op.call.regions[position]
        inner, consts = open_jaxpr(jaxpr), jaxpr_consts(jaxpr)
        entering = self.entering(op, region)
        leaving = self.leaving(op, position)

        def run(*args: Any) -> list[Any]:
            placed = [
                self.mesh.place(x, s) for x, s in zip(args, entering, strict=False)
            ]
            outs = self.region(region, inner, consts, placed)
            return self.leave(inner, outs, region.outputs, leaving)

        return run

    def leave(
        self,
        jaxpr: Any,
        outs: Sequence[Any],
        values: Sequence[int],
        wanted: Sequence[Spec | None],
    ) -> list[Any]:
        """Reshard the results of a jaxpr to the specs in which they leave it.

        Each on the line of the equation that defined it: collectives of the reshard are
        read out of the compiled program as that line's.
        """
        makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
        placed = []
        for x, atom, v, want in zip(outs, jaxpr.outvars, values, wanted, strict=True):
            eqn = None if is_literal(atom) else makers.get(atom)
            with contextlib.nullcontext() if eqn is None else eqn_context(eqn):
                placed.append(self.mesh.travel(x, self.decisions.values.get(v), want))
        return placed

    def entering(self, op: Op, region: Region) -> list[Spec | None]:
        """Return the specs of values when they enter a region; None: not annotated.

        A loop's body is compiled on its own, so they are annotated again inside; so are
        those of a branch. Calls are inlined and take the shardings of their operands.
        """
        assert op.call is not None
        if op.call.kind is RegionKind.CALL:
            return [None] * len(region.inputs)
        values = self.decisions.values
        if op.call.kind is not RegionKind.COND:
            return [values.get(v) for v in region.inputs]
        operands = self.decisions.operands
        return [
            operands.get((op.id, i), values.get(v))
            for i, v in enumerate(op.operands[1:], 1)
        ]

    def leaving(self, op: Op, position: int) -> list[Spec | None]:
        """Return the specs to which values are resharded when they leave a region.

        None where they have that spec already. A loop's carries leave as they enter,
        and all branches with equal specs, or XLA refuses the conditional.
        """
        assert op.call is not None
        region, values = op.call.regions[position], self.decisions.values
        specs: list[Spec | None] = [
            self.decisions.region_outputs.get((op.id, position, i))
            for i in range(len(region.outputs))
        ]
        if op.call.kind is RegionKind.COND:
            # Of each result its own spec, or else that of any branch.
            annotated = self.decisions.region_outputs
            for i, result in enumerate(op.results):
                specs[i] = values.get(result)
                for r, branch in enumerate(op.call.regions):
                    if specs[i] is None:
                        own = values.get(branch.outputs[i])
                        specs[i] = annotated.get((op.id, r, i), own)
            return specs
        for out, value in enumerate(carried(op, position)):
            specs[out] = values.get(value, specs[out])
            if values.get(region.outputs[out]) == specs[out]:
                specs[out] = None
        return specs


def without_whole(
    op: Op, specs: Sequence[Spec | None], sizes: Sequence[int]
) -> list[Spec | None]:
    """Return the specs that replicate the WHOLE dims of operands and results, and dims
    of results between whose elements a pad puts others, unless its operand is sharded
    alike.

    XLA fails to compile such ops with results sharded along these dims, or is wrong
    (pads between elements, jaxlib 0.10.2), so they are resharded before and afterwards.

    Args:
      op: the op.
      specs: specs of its operands, then of its results.
      sizes: sizes of the mesh axes.
    Returns:
      In the same order, the specs; None where no such dim is sharded.
    """
    if op.rule is None:
        return [None] * len(specs)
    rule, count, made = op.rule, len(op.operands), op.rule
    if any(f.dilation > 1 for f in rule.factors):
        made = _with_whole(rule, specs[0] or (), specs[count] or ())
    rules = [rule] * count + [made] * len(op.results)
    layouts = (*rule.operands, *rule.results)
    return [
        uncut_whole(each, layout, spec, sizes)
        for each, layout, spec in zip(rules, layouts, specs, strict=True)
    ]


def uncut_whole(
    rule: Rule, layout: Layout, spec: Spec | None, sizes: Sequence[int]
) -> Spec | None:
    """Return `spec` without the axes that shard WHOLE factors; None if there are none.

    In a dim of (windows, elements of each) windows may be sharded: only what is minor
    to them is whole.
    """
    if spec is None:
        return None
    uncut = tuple(
        axes if _cuts_no_whole(rule, dim, axes, sizes) else ()
        for dim, axes in zip(layout, spec, strict=True)
    )
    return None if uncut == spec else uncut


def _with_whole(rule: Rule, read: Spec, made: Spec) -> Rule:
    """Return a rule in which dilated factors are WHOLE that the specs of an operand and
    of its result do not shard alike."""
    dims = zip(rule.operands[0], read, strict=False)
    of_operand = {f: axes for dim, axes in dims for f in dim}
    factors = list(rule.factors)
    for dim, axes in zip(rule.results[0], made, strict=False):
        for f in dim:
            if factors[f].dilation > 1 and of_operand.get(f, ()) != axes:
                factors[f] = replace(factors[f], kind=FactorKind.WHOLE)
    return replace(rule, factors=tuple(factors))


def _cuts_no_whole(
    rule: Rule, dim: Dim, axes: tuple[int, ...], sizes: Sequence[int]
) -> bool:
    factors = [rule.factors[f] for f in dim]
    if all(f.kind is not FactorKind.WHOLE for f in factors):
        return True
    major = itertools.takewhile(lambda f: f.kind is not FactorKind.WHOLE, factors)
    return math.prod(f.size for f in major) % num_shards(axes, sizes) == 0


def carried(op: Op, position: int) -> tuple[int, ...]:
    """Return the inputs of a loop body that its first results become."""
    call = op.call
    assert call is not None
    is_body = call.kind is RegionKind.WHILE and position == 1
    if call.kind is RegionKind.SCAN or is_body:
        return tuple(call.carries(call.regions[position].inputs))
    return ()
