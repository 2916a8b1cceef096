"""Python processes that this one starts to plan or compile."""

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
"""Lines in an error, of what a process wrote before it ended."""


class ChildEnded(Exception):
    """A process that ended before it answered: how, and its last words."""


class Child:
    """A process that answers pickled tasks, one after the other.

    It is given and gives plain data: neither the user's function nor their script is
    imported there.

    Args:
      module: run as `python -m`; calls `answer_tasks`.

    Attributes:
      kept: a file that the process is given as its argument, to write to what it holds
        back from standard error (`utils.stderr.keep_captured`).
    """

    def __init__(self, module: str) -> None:
        self._said = tempfile.TemporaryFile()
        self._folder = tempfile.TemporaryDirectory()
        self.kept = Path(self._folder.name) / "stderr"
        # A session of its own: the terminal's interrupts are this process's to handle.
        self._process = subprocess.Popen(
            (sys.executable, "-m", module, str(self.kept)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment_of_child(),
            start_new_session=True,
        )

    def answer(self, task: Any) -> Any:
        """Wait for the answer to a task.

        Raises:
          ChildEnded: the process ended first.
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
        """End it, whatever it does."""
        self._process.kill()

    def close(self) -> None:
        """Wait for its end."""
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
    """Answer a parent's tasks until its end, as the child."""
    tasks = sys.stdin.buffer
    # What is printed meanwhile must not be taken for an answer.
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
    """This process's, such that the child finds this package, and starts on CPU.

    Targets are planned and compiled for, not run on: devices stay with this process.
    """
    found = dict(os.environ)
    home = str(Path(__file__).resolve().parents[1])
    paths = [home, *filter(None, [found.get("PYTHONPATH")])]
    found["PYTHONPATH"] = os.pathsep.join(paths)
    found["JAX_PLATFORMS"] = "cpu"
    return found
