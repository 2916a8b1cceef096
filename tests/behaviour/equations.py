"""Equations of a function under the strategies of the model, against one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding

from rhino_jax._compat import bind_eqn
from rhino_jax.analysis.padding import may_pad
from rhino_jax.frontend.check.run import as_array, to_numpy, walk
from rhino_jax.frontend.check.shards import ShardMismatch, compare
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.hardware.lowering import AS_WRITTEN
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec, format_spec, is_even
from rhino_jax.model.strategies import Strategy, strategies
from rhino_jax.plan.decisions import Decisions
from rhino_jax.planner.search.read_back.extract import waypoints_of
from rhino_jax.runtime.constraints import spec_on_mesh
from rhino_jax.runtime.interpret import constrained


MESHES = (8,), (2, 4), (2, 2, 2)
AXES = "x", "y", "z"
TOGETHER = 16
"""Strategies of an equation that are compiled as one program."""


@dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """One equation, with the arrays that it reads.

    Attributes:
      name: of the primitive.
      jaxpr: of a function that runs it alone.
      program: imported from that.
      operands: arrays that it reads, literals among them.
      expected: its results on one device.
    """

    name: str
    jaxpr: Any
    program: Program
    operands: tuple[Any, ...]
    expected: tuple[np.ndarray, ...]

    def strategies(self, sizes: tuple[int, ...]) -> tuple[Strategy, ...]:
        """Return all that the model offers on a mesh with these axis sizes."""
        (op,) = self.program.ops
        assert op.rule is not None
        shapes = tuple(self.program.values[r].shape for r in op.results)
        dims = frozenset(factor.size for factor in op.rule.factors)
        return strategies(op.rule, shapes, sizes, may_pad(op, dims))


def equations_of(
    fn: Callable[..., Any], *args: Any, only: str = ""
) -> Iterator[Equation]:
    """Yield the equations of a function that have a rule, each once.

    Args:
      fn, args: a function of arrays, and its arguments.
      only: the primitive whose equations are wanted; all, where none is given.
    """
    leaves, tree = jax.tree.flatten(args)
    leaves = [as_array(x) for x in leaves]
    closed = jax.make_jaxpr(lambda *flat: fn(*jax.tree.unflatten(tree, flat)))(*leaves)
    visited: list[tuple[Any, Sequence[Any]]] = []
    walk(closed, leaves, lambda *x: visited.append(x), needs_results=False)
    seen = set()
    for eqn, operands in visited:
        types = [str(v.aval) for v in eqn.invars]
        key = f"{eqn.primitive} {types} {sorted(eqn.params.items())}"
        if key not in seen and only in ("", eqn.primitive.name):
            seen.add(key)
            found = _equation(eqn, tuple(map(as_array, operands)))
            if found is not None:
                yield found


def _equation(eqn: Any, operands: tuple[Any, ...]) -> Equation | None:
    def alone(*arrays: Any) -> list[Any]:
        return bind_eqn(eqn, arrays, eqn.params)

    jaxpr = jax.make_jaxpr(alone)(*operands)
    program = import_jaxpr(
        jaxpr,
        name=eqn.primitive.name,
        input_paths=[f"x{i}" for i in range(len(operands))],
        donated=[False] * len(operands),
        output_paths=[f"y{i}" for i in range(len(eqn.outvars))],
        state_of=[None] * len(eqn.outvars),
    )
    if len(program.ops) != 1 or program.ops[0].rule is None:
        return None
    expected = tuple(map(to_numpy, jax.jit(alone)(*operands)))
    return Equation(eqn.primitive.name, jaxpr, program, operands, expected)


@dataclass(frozen=True, eq=False)
class Run:
    """An equation on a mesh.

    Attributes:
      equation: the equation.
      sizes: of the mesh's axes.
    """

    equation: Equation
    sizes: tuple[int, ...]

    @cached_property
    def mesh(self) -> Any:
        kinds = (AxisType.Auto,) * len(self.sizes)
        return jax.make_mesh(self.sizes, AXES[: len(self.sizes)], axis_types=kinds)

    def wrong(self, found: Sequence[Strategy]) -> list[str]:
        """Run strategies; return which give something else than one device.

        All are one program, unless that does not compile.
        """
        try:
            return self._differing(found)
        except jax.errors.JaxRuntimeError as error:
            if len(found) == 1:
                return [self.said(found[0], str(error).strip().replace("\n", " "))]
            half = len(found) // 2
            return self.wrong(found[:half]) + self.wrong(found[half:])

    def _differing(self, found: Sequence[Strategy]) -> list[str]:
        equation, wrong = self.equation, []
        runs = [
            constrained(equation.jaxpr, equation.program, self._decisions(s), self.mesh)
            for s in found
        ]
        # Parameters of its own for each: the compiler would join equal ops.
        given = [self._placed(s) for s in found]

        @jax.jit
        def together(given: Any) -> list[Any]:
            return [run(*arrays) for run, arrays in zip(runs, given, strict=True)]

        for strategy, results in zip(found, together(given), strict=True):
            for i, (got, whole) in enumerate(
                zip(results, equation.expected, strict=True)
            ):
                try:
                    compare(to_numpy(got), whole, f"result {i} differs")
                except ShardMismatch as error:
                    text = f"{error.why}, by {error.difference}"
                    wrong.append(self.said(strategy, text))
        return wrong

    def _decisions(self, strategy: Strategy) -> Decisions:
        (op,) = self.equation.program.ops
        read = zip(op.operands, strategy.operands, strict=True)
        held = zip(op.results, strategy.results, strict=True)
        return Decisions(
            {**dict(read), **dict(held)},
            outputs=strategy.results,
            waypoints=waypoints_of(op, strategy, AS_WRITTEN),
        )

    def _placed(self, strategy: Strategy) -> list[Any]:
        return [
            jax.device_put(x, NamedSharding(self.mesh, self._spec(spec, x.shape)))
            for x, spec in zip(self.equation.operands, strategy.operands, strict=True)
        ]

    def _spec(self, spec: Spec, shape: tuple[int, ...]) -> Any:
        if not is_even(spec, shape, self.sizes):
            spec = ((),) * len(shape)
        return spec_on_mesh(spec, shape, self.mesh)

    def said(self, strategy: Strategy, text: str = "") -> str:
        ins, outs = (
            ", ".join(format_spec(s, self.mesh.axis_names) for s in specs)
            for specs in (strategy.operands, strategy.results)
        )
        (op,) = self.equation.program.ops
        shapes = ", ".join(str(x.shape) for x in self.equation.operands)
        return (
            f"{self.equation.name} of {shapes} ({op.rule}) on {self.sizes}, {ins} ->"
            f" {outs}: {text[:300]}"
        )


def wrong_strategies(
    fn: Callable[..., Any],
    args: Sequence[Any],
    chance: random.Random,
    *,
    num_meshes: int = 1,
    most: int = TOGETHER,
    skip: Container[str] = (),
    before: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Run every equation of a function under strategies drawn at random.

    Args:
      fn, args: a function of arrays, and its arguments.
      chance: draws meshes and strategies.
      num_meshes: on how many of `MESHES`.
      most: strategies of an equation on each mesh; fewer are all run.
      skip: primitives that are left out.
      before: called with what runs next, in case the process does not survive it.
    Returns:
      Which gave something else than one device.
    """
    wrong = []
    for equation in equations_of(fn, *args):
        if equation.name in skip:
            continue
        for sizes in chance.sample(MESHES, num_meshes):
            run, every = Run(equation, sizes), equation.strategies(sizes)
            drawn = chance.sample(every, min(most, len(every)))
            for start in range(0, len(drawn), TOGETHER):
                part = drawn[start : start + TOGETHER]
                before("; ".join(run.said(s) for s in part))
                wrong += run.wrong(part)
    return wrong
