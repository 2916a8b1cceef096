"""Calls of `rhino.choose`'s functions in a trace, and the forms that they take.

A trace for a plan runs within `CallTrace.recording`, which knows the form of every call
and records it. The trace is part of the key of JAX's own caches: a jitted or
rematerialized layer that was traced with one form is traced again for another.
"""

from __future__ import annotations

import contextlib
import functools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from rhino_jax._compat import (
    consts_as_inputs,
    current_source,
    fused_attention_traced,
    hide_frames,
    open_jaxpr,
)
from rhino_jax.errors import TraceError
from rhino_jax.frontend.call import type_text
from rhino_jax.frontend.provenance import source_of
from rhino_jax.ir.op import Source
from rhino_jax.utils.keywords import brief


Functions = Mapping[str, Callable[..., Any]]
"""Form → the function that computes it, the first one first."""

MAX_TYPES = 200
"""Maximum number of characters of a call's types in its key."""


@dataclass(frozen=True, slots=True, eq=False)
class CallSite:
    """Alike calls of one `rhino.choose`: of one line, with arguments of the same types.

    Attributes:
      key: names these calls in plans: function, forms and types, without line numbers.
      source: source line of the calls.
      scopes: scopes of the calls.
      traced: form → jaxpr of a call in that form, the first form first; what the form
        captures, which may be tracers, are its last inputs.
      left: form → why it cannot be traced.
    """

    key: str
    source: Source
    scopes: set[str]
    traced: Mapping[str, Any]
    left: Mapping[str, str]

    @property
    def first(self) -> str:
        """The form of the calls where no other is chosen."""
        return next(iter(self.traced))

    def not_on(self, form: str, platform: str) -> str:
        """Return why a form cannot be lowered for a platform; empty if it can, or if it
        cannot be lowered alone.

        Args:
          form: its name.
          platform: "cpu", "cuda" or "tpu"; no such device has to be present.
        """
        jaxpr = self.traced[form]
        avals = (v.aval for v in jaxpr.invars)
        types = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        run = jax.jit(functools.partial(jax.core.eval_jaxpr, jaxpr, ()))
        # Functions that JAX caches keep the source lines of those who call them first.
        with _within(None), fused_attention_traced():
            try:
                traced = run.trace(*types)
            except Exception:  # collectives over axes of a `shard_map` around the call
                return ""
            try:
                traced.lower(lowering_platforms=(platform,))
            except Exception as error:
                return reason_of(error)
        return ""


def reason_of(error: Exception) -> str:
    """Return an exception as one line of at most 160 characters."""
    text = str(error).strip().partition("\n")[0]
    text = f"{type(error).__name__}: {text}".rstrip(": ")
    return text if len(text) <= 160 else f"{text[:159]}…"


Sites = dict[tuple[str, str, int], CallSite]
"""Key without its number, file, line → call site, in the order of the trace."""


