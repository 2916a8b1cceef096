"""Values that wait in the host's memory from forward to backward tasks."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.passes.staged.remat import StagedRemat
from rhino_jax.passes.staged.sides import Sides, sides_of
from rhino_jax.passes.staged.step import TaskKind, ValueKind
from tests.cases import covering
from tests.passes.staged.helpers_staged import (
    check,
    of_zoo,
    step_with_dropout,
    taken_apart,
)
from tests.passes.zoo import random_like, shape


WIDTH, ROWS, LAYERS = 16, 16, 4


@functools.cache
def traced():
    params, x = random_like(([shape(WIDTH, WIDTH)] * LAYERS, shape(ROWS, WIDTH)))
    args = params, jax.random.key(0), x
    return trace(step_with_dropout, args, {}, donate_argnums=(0,)), jax.tree.leaves(
        args
    )


def made_forward(of: Sides) -> dict[int, int]:
    """Id of what forward ops make → its number."""
    return {
        value: number
        for i in of.forward
        for value, number in zip(
            of.program.ops[of.program.body.ops[i]].results,
            of.region.makes[i],
            strict=True,
        )
    }


def sides(args) -> Sides:
    return sides_of(taken_apart(args[0], 4))


def asked(values, groups) -> StagedRemat:
    text = str(RematChoice(offload=tuple(values)))
    return StagedRemat(values=dict.fromkeys(range(groups), text))


@pytest.mark.parametrize(
    ("stages", "v", "is_compiled"),
    covering([(2, 1, False), (2, 2, False), (2, 1, True)], 2),
    ids=str,
)
def test_what_a_chunk_leaves_for_its_own_backward_pass_may_wait(stages, v, is_compiled):
    args = traced()
    remat = asked(made_forward(sides(args)), stages)
    found = check(*args, stages, 4, is_compiled, v=v, remat=remat)
    assert len(found.offloaded) == stages
    for group, keys in enumerate(found.offloaded):
        assert keys and keys == found.waits_on_host(group)
        for key in keys:
            uses = [
                (task.kind, task.place)
                for task in found.tasks[group]
                if key in (*task.reads, *task.makes)
            ]
            (place,) = {place for _, place in uses}
            kinds = [kind for kind, _ in uses]
            assert kinds == [TaskKind.FORWARD, TaskKind.BACKWARD], place
            assert key.kind is ValueKind.INSIDE and found.types[key].shape
    assert set(found.offloading) == set(range(stages * v))


def test_what_comes_from_the_stage_before_may_wait_as_well():
    def deep(params, key, x):
        def loss(params):
            h = x
            for w in params:
                h = (h * h) @ w
            return jnp.mean(h**2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    _, arrays = traced()
    shapes = arrays[:LAYERS], arrays[LAYERS], arrays[LAYERS + 1]
    args = trace(deep, shapes, {}, donate_argnums=(0,)), arrays
    found = check(*args, 4, 4, remat=asked(made_forward(sides(args)), 4))
    both = [found.received(g) & found.waits_on_host(g) for g in range(4)]
    assert not both[0] and any(both[1:])


def test_every_group_has_a_choice_of_its_own():
    args = traced()
    numbers = made_forward(sides(args))
    text = str(RematChoice(offload=tuple(numbers)))
    found = check(*args, 2, 4, remat=StagedRemat(values={1: text}))
    assert not found.waits_on_host(0) and found.waits_on_host(1)
    assert found.offloading == (1,)
    none = check(*args, 2, 4)
    assert none.offloaded == () and none.offloading == ()


def test_what_is_made_again_of_what_waits_is_the_same():
    args = of_zoo("gpt-tiny", remat=False)
    numbers = list(made_forward(sides(args)))
    text = str(RematChoice(tuple(numbers[::3]), (), tuple(numbers[1::3])))
    found = check(*args, 2, 4, remat=StagedRemat(values={0: text, 1: text}))
    assert any(found.offloaded)
