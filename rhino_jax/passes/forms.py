"""The user's function with other forms of its calls of `rhino.choose`'s functions.

Unlike other passes, this one traces the function again: values, gradients and custom
derivatives all follow the form.
"""

from __future__ import annotations

import json
from typing import Any

import jax

from rhino_jax._compat import jaxpr_consts, open_jaxpr
from rhino_jax.attention.replaced import replacing
from rhino_jax.attention.written import AS_WRITTEN
from rhino_jax.errors import PlanFileError, TraceError
from rhino_jax.frontend.trace import Traced
from rhino_jax.rewrite.retraced import retraced


def in_forms(traced: Traced, choice: str) -> Any:
    """Return the closed jaxpr of a function with chosen forms.

    Args:
      traced: the function, as its user wrote it.
      choice: key of a call site → form, as JSON.
    Returns:
      A closed jaxpr with the inputs and constants of `traced`; arrays that only this
      form captures are embedded in it.
    Raises:
      PlanFileError: the function has no such calls.
      TraceError: its results have other types in these forms.
    """
    chosen: dict[str, str] = json.loads(choice)
    is_written = any(AS_WRITTEN in key for key in chosen)
    more = replacing if is_written else None
    found, outs, keys = (
        (None, [], []) if traced.forms is None else traced.forms.traced(chosen, more)
    )
    for key, form in chosen.items():
        if key not in keys:
            raise PlanFileError(
                f"the plan of `{traced.name}` takes form {form!r} of a call that the"
                " function does not have.",
                where=key,
                numbers=f"calls: {'; '.join(keys) or 'none'}",
                fix="plan again and save that plan, or use the function of the plan.",
            )
    if (*outs,) != traced.out_types:
        raise TraceError(
            f"`{traced.name}` returns other types with forms"
            f" {', '.join(map(repr, chosen.values()))}.",
            where=", ".join(chosen),
            numbers=f"{outs}, without {list(traced.out_types)}",
            fix="let all forms return the same dtypes, weak or not, as by"
            " result.astype(x.dtype).",
        )
    mine, theirs = jaxpr_consts(traced.closed_jaxpr), jaxpr_consts(found)
    if [*map(id, mine)] == [*map(id, theirs)]:
        return found
    count = len(open_jaxpr(traced.closed_jaxpr).invars)

    def run(*values: Any) -> list[Any]:
        shared = dict(zip(map(id, mine), values[count:], strict=True))
        consts = [shared.get(id(c), c) for c in theirs]
        return jax.core.eval_jaxpr(open_jaxpr(found), consts, *values[:count])

    return retraced(traced.closed_jaxpr, run)
