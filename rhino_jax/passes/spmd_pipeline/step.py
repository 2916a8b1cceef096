"""A whole step on one stage: which values are sharded by layers, and its equations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax._compat import (
    at_line_of,
    bind_eqn,
    eqn_context,
    hide_frames,
    is_literal,
)
from rhino_jax.ir.program import Program
from rhino_jax.passes.spmd_pipeline.along import (
    Stacked,
    makes_along,
    reads_along,
)
from rhino_jax.passes.spmd_pipeline.found import StageLoop
from rhino_jax.passes.spmd_pipeline.local import part, run_local
from rhino_jax.passes.spmd_pipeline.run import StageRun
from rhino_jax.passes.spmd_pipeline.spread import StageAxis
from rhino_jax.rewrite.equations import Equations


hide_frames(__file__)


@dataclass(frozen=True, eq=False)
class LoopedStep:
    """A step around its loop over micro-batches.

    Attributes:
      lines: its equations, calls inlined.
      loop: that loop.
      stacks: values of which a stage has its part of dim 0: its layers.
      stacked: equations on such values, by position.
      results: for every result, whether it is sharded by layers.
    """

    lines: Equations
    loop: StageLoop
    stacks: frozenset[int]
    stacked: Mapping[int, Stacked]
    results: tuple[bool, ...]

    def shapes(self, stages: int) -> list[tuple[int, ...]]:
        """Return the shapes of inputs, then constants, on one stage."""
        found = []
        for v in (*self.lines.inputs, *self.lines.consts):
            shape = tuple(getattr(self.lines.avals[v], "shape", ()))
            if v in self.stacks:
                shape = (shape[0] // stages, *shape[1:])
            found.append(shape)
        return found


def step_of(lines: Equations, program: Program, loop: StageLoop) -> LoopedStep:
    """Determine which values are sharded by layers.

    These are stacks that the loop reads, what it outputs of them, and what depends on
    these elementwise, as optimizer state.

    Args:
      lines: the step's equations, calls inlined.
      program: imported from the same jaxpr.
      loop: found in it.
    """
    rules = [program.ops[op].rule for op in program.body.ops]
    state = [e.state_of for e in program.outputs]
    wanted = _read_by_loop(lines, loop)
    while True:
        given, made = _back(lines, rules, loop, wanted)
        stacks, stacked = _forth(lines, rules, loop, given, made)
        late = {
            lines.inputs[of]
            for v, of in zip(lines.outputs, state, strict=True)
            if v in stacks and of is not None and of < len(lines.inputs)
        } - stacks
        if not late:
            break
        wanted |= late
    by_layers = tuple(
        v in stacks if of is None else lines.inputs[of] in stacks
        for v, of in zip(lines.outputs, state, strict=True)
    )
    return LoopedStep(lines, loop, frozenset(stacks), stacked, by_layers)


def _read_by_loop(lines: Equations, loop: StageLoop) -> set[int]:
    body = loop.body
    operands = lines.operands[loop.at]
    sums = [body.is_stacked_sum(s) for s in body.sums]
    consts = [v in body.stacks for v in body.lines.inputs[: body.consts]]
    pairs = zip(operands, (*consts, *sums), strict=False)
    return {v for v, is_stack in pairs if is_stack and v is not None}


def _back(
    lines: Equations, rules: Sequence[Any], loop: StageLoop, wanted: set[int]
) -> tuple[set[int], dict[int, Stacked]]:
    """Return inputs that must be sharded by layers, and equations that keep them so.

    It walks backward from values that must be sharded by layers.

    Args:
      lines: equations of the step.
      rules: for each equation, factors of its op; None: unknown.
      loop: the loop over micro-batches.
      wanted: ids of values that must be sharded.
    """
    wanted, made = set(wanted), dict[int, Stacked]()
    for i in reversed(range(len(lines.eqns))):
        if i == loop.at or not wanted.intersection(lines.makes[i]):
            continue
        found = makes_along(lines, rules[i], i)
        if found is not None:
            made[i] = found
            wanted |= found.stacks_of(lines.operands[i])
    return wanted & set(lines.inputs), made


def _forth(
    lines: Equations,
    rules: Sequence[Any],
    loop: StageLoop,
    given: set[int],
    made: Mapping[int, Stacked],
) -> tuple[set[int], dict[int, Stacked]]:
    """Return all values that are sharded by layers, and equations on them.

    Args:
      lines: equations of the step.
      rules: for each equation, factors of its op; None: unknown.
      loop: the loop over micro-batches.
      given: ids of inputs that are sharded.
      made: equations that `_back` found.
    """
    stacks, stacked = set(given), dict[int, Stacked]()
    for i, makes in enumerate(lines.makes):
        if i == loop.at:
            sums = map(loop.body.is_stacked_sum, loop.body.sums)
            stacks |= {v for v, is_stack in zip(makes, sums, strict=False) if is_stack}
            continue
        found = made.get(i)
        if found is None and stacks.intersection(lines.reads[i]):
            found = reads_along(lines, rules[i], i, stacks)
        if found is not None:
            stacked[i] = found
            pairs = zip(makes, found.results, strict=True)
            stacks |= {v for v, d in pairs if d == 0}
    return stacks, stacked


class OnStage:
    """One stage of a step, while it is traced."""

    def __init__(
        self, step: LoopedStep, axis: StageAxis, arrays: Sequence[Any]
    ) -> None:
        self.step, self.axis = step, axis
        names = (*step.lines.inputs, *step.lines.consts)
        self.env: dict[int, Any] = dict(zip(names, arrays, strict=True))
        self.gathered: dict[int, Any] = {}

    def results(self) -> list[Any]:
        """Return the results of the step, stacks as this stage's part."""
        step, lines = self.step, self.step.lines
        for i, eqn in enumerate(lines.eqns):
            if i == step.loop.at:
                made = self._looped(eqn)
            else:
                made = self._run(i, eqn)
            self.env.update(zip(lines.makes[i], made, strict=True))
        return [self._left(k, is_part) for k, is_part in enumerate(step.results)]

    def _run(self, i: int, eqn: Any) -> list[Any]:
        found, axis = self.step.stacked.get(i), self.axis
        with at_line_of(eqn):
            args = [self._read(v, found is not None) for v in eqn.invars]
        if found is None:
            with eqn_context(eqn):
                return bind_eqn(eqn, args, eqn.params)
        made = run_local(eqn, found, args, axis.stage, axis.stages)
        if found.reducer:
            with at_line_of(eqn):
                made = [axis.together(x, found.reducer) for x in made]
        return made

    def _read(self, atom: Any, as_stack: bool) -> Any:
        if is_literal(atom):
            return atom.val
        value = self.step.lines.number(atom)
        x = self.env[value]
        if as_stack or value not in self.step.stacks:
            return x
        if value not in self.gathered:
            self.gathered[value] = self.axis.whole(x)
        return self.gathered[value]

    def _looped(self, eqn: Any) -> list[Any]:
        """Run the loop over micro-batches and return its outputs."""
        body = self.step.loop.body
        is_stack = [v in body.stacks for v in body.lines.inputs[: body.consts]]
        is_stack += map(body.is_stacked_sum, body.sums)
        arrays = []
        for k, atom in enumerate(eqn.invars):
            if k >= len(is_stack):  # slices of micro-batches; a stage takes its own
                arrays.append(self._part(self._read(atom, False)))
            elif is_stack[k]:
                arrays.append(self._as_part(atom))
            else:
                arrays.append(self._read(atom, False))
        made = StageRun(body, self.axis, arrays).results()
        return [*made[: body.carries], *map(self.axis.whole, made[body.carries :])]

    def _as_part(self, atom: Any) -> Any:
        """Return this stage's part of a value that is sharded by layers."""
        if is_literal(atom) or self.step.lines.number(atom) not in self.step.stacks:
            return self._part(self._read(atom, False))
        return self._read(atom, True)

    def _part(self, x: Any) -> Any:
        return part(x, 0, self.axis.stage, self.axis.stages)

    def _left(self, position: int, is_part: bool) -> Any:
        lines = self.step.lines
        value = lines.outputs[position]
        if value is None:
            x = lines.result(position, {})
            return self._part(x) if is_part else x
        atom = lines.atoms[position]
        return self._as_part(atom) if is_part else self._read(atom, False)
