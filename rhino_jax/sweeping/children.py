"""Processes that search meshes, each one configuration after the other.

They are given and give plain data, so that neither the user's function nor their script
is imported there: a script needs no `if __name__ == "__main__"`, a notebook nothing.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from rhino_jax.children import environment_of_child
from rhino_jax.sweeping.answers import Answer, Task


LAST_LINES = 5
"""Of what a process wrote before it ended, in the error."""


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer, with what was asked under which name.

    Attributes:
      key: as it was given to `ask`.
      answer: what came of it; None where the process ended before.
      ended: how, then.
    """

    key: int
    answer: Answer | None
    ended: str = ""


class Children:
    """Processes that search. To be used in a `with`, which ends them.

    Args:
      count: how many.
    """

    def __init__(self, count: int) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answered] = queue.SimpleQueue()
        self._open = 0
        self._children = [_Child(self._tasks, self._answers) for _ in range(count)]

    def __enter__(self) -> Children:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.end()

    def ask(self, key: int, task: Task) -> None:
        """Have it done by whichever process is free first."""
        self._open += 1
        self._tasks.put((key, task))

    def answers(self, *, all_of_them: bool) -> Iterator[Answered]:
        """What was answered so far; or all, which waits for them."""
        while self._open:
            try:
                found = self._answers.get(block=all_of_them)
            except queue.Empty:
                return
            self._open -= 1
            yield found


_Tasks = queue.SimpleQueue[tuple[int, Task] | None]


class _Child:
    """One process, and the thread that talks to it."""

    def __init__(self, tasks: _Tasks, answers: queue.SimpleQueue[Answered]) -> None:
        self._tasks, self._answers = tasks, answers
        self._said = tempfile.TemporaryFile()
        # A session of its own: the terminal's interrupts are this process's to handle.
        self._process = subprocess.Popen(
            (sys.executable, "-m", "rhino_jax.sweeping.child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=environment_of_child(),
            start_new_session=True,
        )
        self._thread = threading.Thread(
            target=self._talk, name="rhino_jax sweep", daemon=True
        )
        self._thread.start()

    def kill(self) -> None:
        """End it, whatever it does; its thread takes no more tasks."""
        self._process.kill()
        self._tasks.put(None)

    def end(self) -> None:
        """Wait for the end of both."""
        self._process.wait()
        self._thread.join()
        self._said.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _talk(self) -> None:
        known: set[tuple[type, int]] = set()
        while (taken := self._tasks.get()) is not None:
            key, (asked, of) = taken
            number = type(asked), asked.number
            is_known = number in known
            known.add(number)
            try:
                answer = self._answer((asked, None if is_known else of))
            except Exception as error:  # or whoever waits would wait for ever
                self._answers.put(Answered(key, None, self._ended(error)))
                return
            self._answers.put(Answered(key, answer))

    def _answer(self, task: Task) -> Answer:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(pickle.dumps(task))
        process.stdin.flush()
        answer = pickle.load(process.stdout)
        assert isinstance(answer, Answer)
        return answer

    def _ended(self, error: Exception) -> str:
        """How it ended, and what it wrote last."""
        if not isinstance(error, EOFError | OSError):
            return f"{type(error).__name__}: {error}"
        code = self._process.wait()
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
        return "; ".join([how, *lines[-LAST_LINES:]])
