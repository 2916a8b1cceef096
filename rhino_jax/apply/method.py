"""A sharded function as a method of an object."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from rhino_jax.apply.lowering import Lowered
from rhino_jax.plan.plan import Plan


if TYPE_CHECKING:
    from rhino_jax.apply.sharded import ShardedFunction


class Method:
    """What `instance.function` is; see `ShardedFunction.__get__`."""

    def __init__(self, function: ShardedFunction, instance: Any) -> None:
        self.__func__, self.__self__ = function, instance
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        return self.__func__.plan(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return self.__func__.trace(self.__self__, *args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return self.__func__.eval_shape(self.__self__, *args, **kwargs)

    def clear_cache(self) -> None:
        self.__func__.clear_cache()


def unbound(fn: Any, args: Sequence[Any]) -> tuple[Any, tuple[Any, ...]]:
    """A function and its arguments; of a method, its instance is the first."""
    if isinstance(fn, Method):
        return fn.__func__, (fn.__self__, *args)
    return fn, tuple(args)
