"""Rewriting a function with its merged dims split, where that is of use.

A sharding of the minor part of a merged dim (the sequence inside batch · sequence) is
block-cyclic on the merged dim, which no NamedSharding can express. Split, the parts are
dims like any other, and the ops on them the same ops: a matmul has one more free dim, a
sum one more dim to sum over. Results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax import lax

from rhino_jax._compat import (
    bind_eqn,
    eqn_context,
    jaxpr_consts,
    like_jaxpr,
    open_jaxpr,
    retrace,
    scan_counts,
    type_on,
)
from rhino_jax.errors import InternalError
from rhino_jax.frontend.regions import (
    PLAIN_CALLS,
    closed_region_jaxprs,
    evaluate,
    inline_call,
    inner_equations,
    region_kind,
    with_jaxprs,
)
from rhino_jax.frontend.split_dims.flows import Flows, find_flows, takes_parts
from rhino_jax.frontend.split_dims.forms import (
    DimParts,
    Form,
    Groups,
    groups_of,
    is_apart,
    merged,
    shape_of,
)
from rhino_jax.frontend.split_dims.ops import spell
from rhino_jax.ir.program import RegionKind


def split_merged_dims(jaxpr: Any) -> Any:
    """Return the function with its merged dims split, closed where `jaxpr` is.

    Arguments and results are unchanged; the same object where no dim is worth
    splitting.
    """
    # Without a reshape that merges several dims into one, nothing is to split.
    reshapes = (e for e in inner_equations(jaxpr) if e.primitive.name == "reshape")
    spelled = (spell(eqn, [Form(groups_of(eqn.invars[0]))]) for eqn in reshapes)
    if not any(found is not None and is_apart(found.results[0]) for found in spelled):
        return jaxpr
    flows = find_flows(jaxpr)
    if not flows.kept:
        return jaxpr
    found = _Emitter(flows).rebuilt_as_it_was(jaxpr)
    # Results of Pallas kernels are on no mesh.
    old, new = (
        [type_on(v.aval) for v in open_jaxpr(j).outvars] for j in (jaxpr, found)
    )
    if old != new:
        raise InternalError(
            "Splitting merged dims changed the results of a program.",
            numbers=f"results were {old}, are {new}",
        )
    return found


class _Value:
    """A value, as one array or several equivalent ones of different shapes.

    Attributes:
      form: the forms in which it is available.
    """

    def __init__(
        self,
        form: Form,
        array: Any = None,
        make: Callable[[Groups], Any] | None = None,
    ) -> None:
        self.form, self._make = form, make
        self._arrays: dict[Groups, Any] = {}
        if make is None:
            self._arrays[form.groups] = array

    def array(self, groups: Groups | None = None) -> Any:
        """Return the array with these groups; None: with its own."""
        own = self.form.groups
        if groups is None:
            groups = own
        if groups in self._arrays:
            return self._arrays[groups]
        if self._make is not None:
            near = tuple(
                groups[d] if d in self.form.free else own[d] for d in range(len(own))
            )
            if near not in self._arrays:
                self._arrays[near] = self._make(near)
            if near == groups:
                return self._arrays[near]
        else:
            near = own
        self._arrays[groups] = lax.reshape(self._arrays[near], shape_of(groups))
        return self._arrays[groups]

    def merged(self) -> Any:
        """Return the array of the original program."""
        return self.array(merged(self.form.groups))


def _plain(array: Any, atom: Any) -> _Value:
    return _Value(Form(groups_of(atom)), array)


def _apart(arrays: Sequence[Any], groups: Sequence[Groups]) -> list[_Value]:
    return [_Value(Form(g), x) for x, g in zip(arrays, groups, strict=True)]


@dataclass(slots=True)
class _Emitter:
    flows: Flows
    _bodies: dict[Any, tuple[Any, list[Groups]]] = field(default_factory=dict)
    _is_changed: dict[int, bool] = field(default_factory=dict)

    def region(
        self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[_Value]
    ) -> list[_Value]:
        """Run all equations of a jaxpr and return its results."""
        return evaluate(jaxpr, consts, inputs, self.eqn, _plain)

    def eqn(self, eqn: Any, operands: list[_Value]) -> list[_Value]:
        kind, bodies = region_kind(eqn), closed_region_jaxprs(eqn)
        if kind is None:
            return self.plain(eqn, operands)
        if eqn.primitive.name in PLAIN_CALLS:
            return inline_call(eqn, operands, self.eqn, _plain)
        some_apart = any(v.form.is_apart for v in operands)
        if some_apart or any(map(self.changes, bodies)):
            if kind is RegionKind.SCAN:
                return self.scan(eqn, operands)
            if kind is RegionKind.CALL and takes_parts(eqn):
                return self.call(eqn, operands)
            if kind is not RegionKind.CALL:
                same = [
                    self.rebuilt_as_it_was(b) if self.changes(b) else b for b in bodies
                ]
                return self.bound(eqn, operands, with_jaxprs(eqn, same))
        return self.bound(eqn, operands, eqn.params)

    def bound(self, eqn: Any, operands: list[_Value], params: Any) -> list[_Value]:
        """Run an equation on the arrays of the original program."""
        results = bind_eqn(eqn, [v.merged() for v in operands], params)
        return [_plain(x, var) for x, var in zip(results, eqn.outvars, strict=True)]

    def plain(self, eqn: Any, operands: list[_Value]) -> list[_Value]:
        forms = [v.form for v in operands]
        found = spell(eqn, forms)
        if found is None:
            return self.bound(eqn, operands, eqn.params)
        if eqn.primitive.name == "reshape":
            return self.reshape(eqn, operands[0], self.flows.of(found.results[0]))

        def make(target: Groups | None) -> list[Any]:
            spelled = spell(eqn, forms, target)
            assert spelled is not None
            with eqn_context(eqn):
                arrays = [
                    v.array(g) for v, g in zip(operands, spelled.operands, strict=True)
                ]
                return bind_eqn(eqn, arrays, spelled.params)

        if found.free:
            form = Form(found.results[0], found.free)
            return [_Value(form, make=lambda target: make(target)[0])]
        return _apart(make(None), found.results)

    def reshape(self, eqn: Any, operand: _Value, made: Groups) -> list[_Value]:
        """Reshape an operand; nothing, where its parts are split already."""
        x, shape = operand.array(), shape_of(made)
        if shape != x.shape:
            unsaid = {"sharding": None} if is_apart(made) else {}
            (x,) = bind_eqn(eqn, [x], {**eqn.params, "new_sizes": shape, **unsaid})
        return _apart([x], [made])

    def call(self, eqn: Any, operands: list[_Value]) -> list[_Value]:
        """Run a call on arrays with split dims."""
        (body,) = closed_region_jaxprs(eqn)
        enters = [v.form.groups for v in operands]
        key = id(body), tuple(enters)
        if key not in self._bodies:
            self._bodies[key] = self.rebuilt(body, enters, [])
        new, leaves = self._bodies[key]
        arrays = [v.array() for v in operands]
        if eqn.primitive.name.startswith("custom_jvp"):
            results = self.custom_jvp(eqn, enters, leaves, arrays)
        else:
            results = bind_eqn(eqn, arrays, with_jaxprs(eqn, [new]))
        return _apart(results, leaves)

    def custom_jvp(
        self,
        eqn: Any,
        enters: Sequence[Groups],
        leaves: Sequence[Groups],
        arrays: Sequence[Any],
    ) -> Sequence[Any]:
        """Run a `custom_jvp` call on split dims, with the derivative of the original
        call."""
        (body,) = closed_region_jaxprs(eqn)
        inner, consts = open_jaxpr(body), jaxpr_consts(body)

        def as_it_was(*xs: Any) -> tuple[Any, ...]:
            values = _apart(xs, enters)
            results = self.bound(eqn, values, eqn.params)
            return tuple(v.array(g) for v, g in zip(results, leaves, strict=True))

        @jax.custom_jvp
        def on_parts(*xs: Any) -> tuple[Any, ...]:
            results = self.region(inner, consts, _apart(xs, enters))
            return tuple(v.array(g) for v, g in zip(results, leaves, strict=True))

        @on_parts.defjvp
        def derivative(primals: Any, tangents: Any) -> Any:
            return jax.jvp(as_it_was, primals, tangents)

        return on_parts(*arrays)

    def scan(self, eqn: Any, operands: list[_Value]) -> list[_Value]:
        """Run a loop whose carries leave with the parts with which they enter."""
        (body,) = closed_region_jaxprs(eqn)
        num_consts, num_carry = scan_counts(eqn.params)
        first = num_consts + num_carry
        carries = self.flows.carries[id(eqn)]
        enters = [v.form.groups for v in operands]
        enters[num_consts:first] = carries
        for k in range(first, len(operands)):
            if enters[k][0].is_apart:
                enters[k] = merged(enters[k])
        inside = [*enters[:first], *(g[1:] for g in enters[first:])]
        new, leaves = self.rebuilt(body, inside, carries)
        arrays = [v.array(g) for v, g in zip(operands, enters, strict=True)]
        results = bind_eqn(eqn, arrays, with_jaxprs(eqn, [new]))
        length = DimParts((int(eqn.params["length"]),))
        stacks: list[Groups] = [(length, *g) for g in leaves[num_carry:]]
        return _apart(results, [*carries, *stacks])

    def changes(self, jaxpr: Any) -> bool:
        """Whether some merged dim in a jaxpr is split."""
        found = self._is_changed.get(id(jaxpr))
        if found is None:
            merging = {at for at, _ in self.flows.kept}
            found = any(id(eqn) in merging for eqn in inner_equations(jaxpr))
            self._is_changed[id(jaxpr)] = found
        return found

    def rebuilt_as_it_was(self, old: Any) -> Any:
        """Return a jaxpr rewritten inside, with unchanged inputs and results."""
        jaxpr = open_jaxpr(old)
        enters, leaves = (
            [groups_of(v) for v in side] for side in (jaxpr.invars, jaxpr.outvars)
        )
        return self.rebuilt(old, enters, leaves)[0]

    def rebuilt(
        self, old: Any, enters: Sequence[Groups], leaves: Sequence[Groups]
    ) -> tuple[Any, list[Groups]]:
        """Return a jaxpr rewritten for inputs with split dims.

        Args:
          old: the original jaxpr.
          enters: groups of its inputs.
          leaves: groups that its first results must have; the others keep theirs.

        Returns:
          The jaxpr, closed where `old` is, and the groups of its results.
        """
        inner, consts = open_jaxpr(old), jaxpr_consts(old)
        found: list[Groups] = []

        def run(*arrays: Any) -> list[Any]:
            outs = self.region(inner, consts, _apart(arrays, enters))
            found[:] = [v.form.groups for v in outs]
            found[: len(leaves)] = leaves
            return [v.array(g) for v, g in zip(outs, found, strict=True)]

        new, new_consts = retrace(run, inner, [shape_of(g) for g in enters])
        return like_jaxpr(old, new, new_consts), found
