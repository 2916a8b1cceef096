"""What was chosen, as text: a plan keeps it, and whoever runs the plan reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class RematChoice:
    """What the backward pass makes again. Ids are of the program before the pass.

    Attributes:
      recompute: values to be made again; of a loop's stack the loop's result. What
        these need is made again, too, down to what the backward pass reads anyway.
      keep: values that are kept for it though the backward pass reads them not.
      offload: values that wait in the host's memory.
      first: (op id of a forward loop, number): so many slices of its stacks, the first
        ones, are kept as they were.
      ordered: nothing is made again before the late matmuls ahead of it are done, of
        weights' gradients too. XLA:GPU otherwise runs these at the end of the step, and
        what they read is held until then: of a GPT of 6 layers on 8 H100 (0.10.2)
        temporaries are 67 MiB as written, 69 with `jax.checkpoint` or unordered, 33
        ordered. Reductions of gradients then hide behind one layer at most.
    """

    recompute: tuple[int, ...] = ()
    keep: tuple[int, ...] = ()
    offload: tuple[int, ...] = ()
    first: tuple[tuple[int, int], ...] = ()
    ordered: bool = False

    def __str__(self) -> str:
        """As JSON; empty where nothing is to be done."""
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        return (
            json.dumps({k: v for k, v in said.items() if v})
            if any(said.values())
            else ""
        )

    @classmethod
    def parse(cls, text: str) -> RematChoice:
        """The choice that a text says."""
        said = json.loads(text) if text else {}
        first = tuple((int(loop), int(k)) for loop, k in said.pop("first", ()))
        ordered = bool(said.pop("ordered", False))
        values = {k: tuple(map(int, v)) for k, v in said.items()}
        return cls(first=first, ordered=ordered, **values)
