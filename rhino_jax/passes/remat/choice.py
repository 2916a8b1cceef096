"""The remat choice as text: a plan stores it, and the runtime parses it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rhino_jax.utils.codec import from_json, to_json


@dataclass(frozen=True, slots=True)
class RematChoice:
    """Values to recompute, save or offload. Ids are of the program before the pass.

    Attributes:
      recompute: values that the backward pass recomputes; for a stacked residual, the
        loop's result. Values that these depend on are recomputed too, down to values
        that the backward pass reads anyway.
      keep: values that are saved as residuals though the backward pass does not read
        them.
      offload: residuals that are moved to host memory until the backward pass.
      first: (op id of a forward loop, count): the first `count` slices of its stacks
        are saved as in the baseline.
      ordered: no value is recomputed before the backward matmuls ahead of it are done,
        those of weight gradients included. XLA:GPU otherwise runs these at the end of
        the step, and their operands stay live until then: for a GPT of 6 layers on 8
        H100 (0.10.2) temporaries are 67 MiB in the baseline, 69 with `jax.checkpoint`
        or unordered, 33 ordered. Gradient reductions then overlap with one layer at
        most.
    """

    recompute: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()
    offload: tuple[int, ...] = ()
    first: tuple[tuple[int, int], ...] = ()
    ordered: bool = False

    def __str__(self) -> str:
        """Return the choice as JSON; empty where nothing is chosen."""
        said = {key: value for key, value in to_json(self).items() if value}
        return json.dumps(said) if said else ""

    @classmethod
    def parse(cls, text: str) -> RematChoice:
        """Parse a choice from the text that `str` returns."""
        return from_json(cls, json.loads(text or "{}"))
