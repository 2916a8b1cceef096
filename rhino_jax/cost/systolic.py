"""Cost of matmuls and convolutions whose small sizes leave a systolic array idle.

A TPU's matrix unit multiplies by a square of weights that lies in it. The reduced dim
runs down its side, a free factor of one operand along the other side, and rows of the
other operand stream through. Sides are padded to whole squares; a square that few rows
stream through takes as long as its loading does. Products of two vectors, and products
that sum nothing, are multiplied on the vector units instead.

Source: Jouppi et al., "In-Datacenter Performance Analysis of a Tensor Processing Unit"
(ISCA 2017), section 2. Against XLA:TPU's estimates of convolutions (libtpu 0.0.52):
`pytest -m compile_only tests/cost/test_systolic.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from rhino_jax.cost.tiles import padding
from rhino_jax.hardware.observed import OBSERVED
from rhino_jax.ir.factor import FactorKind, Rule


@dataclass(frozen=True, slots=True)
class _Roles:
    """Roles of a product's factors, by position.

    Attributes:
      summed: reducing factors.
      left: parallel factors of the first operand alone.
      right: factors of the second operand alone.
      positions: positions of convolution windows.
    """

    summed: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    positions: tuple[int, ...]


def array_paddings(rule: Rule, pieces: np.ndarray, side: int) -> np.ndarray:
    """Return by how much padding multiplies the arithmetic of a binary product.

    Args:
      rule: the op's rule.
      pieces: [ways, factors], number of shards of each factor.
      side: rows, and columns, of the systolic array; 0: there is none.
    Returns:
      [ways], at least 1.
    """
    sizes = np.array([f.size for f in rule.factors])
    if not side or not sizes.all():
        return np.ones(len(pieces))
    shards = -(-sizes // pieces)
    roles = _roles(rule)
    left, right, summed, positions = (
        shards[:, list(factors)].prod(1)
        for factors in (roles.left, roles.right, roles.summed, roles.positions)
    )
    rows = OBSERVED.least_rows * side
    # If the weights lie in the array, window positions stream past them as rows; if
    # the images do, each position is a product of its own.
    along_right = padding(right, side) * np.maximum(1.0, rows / (left * positions))
    along_left = padding(left, side) * np.maximum(1.0, rows / right)
    padded = padding(summed, side) * np.minimum(along_right, along_left)
    is_vector = (positions == 1) & ((summed == 1) | (left * right == 1))
    return np.where(is_vector, 1.0, padded)


@functools.cache
def _roles(rule: Rule) -> _Roles:
    taken = [{f for dim in layout for f in dim} for layout in rule.operands[:2]]
    made = {f for layout in rule.results for dim in layout for f in dim}
    summed, left, right, positions = [], [], [], []
    for f, factor in enumerate(rule.factors):
        in_left, in_right = f in taken[0], f in taken[1]
        if f not in made:
            # A window's input positions have no role: its taps and results do.
            if in_right:
                summed.append(f)
        elif in_left and in_right:
            continue
        elif in_right:
            right.append(f)
        elif in_left and factor.kind is FactorKind.PARALLEL:
            left.append(f)
        else:
            positions.append(f)
    return _Roles(tuple(summed), tuple(left), tuple(right), tuple(positions))
