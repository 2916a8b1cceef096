"""What processes that search are asked, and what they answer."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rhino_jax.errors import RhinoError
from rhino_jax.ir.program import Program
from rhino_jax.sweeping.meshes import Asked, Best, Meshes
from rhino_jax.sweeping.point import why_not
from rhino_jax.sweeping.work import Counts


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a search.

    Attributes:
      best: budget → the best choice.
      refused: why there is none, for the user.
      failed: what was raised, and where, of an error that no user can mend.
      counts: what the search took.
      cpu_s: since the answer before, or since the process began.
    """

    best: Mapping[int, Best] = field(default_factory=dict)
    refused: str = ""
    failed: str = ""
    counts: Counts = field(default_factory=Counts)
    cpu_s: float = 0.0


Task = tuple[Asked, Program | None]
"""What is asked, with its program the first time that a process is asked about it."""


def answer(meshes: Meshes, asked: Asked) -> Answer:
    """Search, and say what came of it."""
    meshes.counts = Counts()
    try:
        found = Answer(meshes.best(asked))
    except RhinoError as error:
        found = Answer(refused=why_not(error))
    except Exception:
        found = Answer(failed=traceback.format_exc())
    return replace(found, counts=meshes.counts)
