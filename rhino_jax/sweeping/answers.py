"""What processes that search are asked, and what they answer."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field

from rhino_jax.errors import RhinoError
from rhino_jax.ir.program import Program
from rhino_jax.sweeping.meshes import Asked, Best, Meshes


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a search.

    Attributes:
      best: budget → the best choice.
      refused: why there is none, for the user.
      failed: what was raised, and where, of an error that no user can mend.
    """

    best: Mapping[int, Best] = field(default_factory=dict)
    refused: str = ""
    failed: str = ""


Task = tuple[Asked, Program | None]
"""What is asked, with its program the first time that a process is asked about it."""


def answer(meshes: Meshes, asked: Asked) -> Answer:
    """Search, and say what came of it."""
    try:
        return Answer(meshes.best(asked))
    except RhinoError as error:
        return Answer(refused=error.what)
    except Exception:
        return Answer(failed=traceback.format_exc())
