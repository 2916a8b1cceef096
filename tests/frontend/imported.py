"""Functions as programs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from rhino_jax._compat import low_jaxpr, open_jaxpr
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.ir.program import Op, Program
from rhino_jax.ir.verifier import verify


def program_of(fn: Callable[..., Any], *args: Any) -> tuple[Program, Any]:
    """A function's program, verified, and its open jaxpr."""
    closed = low_jaxpr(jax.make_jaxpr(fn)(*args))
    jaxpr = open_jaxpr(closed)
    program = import_jaxpr(
        closed,
        name="fn",
        input_paths=[f"args[{i}]" for i in range(len(jaxpr.invars))],
        donated=[False] * len(jaxpr.invars),
        output_paths=[f"[{i}]" for i in range(len(jaxpr.outvars))],
        state_of=[None] * len(jaxpr.outvars),
    )
    verify(program)
    return program, jaxpr


def op_of(fn: Callable[..., Any], *args: Any, name: str | None = None) -> Op:
    """The last op, or the last of a name; shapes stand for arrays of ones."""
    arrays = [np.ones(a, np.float32) if isinstance(a, tuple) else a for a in args]
    program, _ = program_of(fn, *arrays)
    return [op for op in program.ops if name in (None, op.name)][-1]
