"""The equations of a jaxpr with numbered values, to be run in subsets.

For jaxprs without a `Program`; regions of a program are `flat.FlatRegion`s.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from rhino_jax._compat import (
    bind_eqn,
    eqn_context,
    hide_frames,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
    tagged,
)


hide_frames(__file__)

NO_TAGS: Mapping[int, str] = {}


@dataclass(frozen=True, eq=False)
class Equations:
    """A jaxpr with its values numbered.

    Attributes:
      eqns: the equations.
      operands: for every equation, value ids; None of literals.
      makes: for every equation, value ids of its results.
      inputs: value ids.
      outputs: value ids; None of literals.
      atoms: variables of the results, literals too.
      avals: abstract value of every value, by id; None of ids that no value has.
      consts: constants that the jaxpr captured, by value id.
    """

    eqns: tuple[Any, ...]
    operands: tuple[tuple[int | None, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    atoms: tuple[Any, ...]
    avals: tuple[Any, ...]
    consts: dict[int, Any]
    _number: dict[Any, int]

    @classmethod
    def of(
        cls, closed: Any, numbers: Sequence[tuple[int, ...]] | None = None
    ) -> Equations:
        """Number the values of a closed jaxpr.

        Args:
          closed: a closed jaxpr.
          numbers: for every equation, ids of its results, above those of all inputs and
            constants; None: in order of the equations.
        """
        jaxpr = open_jaxpr(closed)
        number: dict[Any, int] = {}
        for v in (*jaxpr.invars, *jaxpr.constvars):
            number[v] = len(number)
        for i, eqn in enumerate(jaxpr.eqns):
            count = len(number)
            own = numbers[i] if numbers else range(count, count + len(eqn.outvars))
            number.update(zip(eqn.outvars, own, strict=True))
        avals: list[Any] = [None] * (1 + max(number.values(), default=-1))
        for v, n in number.items():
            avals[n] = v.aval
        makes = tuple(tuple(number[v] for v in e.outvars) for e in jaxpr.eqns)
        return cls(
            eqns=tuple(jaxpr.eqns),
            operands=tuple(
                tuple(None if is_literal(v) else number[v] for v in e.invars)
                for e in jaxpr.eqns
            ),
            makes=makes,
            inputs=tuple(number[v] for v in jaxpr.invars),
            outputs=tuple(None if is_literal(v) else number[v] for v in jaxpr.outvars),
            atoms=tuple(jaxpr.outvars),
            avals=tuple(avals),
            consts={
                number[v]: x
                for v, x in zip(jaxpr.constvars, jaxpr_consts(closed), strict=True)
            },
            _number=number,
        )

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Value ids read by each equation."""
        return tuple(tuple(v for v in of if v is not None) for of in self.operands)

    @cached_property
    def maker(self) -> dict[int, int]:
        """Value → position of the equation that computes it."""
        return {v: i for i, made in enumerate(self.makes) for v in made}

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """Value → positions of the equations that read it."""
        found: dict[int, list[int]] = {}
        for i, values in enumerate(self.reads):
            for v in dict.fromkeys(values):
                found.setdefault(v, []).append(i)
        return {v: tuple(readers) for v, readers in found.items()}

    def with_copies(
        self, equations: Collection[int], positions: Collection[int]
    ) -> Equations:
        """Return the jaxpr with copies of some equations ahead of all.

        Args:
          equations: positions of the equations to copy; copies read one another.
          positions: of the outputs that are results of copies.
        """
        first = sorted(equations)
        made = [v for i in first for v in self.makes[i]]
        copy = {v: len(self.avals) + k for k, v in enumerate(made)}
        return replace(
            self,
            eqns=(*(self.eqns[i] for i in first), *self.eqns),
            operands=(
                *(
                    tuple(v if v is None else copy.get(v, v) for v in self.operands[i])
                    for i in first
                ),
                *self.operands,
            ),
            makes=(
                *(tuple(copy[v] for v in self.makes[i]) for i in first),
                *self.makes,
            ),
            outputs=tuple(
                copy.get(v, v) if v is not None and k in positions else v
                for k, v in enumerate(self.outputs)
            ),
            avals=(*self.avals, *(self.avals[v] for v in made)),
        )

    def bytes(self, value: int) -> int:
        aval = self.avals[value]
        return int(getattr(aval, "size", 1)) * int(getattr(aval.dtype, "itemsize", 4))

    def run(
        self,
        equations: Iterable[int],
        env: dict[int, Any],
        tags: Mapping[int, str] = NO_TAGS,
    ) -> None:
        """Run some equations, in this order.

        Args:
          equations: positions.
          env: known arrays, by value id; results are added.
          tags: of equations, for `_compat.untagged`.
        """
        for i in equations:
            eqn = self.eqns[i]
            mark = tagged(tags[i]) if i in tags else nullcontext()
            with eqn_context(eqn), mark:
                results = bind_eqn(eqn, self.arguments(i, env), eqn.params)
            env.update(zip(self.makes[i], results, strict=True))

    def late(self, equations: Iterable[int], again: Collection[int]) -> list[int]:
        """Return equations in an order in which recomputed ones run late.

        Those of `again` come just before the first other equation that needs them:
        their results are not live before.
        """
        ordered = sorted(equations)
        needed: dict[int, int] = {}
        for i in reversed(ordered):
            at = needed.get(i, len(self.eqns)) if i in again else i
            needed[i] = at
            for v in self.reads[i]:
                maker = self.maker.get(v)
                if maker is not None and maker in again:
                    needed[maker] = min(at, needed.get(maker, at))
        return sorted(ordered, key=lambda i: (needed[i], i not in again, i))

    def bound(self, equation: int, env: dict[int, Any], given: dict[int, Any]) -> Any:
        """Return the only result of an equation, some of its operands replaced.

        Args:
          equation: position.
          env: known arrays, by value id.
          given: index of an operand → array in its place.
        """
        eqn = self.eqns[equation]
        args = self.arguments(equation, env)
        for place, x in given.items():
            args[place] = x
        with eqn_context(eqn):
            (result,) = bind_eqn(eqn, args, eqn.params)
        return result

    def arguments(self, equation: int, env: dict[int, Any]) -> list[Any]:
        """Return the arrays that an equation reads, literals too."""
        pairs = zip(self.eqns[equation].invars, self.operands[equation], strict=True)
        return [v.val if n is None else self.read(n, env) for v, n in pairs]

    def number(self, var: Any) -> int:
        """Return the id of a variable of the jaxpr."""
        return self._number[var]

    def read(self, value: int, env: dict[int, Any]) -> Any:
        return env[value] if value in env else self.consts[value]

    def result(self, position: int, env: dict[int, Any]) -> Any:
        value = self.outputs[position]
        if value is None:
            atom = self.atoms[position]
            return jax.numpy.asarray(atom.val, atom.aval.dtype)
        return self.read(value, env)

    def needed(
        self, values: Iterable[int], known: Iterable[int]
    ) -> tuple[set[int], set[int]]:
        """Return the equations that compute some values from others.

        Args:
          values: ids of the values to compute.
          known: ids of values that are available.
        Returns:
          The equations; which of `known`, and of the jaxpr's inputs, they read or are
            wanted themselves.
        """
        have = frozenset(known)

        def maker(value: int) -> int | None:
            return None if value in have else self.maker.get(value)

        found, read = trace_back(values, maker, self.reads.__getitem__)
        return found, read - self.consts.keys()


def trace_back(
    values: Iterable[int],
    maker: Callable[[int], int | None],
    reads: Callable[[int], Iterable[int]],
) -> tuple[set[int], set[int]]:
    """Return the equations that values depend on.

    Args:
      values: ids of the values.
      maker: value id → position of the equation to compute it; None: it is available.
      reads: position of an equation → the values that it reads.
    Returns:
      Positions of the equations; the available values that they read or that are among
        `values`.
    """
    queue = list(values)
    equations: set[int] = set()
    read: set[int] = set()
    while queue:
        value = queue.pop()
        at = maker(value)
        if at is None:
            read.add(value)
        elif at not in equations:
            equations.add(at)
            queue += reads(at)
    return equations, read
