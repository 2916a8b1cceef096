"""Steps in stages over several processes equal those of one device, or fail in all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from tests.cases import covering
from tests.helpers_coupled import STEPS
from tests.processes import staged
from tests.processes.pool import Pool, errors, results


pytestmark = pytest.mark.processes


def on_one_device(step: Any, state: Sequence[Any], batch: Any) -> Any:
    """Return losses of two steps, and the sums of the state after them."""
    step, losses = jax.jit(step), []
    for _ in range(2):
        *state, loss = step(*state, batch)
        losses.append(float(loss))
    return losses, staged.sums(state)


def trained(optimizer: Any, layers: int = 4) -> Any:
    """Return what `staged.trained` does, on one device."""
    params, batch = staged.arrays(layers)
    state = [params, optimizer.init(params)]
    return on_one_device(staged.step_of(optimizer), state, batch)


def check(wanted: Any, found: list[Any], is_apart: bool = True) -> None:
    """Check that all processes have the losses, and together the state."""
    losses, state = wanted
    for got, _ in found:
        np.testing.assert_allclose(got, losses, rtol=1e-4)
    for want, *parts in zip(state, *(sums for _, sums in found), strict=True):
        have = [x for x in parts if x is not None]
        assert have or not is_apart
        np.testing.assert_allclose(have, [want] * len(have), rtol=1e-4)
    if is_apart:
        assert any(None in sums for _, sums in found)


def two_stages(pool: Pool, count: int) -> None:
    found = results(pool.run("in_two_stages", count, module="staged"))
    check(trained(staged.ADAMW, 2), found, count == 2)


def two_stages_of_any_mesh(pool: Pool, count: int) -> None:
    found = results(pool.run("in_two_stages_of_any_mesh", count, module="staged"))
    check(trained(staged.SGD), found, count == 2)


def four_stages(pool: Pool, count: int) -> None:
    found = results(pool.run("in_four_stages", count, module="staged"))
    check(trained(staged.ADAMW), found)


def a_stack(pool: Pool, count: int) -> None:
    params, batch = staged.stacked_arrays(3)
    losses, sums = on_one_device(staged.stacked_step, [params], batch)
    found = results(pool.run("in_some_stages", count, module="staged"))
    for got, _ in found:
        np.testing.assert_allclose(got, losses, rtol=1e-4)
    heads = [sums[0] for _, sums in found if sums[0] is not None]
    np.testing.assert_allclose(heads, sums[:1], rtol=1e-4)


def shared_groups(pool: Pool, count: int) -> None:
    found = results(pool.run("groups_over_processes", count, module="staged"))
    check(trained(staged.ADAMW, 2), found, is_apart=False)


def coupled(pool: Pool, count: int, scenario: str) -> None:
    found = results(pool.run(scenario, count, module="staged"))
    name = scenario.partition("_")[0]
    params, batch = staged.coupled_arrays(name)
    wanted = on_one_device(STEPS[name], [params], batch)
    # Of groups over several processes, what is cut is whole in none of them.
    check(wanted, found, "balanced" not in scenario and count == 2)


def test_two_stages_in_two_processes(pool: Pool) -> None:
    two_stages(pool, 2)


@pytest.mark.slow
def test_two_stages_of_any_mesh_in_two_processes(pool: Pool) -> None:
    two_stages_of_any_mesh(pool, 2)


@pytest.mark.slow
def test_two_processes_hold_two_stages_each(pool: Pool) -> None:
    """Within a process nothing is sent, yet transfers are counted alike."""
    four_stages(pool, 2)


def test_a_stack_lies_on_some_of_the_stages(pool: Pool) -> None:
    a_stack(pool, 2)


COUPLED = ("contrastive", "balanced_in_shared_groups")


@pytest.mark.parametrize("scenario", covering(COUPLED, ["balanced_in_shared_groups"]))
def test_coupled_micro_batches_meet_across_processes(pool: Pool, scenario: str) -> None:
    coupled(pool, 2, scenario)


@pytest.mark.slow
def test_groups_over_all_processes(pool: Pool) -> None:
    shared_groups(pool, 2)


@pytest.mark.slow
def test_sequences_pass_through_two_processes_in_slices(pool: Pool) -> None:
    params, batch = staged.causal_arrays()
    found = results(pool.run("in_slices", module="staged"))
    check(on_one_device(staged.causal_step, [params], batch), found)
    for parts in zip(*(sums for _, sums in found), strict=True):
        assert len([x for x in parts if x is not None]) == 1  # where its stage is


@pytest.mark.slow
def test_one_program_over_two_processes(pool: Pool) -> None:
    params, batch = staged.stacked_arrays()
    losses, state = on_one_device(staged.stacked_step, [params], batch)
    for got, parts in results(pool.run("in_one_program", module="staged")):
        np.testing.assert_allclose(got, losses, rtol=1e-4)
        # Each has its own layers, and all that is in none.
        have = [(x, y) for x, y in zip(parts, state, strict=True) if x is not None]
        assert len(have) == 1
        np.testing.assert_allclose(*have[0], rtol=1e-4)


def test_keys_travel_and_each_process_feeds_its_own_rows(pool: Pool) -> None:
    found = results(pool.run("with_dropout", module="staged"))
    assert [one[0] for one in found] == [
        {"x": True, "y": False},
        {"x": False, "y": True},
    ]
    for _, want, loss, of_one, sums in found:
        assert loss == pytest.approx(want, rel=1e-4)
        have = [(a, b) for a, b in zip(of_one, sums, strict=True) if b is not None]
        assert 0 < len(have) < len(sums)
        np.testing.assert_allclose([b for _, b in have], [a for a, _ in have], 1e-4)


def test_a_task_that_raises_ends_the_step_everywhere_and_state_is_as_before(
    pool: Pool,
) -> None:
    found = results(pool.run("raises", module="staged"))
    losses, _ = trained(staged.SGD, 2)
    for text, *got, _ in found:
        assert "`backward_1_of_group_1` of `train_step` failed in process 1" in text
        assert "FloatingPointError: only here" in text and "as it was" in text
        np.testing.assert_allclose(got, losses, rtol=1e-4)


# From here on the processes end, and others are started.


@pytest.mark.parametrize("how", covering(["killed", "stopped"]))
def test_a_process_that_is_lost_is_named(pool: Pool, how: str) -> None:
    (first,) = pool.run(how, module="staged", of=[0], RHINO_LOST_AFTER_S="3")
    (text,) = errors([first])
    assert "process 1 is lost" in text and "backward_0_of_group_0" in text
    assert first["seconds"] < 40


@pytest.mark.slow
def test_a_process_that_is_lost_in_a_group_of_several_is_named(pool: Pool) -> None:
    how = "killed_in_a_shared_group"
    (first,) = pool.run(how, module="staged", of=[0], RHINO_LOST_AFTER_S="3")
    (text,) = errors([first])
    assert "process 1 is lost" in text and "step 2" in text
    assert first["seconds"] < 40


@pytest.mark.slow
def test_groups_of_unequal_size_in_two_processes(pool: Pool) -> None:
    found = results(pool.run("in_unequal_stages", module="staged", devices=4))
    check(trained(staged.ADAMW), found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "run", [two_stages, two_stages_of_any_mesh, four_stages, a_stack, shared_groups]
)
def test_four_processes(pool: Pool, run: Callable[[Pool, int], None]) -> None:
    run(pool, 4)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", COUPLED)
def test_coupled_micro_batches_of_four_processes(pool: Pool, scenario: str) -> None:
    coupled(pool, 4, scenario)
