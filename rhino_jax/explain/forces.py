"""Constraints that shape a layout: pins, divisibility, memory, neighbours, recipes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rhino_jax.analysis.graph import NodeKind
from rhino_jax.explain.holding import nodes_of, specs_now
from rhino_jax.explain.place import PlacedValues
from rhino_jax.ir.spec import Spec, format_spec
from rhino_jax.model.build import MeshModel
from rhino_jax.plan.plan import PlanData
from rhino_jax.planner.search.driver import search_again
from rhino_jax.planner.search.found import SearchResult
from rhino_jax.planner.search.records import Request
from rhino_jax.solver.problem import Labels


MAX_READERS = 6
"""Maximum number of lines on the ops that read a value; the rest are counted."""


def forces(
    found: SearchResult,
    pins: Sequence[str],
    place: PlacedValues,
    current: Spec | None,
) -> tuple[str, ...]:
    """Return sentences on everything that influences the layout of a place.

    Args:
      found: the search result of the plan's mesh.
      pins: sentences on pins, see `pins_of`.
      place: the values.
      current: the plan's layout; None if the values of the place have several.
    """
    model, labels = found.solved[0].mesh_problem.model, found.solved[0].solution.labels
    assert labels is not None
    return (
        *pins,
        *_divisors(model, place),
        *_memory(found, place, current),
        *_neighbours(model, place, labels),
        *_recipes(found, place),
    )


def pins_of(request: Request, plan: PlanData, place: PlacedValues) -> list[str]:
    """Return the sentence on a place's pins, for a plan on one mesh; empty if none."""
    program_pins = [request.value_pins[v].key for v in place.values
                    if v in request.value_pins]  # fmt: skip
    paths = [plan.inputs[i].path for i in place.inputs if i in request.pins]
    paths += [plan.outputs[i].path for i in place.outputs if i in request.output_pins]
    every = dict.fromkeys([*paths, *program_pins])
    if not every:
        return []
    return [f"pinned: {', '.join(every)}; the other layouts are without that pin."]


def _divisors(model: MeshModel, place: PlacedValues) -> list[str]:
    """Return a sentence for each mesh axis whose size does not divide some dims."""
    lines = []
    for axis in model.mesh.axes:
        odd = [i for i, d in enumerate(place.shape) if axis.size > 1 and d % axis.size]
        if odd:
            dims = " and ".join(f"{i} ({place.shape[i]})" for i in odd)
            lines.append(f"`{axis.name}` ({axis.size} devices) does not divide dim"
                         f"{'s' if len(odd) > 1 else ''} {dims}.")  # fmt: skip
    return lines


def _memory(
    found: SearchResult, place: PlacedValues, current: Spec | None
) -> list[str]:
    """Say whether memory limits the layout; empty if the budget does not bind."""
    if not found.is_bound_by_memory:
        return []
    without = replace(
        found.request,
        memory_budget_bytes=math.inf,
        deadline=math.inf,
        has_recipes=False,
        watch=None,
    )
    free = search_again(found, without)
    best = free.solved[0]
    assert best.solution.labels is not None
    model = best.mesh_problem.model
    specs = set(specs_now(model, place, best.solution.labels))
    if specs == {current}:
        return ["memory binds, but has no part in this: without limit it is the same."]
    text = " and ".join(format_spec(s, model.mesh.names) for s in specs)
    return [f"memory: without limit it would be {text}."]


def _neighbours(model: MeshModel, place: PlacedValues, labels: Labels) -> list[str]:
    """Return sentences on the ops that read the values, and in which layout they do."""
    graph, names = model.graph, model.mesh.names
    readers: dict[tuple[str, str], int] = defaultdict(int)
    for n in nodes_of(model, place):
        for edge in graph.outgoing[n]:
            have = model.spec(edge.source, int(labels[n]))
            want = model.wanted(edge, int(labels[edge.target]))
            reader = graph.nodes[edge.target]
            if reader.kind is NodeKind.COPY:
                continue
            who = reader.kind.value
            if reader.op is not None:
                line = str(reader.op.source).partition(" (")[0]
                who = f"{reader.op.name} at {line}" if line else reader.op.name
            how = "as it is" if have == want else f"as {format_spec(want, names)}"
            readers[who, how] += 1
    lines = [
        f"read {how} by {who}{f' ({count} times)' if count > 1 else ''}."
        for (who, how), count in readers.items()
    ]
    rest = len(lines) - MAX_READERS
    return [*lines[:MAX_READERS], *([f"and {rest} more readers."] if rest > 0 else [])]


def _recipes(found: SearchResult, place: PlacedValues) -> list[str]:
    problem = found.solved[0].mesh_problem
    by_spec: dict[str, list[str]] = defaultdict(list)
    for name, labels in problem.recipes.items():
        if labels is not None:
            specs = dict.fromkeys(specs_now(problem.model, place, labels))
            text = " and ".join(format_spec(s, problem.model.mesh.names) for s in specs)
            by_spec[text].append(name)
    if not by_spec:
        return []
    said = "; ".join(f"{', '.join(names)} {spec}" for spec, names in by_spec.items())
    return [f"recipes have: {said}."]