@dataclass(slots=True, eq=False)
class CallTrace:
    """One trace of a user's function: the forms that its calls take.

    Attributes:
      chosen: key of a call site → form; the first form of all others.
      known: call sites of another trace of the function.
      replacing: see `Forms.traced`.
      jaxpr: the traced function.
      sites: the call sites of this trace.
    """

    chosen: Mapping[str, str] = field(default_factory=dict)
    known: Sites = field(default_factory=dict)
    replacing: Replacing | None = None
    jaxpr: Any = None
    sites: Sites = field(default_factory=dict)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls within this context; those of an earlier trace are lost."""
        self.sites.clear()
        with _within(self):
            yield

    def form(
        self,
        functions: Functions,
        args: Any,
        kwargs: Any,
        place: tuple[Source, str] | None = None,
    ) -> str:
        """Return the form of a call, and record the call.

        Args:
          functions: the forms.
          args, kwargs: its arguments; of arrays, their types suffice.
          place: its source line and types; None: those of the call that runs.

        Raises:
          TraceError: no form can be traced, or their results differ.
        """
        leaves, tree = jax.tree.flatten((args, kwargs))
        source, types = place or (source_of(current_source()), _types_of(leaves))
        text = f"{source.function}: {' | '.join(functions)} of {types}"
        where = text, source.file, source.line
        site = self.sites.get(where)
        if site is None:
            same = sum(other[0] == text for other in self.sites)
            key = f"{text} #{same + 1}" if same else text
            site = self.known.get(where)
            site = site or _site(functions, leaves, tree, key, source)
            self.sites[where] = site
        site.scopes.add(source.scopes)
        return self.chosen.get(site.key, site.first)


_TRACE: ContextVar[CallTrace | None] = ContextVar("calls of forms", default=None)


def current() -> CallTrace | None:
    """Return the trace for a plan that runs; None where none does."""
    return _TRACE.get()


@functools.cache
def in_cache_keys() -> Any:
    """Return the context whose value is part of the keys of JAX's caches.

    It is made with the first function of `rhino.choose`, since another context changes
    the keys of all that JAX has cached: programs without such functions keep theirs.
    """
    return jax.make_user_context(None)


@contextlib.contextmanager
def _within(trace: CallTrace | None) -> Iterator[None]:
    token = _TRACE.set(trace)
    has_forms = in_cache_keys.cache_info().currsize
    try:
        with in_cache_keys()(object()) if has_forms else contextlib.nullcontext():
            yield
    finally:
        _TRACE.reset(token)


def _types_of(leaves: Sequence[Any]) -> str:
    """Return the types of the arrays among arguments, and the others, as text."""
    plain = bool | int | float | str | None
    # Of others the type alone: their texts have addresses, which change.
    texts = [
        type_text(x)
        if isinstance(x, _ARRAYS)
        else brief(x)
        if isinstance(x, plain)
        else type(x).__name__
        for x in leaves
    ]
    types = ", ".join(texts)
    if len(types) > MAX_TYPES:
        types = f"{types[:MAX_TYPES]}… {zlib.crc32(types.encode()):08x}"
    return types


def _site(
    functions: Functions, leaves: Sequence[Any], tree: Any, key: str, source: Source
) -> CallSite:
    """Trace every form of a call.

    Args:
      functions: the forms.
      leaves, tree: the arguments, by position and by name.
      key, source: of the call site.

    Raises:
      TraceError: as `CallTrace.form`.
    """
    at = [i for i, x in enumerate(leaves) if isinstance(x, _ARRAYS)]

    def traced_as(function: Callable[..., Any]) -> tuple[Any, Any]:
        """Return the jaxpr of the call, and the types of its results."""

        def run(*arrays: Any) -> Any:
            given = dict(zip(at, arrays, strict=True))
            everything = [given.get(i, x) for i, x in enumerate(leaves)]
            args, kwargs = jax.tree.unflatten(tree, everything)
            return function(*args, **kwargs)

        traced = jax.make_jaxpr(run, return_shape=True)
        closed, results = traced(*[leaves[i] for i in at])
        types = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", results)
        return consts_as_inputs(open_jaxpr(closed)), types

    traced: dict[str, Any] = {}
    left: dict[str, str] = {}
    results: dict[str, Any] = {}
    error: Exception | None = None
    for name, function in functions.items():
        try:
            with _within(None):
                traced[name], results[name] = traced_as(function)
        except Exception as raised:
            left[name] = reason_of(raised)
            error = error or raised
    if not traced:
        raise TraceError(
            "`rhino.choose`: no form can be traced.",
            where=str(source),
            numbers="; ".join(f"{name}: {why}" for name, why in left.items()),
            fix="give a form that these arguments suit.",
        ) from error
    first, *others = results
    for name in others:
        if results[name] != results[first]:
            raise TraceError(
                f"`rhino.choose`: forms {first!r} and {name!r} give different results.",
                where=str(source),
                numbers=f"{first}: {brief(results[first])}; {name}:"
                f" {brief(results[name])}",
                fix="return the same shapes and dtypes, as result.astype(x.dtype).",
            )
    return CallSite(key, source, set(), traced, left)


_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


hide_frames(__file__)


Replacing = Callable[[CallTrace], contextlib.AbstractContextManager[Callable[..., Any]]]
"""Trace of calls → a context in which functions are traced with other forms of what
they write out, with a function that returns a function with them."""


@dataclass(slots=True, eq=False)
class Forms:
    """The calls of `rhino.choose`'s functions in a traced function.

    Attributes:
      sites: the call sites, in the order of the trace.
      jaxpr: the function as traced, before any pass.
      traced: (key of a call site → form, what replaces more than calls) → closed jaxpr
        of the user's function with these forms, types of its results, and the keys of
        its call sites.
      known: the call sites that are known, more than `sites` where those of what is
        written out have been sought.
      written: the latter; None: not sought yet.
    """

    sites: tuple[CallSite, ...]
    jaxpr: Any
    traced: Callable[
        [Mapping[str, str], Replacing | None], tuple[Any, list[Any], list[str]]
    ]
    known: Sites
    written: tuple[CallSite, ...] | None = None

    @property
    def key(self) -> str:
        """Text that differs where plans of functions with equal first forms may."""
        lines = [
            f"{site.key} {site.source} {dict(site.left)} {form} {jaxpr}"
            for site in self.sites
            for form, jaxpr in site.traced.items()
        ]
        # Functions among the parameters of equations are printed with their addresses.
        return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines))
