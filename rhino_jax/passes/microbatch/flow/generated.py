"""Values that pieces make for themselves: positions, random bits, broadcasts.

They are whole in the program, but nothing has to be cut to have a piece of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax

from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.microbatch.flow.blocks import Flat, Item
from rhino_jax.passes.microbatch.flow.states import RowsState, Spot, locate, placed


REMADE = frozenset(
    {
        OpKind.ELEMENTWISE,
        OpKind.EXPONENTIAL,
        OpKind.CONVERSION,
        OpKind.IDENTITY,
        OpKind.BROADCAST,
        OpKind.MOVEMENT,
    }
)


def spot_of(item: Item, value: int, rows: RowsState, size: int) -> Spot | None:
    """Where an op has the batch, if a result is to be cut there."""
    rule = item.op.rule
    if rule is None or item.blocks:
        return None
    layout = rule.results[item.results.index(value)]
    spot = locate(rule, layout, rows, size)
    if spot is None or rule.factors[spot.factor].kind is not FactorKind.PARALLEL:
        return None
    return spot


def operands_cut(item: Item, spot: Spot) -> Iterator[tuple[int, RowsState | None]]:
    """Every operand, and how it is cut where the op is."""
    rule: Rule | None = item.op.rule
    assert rule is not None
    for value, layout in zip(item.operands, rule.operands, strict=True):
        yield value, placed(rule, layout, spot)


Leaves = dict[tuple[int, tuple[int, int, int]], frozenset[int] | None]
"""Of values and where they are cut: what is needed in full to make a piece."""


def leaves_of(
    flat: Flat, value: int, rows: RowsState, size: int, found: Leaves
) -> frozenset[int] | None:
    """What is needed in full to make a piece of a whole value; None: that itself.

    Args:
      flat: the program.
      value: the value.
      rows: where it is cut.
      size: of the batch.
      found: what was found before.
    """
    key = value, rows.place
    if key not in found:
        found[key] = _leaves(flat, value, rows, size, found)
    return found[key]


def _leaves(
    flat: Flat, value: int, rows: RowsState, size: int, found: Leaves
) -> frozenset[int] | None:
    if value not in flat.maker:
        return None
    item = flat.maker[value]
    spot = spot_of(item, value, rows, size)
    if spot is None:
        return None
    if item.op.name == "iota":
        return frozenset()
    if item.op.name == "random_bits":
        return frozenset(item.operands) if _draws_by_position(item) else None
    if item.op.traits.kind not in REMADE or len(item.results) != 1:
        return None
    leaves: set[int] = set()
    for operand, cut in operands_cut(item, spot):
        if cut is None:
            leaves.add(operand)
            continue
        more = leaves_of(flat, operand, cut, size, found)
        if more is None:
            return None
        leaves |= more
    return frozenset(leaves)


def _draws_by_position(item: Item) -> bool:
    """Whether each random word is a function of a key and its position."""
    key, drawn = item.eqn.invars[0].aval, item.eqn.outvars[0].aval
    is_small = math.prod(drawn.shape) < 2**32
    is_free = bool(jax.config.values["jax_threefry_partitionable"])
    return is_free and is_small and key.shape == () and str(key.dtype) == "key<fry>"
