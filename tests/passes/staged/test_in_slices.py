"""Steps whose sequences run in slices, as tasks: the same numbers, and what is sent."""

from __future__ import annotations

from collections import Counter

import pytest

from rhino_jax.passes.staged.remat import StagedRemat
from rhino_jax.passes.staged.step import TaskKind, ValueKind
from tests.cases import covering
from tests.passes.staged.helpers_staged import (
    check,
    in_equal_parts,
    of_zoo,
    taken_apart,
)


MODEL = "gpt-tiny-unrolled"


@pytest.mark.parametrize(
    ("stages", "count", "lengths", "is_compiled"),
    covering(
        [
            (2, 1, (16, 16), False),
            (2, 1, (16, 16), True),
            (2, 2, (13, 10, 9), False),
            (4, 1, (8, 8, 8, 8), False),
        ]
    ),
)
def test_a_step_is_the_same_in_slices(stages, count, lengths, is_compiled):
    step = check(*of_zoo(MODEL), stages, count, is_compiled, lengths=lengths)
    slices = len(lengths)
    assert step.chunks == tuple(range(stages)) * slices
    kinds = Counter(t.kind for tasks in step.tasks for t in tasks)
    assert kinds[TaskKind.FORWARD] == kinds[TaskKind.BACKWARD] == stages * slices


def test_a_slice_reads_what_slices_before_it_made_on_its_group():
    """Keys and values, and sums of gradients, are not sent; of what is, no more is than
    of whole sequences."""
    traced, _ = of_zoo(MODEL)
    apart = taken_apart(traced, 1)
    whole, sliced = (in_equal_parts(apart, 2, lengths=n) for n in ((), (16, 16)))

    def sent(step):
        inside = [s.key for s in step.sends if s.key.kind is ValueKind.INSIDE]
        return sum(step.types[key].size for key in inside)

    assert sent(sliced) == sent(whole) > 0
    made = {k: t for of in sliced.tasks for t in of for k in t.makes}
    inside = [
        (made[key], task)
        for of in sliced.tasks
        for task in of
        for key in task.reads
        if key.kind is ValueKind.INSIDE and task.kind is made[key].kind
    ]
    across = [(a, b) for a, b in inside if a.place // 2 != b.place // 2]
    assert across and all(a.group == b.group for a, b in across)
    assert {a.kind for a, _ in across} == {TaskKind.FORWARD, TaskKind.BACKWARD}


@pytest.mark.slow
def test_forward_passes_of_slices_run_again():
    remat = StagedRemat(frozenset({0, 2}))  # both slices of the first stage
    check(*of_zoo(MODEL), 2, 1, lengths=(16, 16), remat=remat)


def test_layers_take_their_weights_from_stacks_in_every_slice():
    """In each anew: kept between slices they would be a copy of the stack."""
    traced, _ = of_zoo("gpt-tiny")
    apart = taken_apart(traced, 1)
    step = in_equal_parts(apart, 2, lengths=(16, 16))
    layers = {aval.shape[1:] for aval in traced.closed_jaxpr.in_avals if aval.ndim > 2}
    later = [
        step.types[key].shape
        for of in step.tasks
        for task in of
        for key in task.reads
        if task.kind is TaskKind.FORWARD and task.place // 2 == 1
    ]
    assert {shape[1:] for shape in later} & layers and not {*later} & layers
