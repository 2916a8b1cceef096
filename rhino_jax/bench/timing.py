"""Seconds of functions that run on devices, and of steps with their state fed back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from rhino_jax.models.workload import Workload


def fed_back(
    run: Callable[..., Any], workload: Workload, args: Sequence[Any]
) -> Callable[[], Any]:
    """Return a function that starts a step, which takes the state of the last one.

    Args:
      run: the workload's step, as it is compiled.
      workload: the workload.
      args: arguments of the first step.
    """
    state = list(args)

    def step() -> Any:
        result = run(*state)
        for i in workload.donate_argnums:
            state[i] = result[i]
        return result

    return step


def mean_s(run: Callable[[], Any], count: int = 1) -> float:
    """Return the mean seconds of calls one after the other, the last one awaited."""
    started = time.perf_counter()
    for _ in range(count):
        result = run()
    jax.block_until_ready(result)
    return (time.perf_counter() - started) / count
