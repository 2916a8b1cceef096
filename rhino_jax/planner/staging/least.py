"""A lower bound on the memory of all stages together, whatever the cut, the schedule
and the shardings.

Planning submeshes until none fits takes many searches. A step that needs more memory
than all devices have, even with nothing replicated, is refused without them.
"""

from __future__ import annotations

import math

from rhino_jax.errors import InfeasiblePlanError
from rhino_jax.ir.program import Program
from rhino_jax.passes.staged.apart import take_apart
from rhino_jax.planner.staging.cuts import StagingRequest
from rhino_jax.units import format_bytes


def check_least(asked: StagingRequest, micro_batches: int) -> None:
    """Refuse a step whose arguments and accumulated gradients exceed the memory of all
    devices. Both are live while micro-batches run.

    Args:
      asked: the step to plan.
      micro_batches: any number of micro-batches.
    Raises:
      InfeasiblePlanError: no stages have room for it.
      MicrobatchError: the batch cannot be split so.
    """
    program, search = asked.of_step.program, asked.search
    devices = math.prod(size for _, size in search.meshes[0])
    budget = search.request.memory_budget_bytes
    arguments = _arguments(program)
    held = sum(arguments.values())
    # Accumulated gradients are as large as their parameters, and hardly larger.
    if 2 * held <= budget * devices:
        return
    closed, places = asked.of_step.closed, asked.places
    apart = take_apart(closed, program, micro_batches, places)
    sums = [apart.sum_type(k) for k in range(len(apart.leaving))]
    summed = sum(x.size * x.dtype.itemsize for x in sums)
    needed = held + summed
    if needed <= budget * devices:
        return
    each, groups = math.ceil(needed / devices), len(asked.shares)
    least = search.request.budget_for(each)
    largest = max(arguments, key=lambda path: arguments[path])
    raise InfeasiblePlanError(
        f"`{program.name}` fits in no {groups} stages: at least one of them needs"
        f" {format_bytes(each)} on each of its devices, wherever it is cut.",
        where=f"{search.request.budget_text}; largest argument"
        f" {largest}, {format_bytes(arguments[largest])}",
        numbers=f"{format_bytes(held)} of arguments and {format_bytes(summed)} of sums"
        f" over micro-batches, of which {devices} devices hold"
        f" {format_bytes(int(budget) * devices)}",
        fix=f"take {math.ceil(needed / budget)} devices or more, or raise"
        f" memory_budget_bytes to {least} ({format_bytes(least)}), and beyond that for"
        " activations; more micro-batches or stages do not help.",
    )


def _arguments(program: Program) -> dict[str, int]:
    """Return path → bytes of the arguments that the step reads or returns."""
    read = {v for op in program.body.ops for v in program.ops[op].operands}
    read |= {*program.body.outputs}
    return {
        entry.path: program.values[entry.value].bytes
        for entry in program.inputs
        if entry.value in read
    }
