"""Children import this package wherever they start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rhino_jax.utils.worker import (
    TaskFailed,
    Worker,
    WorkerEnded,
    WorkerTimeout,
    environment_of_worker,
)
from rhino_jax.verify.hlo import module


def test_children_find_the_package() -> None:
    first, *_ = environment_of_worker()["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "rhino_jax" / "utils" / "worker.py").is_file()


def test_lines_that_apply_plans_are_of_a_folder_that_is_there() -> None:
    assert (Path(module._RUNTIME) / "interpret.py").is_file()


def test_an_error_of_a_task_is_told_and_the_next_is_answered() -> None:
    with Worker("math:sqrt") as worker:
        with pytest.raises(TaskFailed, match="ValueError: .*") as failed:
            worker.answer(-1)
        assert "Traceback" in failed.value.trace
        assert worker.answer(4) == 2


def test_a_worker_that_is_not_in_time_cannot_answer_any_more() -> None:
    with Worker("time:sleep") as worker:
        assert worker.answer(0) is None
        with pytest.raises(WorkerTimeout):
            worker.answer(60, timeout_s=0.2)
        assert not worker.is_running


def test_a_dead_worker_tells_what_was_fatal() -> None:
    lines = "F0000 partitioner.cc: Check failed: why\n" + "E0000 handler\n" * 9
    code = f"import os; os.write(2, {lines.encode()!r}); os.abort()"
    with Worker("builtins:exec") as worker, pytest.raises(WorkerEnded) as ended:
        worker.answer(code)
    assert "killed by signal 6; F0000 partitioner.cc: Check failed: why; E0000" in str(
        ended.value
    )
