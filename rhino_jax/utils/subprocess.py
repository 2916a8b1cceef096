"""Start child processes of Python to plan or compile."""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


LAST_LINES = 5
"""Number of lines of a dead child's output that an error quotes."""


class ChildEnded(Exception):
    """A child process ended before it answered: exit status and last output."""


class Child:
    """A child process that answers pickled tasks, one after the other.

    Tasks and answers are plain data: neither the user's function nor their script is
    imported in the child.

    Args:
      module: module to run as `python -m`; it calls `answer_tasks`.

    Attributes:
      kept: file that the child receives as its argument, for the standard error that it
        captures (`utils.stderr.keep_captured`).
    """

    def __init__(self, module: str) -> None:
        self._said = tempfile.TemporaryFile()
        self._folder = tempfile.TemporaryDirectory()
        self.kept = Path(self._folder.name) / "stderr"
        # A session of its own: this process handles the terminal's interrupts.
        self._process = subprocess.Popen(
            (sys.executable, "-m", module, str(self.kept)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment_of_child(),
            start_new_session=True,
        )

    def answer(self, task: Any) -> Any:
        """Send a task, and wait for its answer.

        Raises:
          ChildEnded: the child process ended first.
        """
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(pickle.dumps(task))
            process.stdin.flush()
            return pickle.load(process.stdout)
        except (EOFError, OSError):
            raise ChildEnded(self._last_words()) from None

    def kill(self) -> None:
        """Kill the child process."""
        self._process.kill()

    def close(self) -> None:
        """Wait until the child process has ended, and close its files."""
        self._process.wait()
        self._said.close()
        self._folder.cleanup()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._said.seek(0)
        said = self._said.read()
        if self.kept.exists():
            said += b"\n" + self.kept.read_bytes()
        lines = [
            line.strip()[:300]
            for line in said.decode(errors="replace").splitlines()
            if line.strip() and not line.lstrip().startswith("@")  # a C++ stack
        ]
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return "; ".join([how, *lines[-LAST_LINES:]])


def answer_tasks(answer: Callable[[Any], Any]) -> None:
    """Answer the parent's tasks until it ends; runs in the child."""
    tasks = sys.stdin.buffer
    # Printed output must not be mistaken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            task = pickle.load(tasks)
        except EOFError:
            return
        pickle.dump(answer(task), answers)
        answers.flush()


def environment_of_child() -> dict[str, str]:
    """Return the environment of a child: it finds this package, and starts JAX on CPU.

    A child plans and compiles for targets, and runs nothing: devices stay with this
    process.
    """
    found = dict(os.environ)
    home = str(Path(__file__).resolve().parents[2])
    paths = [home, *filter(None, [found.get("PYTHONPATH")])]
    found["PYTHONPATH"] = os.pathsep.join(paths)
    found["JAX_PLATFORMS"] = "cpu"
    return found
