"""Output projections: matmuls of tokens with a parameter, as those to a vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rhino_jax.ir.axes import AxisSpan
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.rewrite.flat import FlatOp, FlatProgram


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A matmul of tokens with a parameter, as an output projection to a vocabulary.

    Attributes:
      item: the matmul.
      tokens: position of the operand that has the tokens; the other is a parameter.
      cut: the dim of that operand to chunk: the longest that the parameter lacks.
      made: the same dim in the result.
      row: the dim of the result that only the parameter has: the vocabulary.
    """

    item: FlatOp
    tokens: int
    cut: AxisSpan
    made: AxisSpan
    row: AxisSpan


def heads_of(flat: FlatProgram) -> Iterator[Head]:
    """Yield the output projections of a program's top level, largest results first.

    Of several on one source line only the first is yielded: those are layers.
    """
    values = flat.program.values
    found = [
        head
        for item in flat.top.ops
        if item.op.traits.is_contraction and (head := _head(flat, item)) is not None
    ]
    found.sort(key=lambda h: -values[h.item.results[0]].bytes)
    seen: set[str] = set()
    for head in found:
        line = str(head.item.op.source)
        if line not in seen:
            seen.add(line)
            yield head


def _head(flat: FlatProgram, item: FlatOp) -> Head | None:
    """Return an op as an output projection; None where it is none."""
    rule = item.op.rule
    if rule is None or item.regions or len(item.operands) != 2:
        return None
    parameters = [i for i, v in enumerate(item.operands) if flat.is_parameter(v)]
    if len(parameters) != 1:
        return None
    tokens = 1 - parameters[0]
    (result,) = rule.results
    cut, row = _own(rule, tokens, parameters[0]), _own(rule, parameters[0], tokens)
    if not cut or len(row) != 1:
        return None
    size = {f: rule.factors[f].size for f in (*cut, *row)}
    longest = max(cut, key=lambda f: size[f])
    cuts = (rule.operands[tokens], longest), (result, longest), (result, row[0])
    spans = [AxisSpan(layout.index((f,)), size[f]) for layout, f in cuts]
    return Head(item, tokens, *spans)


def _own(rule: Rule, mine: int, other: int) -> list[int]:
    """Return the parallel factors that are dims of one operand and of the result alone.

    Args:
      rule: factors of the op.
      mine: position of the operand.
      other: position of the other operand.
    """
    return [
        f
        for f, factor in enumerate(rule.factors)
        if (f,) in rule.operands[mine]
        and (f,) in rule.results[0]
        and not any(f in dim for dim in rule.operands[other])
        and factor.kind is FactorKind.PARALLEL
    ]
