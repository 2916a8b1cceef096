"""The equations of a jaxpr, to be run in parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax

from rhino_jax._compat import (
    bind_eqn,
    eqn_context,
    hide_frames,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
)


hide_frames(__file__)


@dataclass(frozen=True, eq=False)
class Lines:
    """A jaxpr with its values numbered.

    Attributes:
      eqns: the equations.
      reads, makes: of every equation, numbers of values; literals left out.
      inputs: numbers.
      outputs: numbers; None of literals.
      atoms: what the results are, literals too.
      avals: of every value.
      consts: of constants that the jaxpr captured, by number.
      maker: value → position of the equation that makes it.
    """

    eqns: tuple[Any, ...]
    reads: tuple[tuple[int, ...], ...]
    makes: tuple[tuple[int, ...], ...]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    atoms: tuple[Any, ...]
    avals: tuple[Any, ...]
    consts: dict[int, Any]
    maker: dict[int, int]
    _number: dict[Any, int]

    @classmethod
    def of(cls, closed: Any) -> Lines:
        jaxpr = open_jaxpr(closed)
        number: dict[Any, int] = {}
        for v in (*jaxpr.invars, *jaxpr.constvars):
            number[v] = len(number)
        for eqn in jaxpr.eqns:
            for v in eqn.outvars:
                number[v] = len(number)
        makes = tuple(tuple(number[v] for v in e.outvars) for e in jaxpr.eqns)
        return cls(
            eqns=tuple(jaxpr.eqns),
            reads=tuple(
                tuple(number[v] for v in e.invars if not is_literal(v))
                for e in jaxpr.eqns
            ),
            makes=makes,
            inputs=tuple(number[v] for v in jaxpr.invars),
            outputs=tuple(None if is_literal(v) else number[v] for v in jaxpr.outvars),
            atoms=tuple(jaxpr.outvars),
            avals=tuple(v.aval for v in number),
            consts={
                number[v]: x
                for v, x in zip(jaxpr.constvars, jaxpr_consts(closed), strict=True)
            },
            maker={v: i for i, made in enumerate(makes) for v in made},
            _number=number,
        )

    def bytes(self, value: int) -> int:
        aval = self.avals[value]
        return int(getattr(aval, "size", 1)) * int(getattr(aval.dtype, "itemsize", 4))

    def run(self, equations: Iterable[int], env: dict[int, Any]) -> None:
        """Run some equations, in their order.

        Args:
          env: what is known, by number; gains what is made.
        """
        for i in sorted(equations):
            eqn = self.eqns[i]
            with eqn_context(eqn):
                results = bind_eqn(eqn, self.operands(i, env), eqn.params)
            env.update(zip(self.makes[i], results, strict=True))

    def bound(self, equation: int, env: dict[int, Any], given: dict[int, Any]) -> Any:
        """The only result of an equation with some operands in place of others."""
        eqn = self.eqns[equation]
        args = self.operands(equation, env)
        for place, x in given.items():
            args[place] = x
        with eqn_context(eqn):
            (result,) = bind_eqn(eqn, args, eqn.params)
        return result

    def operands(self, equation: int, env: dict[int, Any]) -> list[Any]:
        """What an equation reads, literals too."""
        return [
            v.val if is_literal(v) else self.read(self._number[v], env)
            for v in self.eqns[equation].invars
        ]

    def number(self, var: Any) -> int:
        """Of a variable of the jaxpr."""
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
        """The equations that make values of others.

        Args:
          values: wanted.
          known: values that need not be made.
        Returns:
          The equations; what of `known`, and of the jaxpr's inputs, they read or is
          wanted itself.
        """
        have, queue = set(known), list(values)
        equations: set[int] = set()
        read: set[int] = set()
        while queue:
            value = queue.pop()
            at = self.maker.get(value)
            if value in have or at is None:
                if value not in self.consts:
                    read.add(value)
            elif at not in equations:
                equations.add(at)
                queue += self.reads[at]
        return equations, read
