"""What is between the tasks of a group: held whoever runs, or a task's own."""

from __future__ import annotations

from rhino_jax.passes.staged.holding import TaskResiduals, earlier_results
from rhino_jax.passes.staged.step import StagedTask, TaskKind, ValueKey, ValueKind


WEIGHT, DATA, TOTAL = (
    ValueKey(ValueKind.INPUT, 0),
    ValueKey(ValueKind.ENTERING, 1),
    ValueKey(ValueKind.SUM, 0),
)
RECEIVED, RESIDUAL, SENT, GRADIENT, HANDED = (
    ValueKey(ValueKind.INSIDE, n) for n in range(5)
)
NEW, NORM = ValueKey(ValueKind.AFTER, 0), ValueKey(ValueKind.AFTER, 1)


def task(
    kind: TaskKind, reads: list[ValueKey], makes: list[ValueKey], place: int = 0
) -> StagedTask:
    return StagedTask(
        kind, 0, place, tuple(reads), tuple(makes), lambda *arrays: list(arrays)
    )


START = task(TaskKind.START, [WEIGHT], [DATA, TOTAL])
FORWARD = task(TaskKind.FORWARD, [WEIGHT, DATA, RECEIVED], [RESIDUAL, SENT])
WHOLE = task(TaskKind.BACKWARD, [WEIGHT, RECEIVED, RESIDUAL, GRADIENT, TOTAL], [TOTAL])
BACKWARD = task(TaskKind.BACKWARD, [WEIGHT, RESIDUAL, GRADIENT], [HANDED])
LATE = task(TaskKind.WEIGHT_GRADIENT, [RECEIVED, GRADIENT, HANDED, TOTAL], [TOTAL])


def test_what_is_only_sent_is_a_tasks_own_and_so_is_what_only_it_receives():
    holding = TaskResiduals.of([START, FORWARD, WHOLE])
    assert holding.of_chunk(0) == ({RECEIVED, RESIDUAL}, set(), set())
    assert holding.held(FORWARD) == [WEIGHT, DATA, RECEIVED, RESIDUAL]
    assert holding.held(WHOLE) == [WEIGHT, RECEIVED, RESIDUAL, TOTAL]
    assert holding.held(START) == [WEIGHT, DATA, TOTAL]


def test_what_is_received_ahead_of_a_backward_pass_that_alone_reads_it_is_held():
    alone = task(TaskKind.FORWARD, [WEIGHT, DATA], [SENT])
    holding = TaskResiduals.of([START, alone, WHOLE], [RECEIVED])
    assert holding.of_chunk(0) == ({RECEIVED}, set(), set())
    assert holding.held(WHOLE) == [WEIGHT, RECEIVED, TOTAL]
    # The same where the group has no forward pass at all.
    assert TaskResiduals.of([START, WHOLE], [RECEIVED]).of_chunk(0)[0] == {RECEIVED}


def test_what_gradients_of_weights_read_later_is_held_until_then():
    holding = TaskResiduals.of([START, FORWARD, BACKWARD, LATE])
    left, kept, handed = holding.of_chunk(0)
    assert left == {RECEIVED, RESIDUAL} and kept == {RECEIVED}
    assert handed == {GRADIENT, HANDED}
    assert holding.held(BACKWARD) == [WEIGHT, RESIDUAL, GRADIENT, HANDED]
    assert holding.held(LATE) == [RECEIVED, GRADIENT, HANDED, TOTAL]


def test_what_several_chunks_have_is_with_the_first_of_them():
    second = task(TaskKind.FORWARD, [RESIDUAL], [SENT], 1)
    holding = TaskResiduals.of([FORWARD, second, WHOLE])
    assert holding.of_chunk(0)[0] == {RECEIVED, RESIDUAL}
    assert holding.of_chunk(1)[0] == set()


def test_results_of_earlier_rounds_stay_until_the_step_ends():
    first = task(TaskKind.UPDATE, [TOTAL], [NORM, NEW])
    second = task(TaskKind.UPDATE, [WEIGHT, NORM], [ValueKey(ValueKind.AFTER, 2)], 1)
    tasks = [START, first, second]
    assert earlier_results(tasks, first) == []
    assert earlier_results(tasks, second) == [NEW]
