"""Pins of forms: line, scope or glob → the form of calls there (`rhino.choose`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rhino_jax.errors import PinError, nearest
from rhino_jax.ir.places import in_scope, on_line


def without_forms(
    pinned: Mapping[str, Any], sites: Sequence[Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Separate layout and stage pins from pins of forms, which are names.

    Args:
      pinned: key → spec, stage or form.
      sites: the calls of the function (`frontend.forms.calls.CallSite`).
    Returns:
      The other pins; key of a call site → its form.
    Raises:
      PinError: no call is there, or it has no such form, or two pins differ.
    """
    if not sites:  # Text is no spec, as another error says.
        return dict(pinned), {}
    names = {key: name for key, name in pinned.items() if isinstance(name, str)}
    found: dict[str, str] = {}
    for key, name in names.items():
        line, scope = on_line(key), in_scope(key)
        there = [
            site
            for site in sites
            if key == "*"
            or (line(site.source) if line else any(map(scope, site.scopes)))
        ]
        if not there:
            raise PinError(
                f"pin {key!r} to {name!r}: no function of `rhino.choose` is called"
                " there, nor is attention written out.",
                where=repr(key),
                numbers=f"calls: {_places(sites)}",
                fix="name the line of a call, as 'model.py:61', its scope, or '*'.",
            )
        for site in there:
            known = (*site.traced, *site.left)
            if name not in known:
                raise PinError(
                    f"pin {key!r}: there is no form {name!r}.{nearest(name, known)}",
                    where=str(site.source),
                    numbers=f"forms: {', '.join(known)}",
                    fix="pin one of these.",
                )
            if name in site.left:
                raise PinError(
                    f"pin {key!r}: form {name!r} cannot be traced.",
                    where=str(site.source),
                    numbers=site.left[name],
                    fix=f"pin one of {', '.join(site.traced)}.",
                )
            if found.setdefault(site.key, name) != name:
                raise PinError(
                    f"pin {key!r} and another say two forms of one call.",
                    where=str(site.source),
                    numbers=f"{found[site.key]!r} and {name!r}",
                    fix="take one of them out.",
                )
    return {k: v for k, v in pinned.items() if k not in names}, found


def _places(sites: Any) -> str:
    return ", ".join(dict.fromkeys(str(site.source) for site in sites))
