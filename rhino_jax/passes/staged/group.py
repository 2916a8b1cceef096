"""The tasks of a submesh as one program, to be planned; each is compiled by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from rhino_jax._compat import open_jaxpr, untagged, with_eqns
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.frontend.regions import closed_region_jaxprs, with_jaxprs
from rhino_jax.ir.program import Program
from rhino_jax.passes.staged.step import StagedStep, StagedTask, ValueKey, ValueKind
from rhino_jax.rewrite.retraced import traced_on


@dataclass(frozen=True, eq=False)
class GroupProgram:
    """The tasks of a submesh, each once: of a micro-batch, and once a step.

    Attributes:
      closed: closed jaxpr: one call (`jit`) for every task.
      program: imported from it; calls of tasks that run for every micro-batch have the
        number of micro-batches as trip count.
      tasks: the task of every equation.
      arguments: keys of its arguments.
      results: keys of its results.
      places: ids of ops of forward tasks → positions in `Sides.forward` of the forward
        ops that they are, where the op is the only one with that position.
    """

    closed: Any
    program: Program
    tasks: tuple[StagedTask, ...]
    arguments: tuple[ValueKey, ...]
    results: tuple[ValueKey, ...]
    places: Mapping[int, int] = field(default_factory=dict)


def group_program(step: StagedStep, group: int, before: Program) -> GroupProgram:
    """Trace and import the program of one submesh.

    Args:
      step: all tasks.
      group: index of the submesh.
      before: the step's program, whose inputs and outputs have paths.
    """
    tasks = step.tasks[group]
    made = {key for task in tasks for key in task.makes}
    read = dict.fromkeys(key for task in tasks for key in task.reads)
    arguments = tuple(sorted(key for key in read if key not in made))
    given = [o[1] for o in step.outputs if isinstance(o, tuple) and o[0] == group]
    wanted = dict.fromkeys([*given, *step.sent(group)])
    results = tuple(key for key in wanted if key in made)

    def run(*arrays: Any) -> list[Any]:
        env = dict(zip(arguments, arrays, strict=True))
        for task in tasks:
            call = task.run
            call.__name__ = call.__qualname__ = task.name
            outs = jax.jit(call)(*(env[key] for key in task.reads))
            env.update(zip(task.makes, outs, strict=True))
        return [env[key] for key in results]

    closed, tags = _untagged(traced_on(run, [step.types[key] for key in arguments]))
    outputs = {
        o[1]: end
        for o, end in zip(step.outputs, before.outputs, strict=True)
        if isinstance(o, tuple)
    }
    place: dict[int | None, int] = {
        key.number: i for i, key in enumerate(arguments) if key.kind is ValueKind.INPUT
    }
    program = import_jaxpr(
        closed,
        name=f"{before.name}, group {group}",
        input_paths=[
            before.inputs[key.number].path if key.kind is ValueKind.INPUT else key.label
            for key in arguments
        ],
        donated=[
            key.kind is ValueKind.INPUT
            and before.inputs[key.number].is_donated
            and step.home[key.number] == group
            for key in arguments
        ],
        output_paths=[
            outputs[key].path if key in outputs else key.label for key in results
        ],
        state_of=[
            place.get(outputs[key].state_of) if key in outputs else None
            for key in results
        ],
        while_trips=before.while_trips,
    )
    # Calls are compiled alone, and those of micro-batches run for each.
    ops = list(program.ops)
    for op_id, task in zip(program.body.ops, tasks, strict=True):
        call = ops[op_id].call
        assert call is not None  # as every task is traced to one
        times = step.micro_batches if task.is_per_micro_batch else 1
        call = replace(call, trip_count=times, is_program=True)
        ops[op_id] = replace(ops[op_id], call=call)
    program = replace(program, ops=tuple(ops))
    return GroupProgram(
        closed, program, tasks, arguments, results, _places(program, tags)
    )


def _untagged(closed: Any) -> tuple[Any, list[list[str | None]]]:
    """Return the program with untagged calls, and for every call its ops' tags."""
    calls, tags = [], []
    for eqn in open_jaxpr(closed).eqns:
        (body,) = closed_region_jaxprs(eqn)
        body, found = untagged(body)
        calls.append(eqn.replace(params=dict(with_jaxprs(eqn, (body,)))))
        tags.append(found)
    return with_eqns(closed, calls, open_jaxpr(closed).outvars), tags


def _places(program: Program, tags: list[list[str | None]]) -> dict[int, int]:
    """Return op → the forward op that it is; ops that became several are left out."""
    found: dict[int, int] = {}
    for op_id, of_call in zip(program.body.ops, tags, strict=True):
        count, call = Counter(of_call), program.ops[op_id].call
        assert call is not None  # as every task is traced to one
        (body,) = call.regions
        for op, tag in zip(body.ops, of_call, strict=True):
            if tag is not None and count[tag] == 1:
                found[op] = int(tag)
    return found
