"""How a batch is to be cut, as text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from rhino_jax.errors import MicrobatchError, check_keys


KEPT = 1.0
"""See `MicrobatchChoice.kept`. Plans of before 2026-11-25 have 0, and do not say so."""


@dataclass(frozen=True, slots=True)
class MicrobatchChoice:
    """Attributes:
    count: pieces.
    accumulate: type in which sums of narrower floats are kept over the pieces.
    most_loops: a batch that needs more loops than these is not cut.
    most_meeting: nor is one of whose FLOPs more than this share would run on all of it
      at once, outside of loops.
    cheap: functions of the data of up to this many times the bytes of its largest
      array may be made in full, if that saves a loop (contractions never).
    kept: so may functions of what loops before leave of the rows, if that is up to this
      many times those bytes: the losses of the rows, say, for their maximum.
    per_microbatch: places, as `ir.places.at_place` reads them, whose ops take sums over
      the batch from each piece's own rows: the only thing that changes results.
    least: pieces: a step in stages may run as one.
    """

    count: int
    accumulate: str = "float32"
    most_loops: int = 3
    most_meeting: float = 0.1
    cheap: float = 4.0
    kept: float = KEPT
    per_microbatch: tuple[str, ...] = ()
    least: int = 2

    @classmethod
    def read(cls, text: str) -> MicrobatchChoice:
        """From JSON, as `{"count": 4}`.

        Raises:
          MicrobatchError: it is no such choice.
        """
        where = f"choice {text}"
        try:
            table = json.loads(text)
        except ValueError:
            table = None
        if not isinstance(table, dict) or not isinstance(table.get("count"), int):
            raise MicrobatchError(
                "the choice of micro-batches is no table with a `count`.",
                where=where,
                fix='write {"count": 4}.',
            )
        known = cls.__dataclass_fields__
        check_keys(MicrobatchError, "the choice of micro-batches", table, known, where)
        places = tuple(table.pop("per_microbatch", ()))
        return cls(**table, per_microbatch=places)

    def text(self) -> str:
        """The JSON that `read` reads."""
        return json.dumps(asdict(self), sort_keys=True)
