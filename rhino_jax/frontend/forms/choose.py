"""`rhino.choose`: functions that compute the same, one of which runs at every call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rhino_jax._compat import hide_frames
from rhino_jax.errors import OptionError
from rhino_jax.frontend.forms.calls import current, in_cache_keys
from rhino_jax.utils.keywords import brief


def choose(**forms: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs as one of several forms of one computation.

    Where rhino does not plan (a plain call, under `jit`, `grad`, `vmap`, `scan`,
    `checkpoint`), the first form runs. The planner takes one form for every call, by
    the predicted step of the program with that form in place; calls on one line with
    arguments of the same types, as those of equal layers, take the same. Notes of the
    plan say what the others would cost. A form that cannot be traced, or lowered for
    the hardware, is left out with a note. A pin of a line or scope to a name, as
    `pins={"model.py:61": "cudnn"}`, chooses by hand. `plan.check` compares with the
    first form.

    Args:
      **forms: name → function. All take the same arguments and return results of the
        same shapes and dtypes, equal but for rounding. Arguments that are no arrays
        are passed as they are.
    Raises:
      OptionError: there are no forms, or one is no function.
      TraceError: when planning: no form can be traced, or their results differ.
    Example:
      >>> attend = rhino.choose(xla=plain_attention, cudnn=fused_attention)
    """
    if not forms:
        raise OptionError(
            "`rhino.choose`: there are no forms.",
            where="the call of `rhino.choose`",
            numbers="0 functions",
            fix="name functions, as rhino.choose(xla=plain, cudnn=fused).",
        )
    for name, function in forms.items():
        if not callable(function):
            raise OptionError(
                f"`rhino.choose`: form {name!r} is no function.",
                where=f"{name}=",
                numbers=f"got {brief(function)} ({type(function).__name__})",
                fix=f"pass the function itself, as {name}=fn.",
            )
    first = next(iter(forms.values()))
    in_cache_keys()

    @functools.wraps(first)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        trace = current()
        if trace is None:
            return first(*args, **kwargs)
        return forms[trace.form(forms, args, kwargs)](*args, **kwargs)

    return chosen


hide_frames(__file__)
