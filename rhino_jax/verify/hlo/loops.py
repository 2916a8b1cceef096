"""Compute which computations an instruction runs, and the trip counts of loops.

The compiler often states the count (`known_trip_count`). Where it does not (XLA:TPU),
the count follows from the loop itself: the bound in the condition, the initial value of
the counter and its step (2 after unrolling by two), each of them a constant, or a
loop-invariant element of the state of this loop or of one around it. A loop whose count
depends on data counts as it was planned with, else by its bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rhino_jax.verify.hlo.module import (
    Computation,
    Instruction,
    Module,
    called_names,
)


_KNOWN = re.compile(r'"?known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
_PASSES = ("copy", "bitcast", "convert", "reshape", "copy-done", "copy-start")
_CALLS = ("fusion", "call")
_WHILE = re.compile(r"(?:^|/)while(?:\[[^/]*)?$")
"""Matches the end of the op name of a `lax.while_loop`."""
_MAX_STEPS = 100


@dataclass(frozen=True, slots=True)
class ControlFlow:
    """The computations that one run of an instruction runs.

    Attributes:
      branches: alternatives, of which one runs; each has the names of computations that
        run one after another.
      trips: number of times that the branch runs.
      is_known: False where data determine `trips`.
    """

    branches: tuple[tuple[str, ...], ...]
    trips: int = 1
    is_known: bool = True


def control_flow(
    module: Module, caller: Computation, instruction: Instruction
) -> ControlFlow:
    """Return what a `while`, a conditional, a call or a fusion runs."""
    match instruction.opcode:
        case "while":
            trips, is_known = trips_of(module, caller, instruction)
            condition, body = map(instruction.attribute, ("condition", "body"))
            # XLA:GPU and XLA:CPU run no condition where they know the count.
            is_counted = bool(instruction.find(_KNOWN))
            names = (body,) if is_counted else (condition, body)
            return ControlFlow((names,), trips, is_known)
        case "conditional":
            return ControlFlow(tuple((name,) for name in called_names(instruction)))
        case _:
            return ControlFlow((tuple(called_names(instruction)),))


def trips_of(
    module: Module, caller: Computation, loop: Instruction
) -> tuple[int, bool]:
    """Return the trip count of a `while`, and whether it is independent of data.

    A loop that data may end has the count that it was planned with, or its bound, or 1.
    """
    if known := loop.find(_KNOWN):
        return int(known), True
    counts = [_counted(module, caller, loop, x) for x in _tests(module, loop)]
    bounds = [count for count in counts if count is not None]
    if len(bounds) == len(counts) == 1:
        return bounds[0], True
    planned: frozenset[int] = frozenset()
    if _WHILE.search(loop.op_name):  # not a loop that the compiler generated
        planned = module.while_trips.get(loop.source, planned)
    if len(planned) != 1 and bounds:
        return min(bounds), False
    return max(planned, default=1), False


def _tests(module: Module, loop: Instruction) -> Iterator[_At]:
    """Yield the tests that a loop's condition conjoins."""
    condition = module.computations.get(loop.attribute("condition"))
    todo = (
        [] if condition is None else [_settle(module, _At(condition, condition.root))]
    )
    while todo:
        test = todo.pop()
        if test.instruction.opcode == "and":
            todo += [_settle(module, test.to(x)) for x in test.instruction.operands]
        else:
            yield test


def _counted(
    module: Module, caller: Computation, loop: Instruction, test: _At
) -> int | None:
    """Return how many trips a comparison holds, or None where that depends on data."""
    body = module.computations.get(loop.attribute("body"))
    if body is None:
        return None
    if test.instruction.opcode != "compare" or len(test.instruction.operands) != 2:
        return None
    left, right = (_settle(module, test.to(x)) for x in test.instruction.operands)
    direction = test.instruction.attribute("direction")
    bound = _constant(module, right)
    if bound is None:
        left, right, bound = right, left, _constant(module, left)
        direction = _FLIPPED.get(direction, direction)
    counter = left.loop_index
    if counter is None or bound is None:
        return None
    start = _constant(module, _element(module, _At(caller, loop.operands[0]), counter))
    step = _step(module, body, counter)
    if start is None or not step:
        return None
    return _count(direction, start, bound, step)


_FLIPPED = {"LT": "GT", "GT": "LT", "LE": "GE", "GE": "LE"}


