"""Stages that make some values of their forward passes again, and keep the others."""

from __future__ import annotations

import functools
import random
from dataclasses import replace

import jax
import pytest

from rhino_jax.frontend.trace import trace
from rhino_jax.passes.remat.choice import RematChoice
from rhino_jax.passes.remat.late import find_stacks, halves_of
from rhino_jax.passes.staged.group import group_program
from rhino_jax.passes.staged.holding import TaskResiduals
from rhino_jax.passes.staged.remat import StagedRemat, applied, in_ids_of_piece
from rhino_jax.passes.staged.sides import Sides, sides_of
from rhino_jax.passes.staged.step import StagedStep, TaskKind, ValueKind
from rhino_jax.rewrite.flatten import flatten
from tests.cases import covering
from tests.passes.staged.helpers_staged import (
    check,
    in_equal_parts,
    of_zoo,
    step_with_dropout,
    taken_apart,
)
from tests.passes.zoo import random_like, shape


WIDTH, ROWS, LAYERS = 32, 16, 8
ROW = 4 * ROWS // 4 * WIDTH


@functools.cache
def traced():
    params, x = random_like(([shape(WIDTH, WIDTH)] * LAYERS, shape(ROWS, WIDTH)))
    args = params, jax.random.key(0), x
    return trace(step_with_dropout, args, {}, donate_argnums=(0,)), jax.tree.leaves(
        args
    )


def sides(args) -> Sides:
    return sides_of(taken_apart(args[0], 4))


def crossing(of: Sides) -> dict[int, tuple[str, int]]:
    """Id of what the backward pass reads of the forward pass → op, and bytes."""
    read = {v for i in of.backward for v in of.region.reads[i]}
    found = {}
    for i in of.forward:
        op = of.program.ops[of.program.body.ops[i]]
        for value, number in zip(op.results, of.region.makes[i], strict=True):
            if number in read:
                found[value] = op.name, of.region.bytes(number)
    return found


def kept_bytes(step: StagedStep) -> list[int]:
    found = []
    for chunk, group in enumerate(step.chunks):
        keys, _, _ = TaskResiduals.of(step.tasks[group]).of_chunk(chunk)
        types = [step.types[key] for key in keys]
        found.append(sum(t.size * t.dtype.itemsize for t in types))
    return found


def remat(values) -> StagedRemat:
    """One group's choice may be all of it: which group it is of is only its name."""
    return StagedRemat(values={0: str(RematChoice(tuple(values)))})


@pytest.mark.parametrize(
    ("stages", "v", "is_compiled"),
    covering([(2, 1, False), (4, 1, False), (2, 2, False), (2, 2, True)], 3),
    ids=str,
)
def test_all_but_products_made_again_with_the_same_random_bits(stages, v, is_compiled):
    args = traced()
    values = crossing(sides(args))
    again = [k for k, (name, _) in values.items() if name != "dot_general"]
    before = check(*args, stages, 4, is_compiled, v=v)
    after = check(*args, stages, 4, is_compiled, v=v, remat=remat(again))
    per_chunk = LAYERS // (v * stages)
    # A product of every layer is kept, and what comes from the chunk before.
    rows = [n // ROW for n in kept_bytes(after)]
    assert rows[0] <= per_chunk and max(rows) <= per_chunk + 1
    assert sum(kept_bytes(after)) < sum(kept_bytes(before))


def test_what_is_made_again_is_no_longer_kept():
    args = traced()
    values = [*crossing(sides(args)).items()]
    before = sum(kept_bytes(check(*args, 2, 4)))
    for value, (name, size) in values[2:8]:
        again = check(*args, 2, 4, remat=remat([value]))
        after = sum(kept_bytes(again))
        assert after == before - size, name


def test_values_without_a_counterpart_are_saved():
    apart, other = (taken_apart(traced()[0], 4) for _ in range(2))
    of = sides_of(apart)
    value = next(iter(crossing(of)))
    unknown = len(of.program.values)
    choice = RematChoice((value, unknown), (unknown,))
    for now in (of, replace(sides_of(other))):
        _, again, kept = applied(now, other, choice, of)
        assert len(again) == 1 and not kept


def test_what_the_other_stage_knows_by_number_stays_the_same():
    args = of_zoo("gpt-tiny", remat=False)
    of = sides(args)
    blocks = flatten(of.program, is_top_entered=False)
    stacks = find_stacks(blocks, halves_of(blocks.top))
    before = check(*args, 1, 4)
    after = check(*args, 1, 4, remat=remat([s.value for s in stacks[::2]]))
    inside = [
        {k for t in s.tasks[0] for k in t.makes if k.kind is ValueKind.INSIDE}
        for s in (before, after)
    ]
    for key in inside[0] & inside[1]:
        assert before.types[key].shape == after.types[key].shape
    assert len(inside[0] - inside[1]) >= len(stacks[::2])
    assert sum(kept_bytes(after)) < sum(kept_bytes(before))


def test_ids_of_a_group_are_those_of_the_micro_batch():
    args = of_zoo("gpt-tiny", remat=False)
    apart = taken_apart(args[0], 4)
    of = sides_of(apart)
    made = in_equal_parts(apart, 1)
    program = group_program(made, 0, args[0].program)
    (forward,) = [t for t in program.tasks if t.kind is TaskKind.FORWARD]
    call = program.program.ops[program.program.body.ops[made.tasks[0].index(forward)]]
    ops = [program.program.ops[i] for i in call.call.regions[0].ops]
    loop = next(op for op in ops if op.name == "scan")
    body = loop.call.regions[0]
    choice = RematChoice((loop.results[-1],), (body.inputs[-1],))
    said = RematChoice.parse(in_ids_of_piece(choice, program, of))
    theirs = next(
        op for i in of.program.body.ops if (op := of.program.ops[i]).name == "scan"
    )
    assert said.recompute == (theirs.results[-1],)
    assert said.keep == (theirs.call.regions[0].inputs[-1],)


@pytest.mark.parametrize("seed", covering(range(3)))
@pytest.mark.parametrize(
    ("name", "options", "stages"),
    covering(
        [
            ("gpt-tiny-unrolled", {"clip_norm": 0.5}, 4),
            ("gpt-tiny-unrolled", {}, 2),
            ("gpt-tiny", {"remat": False}, 1),
            ("t5-tiny", {}, 2),
            ("unet-tiny", {}, 2),
        ]
    ),
    ids=str,
)
def test_models_of_the_zoo_are_the_same_whatever_is_made_again(
    name, options, stages, seed
):
    args = of_zoo(name, **options)
    values = [*crossing(sides(args))]
    draw = random.Random(seed)
    chosen = draw.sample(values, draw.randint(1, len(values)))
    before = in_equal_parts(taken_apart(args[0], 4), stages)
    after = check(*args, stages, 4, remat=remat(chosen))
    assert kept_bytes(after) != kept_bytes(before)
