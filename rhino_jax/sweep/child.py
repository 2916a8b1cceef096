"""Process that searches and plans for a sweep.

    python -m rhino_jax.sweep.child

It answers each task with a `SearchOutcome`. Programs and results are plain data:
nothing of the user's code is imported.
"""

from __future__ import annotations

import time
from dataclasses import replace

from rhino_jax.sweep.answers import Answering, SearchOutcome, Task
from rhino_jax.utils.subprocess import answer_tasks


def main() -> None:
    """Answer tasks until the parent process ends."""
    answering, before_s = Answering(), 0.0

    def answer(task: Task) -> SearchOutcome:
        nonlocal before_s
        found, now_s = answering.answer(task), time.process_time()
        taken_s, before_s = now_s - before_s, now_s
        return replace(found, cpu_s=taken_s)

    answer_tasks(answer)


if __name__ == "__main__":
    main()
