"""What was done to a program before it was planned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Transform:
    """A pass from program to program that found something to change.

    Results are those of the program as its user wrote it.

    Attributes:
      name: as "dead code".
      ops_before, ops_after: ops of the program, regions included.
      choice: of a pass that was chosen among others, what it needs to be done again
        (see `rhino_jax.transform`); empty where it follows from the program.
    """

    name: str
    ops_before: int
    ops_after: int
    choice: str = ""
