from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from rhino_jax.bench.process import JobProcess, Outcome
from rhino_jax.utils.worker import WorkerStopped


def run(code: str, folder: Path, timeout_s: float = 60.0) -> Outcome:
    with closing(JobProcess("builtins:exec")) as process:
        return process.run(code, folder / "log", timeout_s)


def test_a_process_that_ends_well(tmp_path: Path) -> None:
    outcome = run("print('hello')", tmp_path)
    assert (outcome.status, outcome.error) == ("ok", "")
    assert (tmp_path / "log").read_text() == "hello\n"


def test_a_process_that_raises_is_told_without_its_traceback(tmp_path: Path) -> None:
    outcome = run("def f():\n  raise ValueError('bad\\nsecond line')\nf()", tmp_path)
    assert outcome.status == "error"
    assert outcome.error == "ValueError: bad\nsecond line"


def test_a_process_that_ends_without_a_word(tmp_path: Path) -> None:
    outcome = run("import sys; print('last words'); sys.exit(7)", tmp_path)
    assert (outcome.status, outcome.error) == ("error", "last words")


def test_a_process_that_is_killed(tmp_path: Path) -> None:
    outcome = run("import os; os.kill(os.getpid(), 9)", tmp_path)
    assert outcome.status == "died"
    assert "SIGKILL" in outcome.error and "memory" in outcome.error
    aborted = run("import os; os.abort()", tmp_path)
    assert aborted.status == "died" and "SIGABRT" in aborted.error


def test_a_process_does_jobs_until_it_ends(tmp_path: Path) -> None:
    with closing(JobProcess("builtins:eval")) as process:

        def value(code: str, log: str) -> Outcome:
            return process.run(f"__import__('os').{code}", tmp_path / log, 60.0)

        first = value("getpid()", "a")
        assert value("getpid()", "b") == first and not (tmp_path / "b").exists()
        assert value("abort()", "c").status == "died"
        again = value("getpid()", "d")
        assert again.status == "ok" and again.values != first.values
        assert (tmp_path / "d").exists()


def test_a_process_that_hangs_is_killed(tmp_path: Path) -> None:
    outcome = run("import time\ntime.sleep(600)", tmp_path, timeout_s=0.1)
    assert outcome.status == "timeout"


@pytest.fixture
def _listens_to_interrupts() -> Iterator[None]:
    """What is started in the background of a shell ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_listens_to_interrupts")
def test_an_interrupt_takes_the_process_along(tmp_path: Path) -> None:
    log = tmp_path / "log"

    def interrupt() -> None:
        _wait_until_written(log)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(
            "import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)", tmp_path
        )
    _wait_until_gone(int(log.read_text()))


def test_a_process_is_stopped_with_its_children(tmp_path: Path) -> None:
    stop, log = threading.Event(), tmp_path / "log"
    code = (
        "import subprocess, sys, time\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(sleep)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)"
    )

    def stop_it() -> None:
        _wait_until_written(log)
        stop.set()

    threading.Thread(target=stop_it, daemon=True).start()
    with pytest.raises(WorkerStopped):
        with closing(JobProcess("builtins:exec")) as process:
            process.run(code, log, 60.0, stop)
    _wait_until_gone(int(log.read_text()))


def _wait_until_written(log: Path) -> None:
    while not (log.exists() and log.read_text().strip()):
        time.sleep(0.05)


def _wait_until_gone(pid: int) -> None:
    for _ in range(200):
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return
        if stat.rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


def test_what_a_compiler_said_before_it_ended_the_process_is_told(
    tmp_path: Path,
) -> None:
    code = (
        "import os\n"
        "from rhino_jax.utils.stderr import captured_stderr\n"
        "with captured_stderr():\n"
        "    os.write(2, b'F0101 fatal: no such kernel')\n"
        "    os._exit(1)"
    )
    outcome = run(code, tmp_path)
    assert (outcome.status, outcome.error) == ("error", "F0101 fatal: no such kernel")
