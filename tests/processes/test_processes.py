"""Several processes of this machine, joined by `jax.distributed`, plan alike."""

from __future__ import annotations

import time
from functools import cache

import jax
import numpy as np
import pytest

from tests.processes.pool import Pool, errors, results
from tests.processes.worker import arrays, train_step


pytestmark = pytest.mark.processes


@cache
def losses_here() -> list[float]:
    """Losses of five steps on one device."""
    params, x, y = arrays()
    step, losses = jax.jit(train_step), []
    for _ in range(5):
        params, loss = step(params, x, y)
        losses.append(float(loss))
    return losses


def test_one_plan_although_one_process_is_busy_and_the_clock_is_short(
    pool: Pool,
) -> None:
    first, second = results(pool.run("plans"))
    assert first == second


def test_only_the_first_process_asks_the_compiler(pool: Pool) -> None:
    first, second = results(pool.run("refines"))
    assert first == second
    assert first[0] == 2


def test_each_process_checks_what_it_holds(pool: Pool) -> None:
    for ok, count, left in results(pool.run("checks")):
        assert ok and count == 3
        assert all("in other processes" in why for why in left.values())


def test_plans_that_share_state_are_the_same_too(pool: Pool) -> None:
    first, second = results(pool.run("plans_together"))
    assert first == second


def test_what_is_shared_is_laid_out_by_the_first_process(pool: Pool) -> None:
    first, second = results(pool.run("plans_together_in_a_hurry"))
    assert first == second


def test_another_program_beside_one_that_is_alike_is_told_in_every_process(
    pool: Pool,
) -> None:
    for text in errors(pool.run("together_with_another")):
        assert "process 1 traced another program" in text
        assert "tanh" in text and "sin" in text


def test_two_processes_train_like_one(pool: Pool) -> None:
    for losses in results(pool.run("trains")):
        np.testing.assert_allclose(losses, losses_here(), rtol=1e-5)


def test_one_state_is_made_fed_and_evaluated_by_two_processes(pool: Pool) -> None:
    first, second = results(pool.run("one_state"))
    assert first == second
    losses, fed, _ = first
    np.testing.assert_allclose(losses[:5], losses_here(), rtol=1e-4)
    assert fed == [[32, 16]] * 2
    np.testing.assert_allclose(losses[5], losses[6], rtol=1e-4)
    assert losses[5] < losses[4]


def test_another_program_is_told_in_every_process(pool: Pool) -> None:
    found = pool.run("another")
    for text in errors(found):
        assert "process 1 traced another program of `step` than process 0" in text
        assert "tanh %3 in process 0, sin %3 in process 1" in text
        assert "worker.py:" in text and "f32[64,16]" in text
    assert all(one["seconds"] < 20 for one in found)


def test_another_wish_is_told_in_every_process(pool: Pool) -> None:
    for text in errors(pool.run("asks_for_something_else")):
        assert "what is asked for" in text
        assert "'best'" in text and "'fast'" in text


def test_what_the_planner_raises_is_raised_in_every_process(pool: Pool) -> None:
    one, other = errors(pool.run("impossible"), "InfeasiblePlanError")
    assert one == other


def test_an_error_while_tracing_does_not_keep_the_others_waiting(pool: Pool) -> None:
    first, second = pool.run("raises_while_tracing")
    assert second["error"] == "ValueError"
    (text,) = errors([first])
    assert "process 1 failed" in text and "ValueError: only here" in text
    assert first["seconds"] < 20


def test_a_slow_process_is_waited_for(pool: Pool) -> None:
    first, second = results(pool.run("comes_late", RHINO_LOST_AFTER_S="1.5"))
    assert first == second


def test_a_process_that_never_comes_is_named(pool: Pool) -> None:
    first, second = pool.run("plans_alone", RHINO_ARRIVE_WITHIN_S="2")
    assert results([second]) == [None]
    (text,) = errors([first])
    assert "process 1 has not come to the planning" in text and "RHINO_ARRIVE" in text


def test_a_mesh_of_one_process_waits_for_nobody(pool: Pool) -> None:
    (loss, axes), _ = results(pool.run("local_mesh", RHINO_ARRIVE_WITHIN_S="1"))
    assert loss == pytest.approx(losses_here()[0], rel=1e-5)
    assert axes == [["a", 64]]


def test_plans_that_were_loaded_are_compared(pool: Pool) -> None:
    for text in errors(pool.run("kept_plans_differ")):
        assert "process 1 has another plan of `train_step` than process 0" in text
        assert "params['w1']" in text


# It ends the processes: all tests that need two come before it. In the short run a
# process is killed in test_staged.py.
@pytest.mark.slow
def test_a_process_that_is_killed_before_it_plans_is_named(pool: Pool) -> None:
    (first,) = pool.run("killed_before_planning", of=[0], RHINO_LOST_AFTER_S="3")
    (text,) = errors([first])
    assert "process 1 is lost" in text and "RHINO_LOST_AFTER_S" in text
    assert first["seconds"] < 20


@pytest.mark.slow
def test_a_process_that_is_killed_while_it_plans_is_named(pool: Pool) -> None:
    found = pool.run("killed_while_planning", 3, of=[2], RHINO_LOST_AFTER_S="3")
    (text,) = errors(found)
    assert "process 1 is lost" in text and "to plan" in text
    assert found[0]["seconds"] < 20


@pytest.mark.slow
def test_four_processes_train_like_one(pool: Pool) -> None:
    for losses in results(pool.run("trains", 4)):
        np.testing.assert_allclose(losses, losses_here(), rtol=1e-5)


@pytest.mark.slow
def test_four_processes_have_one_plan(pool: Pool) -> None:
    first, *others = results(pool.run("plans", 4))
    assert all(other == first for other in others)


@pytest.mark.slow
def test_nobody_waits_for_a_process_0_that_was_killed(pool: Pool) -> None:
    """It holds the coordination service: where it is killed, JAX lets nobody live. What
    a process writes of it before that, if it is quick enough, says the same as JAX."""
    started = time.monotonic()
    found = pool.run("first_is_killed", of=[1])
    assert time.monotonic() - started < 60
    said = found[0]["stderr"] + found[0].get("text", "")
    assert found[0]["rc"] != 0 or found[0].get("error") == "ProcessError"
    assert "process 0 is lost" in said or "coordination service" in said


@pytest.mark.slow
def test_a_process_0_that_is_stopped_is_named(pool: Pool) -> None:
    """JAX's own calls to the coordination service, which it holds, never end then."""
    found = pool.run("first_is_stopped", of=[1], RHINO_LOST_AFTER_S="3")
    (text,) = errors(found)
    assert "process 0 is lost" in text and "no answer for 3 s" in text
    assert found[0]["seconds"] < 20
