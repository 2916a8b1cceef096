"""What searches and plans in a process of its own.

    python -m rhino_jax.sweeping.child

Reads pickled tasks from standard input, and writes an `Answer` to each. Programs and
answers are plain data: nothing of the user's code is imported.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO

from rhino_jax.sweeping.answers import Answering, Task


def main() -> None:
    """Answer until standard input ends, as it does with the process that asks."""
    tasks = sys.stdin.buffer
    # What is printed meanwhile must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answering, before_s = Answering(), 0.0
    for task in _read(tasks):
        found, now_s = answering.answer(task), time.process_time()
        pickle.dump(replace(found, cpu_s=now_s - before_s), answers)
        answers.flush()
        before_s = now_s


def _read(tasks: BinaryIO) -> Iterator[Task]:
    while True:
        try:
            yield pickle.load(tasks)
        except EOFError:
            return


if __name__ == "__main__":
    main()
