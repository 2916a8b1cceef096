"""The options of a plan by which its user takes decisions, or leaves them open."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


AUTO = "auto"
AS_WRITTEN = "as written"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionOptions:
    """The decisions of a plan, as its user takes them; "auto" leaves one to the
    planner. `rhino_jax.options.UserOptions` describes them."""

    microbatches: Any = AUTO
    recompute: str = AUTO
    loops: str = AUTO
    stages: Any = AUTO
    schedule: str = AUTO
    storage: str = AS_WRITTEN
    per_microbatch: Any = ()

    @property
    def may_recompute(self) -> bool:
        """Whether the planner chooses what is recomputed."""
        return self.recompute == AUTO
