"""Pins in users' forms: path → spec, or pytrees of specs shaped like the arguments.

All are converted to path → spec, which `resolve_pins` reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec, Sharding
from jax.tree_util import keystr, tree_flatten_with_path

from rhino_jax.errors import PinError
from rhino_jax.utils.keywords import brief


_FORMS = (
    "write {\"params['w']\": PartitionSpec('model')}, {'params': a pytree of specs},"
    " or a tuple shaped like the arguments, as plan.in_specs is."
)


@dataclass(frozen=True, slots=True)
class WithShardings:
    """Pins, together with the equivalent keywords of `jax.jit`.

    Attributes:
      pins: as `check_pins` returns them.
      in_shardings: a pytree prefix of the arguments without static ones.
      out_shardings: a pytree prefix of the result.
    """

    pins: Any
    in_shardings: Any
    out_shardings: Any


def check_pins(
    what: str, pins: Any, in_shardings: Any = None, out_shardings: Any = None
) -> Any:
    """Check that pins have a supported form; {} for None.

    Raises:
      PinError: they have no supported form.
    """
    if in_shardings is not None or out_shardings is not None:
        return WithShardings(check_pins(what, pins), in_shardings, out_shardings)
    if pins is None:
        return {}
    if isinstance(pins, WithShardings):
        return pins
    if isinstance(pins, Mapping):
        for key in pins:
            if not isinstance(key, str):
                raise PinError(
                    f"{what}: a pin's key must be a tree path, a glob, or the name of"
                    " an argument.",
                    where=f"pins[{brief(key)}]",
                    numbers=f"got a {type(key).__name__}",
                    fix=_FORMS,
                )
        return dict(pins)
    if isinstance(pins, tuple | list) and not is_spec(pins):
        if all(map(_is_pin, jax.tree.leaves(pins, is_leaf=_is_pin))):
            return tuple(pins)
    raise PinError(
        f"{what}: these are no pins.",
        where="pins=",
        numbers=f"got {brief(pins)} ({type(pins).__name__})",
        fix=_FORMS,
    )


def is_spec(x: Any) -> bool:
    """Whether `x` is one spec, not a tree of them; a tuple of axis names is one."""
    if isinstance(x, PartitionSpec | Sharding):
        return True
    return isinstance(x, tuple | list) and all(
        entry is None
        or isinstance(entry, str)
        or (isinstance(entry, tuple) and all(isinstance(n, str) for n in entry))
        for entry in x
    )


def expand_pins(pins: Any, traced: Any) -> dict[str, Any]:
    """Convert pins of any form to path → spec.

    Args:
      pins: result of `check_pins`. None in a tree pins nothing; a spec in place of a
        subtree pins all arrays below it.
      traced: `frontend.trace.Traced` of the pinned function.
    Raises:
      PinError: a tree does not fit the arguments or the result.
    """
    if isinstance(pins, WithShardings):
        return {
            **_of_in_shardings(pins.in_shardings, traced),
            **_of_out_shardings(pins.out_shardings, traced),
            **expand_pins(pins.pins, traced),
        }
    tree, paths = traced.arguments.tree, traced.arguments.paths
    if not isinstance(pins, Mapping):
        args, kwargs = jax.tree.unflatten(tree, paths)
        shaped = (tuple(args), kwargs) if kwargs else tuple(args)
        given = f"{len(pins)} given" if isinstance(pins, tuple) else "one given"
        fix = (
            f"{len(args)} positional arguments"
            + (f" and {', '.join(kwargs)}: write (args, kwargs)" if kwargs else "")
            + "; None pins nothing. Or pin by name: {'params': …}."
        )
        return _of_prefix("pins", pins, shaped, "arguments", given, fix)
    found: dict[str, Any] = {}
    for key, value in pins.items():
        is_leaf = value is not None and jax.tree_util.all_leaves([value])
        if is_spec(value) or is_leaf:
            found[key] = value
            continue
        below, _ = tree_flatten_with_path(value, is_leaf=_is_pin)
        for path, spec in below:
            name = key + keystr(path)
            matched = [
                p for p in paths if p == name or p.startswith((name + "[", name + "."))
            ]
            if spec is not None:
                found.update(dict.fromkeys(matched or [name], spec))
            elif not matched:
                # A path that matches nothing is a mistake, even if it pins nothing.
                found[name] = spec
    return found


def _of_in_shardings(prefix: Any, traced: Any) -> dict[str, Any]:
    if prefix is None:
        return {}
    args, _ = jax.tree.unflatten(traced.arguments.tree, traced.arguments.paths)
    static = {key for key, _ in traced.signature.statics}
    args = tuple(a for i, a in enumerate(args) if i not in static)
    fix = (
        f"give a tuple of {len(args)}, one for each positional argument that is not"
        " static, or one sharding for all; None pins nothing."
    )
    return _of_prefix("in_shardings", prefix, args, "arguments", brief(prefix), fix)


def _of_out_shardings(prefix: Any, traced: Any) -> dict[str, Any]:
    if prefix is None:
        return {}
    paths = list(traced.result.paths)
    ends = traced.program.outputs[: len(traced.result.positions)]
    for position, end in zip(traced.result.positions, ends, strict=True):
        paths[position] = end.path
    shaped = jax.tree.unflatten(traced.result.tree, paths)
    fix = "give a pytree shaped as the result, or one sharding for all of it."
    given = brief(prefix)
    return _of_prefix("out_shardings", prefix, shaped, "result", given, fix)


def _of_prefix(
    keyword: str, prefix: Any, shaped: Any, of: str, given: str, fix: str
) -> dict[str, Any]:
    """Expand a pytree prefix of a tree of paths to path → spec.

    Raises:
      PinError: it is no prefix.
    """
    found: dict[str, Any] = {}

    def pin(spec: Any, below: Any) -> None:
        if spec is not None:
            found.update(dict.fromkeys(jax.tree.leaves(below), spec))

    try:
        # A tuple at the top lists arguments or results, not axis names.
        jax.tree.map(
            pin, prefix, shaped, is_leaf=lambda x: x is not prefix and _is_pin(x)
        )
    except (ValueError, TypeError, KeyError) as error:
        raise PinError(
            f"{keyword}: this tree does not have the shape of the {of}.",
            where=f"{keyword}=",
            numbers=f"{given}; {brief(str(error).splitlines()[0])}",
            fix=fix,
        ) from None
    return found


def _is_pin(x: Any) -> bool:
    return x is None or is_spec(x)


def check_devices(pins: Mapping[str, Any], mesh: Any) -> None:
    """Refuse shardings over other devices than those of the plan.

    Args:
      pins: path → spec or sharding.
      mesh: the mesh of the plan.
    Raises:
      PinError: a sharding has another mesh of devices.
    """
    for key, spec in pins.items():
        other = getattr(spec, "mesh", None)
        if not isinstance(other, Mesh) or not isinstance(mesh, Mesh):
            continue
        if other.devices.shape == mesh.devices.shape and (
            (other.devices != mesh.devices).any()
        ):
            raise PinError(
                f"pin {key!r} is a sharding over other devices than the plan's.",
                where=key,
                numbers=f"its devices {brief(list(other.devices.flat))}, the plan's"
                f" {brief(list(mesh.devices.flat))}",
                fix="pin the PartitionSpec alone, or plan with mesh=sharding.mesh.",
            )
