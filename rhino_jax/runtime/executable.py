"""The interface of executables: run a plan on flat arrays, as one program or many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding

from rhino_jax.frontend.trace import Traced
from rhino_jax.plan.plan import PlanData
from rhino_jax.runtime.spmd import SpmdExecutable
from rhino_jax.runtime.tasks.executable import TaskExecutable


class Executable(Protocol):
    """Runs a program as its plan says.

    Arrays are flat: the arguments, then captured constants; the results, then values
    that are written back.

    Attributes:
      in_shardings: sharding of each input.
      out_shardings: sharding of each result.
      is_runnable: whether its devices are present.
    """

    in_shardings: Sequence[NamedSharding]
    out_shardings: Sequence[NamedSharding]

    @property
    def is_runnable(self) -> bool: ...

    def run(self, arrays: Sequence[Any], compiled: Any = None) -> Sequence[Any]:
        """Run on arrays in `in_shardings`; donated ones are consumed.

        Args:
          arrays: concrete arrays.
          compiled: the compiled result of `lower`; None: compile where needed.
        """
        ...

    def for_types(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> Executable:
        """Return a copy, with its compiled programs, for other weak types.

        Args:
          shapes: types of the arrays that it was compiled for.
        """
        ...

    def run_staged(self, arrays: Sequence[Any]) -> Sequence[Any]:
        """Run inside of an outer trace: only constraints are placed."""
        ...

    def trace(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> jax.stages.Traced:
        """Trace the program that `run` compiles."""
        ...

    def lower(self, shapes: Sequence[jax.ShapeDtypeStruct]) -> jax.stages.Lowered:
        """Lower the program that `run` compiles, also for an abstract mesh."""
        ...


def executable_of(traced: Traced, plan: PlanData, mesh: Any) -> Executable:
    """Return the executable of a plan of a traced function on a mesh."""
    if plan.has_tasks:
        return TaskExecutable(traced, plan, mesh)
    return SpmdExecutable(traced, plan, mesh)
