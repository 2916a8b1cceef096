"""What searches meshes in a process of its own.

    python -m rhino_jax.sweeping.child

Reads pickled tasks from standard input, and writes an `Answer` to each. Programs and
answers are plain data: nothing of the user's code is imported.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from typing import BinaryIO

from rhino_jax.sweeping.answers import Task, answer
from rhino_jax.sweeping.meshes import Meshes


def main() -> None:
    """Answer until standard input ends, as it does with the process that asks."""
    tasks = sys.stdin.buffer
    # What is printed meanwhile must not be taken for an answer.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    meshes = Meshes()
    for asked, program in _read(tasks):
        if program is not None:
            meshes.programs[asked.number] = program
        pickle.dump(answer(meshes, asked), answers)
        answers.flush()


def _read(tasks: BinaryIO) -> Iterator[Task]:
    while True:
        try:
            yield pickle.load(tasks)
        except EOFError:
            return


if __name__ == "__main__":
    main()
