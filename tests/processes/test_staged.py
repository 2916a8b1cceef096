"""Steps in stages over several processes equal those of one device, or fail in all."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from tests.helpers_coupled import STEPS, arguments
from tests.processes import staged
from tests.processes.test_processes import errors, results, together


def on_one_device(optimizer: Any) -> tuple[list[float], list[float | None]]:
    params, batch = staged.arrays()
    state, step = optimizer.init(params), jax.jit(staged.step_of(optimizer))
    losses = []
    for _ in range(2):
        params, state, loss = step(params, state, batch)
        losses.append(float(loss))
    return losses, staged.sums((params, state))


def check(optimizer: Any, found: list[Any], *, is_apart: bool = True) -> None:
    """All processes have the losses, and together the state."""
    losses, state = on_one_device(optimizer)
    for got, _ in found:
        np.testing.assert_allclose(got, losses, rtol=1e-4)
    for want, *parts in zip(state, *(sums for _, sums in found), strict=True):
        have = [x for x in parts if x is not None]
        assert have or not is_apart
        np.testing.assert_allclose(have, [want] * len(have), rtol=1e-4)
    if is_apart:
        assert any(None in sums for _, sums in found)


def test_two_stages_in_two_processes() -> None:
    found = results(together("in_two_stages", worker="staged", devices=4))
    check(staged.SGD, [one[0] for one in found])
    check(staged.ADAMW, [one[1] for one in found])


def test_two_processes_hold_two_stages_each() -> None:
    """Within a process nothing is sent, yet transfers are counted alike."""
    found = results(together("in_four_stages", worker="staged"))
    check(staged.ADAMW, [one[0] for one in found])


def test_groups_of_unequal_size_in_two_processes() -> None:
    found = results(together("in_unequal_stages", worker="staged", devices=4))
    check(staged.ADAMW, [one[0] for one in found])


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_stack_lies_on_some_of_the_stages(count: int) -> None:
    params, batch = staged.stacked_arrays(3)
    step, wanted = jax.jit(staged.stacked_step), []
    for _ in range(2):
        params, loss = step(params, batch)
        wanted.append(float(loss))
    found = results(together("in_some_stages", count, worker="staged"))
    for losses, _ in found:
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    heads = [sums[0] for _, sums in found if sums[0] is not None]
    np.testing.assert_allclose(heads, [staged.sums(params)[0]], rtol=1e-4)


def test_sequences_pass_through_two_processes_in_slices() -> None:
    params, batch = staged.causal_arrays()
    step, wanted = jax.jit(staged.causal_step), []
    for _ in range(2):
        params, loss = step(params, batch)
        wanted.append(float(loss))
    found = results(together("in_slices", worker="staged"))
    for losses, _ in found:
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)
    parts = zip(staged.sums(params), *(sums for _, sums in found), strict=True)
    for want, *of in parts:
        (have,) = [x for x in of if x is not None]  # where its stage is
        np.testing.assert_allclose(have, want, rtol=1e-4)


@pytest.mark.slow
def test_one_program_over_two_processes() -> None:
    params, batch = staged.stacked_arrays()
    step, wanted = jax.jit(staged.stacked_step), []
    for _ in range(2):
        params, loss = step(params, batch)
        wanted.append(float(loss))
    state = staged.sums(params)
    for losses, parts in results(together("in_one_program", worker="staged")):
        np.testing.assert_allclose(losses, wanted, rtol=1e-4)
        # Each has its own layers, and all that is in none.
        have = [(x, y) for x, y in zip(parts, state, strict=True) if x is not None]
        assert len(have) == 1
        np.testing.assert_allclose(*have[0], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["in_two_stages", "in_four_stages"])
def test_four_processes(scenario: str) -> None:
    found = results(together(scenario, 4, worker="staged"))
    check(staged.ADAMW, [one[-1] for one in found], is_apart=scenario[3] == "f")


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_groups_over_all_processes(count: int) -> None:
    found = results(together("groups_over_processes", count, worker="staged"))
    check(staged.ADAMW, [one[0] for one in found], is_apart=False)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_coupled_micro_batches_meet_across_processes(count: int) -> None:
    found = results(together("coupled", count, worker="staged", devices=8 // count))
    for at, name in enumerate(["contrastive", "balanced", "contrastive"]):
        params, batch = arguments()
        losses, step = [], jax.jit(STEPS[name])
        for _ in range(2):
            params, loss = step(params, batch)
            losses.append(float(loss))
        for got, _ in (one[at] for one in found):
            np.testing.assert_allclose(got, losses, rtol=1e-4)
        state = staged.sums(params)
        for want, *parts in zip(state, *(one[at][1] for one in found), strict=True):
            have = [x for x in parts if x is not None]
            # Of groups over several processes, what is cut is whole in none of them.
            assert have or name == "balanced" or count == 4
            np.testing.assert_allclose(have, [want] * len(have), rtol=1e-4)


def test_a_task_that_raises_ends_the_step_everywhere_and_state_is_as_before() -> None:
    found = results(together("raises", worker="staged"))
    losses, _ = on_one_device(staged.SGD)
    for text, *got, _ in found:
        assert "`backward_1_of_group_1` of `train_step` failed in process 1" in text
        assert "FloatingPointError: only here" in text and "as it was" in text
        np.testing.assert_allclose(got, losses, rtol=1e-4)


def test_keys_travel_and_each_process_feeds_its_own_rows() -> None:
    found = results(together("with_dropout", worker="staged"))
    assert [one[0] for one in found] == [
        {"x": True, "y": False},
        {"x": False, "y": True},
    ]
    for _, want, loss, of_one, sums in found:
        assert loss == pytest.approx(want, rel=1e-4)
        have = [(a, b) for a, b in zip(of_one, sums, strict=True) if b is not None]
        assert 0 < len(have) < len(sums)
        np.testing.assert_allclose([b for _, b in have], [a for a, _ in have], 1e-4)


@pytest.mark.slow
def test_a_process_that_is_lost_in_a_group_of_several_is_named() -> None:
    how = "killed_in_a_shared_group"
    (first,) = together(how, worker="staged", of=[0], RHINO_LOST_AFTER_S="3")
    (text,) = errors([first])
    assert "process 1 is lost" in text and "step 2" in text
    assert first["seconds"] < 40


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_process_that_is_lost_is_named(how: str) -> None:
    (first,) = together(how, worker="staged", of=[0], RHINO_LOST_AFTER_S="3")
    (text,) = errors([first])
    assert "process 1 is lost" in text and "backward_0_of_group_0" in text
    assert first["seconds"] < 40
