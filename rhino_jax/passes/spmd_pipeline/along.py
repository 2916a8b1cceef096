"""Equations along the layers of stacks `[L, …]`: each stage may run its own part."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rhino_jax.frontend.registry import traits_of
from rhino_jax.ir.factor import FactorKind, Layout, Rule
from rhino_jax.ir.traits import OpKind
from rhino_jax.rewrite.equations import Equations


_PASSING = (OpKind.IDENTITY, OpKind.CONVERSION)


@dataclass(frozen=True, slots=True)
class Stacked:
    """An equation on a stage's part of stacks.

    Attributes:
      dims: for every operand the dim over layers; -1: it has none.
      results: likewise; -1: a reduction over layers, each stage's own.
      reducer: of that reduction; empty where there is none.
    """

    dims: tuple[int, ...]
    results: tuple[int, ...]
    reducer: str = ""

    def stacks_of(self, operands: Sequence[int | None]) -> set[int]:
        """Return those of the operands that are read along their dim 0.

        Args:
          operands: value ids, None of literals.
        """
        pairs = zip(operands, self.dims, strict=True)
        return {v for v, d in pairs if d == 0 and v is not None}


def reads_along(
    lines: Equations, rule: Rule | None, i: int, stacks: Collection[int]
) -> Stacked | None:
    """Return an equation along dim 0 of stacks that it reads.

    None where it needs them whole.

    Args:
      lines: equations.
      rule: factors of the equation's op; None: unknown.
      i: its position.
      stacks: value ids of stacks.
    """
    if (found := plain(lines, i)) is not None or rule is None:
        return found
    operands = lines.operands[i]
    kind = traits_of(lines.eqns[i].primitive.name).kind
    if kind is OpKind.IDENTITY and len(operands) == len(lines.makes[i]):
        same = tuple(0 if v in stacks else -1 for v in operands)
        return Stacked(same, same)
    known = {k: 0 for k, v in enumerate(operands) if v in stacks}
    cut = {rule.operands[k][:1] for k in known}
    if len(cut) != 1:
        return None
    return _along(rule, next(iter(cut)), known, lines, i)


def makes_along(lines: Equations, rule: Rule | None, i: int) -> Stacked | None:
    """Return an equation along dim 0 of its only result; None where it is not.

    Args:
      lines: equations.
      rule: factors of the equation's op; None: unknown.
      i: its position.
    """
    if len(lines.makes[i]) != 1:
        return None
    if (found := plain(lines, i)) is not None or rule is None:
        return found
    found = _along(rule, rule.results[0][:1], {}, lines, i)
    if found is not None and 0 not in found.dims:
        # A result that depends on positions alone (an iota) differs on every stage.
        kind = traits_of(lines.eqns[i].primitive.name).kind
        return found if kind is OpKind.BROADCAST else None
    return found


def plain(lines: Equations, i: int) -> Stacked | None:
    return Stacked((0,), (0,)) if passes_on(lines.eqns[i]) else None


def passes_on(eqn: Any) -> bool:
    """Whether an equation's result is its operand, perhaps of another type."""
    is_one = len(eqn.invars) == 1 == len(eqn.outvars)
    return is_one and traits_of(eqn.primitive.name).kind in _PASSING


def _along(
    rule: Rule, layout: Layout, known: Mapping[int, int], lines: Equations, i: int
) -> Stacked | None:
    """Return an equation along the factor that is dim 0 of a layout.

    None where that factor is not a dim of its own in all operands and results.

    Args:
      rule: factors of the equation's op.
      layout: of an operand or result; its dim 0 is the factor.
      known: index of an operand → the dim that must be the factor.
      lines: equations.
      i: position of the equation.
    """
    if not layout or len(layout[0]) != 1 or lines.eqns[i].primitive.name == "scan":
        return None
    (factor,) = layout[0]
    kind = rule.factors[factor].kind
    if kind not in (FactorKind.PARALLEL, FactorKind.REDUCE):
        return None
    dims = [_dim(lay, factor) for lay in rule.operands]
    results = [_dim(lay, factor) for lay in rule.results]
    if None in dims or any(d not in (0, -1) for d in results):
        return None
    if any(dims[k] != d for k, d in known.items()):
        return None
    partial = rule.partial_results(factor)
    gone = [k for k, d in enumerate(results) if d == -1]
    if gone and (len(gone) != len(results) or any(k not in partial for k in gone)):
        return None
    reducer = str(rule.factors[factor].reducer) if gone else ""
    return Stacked(
        tuple(int(d) for d in dims if d is not None),
        tuple(int(d) for d in results if d is not None),
        reducer,
    )


def _dim(layout: Layout, factor: int) -> int | None:
    """Return the dim that is exactly a factor.

    It is -1 where no dim has the factor, None where it is a part of a dim, or in
    several.
    """
    found = [d for d, dim in enumerate(layout) if factor in dim]
    if not found:
        return -1
    return found[0] if len(found) == 1 and len(layout[found[0]]) == 1 else None
