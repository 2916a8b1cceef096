"""Options of the micro-batch pass, and their JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rhino_jax.passes.program_pass import read_choice
from rhino_jax.utils.codec import to_json


KEPT = 1.0
"""Default of `MicrobatchChoice.kept`. Plans made before 2026-11-25 used 0 and do not
record it."""


@dataclass(frozen=True, slots=True)
class MicrobatchChoice:
    """Options of the micro-batch pass.

    Attributes:
      count: number of micro-batches.
      accumulate: dtype in which sums of narrower floats are accumulated.
      most_loops: maximum number of loops over micro-batches; None: any number.
      most_growth: maximum size of all loops together, in ops and in FLOPs, relative to
        the program's: an op runs again in every loop that needs what it computes. Three
        loops are always allowed.
      most_meeting: maximum share of the program's FLOPs that may run on the whole
        batch, outside of loops.
      cheap: functions of the data of up to this many times the bytes of its largest
        array may be computed on the whole batch if that saves a loop (contractions
        never).
      kept: functions of per-row results of earlier loops may be, too, if those results
        take up to this many times those bytes: the maximum of per-row losses, say.
      per_microbatch: places, as `ir.places.at_place` reads them, whose ops take sums
        over the batch from each micro-batch alone: the only option that changes
        results.
      least: minimum number of micro-batches: a step in stages may run as one.
    """

    count: int
    accumulate: str = "float32"
    most_loops: int | None = None
    most_growth: float = 3.0
    most_meeting: float = 0.1
    cheap: float = 4.0
    kept: float = KEPT
    per_microbatch: tuple[str, ...] = ()
    least: int = 2

    @classmethod
    def read(cls, text: str) -> MicrobatchChoice:
        """Parse a choice from JSON, as `{"count": 4}`.

        Raises:
          MicrobatchError: the text is no valid choice.
        """
        return read_choice(cls, text, "the choice of micro-batches")

    def text(self) -> str:
        """Return the choice as JSON, which `read` parses."""
        return json.dumps(to_json(self), sort_keys=True)
