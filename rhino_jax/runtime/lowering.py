"""`lower` and `compile` of a sharded function, as `jax.stages` has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from rhino_jax.errors import TraceError
from rhino_jax.hardware.compile_only import compiler_options as needed_options
from rhino_jax.runtime.bound import Arguments, Bound


class Lowered:
    """A sharded function, lowered for one signature.

    Everything that `jax.stages.Lowered` has is here too (`as_text`,
    `compiler_ir`, `cost_analysis`, …).
    """

    def __init__(self, bound: Bound, lowered: jax.stages.Lowered) -> None:
        self.bound, self.lowered = bound, lowered

    @property
    def plan(self) -> Any:
        return self.bound.plan

    def compile(
        self, compiler_options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> CompiledFunction:
        """Compile; arguments as for `jax.stages.Lowered.compile`.

        For compile-only GPUs, the XLA options that they need are added.
        """
        options = {**needed_options(self.bound.mesh), **(compiler_options or {})}
        compiled = self.lowered.compile(compiler_options=options or None, **kwargs)
        return CompiledFunction(self.bound, compiled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lowered, name)


class CompiledFunction:
    """A sharded function, compiled for one signature; called as the function is.

    Everything that `jax.stages.Compiled` has is here too (`as_text`,
    `memory_analysis`, `cost_analysis`, …).
    """

    def __init__(self, bound: Bound, compiled: jax.stages.Compiled) -> None:
        self.bound, self.compiled = bound, compiled

    @property
    def plan(self) -> Any:
        return self.bound.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run; static arguments are omitted or None, since they were compiled in."""
        arguments: Arguments | None = self.bound.read(args, kwargs)
        if arguments is None:
            tree = jax.tree.structure((args, kwargs))
            name = self.bound.traced.name
            raise TraceError(
                f"`{name}` was compiled for other arguments.",
                numbers=f"got {tree}, compiled for {self.bound.traced.arguments.tree};"
                " or shapes, types or static leaves differ",
                fix=f"lower and compile `{name}` for these, or call it itself.",
            )
        return self.bound.run(arguments, self.compiled)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


def lower(bound: Bound) -> Lowered:
    """Lower for the bound's signature and mesh; nothing is allocated."""
    return Lowered(bound, bound.executable.lower(bound.abstract_arrays()))
