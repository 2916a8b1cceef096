"""Pins on arguments, results and values, resolved and checked before any search.

Values inside the program are pinned by `rhino.pin`, source lines and scopes:
`"model.py:61"` pins the values that line 61 computes, `"encoder/layer_*/attn"` those of
these scopes (`jax.named_scope`, Flax modules): the arrays that an op outside of the
line or scope reads. Values of the backward pass are not pinned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from rhino_jax.errors import PinError, nearest
from rhino_jax.ir.places import in_scope, known_places, on_line, path_glob
from rhino_jax.ir.program import Op, Program, RegionKind, Value
from rhino_jax.ir.spec import OpenSpec, Spec, axes_text, entry_axes
from rhino_jax.utils.keywords import brief


@dataclass(frozen=True, slots=True)
class ValuePin:
    """The pinned layout of one value, and its origin.

    Attributes:
      spec: the layout; None for dims left open.
      key: the user's key; for a `rhino.pin` in the program, its source line.
      is_in_program: whether it is a `rhino.pin`.
    """

    spec: OpenSpec
    key: str
    is_in_program: bool = False


@dataclass(frozen=True, slots=True)
class Places:
    """Producers and readers of a program's values.

    Attributes:
      program: the program.
      makers: value id → the op that computes it.
      readers: value id → the ops that read it; None stands for a result of a region or
        of the program.
      same: value id inside a call's region → the equal value outside: results of the
        call, and operands for the region's inputs.
    """

    program: Program
    makers: Mapping[int, Op]
    readers: Mapping[int, list[Op | None]]
    same: Mapping[int, int]

    @classmethod
    def of(cls, program: Program) -> Places:
        makers = {v: op for op in program.ops for v in op.results}
        readers: dict[int, list[Op | None]] = {v: [] for v in makers}
        same: dict[int, int] = {}
        for op in program.ops:
            is_call = op.call is not None and op.call.kind is RegionKind.CALL
            for v in op.operands:
                if not is_call and v in readers:
                    readers[v].append(op)
            for region in op.call.regions if op.call is not None else ():
                if is_call:
                    same.update(zip(op.results, region.outputs, strict=True))
                    same.update(zip(region.inputs, op.operands, strict=True))
                else:
                    for v in region.outputs:
                        readers.setdefault(v, []).append(None)
        for result in program.outputs:
            readers.setdefault(result.value, []).append(None)
        found = cls(program, makers, readers, same)
        # A call's operands and results are aliases of the values inside its region.
        for v in list(readers):
            root = found.root(v)
            if root != v:
                readers.setdefault(root, []).extend(readers[v])
        return found

    def root(self, value: int) -> int:
        """Return the representative of a value and its aliases across calls."""
        while value in self.same:
            value = self.same[value]
        return value

    def made(self, group_of: Callable[[Op], str | None]) -> list[int]:
        """Return the arrays that leave their group: an op outside the group reads them.

        Args:
          group_of: returns the group of an op; None if it is in none.
        """
        found: dict[int, None] = {}
        for value, op in self.makers.items():
            root = self.root(value)
            if not self.program.values[value].shape or root not in self.makers:
                continue
            group = None if op.source.is_backward else group_of(op)
            if group is None:
                continue
            readers = self.readers.get(value, [])
            if any(r is None or group_of(r) != group for r in readers):
                found[root] = None
        return list(found)


def values_of_key(key: str, places: Places) -> list[int]:
    """Return the values that a source line or glob over scopes matches; else empty."""
    is_on_line = on_line(key)
    if is_on_line is not None:
        return places.made(lambda op: key if is_on_line(op.source) else None)
    scope = in_scope(key)
    return places.made(lambda op: scope(op.source.scopes))


MeshAxes = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class ResolvedPins:
    """Pins by position in the program.

    Attributes:
      inputs: position in `Program.inputs` → spec.
      outputs: position in `Program.outputs` → spec; results that replace an argument
        are pinned there instead.
      values: value id → pin of a value inside the program.
    """

    inputs: Mapping[int, Spec] = field(default_factory=dict)
    outputs: Mapping[int, Spec] = field(default_factory=dict)
    values: Mapping[int, ValuePin] = field(default_factory=dict)


def resolve_pins(
    pins: Mapping[str, Any] | None, program: Program, mesh_axes: MeshAxes
) -> ResolvedPins:
    """Resolve every pin to positions and values.

    A key is a tree path (`params['w1']`, `out[1]`), or a glob over tree paths in which
    `*` stands for anything and `?` for one character; brackets stand for themselves. A
    path takes precedence over a glob, a later pin over an earlier one. A key that
    matches no path may be a source line or a scope; `rhino.pin`s in the
    program are resolved too.

    Args:
      pins: key → PartitionSpec, or NamedSharding over the same mesh; None: no pins.
      program: the program whose inputs and outputs have the paths.
      mesh_axes: (name, size), major first.
    Raises:
      PinError: a pin matches nothing, names an unknown axis, names an axis twice,
        has too many dims, does not divide, or contradicts another.
    """
    inputs: dict[int, Spec] = {}
    outputs: dict[int, Spec] = {}
    entries = [
        (e.path, False, i, program.values[e.value])
        for i, e in enumerate(program.inputs)
    ] + [
        (e.path, True, i, program.values[e.value])
        for i, e in enumerate(program.outputs)
    ]
    paths = [path for path, *_ in entries]
    given_by: dict[int, str] = {}
    inside: dict[str, Any] = {}
    globs_first = sorted((pins or {}).items(), key=lambda pin: pin[0] in paths)
    for key, spec in globs_first:
        pattern = path_glob(key)
        is_path = key in paths
        matched = [
            e for e in entries if (e[0] == key if is_path else pattern.fullmatch(e[0]))
        ]
        if not matched:
            inside[key] = spec
        for path, is_output, i, value in matched:
            found = to_spec(key, spec, path, value, mesh_axes)
            state = program.outputs[i].state_of if is_output else None
            if not is_output:
                inputs[i] = found
                given_by[i] = key
            elif state is None:
                outputs[i] = found
            elif inputs.setdefault(state, found) != found:
                if not is_path:
                    continue
                raise PinError(
                    f"two pins contradict each other: {given_by.get(state)!r} and"
                    f" {key!r}.",
                    where=f"{program.inputs[state].path} and {path}",
                    numbers="the result replaces the argument in the next call, so"
                    " both have one sharding",
                    fix="drop one of the two.",
                )
            else:
                given_by.setdefault(state, key)
    return ResolvedPins(inputs, outputs, _inside(inside, program, mesh_axes, paths))


def _inside(
    pins: Mapping[str, Any],
    program: Program,
    mesh_axes: MeshAxes,
    paths: Sequence[str],
) -> dict[int, ValuePin]:
    """Resolve pins of values inside the program, those of `rhino.pin` first.

    Raises:
      PinError: as `resolve_pins`.
    """
    found: dict[int, ValuePin] = {}
    for op in program.ops:
        if op.pin is not None:
            name = f"rhino.pin at {op.source}"
            value = program.values[op.results[0]]
            # The pin's layout as an open spec; it may be for another mesh.
            if op.pin.mesh_axes is not None and dict(op.pin.mesh_axes) != dict(
                mesh_axes
            ):
                raise _other_mesh(name, name, op.pin.mesh_axes, mesh_axes)
            unconstrained = PartitionSpec.UNCONSTRAINED
            dims = [unconstrained if d is None else d for d in op.pin.layout]
            spec = to_open_spec(name, PartitionSpec(*dims), name, value, mesh_axes)
            found[value.id] = ValuePin(spec, name, is_in_program=True)
    places = Places.of(program) if pins else None
    for key, given in pins.items():
        values = [] if places is None else values_of_key(key, places)
        if not values:
            raise _matches_nothing(key, paths, program)
        for v in values:
            value = program.values[v]
            where = f"{key} (%{v}: {value.dtype}{list(value.shape)})"
            pin = ValuePin(to_open_spec(key, given, where, value, mesh_axes), key)
            if found.setdefault(v, pin).spec != pin.spec:
                raise PinError(
                    f"two pins contradict each other: {found[v].key!r} and {key!r}.",
                    where=where,
                    numbers="both pin this value, and differ",
                    fix="drop one of the two.",
                )
    return found


def to_spec(key: str, spec: Any, path: str, value: Value, mesh_axes: MeshAxes) -> Spec:
    """Convert a PartitionSpec to a `Spec` of one value.

    Raises:
      PinError: see `resolve_pins`; or the PartitionSpec leaves a dim unconstrained.
    """
    found = to_open_spec(key, spec, path, value, mesh_axes)
    dims = tuple(dim for dim in found if dim is not None)
    if len(dims) < len(found):
        raise PinError(
            f"pin {key!r} leaves a dim of an argument or result open.",
            where=path,
            numbers=brief(spec),
            fix="name its axes, or None for a whole dim; rhino.pin may leave it open.",
        )
    return dims


def to_open_spec(
    key: str, spec: Any, path: str, value: Value, mesh_axes: MeshAxes
) -> OpenSpec:
    """Convert a PartitionSpec to a spec of one value, UNCONSTRAINED dims as None.

    Raises:
      PinError: see `resolve_pins`.
    """
    position = {name: i for i, (name, _) in enumerate(mesh_axes)}
    sizes = dict(mesh_axes)
    entries = _entries(key, spec, path, mesh_axes)
    if len(entries) > value.rank:
        raise PinError(
            f"pin {key!r} has more dims than the array.",
            where=path,
            numbers=f"{spec} has {len(entries)} dims, the shape is {value.shape}",
            fix=f"give at most {value.rank} dims.",
        )
    dims: list[tuple[int, ...] | None] = []
    for entry in entries:
        if entry is PartitionSpec.UNCONSTRAINED:
            dims.append(None)
            continue
        names = entry_axes(entry)
        for name in names:
            if not isinstance(name, str) or name not in position:
                known = nearest(name, position) if isinstance(name, str) else ""
                raise PinError(
                    f"pin {key!r} names an axis that the mesh does not have:"
                    f" {name!r}.{known}",
                    where=path,
                    numbers=f"the mesh has {axes_text(mesh_axes)}",
                    fix=f"use the mesh's axis names, or give mesh={{{name!r}: …}}.",
                )
        dims.append(tuple(position[name] for name in names))
    dims += [()] * (value.rank - len(dims))
    used = [axis for dim in dims for axis in dim or ()]
    if len(used) != len(set(used)):
        raise PinError(
            f"pin {key!r} names an axis twice.",
            where=path,
            numbers=str(spec),
            fix="shard one dim over each axis, or several axes on one dim.",
        )
    for i, (dim, size) in enumerate(zip(dims, value.shape, strict=True)):
        cut_by = [mesh_axes[a][0] for a in dim or ()]
        shards = math.prod(sizes[name] for name in cut_by)
        if size % shards:
            raise PinError(
                f"pin {key!r} does not divide dim {i} of the array.",
                where=path,
                numbers=f"{size} over {shards} devices"
                f" ({', '.join(cut_by)}); shape {value.shape},"
                f" mesh {axes_text(mesh_axes)}",
                fix=_dividing(i, value, mesh_axes),
            )
    # Axes of one device shard nothing.
    return tuple(
        dim if dim is None else tuple(a for a in dim if mesh_axes[a][1] > 1)
        for dim in dims
    )


def _entries(key: str, spec: Any, path: str, mesh_axes: MeshAxes) -> tuple[Any, ...]:
    """Return the entries by dim of a PartitionSpec, or of a NamedSharding's.

    Raises:
      PinError: it is neither, is over another mesh, or has a memory kind or unreduced
        axes.
    """
    if isinstance(spec, NamedSharding):
        axes = tuple((str(n), int(s)) for n, s in spec.mesh.shape.items())
        if dict(axes) != dict(mesh_axes):
            raise _other_mesh(key, path, axes, mesh_axes)
        if spec.memory_kind == "pinned_host":
            raise PinError(
                f"pin {key!r} is in another memory than the device's.",
                where=path,
                numbers=f"memory kind {spec.memory_kind!r}",
                fix="leave out the memory kind: rhino plans device memory only.",
            )
        spec = spec.spec
    is_partial = getattr(spec, "unreduced", None) or getattr(spec, "reduced", None)
    if not isinstance(spec, PartitionSpec | tuple | list) or is_partial:
        raise PinError(
            f"pin {key!r} is not a PartitionSpec"
            + (" of whole values." if is_partial else "."),
            where=path,
            numbers=f"got {brief(spec)}",
            fix="write jax.sharding.PartitionSpec('axis', None, …).",
        )
    return tuple(spec)


def _other_mesh(key: str, path: str, axes: MeshAxes, mesh_axes: MeshAxes) -> PinError:
    return PinError(
        f"pin {key!r} is a sharding over another mesh than the plan's.",
        where=path,
        numbers=f"its mesh {dict(axes)}, the plan's {dict(mesh_axes)}",
        fix="plan with mesh=sharding.mesh, or pin a PartitionSpec.",
    )


def _dividing(dim: int, value: Value, mesh_axes: MeshAxes) -> str:
    """Return a fix that names the axes that divide the dim."""
    size = value.shape[dim]
    fitting = [n for n, count in mesh_axes if count > 1 and size % count == 0]
    others = [
        str(i)
        for i, other in enumerate(value.shape)
        if i != dim and any(c > 1 and other % c == 0 for _, c in mesh_axes)
    ]
    if fitting:
        return f"shard dim {dim} over {' or '.join(map(repr, fitting))} alone."
    if others:
        return f"leave dim {dim} whole; dim {' or '.join(others)} can be sharded."
    return "leave the array whole: PartitionSpec()."


def _matches_nothing(key: str, paths: Sequence[str], program: Program) -> PinError:
    below = sum(p.startswith((key + "[", key + ".")) for p in paths)
    fix = f"to pin all {below} arrays below it, write {key + '*'!r}." if below else ""
    shown = ", ".join(paths[:8]) + (", …" if len(paths) > 8 else "")
    places = known_places(program)
    return PinError(
        f"pin {key!r} matches no argument and no result, no source line and no scope."
        + ("" if below else nearest(key, [*paths, *places])),
        where=repr(key),
        numbers=f"{len(paths)} paths: {shown}; {len(places)} lines and scopes",
        fix=fix
        or "use one of these paths, a glob as \"params['blocks']*\", a line as"
        " 'model.py:61', a scope as 'encoder/layer_*', or rhino.pin in the function.",
    )
