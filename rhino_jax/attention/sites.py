"""Calls that have several forms, and which of these run on some hardware."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rhino_jax.attention.replaced import find_written
from rhino_jax.attention.written import AS_WRITTEN
from rhino_jax.errors import PinError, TraceError
from rhino_jax.frontend.forms.calls import CallSite, Forms


WITH_KERNELS = ("cuda", "tpu")
"""Platforms that have kernels of attention."""


def sites_of(
    forms: Forms | None, pins: Mapping[str, Any], platform: str | None = None
) -> tuple[CallSite, ...]:
    """Return the calls of `rhino.choose`'s functions, with attention that is written
    out.

    Args:
      forms: of the function; None: it has none.
      pins: attention is sought where one of these is a name.
      platform: or where this one has kernels of it; None: it is not.
    """
    if forms is None:
        return ()
    has_names = any(isinstance(pin, str) for pin in pins.values())
    is_sought = has_names or platform in WITH_KERNELS
    return (*forms.sites, *(_written(forms) if is_sought else ()))


def _written(forms: Forms) -> tuple[CallSite, ...]:
    """Return the attentions that a function writes out and `jax.nn` can compute, but
    for those that are forms of its calls."""
    if forms.written is None:
        places = {place[1:] for place in forms.known}
        found = find_written(forms.jaxpr).sites.items()
        own = {
            place: site
            for place, site in found
            if place[1:] not in places and site.first == AS_WRITTEN
        }
        forms.known.update(own)
        forms.written = tuple(own.values())
    return forms.written


def usable_forms(
    site: CallSite, hardware: str, platform: str | None, pinned: str | None, what: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the forms of a call that run on the hardware, and why others do not.

    Args:
      site: the call.
      hardware, platform: of the plan; platform None: it is not known.
      pinned: the form that the user wants; None: any.
      what: the caller, for messages.
    Raises:
      TraceError: no form runs there.
      PinError: the pinned form does not.
    """
    left = dict(site.left)
    for form in site.traced:
        if platform is not None and (why := site.not_on(form, platform)):
            left[form] = why
    usable = tuple(form for form in site.traced if form not in left)
    numbers = "; ".join(f"{form}: {why}" for form, why in left.items())
    if pinned in left:
        raise PinError(
            f"{what}: pinned form {pinned!r} does not run on {hardware}.",
            where=str(site.source),
            numbers=numbers,
            fix=f"pin one of {', '.join(usable)}." if usable else "drop the pin.",
        )
    if not usable:
        raise TraceError(
            f"{what}: no form of a call runs on {hardware}.",
            where=str(site.source),
            numbers=numbers,
            fix="add a form of plain JAX operations.",
        )
    return usable if pinned is None else (pinned,), left