def _count(direction: str, start: int, bound: int, step: int) -> int | None:
    """Return the trips of `for (i = start; i direction bound; i += step)`, or None."""
    if direction in ("GT", "GE"):
        start, bound, step = -start, -bound, -step
        direction = "LT" if direction == "GT" else "LE"
    if direction == "LE":
        bound, direction = bound + 1, "LT"
    if direction == "NE" and (bound - start) % step == 0:
        count = (bound - start) // step
        return count if count >= 0 else None
    if direction != "LT" or step <= 0:
        return None
    return max(0, -(-(bound - start) // step))


@dataclass(frozen=True, slots=True)
class _At:
    """An instruction, with the call arguments bound to its computation's parameters."""

    computation: Computation
    name: str
    arguments: tuple[_At, ...] | None = None

    @property
    def instruction(self) -> Instruction:
        return self.computation.instructions[self.name]

    def to(self, name: str) -> _At:
        return _At(self.computation, name, self.arguments)

    @property
    def constant(self) -> int | None:
        if self.instruction.opcode != "constant":
            return None
        text = self.instruction.operands[0]
        return int(text) if re.fullmatch(r"-?\d+", text) else None

    @property
    def loop_index(self) -> int | None:
        """Index of this loop-state element, inside condition or body; else None."""
        if self.arguments is not None:
            return None
        if self.instruction.opcode == "parameter":
            return 0
        if self.instruction.opcode != "get-tuple-element":
            return None
        of = self.computation.instructions[self.instruction.operands[0]]
        index = self.instruction.attribute("index")
        return int(index) if of.opcode == "parameter" else None


def _settle(module: Module, at: _At) -> _At:
    """Follow copies, fusions and tuples to the instruction that defines a value."""
    for _ in range(_MAX_STEPS):
        instruction = at.instruction
        if instruction.opcode in _PASSES:
            at = at.to(instruction.operands[0])
        elif instruction.opcode in _CALLS:
            called = module.computations[instruction.called]
            at = _At(called, called.root, tuple(at.to(x) for x in instruction.operands))
        elif instruction.opcode == "parameter" and at.arguments is not None:
            at = at.arguments[int(instruction.operands[0])]
        elif instruction.opcode == "get-tuple-element":
            of = _settle_tuple(module, at)
            if of is None:
                return at
            at = of
        else:
            return at
    return at


def _constant(module: Module, at: _At | None) -> int | None:
    """Return the constant integer of a settled value, or None.

    An element of a loop's state that the body returns unchanged has its initial value.
    """
    for _ in range(_MAX_STEPS):
        if at is None or at.constant is not None:
            return None if at is None else at.constant
        index = at.loop_index
        place = module.loops.get(at.computation.name)
        if index is None or place is None:
            return None
        caller = module.computations[place[0]]
        loop = caller.instructions[place[1]]
        body = module.computations[loop.attribute("body")]
        new = _element(module, _At(body, body.root), index)
        if new is None or new.computation is not body or new.loop_index != index:
            return None
        at = _element(module, _At(caller, loop.operands[0]), index)
    return None


def _settle_tuple(module: Module, at: _At) -> _At | None:
    """Return the element that a get-tuple-element takes of a known tuple, or None."""
    source = at.to(at.instruction.operands[0])
    if source.instruction.opcode == "parameter" and source.arguments is None:
        return None
    return _element(module, source, int(at.instruction.attribute("index")))


def _element(module: Module, at: _At, index: int) -> _At | None:
    """Return element `index` of a tuple, settled, or the value if it is no tuple."""
    settled = _settle(module, at)
    if settled.instruction.opcode == "tuple":
        return _settle(module, settled.to(settled.instruction.operands[index]))
    return settled if index == 0 and not at.instruction.type.startswith("(") else None


def _step(module: Module, body: Computation, counter: int) -> int | None:
    """Return the increment of the counter by one run of the body, or None."""
    new = _element(module, _At(body, body.root), counter)
    if new is None or new.instruction.opcode not in ("add", "subtract"):
        return None
    left, right = (_settle(module, new.to(x)) for x in new.instruction.operands)
    sign = 1 if new.instruction.opcode == "add" else -1
    if right.loop_index == counter and sign == 1:
        left, right = right, left
    by = _constant(module, right)
    return sign * by if left.loop_index == counter and by is not None else None
