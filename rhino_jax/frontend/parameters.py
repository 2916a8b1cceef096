"""The parameters of a user's function: their names, and which are static or donated."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax._compat import jit_options, jit_shardings
from rhino_jax.errors import TraceError, nearest
from rhino_jax.frontend.leaves import Static
from rhino_jax.utils.keywords import brief, whole


Options = dict[str, tuple[Any, ...]]


def take_off(fn: Callable[..., Any]) -> tuple[Callable[..., Any], Options]:
    """Return the function inside `jax.jit` or `nnx.jit`, and the wrapper's options.

    Returns:
      The function, and its `static_argnums`, `static_argnames`, `donate_argnums` and
      `donate_argnames`; without such a wrapper, the function itself and no options.
    """
    if is_nnx_jit(fn):
        return fn.fun, jit_options(fn.jitted_fn)  # type: ignore[attr-defined]
    options = jit_options(fn)
    return (fn.__wrapped__, options) if options else (fn, {})  # type: ignore[attr-defined]


def is_nnx_jit(fn: Any) -> bool:
    """Whether `fn` was made by `nnx.jit`; objects made by `nnx.jit_partial`, which hold
    arguments, do not count."""
    module = sys.modules.get("flax.nnx.transforms.compilation")
    kinds = [getattr(module, name, None) for name in ("JitWrapped", "SimpleJitWrapped")]
    return module is not None and any(type(fn) is kind for kind in kinds)


def check_no_shardings(fn: Any, what: str) -> None:
    """Refuse a function whose `jit` specifies shardings: they would be lost.

    Args:
      fn: the function.
      what: the caller, for messages.

    Raises:
      TraceError: `in_shardings` or `out_shardings` was given.
    """
    if is_nnx_jit(fn):
        name, has_any = "nnx.jit", (fn.in_shardings, fn.out_shardings) != (None, None)
    else:
        name, has_any = "jax.jit", bool(jit_shardings(fn))
    if not has_any:
        return
    raise TraceError(
        f"{what}: `{getattr(fn, '__name__', name)}` is wrapped in a `{name}` with"
        " shardings, which would be lost: the plan has those of all arrays.",
        where=f"in_shardings= or out_shardings= of `{name}`",
        fix=f"leave them out of `{name}`; what must stay fixed goes to in_shardings=,"
        " out_shardings= or pins= of `auto_shard` and `rhino.plan`.",
    )


CALLING = ("donate_argnums", "donate_argnames", "static_argnums", "static_argnames")
"""The options on a function's arguments, as in `jax.jit`."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a function, and how its arguments are treated.

    Attributes:
      fn: the function, unwrapped from `jax.jit` or `nnx.jit`.
      name: its name.
      positional: names of the parameters that may be passed by position.
      variadic: name of the `*args` parameter; None where it has none.
      static: names of the static parameters, and numbers beyond `positional`.
      donated: names of the donated parameters, and numbers beyond `positional`.
      is_of_nnx: whether it was wrapped in `nnx.jit`, whose treatment of arguments then
        applies.
    """

    fn: Callable[..., Any]
    name: str
    positional: tuple[str, ...]
    variadic: str | None
    static: frozenset[str | int]
    donated: frozenset[str | int]
    is_of_nnx: bool = False

    def names(self, count: int) -> tuple[str, ...]:
        """Return the names of the first `count` positional arguments, as tree paths
        show them."""
        first = len(self.positional)
        rest = self.variadic or "args"
        return self.positional[:count] + tuple(
            f"{rest}[{i - first}]" for i in range(first, count)
        )

    def is_static(self, key: str | int) -> bool:
        return bool(self.static) and self._key(key) in self.static

    def is_donated(self, key: str | int) -> bool:
        return bool(self.donated) and self._key(key) in self.donated

    def _key(self, key: str | int) -> str | int:
        if isinstance(key, int) and key < len(self.positional):
            return self.positional[key]
        return key

    def take_statics(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[tuple[str | int, Static], ...]]:
        """Replace static arguments by None.

        Returns:
          The arguments by position, those by name, and (position or name, value) of
          each static one.
        """
        if not self.static:
            return tuple(args), dict(kwargs), ()
        taken: list[tuple[str | int, Static]] = []

        def left(key: str | int, value: Any) -> Any:
            if not self.is_static(key):
                return value
            taken.append((key, Static(value)))
            return None

        return (
            tuple(left(i, value) for i, value in enumerate(args)),
            {**kwargs, **{key: left(key, kwargs[key]) for key in sorted(kwargs)}},
            tuple(taken),
        )


def read_parameters(
    fn: Callable[..., Any],
    *,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    what: str = "`auto_shard`",
) -> Parameters:
    """Resolve numbers and names by the function's signature.

    A `jax.jit` or `nnx.jit` wrapper is removed, and its own static and donated
    arguments are added.

    Raises:
      TraceError: a name that the function does not have, a number out of range, or an
        argument that is both static and donated.
    """
    check_callable(what, fn)
    is_of_nnx = is_nnx_jit(fn)
    fn, own = take_off(fn)
    name = function_name(fn)
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # a builtin, which lists none
        parameters = []
    kinds = inspect.Parameter

    def of_kinds(*wanted: Any) -> tuple[str, ...]:
        return tuple(p.name for p in parameters if p.kind in wanted)

    positional = of_kinds(kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    by_name = positional + of_kinds(kinds.KEYWORD_ONLY)
    variadic = next(iter(of_kinds(kinds.VAR_POSITIONAL)), None)

    def checked(kind: str, given: Any) -> str | int:
        """Return the name of a parameter, or its number if it has none."""
        is_name = isinstance(given, str)
        known, option = (by_name, "argnames") if is_name else (positional, "argnums")
        at = given + len(known) if not is_name and given < 0 else given
        if at in (known if is_name else range(len(known))):
            return at if is_name else known[at]
        more = of_kinds(kinds.VAR_KEYWORD) if is_name else variadic
        if (is_name or at >= 0) and (more or not parameters):
            return at
        hint = nearest(given, known) if is_name else ""
        raise TraceError(
            f"{what}: `{name}` has no argument {given!r}, given in"
            f" {kind}_{option}.{hint}",
            where=f"{kind}_{option}",
            numbers=f"`{name}` takes ({', '.join(known)})",
            fix=f"give {kind}_{option} from these.",
        )

    def resolve(kind: str, nums: Any, names: Any) -> frozenset[str | int]:
        options = {f"{kind}_argnums": nums, f"{kind}_argnames": names}
        read = [_read(what, key, x) + own.get(key, ()) for key, x in options.items()]
        return frozenset(checked(kind, x) for several in read for x in several)

    static = resolve("static", static_argnums, static_argnames)
    donated = resolve("donate", donate_argnums, donate_argnames)
    if both := static & donated:
        raise TraceError(
            f"{what}: an argument of `{name}` is both static and donated.",
            where=_listed(both),
            numbers=f"static: {_listed(static)}; donated: {_listed(donated)}",
            fix="donate arrays only; drop it from one of the two.",
        )
    return Parameters(fn, name, positional, variadic, static, donated, is_of_nnx)


def check_callable(what: str, fn: Any) -> None:
    """Refuse a value that is not a function of arrays.

    Args:
      what: the caller, for messages.
      fn: the value.

    Raises:
      TraceError: it cannot be called, or is a generator or coroutine function.
    """
    if not callable(fn):
        raise TraceError(
            f"{what}: this cannot be called.",
            where="the first argument",
            numbers=f"got {brief(fn)} ({type(fn).__name__})",
            fix="give the function itself, and its arguments after it.",
        )
    is_generator = inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)
    if is_generator or inspect.iscoroutinefunction(fn):
        kind = "generator" if is_generator else "coroutine"
        raise TraceError(
            f"{what}: `{function_name(fn)}` is a {kind} function: to call it runs none"
            " of its code.",
            where=f"`{function_name(fn)}`",
            numbers=f"it returns a {kind}, and no arrays",
            fix="give a function that returns arrays, and call that in it.",
        )


def check_misspelt(
    what: str, fn: Any, given: Collection[str], keywords: Iterable[str]
) -> None:
    """Refuse a keyword that the function does not have and that is close to an option's
    name.

    Args:
      what: the caller, for messages.
      fn: the function, or its `auto_shard` wrapper.
      given: keywords that are to be passed to it.
      keywords: names of the options of the caller.

    Raises:
      TraceError: one is misspelt.
    """
    if not given or not callable(fn):
        return
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for key in given:
        hint = nearest(key, keywords, cutoff=0.7)
        if key not in parameters and hint:
            name = function_name(fn)
            raise TraceError(
                f"{what}: neither this call nor `{name}` has a keyword {key!r}.{hint}",
                where=f"{key}=",
                numbers=f"`{name}` takes ({', '.join(parameters)})",
                fix="write the option as it is spelt, or leave it out.",
            )


def function_name(fn: Any) -> str:
    """Return the name of a function, of the function in a partial, or of an object's
    class."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", None) or type(fn).__name__


def _read(what: str, option: str, value: Any) -> tuple[Any, ...]:
    """Return positions as ints, or names as strings, given one or several.

    Raises:
      TraceError: one of them is neither.
    """
    is_names = option.endswith("names")
    if value is None:
        return ()
    if isinstance(value, str):
        several: tuple[Any, ...] = (value,)
    else:
        try:
            several = (value,) if isinstance(value, Mapping) else tuple(value)
        except TypeError:
            several = (value,)
    read = [x if isinstance(x, str) else whole(x) for x in several]
    if any(x is None or isinstance(x, str) != is_names for x in read):
        raise TraceError(
            f"{what}: {option} must be "
            + ("names of arguments." if is_names else "positions of arguments."),
            where=f"{option}=",
            numbers=f"got {brief(value)} ({type(value).__name__})",
            fix=f"write {option}=" + ("('state',)." if is_names else "(0, 1)."),
        )
    return tuple(read)


def _listed(keys: Iterable[str | int]) -> str:
    return ", ".join(sorted(map(str, keys)))
