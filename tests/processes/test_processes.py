"""Several processes of this machine, joined by `jax.distributed`, plan alike."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from typing import Any

import jax
import numpy as np
import pytest

from tests.processes.worker import arrays, train_step


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def together(
    scenario: str,
    count: int = 2,
    *,
    of: list[int] | None = None,
    worker: str = "worker",
    devices: int = 2,
    **settings: str,
) -> list[dict[str, Any]]:
    """What processes found that ran a scenario, in order.

    Args:
      scenario: name of a function there.
      count: number of processes.
      of: those whose findings count; the others are ended when these are done.
      worker: the module of the scenario, beside this one.
      devices: of every process.
      settings: of the environment.
    """
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"
        " --xla_backend_optimization_level=0",
        **settings,
    }
    port = str(free_port())
    command = [sys.executable, "-m", f"tests.processes.{worker}", scenario]
    running = [
        subprocess.Popen(
            [*command, str(i), str(count), port],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for i in range(count)
    ]  # fmt: skip
    found = []
    try:
        for i in range(count) if of is None else of:
            out, err = running[i].communicate(timeout=300)
            lines = [x for x in out.splitlines() if x.startswith("FOUND ")]
            said = json.loads(lines[0].removeprefix("FOUND ")) if lines else {}
            found.append({**said, "rc": running[i].returncode, "stderr": err})
    finally:
        for process in running:
            process.kill()
            process.wait()
    return found


def results(found: list[dict[str, Any]]) -> list[Any]:
    for one in found:
        assert "result" in one, one.get("text") or one["stderr"][-2000:]
    return [one["result"] for one in found]


def errors(found: list[dict[str, Any]], kind: str = "ProcessError") -> list[str]:
    for one in found:
        assert one.get("error") == kind, one.get("text") or one["stderr"][-2000:]
    return [one["text"] for one in found]


def losses_here() -> list[float]:
    params, x, y = arrays()
    losses = []
    for _ in range(5):
        params, loss = jax.jit(train_step)(params, x, y)
        losses.append(float(loss))
    return losses


def test_one_plan_although_one_process_is_busy_and_the_clock_is_short() -> None:
    first, second = results(together("plans"))
    assert first == second


def test_only_the_first_process_asks_the_compiler() -> None:
    first, second = results(together("refines"))
    assert first == second
    assert first[0] == 2


def test_each_process_checks_what_it_holds() -> None:
    for ok, count, left in results(together("checks")):
        assert ok and count == 3
        assert all("in other processes" in why for why in left.values())


def test_plans_that_share_state_are_the_same_too() -> None:
    first, second = results(together("plans_together"))
    assert first == second


def test_what_is_shared_is_laid_out_by_the_first_process() -> None:
    first, second = results(together("plans_together_in_a_hurry"))
    assert first == second


def test_another_program_beside_one_that_is_alike_is_told_in_every_process() -> None:
    for text in errors(together("together_with_another")):
        assert "process 1 traced another program" in text
        assert "tanh" in text and "sin" in text


def test_two_processes_train_like_one() -> None:
    for losses in results(together("trains")):
        np.testing.assert_allclose(losses, losses_here(), rtol=1e-5)


def test_one_state_is_made_fed_and_evaluated_by_two_processes() -> None:
    first, second = results(together("one_state"))
    assert first == second
    losses, fed, _ = first
    np.testing.assert_allclose(losses[:5], losses_here(), rtol=1e-4)
    assert fed == [[32, 16]] * 2
    np.testing.assert_allclose(losses[5], losses[6], rtol=1e-4)
    assert losses[5] < losses[4]


def test_another_program_is_told_in_every_process() -> None:
    found = together("another")
    for text in errors(found):
        assert "process 1 traced another program of `step` than process 0" in text
        assert "tanh %3 in process 0, sin %3 in process 1" in text
        assert "worker.py:" in text and "f32[64,16]" in text
    assert all(one["seconds"] < 20 for one in found)


def test_another_wish_is_told_in_every_process() -> None:
    for text in errors(together("asks_for_something_else")):
        assert "what is asked for" in text
        assert "'best'" in text and "'fast'" in text


def test_what_the_planner_raises_is_raised_in_every_process() -> None:
    one, other = errors(together("impossible"), "InfeasiblePlanError")
    assert one == other


def test_an_error_while_tracing_does_not_keep_the_others_waiting() -> None:
    first, second = together("raises_while_tracing")
    assert second["error"] == "ValueError"
    (text,) = errors([first])
    assert "process 1 failed" in text and "ValueError: only here" in text
    assert first["seconds"] < 20


def test_a_process_that_is_killed_before_it_plans_is_named() -> None:
    (first,) = together("killed_before_planning", of=[0], RHINO_LOST_AFTER_S="3")
    (text,) = errors([first])
    assert "process 1 is lost" in text and "RHINO_LOST_AFTER_S" in text
    assert first["seconds"] < 20


def test_a_process_that_is_killed_while_it_plans_is_named() -> None:
    found = together("killed_while_planning", 3, of=[2], RHINO_LOST_AFTER_S="3")
    (text,) = errors(found)
    assert "process 1 is lost" in text and "to plan" in text
    assert found[0]["seconds"] < 20


def test_a_slow_process_is_waited_for() -> None:
    first, second = results(together("comes_late", RHINO_LOST_AFTER_S="2.5"))
    assert first == second


def test_a_process_that_never_comes_is_named() -> None:
    found = together("plans_alone", of=[0], RHINO_ARRIVE_WITHIN_S="2")
    (text,) = errors(found)
    assert "process 1 has not come to plan" in text and "RHINO_ARRIVE" in text


def test_a_mesh_of_one_process_waits_for_nobody() -> None:
    (loss, axes), _ = results(together("local_mesh", RHINO_ARRIVE_WITHIN_S="1"))
    assert loss == pytest.approx(losses_here()[0], rel=1e-5)
    assert axes == [["a", 64]]


def test_plans_that_were_loaded_are_compared() -> None:
    for text in errors(together("kept_plans_differ")):
        assert "process 1 has another plan of `train_step` than process 0" in text
        assert "params['w1']" in text


@pytest.mark.slow
def test_four_processes_train_like_one() -> None:
    for losses in results(together("trains", 4)):
        np.testing.assert_allclose(losses, losses_here(), rtol=1e-5)


@pytest.mark.slow
def test_four_processes_have_one_plan() -> None:
    first, *others = results(together("plans", 4))
    assert all(other == first for other in others)


@pytest.mark.slow
def test_nobody_waits_for_a_process_0_that_was_killed() -> None:
    """It holds the coordination service: where it is killed, JAX lets nobody live. What
    a process writes of it before that, if it is quick enough, says the same as JAX."""
    started = time.monotonic()
    found = together("first_is_killed", of=[1])
    assert time.monotonic() - started < 60
    said = found[0]["stderr"] + found[0].get("text", "")
    assert found[0]["rc"] != 0 or found[0].get("error") == "ProcessError"
    assert "process 0 is lost" in said or "coordination service" in said


@pytest.mark.slow
def test_a_process_0_that_is_stopped_is_named() -> None:
    """JAX's own calls to the coordination service, which it holds, never end then."""
    found = together("first_is_stopped", of=[1], RHINO_LOST_AFTER_S="3")
    (text,) = errors(found)
    assert "process 0 is lost" in text and "no answer for 3 s" in text
    assert found[0]["seconds"] < 20
