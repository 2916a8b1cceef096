"""Run a step's tasks one after the other, without a plan, in NumPy or on one device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rhino_jax._compat import open_jaxpr
from rhino_jax.frontend.trace import Traced
from rhino_jax.passes.staged.apart import Apart, take_apart
from rhino_jax.passes.staged.in_slices import staged_in_slices
from rhino_jax.passes.staged.sides import sides_of
from rhino_jax.passes.staged.staging import staged
from rhino_jax.passes.staged.step import (
    StagedStep,
    StagedTask,
    TaskKind,
    ValueKey,
    ValueKind,
)
from tests.passes.interpreter import interpret
from tests.passes.zoo import compiled, of_zoo as of_zoo


def in_equal_parts(
    apart: Apart, stages: int, v: int = 1, lengths: Sequence[int] = (), **options: Any
) -> StagedStep:
    """As many forward ops in every chunk, in the program's order, v for every group; of
    sequences in slices of such lengths, if there are any."""
    count, chunks = len(sides_of(apart).forward), v * stages
    groups = [c % stages for c in range(chunks)]
    parts = [k * chunks // count for k in range(count)]
    if lengths:
        return staged_in_slices(apart, parts, groups, lengths, **options)
    return staged(apart, parts, groups, **options)


def undivided(traced: Traced, arrays: Sequence[Any]) -> list[Any]:
    return interpret(traced.closed_jaxpr, arrays)


@functools.cache
def taken_apart(traced: Traced, count: int) -> Apart:
    """Return `take_apart` of a step, once for every count of micro-batches."""
    return take_apart(traced.closed_jaxpr, traced.program, count)


def entering(
    apart: Apart,
    arrays: Sequence[Any],
    run: Callable[..., list[Any]] = interpret,
) -> list[Any]:
    """Return what enters every micro-batch, of a step whose micro-batches are not
    coupled."""
    assert not apart.coupled
    types = [v.aval for v in open_jaxpr(apart.once).invars[len(arrays) :]]
    sums = [np.zeros(v.shape, v.dtype) for v in types]
    return run(apart.once, [*arrays, *sums])[: len(apart.entering)]


def _interpreted(step: StagedStep, task: StagedTask) -> Callable[..., list[Any]]:
    jaxpr = jax.make_jaxpr(task.run)(*(step.types[key] for key in task.reads))
    return lambda *arrays: interpret(jaxpr, arrays)


def run_tasks(
    step: StagedStep, arrays: Sequence[Any], is_compiled: bool = False
) -> list[Any]:
    """Run all tasks: every group sees only its inputs, what it made and what it was
    sent."""
    held: list[dict[ValueKey, Any]] = [
        {key: arrays[key.number] for key in step.inputs(g)} for g in range(step.groups)
    ]
    pieces: list[list[dict[ValueKey, Any]]] = [
        [{ValueKey(ValueKind.PIECE): np.int32(m)} for m in range(step.micro_batches)]
        for _ in held
    ]
    made = {(t.kind, t.group, t.place): t for tasks in step.tasks for t in tasks}
    runs = {
        at: jax.jit(task.run) if is_compiled else _interpreted(step, task)
        for at, task in made.items()
    }

    def run(at: tuple[TaskKind, int, int], m: int = 0) -> None:
        task: StagedTask | None = made.get(at)
        if task is None:
            return

        def where(key: ValueKey, group: int) -> dict[ValueKey, Any]:
            of_piece = key.kind in (ValueKind.PIECE, ValueKind.INSIDE)
            return pieces[group][m] if of_piece else held[group]

        outs = runs[at](*(where(key, task.group)[key] for key in task.reads))
        for key, x in zip(task.makes, outs, strict=True):
            where(key, task.group)[key] = x
        for send in step.sends:
            if send.source == task.group and send.key in task.makes:
                mine = where(send.key, task.group)
                where(send.key, send.target)[send.key] = mine[send.key]

    for g in range(step.groups):
        run((TaskKind.START, g, 0))
    chunks = [*enumerate(step.chunks)]
    for m in range(step.micro_batches):
        for c, g in chunks:
            run((TaskKind.FORWARD, g, c), m)
    for g in range(step.groups):
        run((TaskKind.BETWEEN, g, 0))
    for m in range(step.micro_batches):
        for kind in (TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT):
            for c, g in reversed(chunks):
                run((kind, g, c), m)
    for at in sorted((a for a in made if a[0] is TaskKind.UPDATE), key=lambda a: a[2]):
        run(at)
    results = []
    for out in step.outputs:
        if not isinstance(out, tuple):
            results.append(out)
        elif out[1].kind is ValueKind.INPUT:
            results.append(arrays[out[1].number])
        else:
            results.append(held[out[0]][out[1]])
    return results


def check(
    traced: Traced,
    arrays: Sequence[Any],
    stages: int,
    count: int,
    is_compiled: bool = False,
    **options: Any,
) -> StagedStep:
    """Check that tasks give what the undivided step gives."""
    step = in_equal_parts(taken_apart(traced, count), stages, **options)
    run = compiled if is_compiled else interpret
    expected = run(traced.closed_jaxpr, arrays)
    most = max(np.abs(np.asarray(x)).max(initial=0) for x in expected)
    for end, a, b in zip(
        traced.program.outputs,
        expected,
        run_tasks(step, arrays, is_compiled),
        strict=True,
    ):
        # The bias of a key shifts all scores of a row alike: its gradient is noise.
        if end.path.endswith("['k']['bias']"):
            continue
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        atol = 1e-4 * np.abs(a).max(initial=0) + 3e-7 * most
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=atol, err_msg=end.path)
    return step


def step_with_dropout(params, key, x):
    """A step of SGD on layers with dropout."""

    def loss(params):
        h = x
        for i, w in enumerate(params):
            h = jnp.tanh(h @ w)
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, h.shape)
            h = jnp.where(keep, h / 0.8, 0)
        return jnp.mean((h - x) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value
