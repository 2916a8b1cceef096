"""Random steps as tasks of two to four stages: the numbers of the undivided step."""

from __future__ import annotations

import random
from typing import Any

import jax
import pytest

from rhino_jax.errors import MicrobatchError
from rhino_jax.frontend.trace import trace
from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.passes.staged.group import group_program
from rhino_jax.passes.staged.remat import StagedRemat
from rhino_jax.passes.staged.sides import Sides, sides_of
from tests.cases import covering
from tests.passes.microbatch.random_programs import arguments, step_of
from tests.passes.staged.helpers_staged import check, taken_apart


def residuals(sides: Sides) -> list[int]:
    """Ids of what the backward pass reads of the forward pass."""
    read = {v for i in sides.backward for v in sides.region.reads[i]}
    ops = sides.program.ops
    return [
        value
        for i in sides.forward
        for value, number in zip(
            ops[sides.program.body.ops[i]].results, sides.region.makes[i], strict=True
        )
        if number in read
    ]


# In short: passes as they are, split ones, several chunks of a stage, some of them
# recomputed; and a step of two forward ops in four stages.
@pytest.mark.parametrize("seed", covering(range(200), (1, 4, 9, 21, 101)))
def test_random_steps_are_the_same_in_stages(seed: int) -> None:
    draw, args = random.Random(seed), arguments(seed)
    traced = trace(step_of(seed), args, {}, donate_argnums=(0,))
    count = draw.choice([2, 3])
    try:
        sides = sides_of(taken_apart(traced, count))
    except MicrobatchError:
        return
    stages, options = draw.choice([2, 3, 4]), dict[str, Any]()
    if not sides.forward:
        return
    if draw.random() < 0.3:
        options["is_split"] = True
    elif draw.random() < 0.3:
        options["v"] = 2
    values = residuals(sides)
    if values and "is_split" not in options and draw.random() < 0.4:
        chosen = draw.sample(values, draw.randint(1, len(values)))
        options["remat"] = StagedRemat(values={0: str(RematChoice(tuple(chosen)))})
    step = check(traced, jax.tree.leaves(args), stages, count, **options)
    for group in range(step.groups):
        if step.tasks[group]:
            group_program(step, group, traced.program)
