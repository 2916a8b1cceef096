"""The public call `rhino.audit`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rhino_jax.explain.results.audit import Audit
from rhino_jax.frontend.parameters import CALLING
from rhino_jax.hardware.target import Target
from rhino_jax.planner.options import Wishes
from rhino_jax.verify.by_hand.audit import audit as run


def audit(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Any = None,
    hardware: str | Path | Target | None = None,
    memory_budget_bytes: float | str | None = None,
    pins: Any = None,
    level: str = "best",
    time_limit_s: float | str | None = None,
    seed: int = 0,
    refine: int = 0,
    microbatches: int | str = "auto",
    per_microbatch: str | Sequence[str] = (),
    recompute: str = "auto",
    while_trips: int | Mapping[str, int] | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    progress: bool | Callable[[float | None, float | None], None] = True,
    **kwargs: Any,
) -> Audit:
    """Compare a program that its user sharded by hand with rhino's plan of it.

    Compiles `fn(*args, **kwargs)` as it is and reads the HLO back: every collective
    with its source line, and the cost of each line. Then plans the same function,
    without its user's sharding annotations, for the same mesh, and compiles that too.
    Allocates and runs nothing; the hardware need not be there (`rhino.compile_target`).

    Args:
      fn: a `jax.jit` object, or a function. Constraints and `shard_map` inside are
        compiled as they are; in rhino's plan the constraints are left out.
      args, kwargs: arrays or `jax.ShapeDtypeStruct`s, or pytrees of them, with
        `NamedSharding`s.
      mesh: a mesh with devices, or a compile-only one; set as the mesh in context while
        `fn` is traced, and arguments that are sharded over a mesh with the same axes
        are moved to it. None: the mesh of the arguments, of `in_shardings`, or in
        context.
      donate_argnums, donate_argnames, static_argnums, static_argnames: as in `jax.jit`;
        a `jax.jit` object has its own.
      Others: options of rhino's plan, see `auto_shard`.
    Returns:
      The audit. A program that does not fit is a result too.
    Raises:
      MeshError: there is no mesh, or there are several.
      RhinoError: `fn` is sharded by rhino.
    Example:
      >>> found = rhino.audit(train_step, params, batch)  # doctest: +SKIP
      >>> found.costs[0].source, found.gain  # doctest: +SKIP
    """
    said = {k: v for k, v in locals().items() if k not in ("fn", "args", "kwargs")}
    mesh, calling = said.pop("mesh"), {k: said.pop(k) for k in CALLING}
    wishes = Wishes(what="`rhino.audit`", **said)
    budget = wishes.memory_budget_bytes
    return Audit.of(
        run(
            fn,
            args,
            kwargs,
            wishes.plan,
            mesh=mesh,
            hardware=hardware,
            memory_budget_bytes=budget,
            **calling,
        )
    )
