"""What a matmul or convolution costs where small sizes leave a systolic array idle.

A TPU's matrix unit multiplies by a square of weights that lies in it. What is summed
over runs down its side, a free factor of one operand along the other side, and rows
of the other operand stream through. Sides are padded to whole squares; a square that
few rows stream through takes as long as its loading does.

Source: Jouppi et al., "In-Datacenter Performance Analysis of a Tensor Processing Unit"
(ISCA 2017), section 2. Against XLA:TPU's estimates of convolutions (libtpu 0.0.52):
`pytest -m compile_only tests/cost/test_systolic.py`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from rhino_jax.hardware.observed import OBSERVED
from rhino_jax.ir.factor import FactorKind, Rule


@dataclass(frozen=True, slots=True)
class _Roles:
    """Factors of a product: summed, free in one operand, and positions of windows."""

    summed: tuple[int, ...]
    left: tuple[int, ...]
    right: tuple[int, ...]
    positions: tuple[int, ...]


def array_paddings(rule: Rule, pieces: np.ndarray, side: int) -> np.ndarray:
    """How many times its own arithmetic a product of two operands takes.

    Args:
      rule: of the op.
      pieces: [ways, factors], into how many each factor is cut.
      side: of the systolic array; 0: there is none.
    Returns:
      [ways].
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
    # A window's positions stream past the weights; where what is convolved lies in
    # the array, they are its batch, one after the other.
    along_right = _padding(right, side) * np.maximum(1.0, rows / (left * positions))
    along_left = _padding(left, side) * np.maximum(1.0, rows / right)
    return _padding(summed, side) * np.minimum(along_right, along_left)


def _padding(sizes: np.ndarray, multiple: int) -> np.ndarray:
    return -(-sizes // multiple) * multiple / sizes


@functools.cache
def _roles(rule: Rule) -> _Roles:
    taken = [{f for dim in layout for f in dim} for layout in rule.operands[:2]]
    made = {f for layout in rule.results for dim in layout for f in dim}
    summed, left, right, positions = [], [], [], []
    for f, factor in enumerate(rule.factors):
        in_left, in_right = f in taken[0], f in taken[1]
        if f not in made:
            # Input positions of a window are neither: its taps and results are.
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
