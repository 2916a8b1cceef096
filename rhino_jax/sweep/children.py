"""Pool of processes that search meshes, each one configuration at a time.

They receive and return plain data, so that neither the user's function nor their script
is imported there: a script needs no `if __name__ == "__main__"`, a notebook nothing.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

from rhino_jax.sweep.answers import SearchOutcome, Task
from rhino_jax.utils.worker import TaskFailed, Worker, WorkerEnded


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of a task, or why there is none.

    Attributes:
      key: key of the task, as passed to `ask`.
      answer: the result.
      error: why there is none: the process ended, or the search raised.
    """

    key: int
    answer: SearchOutcome | None
    error: TaskFailed | WorkerEnded | None = None


class Children:
    """Pool of processes that search; a context manager, whose exit ends them.

    Args:
      count: number of processes.
    """

    def __init__(self, count: int) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answered] = queue.SimpleQueue()
        self._open = 0
        self._children = [_Searcher(self._tasks, self._answers) for _ in range(count)]

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
        """Submit a task to the first free process."""
        self._open += 1
        self._tasks.put((key, task))

    def answers(self, *, all_of_them: bool) -> Iterator[Answered]:
        """Yield the results that arrived; with `all_of_them`, wait for all."""
        while self._open:
            try:
                found = self._answers.get(block=all_of_them)
            except queue.Empty:
                return
            self._open -= 1
            yield found


_Tasks = queue.SimpleQueue[tuple[int, Task] | None]


class _Searcher:
    """One process, and the thread that communicates with it."""

    def __init__(self, tasks: _Tasks, answers: queue.SimpleQueue[Answered]) -> None:
        self._tasks, self._answers = tasks, answers
        self._child = Worker("rhino_jax.sweep.answers:answer_task")
        self._thread = threading.Thread(
            target=self._talk, name="rhino_jax sweep", daemon=True
        )
        self._thread.start()

    def kill(self) -> None:
        """Kill the process; its thread takes no more tasks."""
        self._child.kill()
        self._tasks.put(None)

    def end(self) -> None:
        """Wait for the end of the thread and the process."""
        self._thread.join()
        self._child.close()

    def _talk(self) -> None:
        known: set[tuple[type, int]] = set()
        while (taken := self._tasks.get()) is not None:
            key, (asked, of) = taken
            number = type(asked), asked.number
            is_known = number in known
            known.add(number)
            try:
                answer = self._child.answer((asked, None if is_known else of))
            except (TaskFailed, WorkerEnded) as error:
                self._answers.put(Answered(key, None, error))
                return
            except Exception as error:  # else the receiver would wait forever
                failed = TaskFailed(type(error).__name__, str(error), "")
                self._answers.put(Answered(key, None, failed))
                return
            self._answers.put(Answered(key, answer))
