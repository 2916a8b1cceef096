"""Divide the seconds of compiled kernels among what was planned.

A kernel computes ops of several lines and primitives. Its seconds go to those that the
plan still expects seconds of, so that fusion alone is no difference: kernels of few ops
first; what exceeds all that is expected goes to the main one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

from rhino_jax.cost.corrections import OpKey
from rhino_jax.verify.hlo.records import CompiledKernel


Part = TypeVar("Part", bound=Hashable)


def divide(
    kernels: Iterable[CompiledKernel],
    parts_of: Callable[[CompiledKernel], tuple[Part, ...]],
    expected_s: Mapping[Part, float],
) -> dict[Part, list[tuple[float, CompiledKernel]]]:
    """Return the kernels that compute anything of a part, with their seconds there.

    Args:
      kernels: the kernels of a compiled step.
      parts_of: returns the parts that a kernel computes, the main one first; at least
        one.
      expected_s: part → planned seconds.
    """
    left = defaultdict(float, expected_s)
    shares: dict[Part, list[tuple[float, CompiledKernel]]] = defaultdict(list)
    named = [(parts_of(k), k) for k in kernels]
    for parts, k in sorted(named, key=lambda x: (len(x[0]), -x[1].seconds, x[1].name)):
        wanted = [max(left[p], 0.0) for p in parts]
        whole = sum(wanted)
        share = min(1.0, k.seconds / whole) if whole else 0.0
        took = [share * x for x in wanted]
        took[0] += max(0.0, k.seconds - sum(took))
        for part, seconds in zip(parts, took, strict=True):
            left[part] -= seconds
            shares[part].append((seconds, k))
    return shares


_NO_OP: OpKey = ("", "", "")


def op_times(
    kernels: Iterable[CompiledKernel], planned_s: Mapping[OpKey, float]
) -> tuple[dict[OpKey, float], float]:
    """Return the compiled seconds of ops per step, and of kernels of no op.

    Kernels that name no op with a planned cost are divided among those of their line.

    Args:
      kernels: the kernels of a compiled step.
      planned_s: key of ops → their planned seconds of compute per step.
    """
    on_line: dict[str, list[OpKey]] = defaultdict(list)
    for key in sorted(planned_s, key=lambda k: (-planned_s[k], k)):
        if planned_s[key] and key[0]:
            on_line[key[0]].append(key)

    def ops_of(kernel: CompiledKernel) -> tuple[OpKey, ...]:
        known = tuple(k for k in kernel.ops if planned_s.get(k))
        return known or tuple(on_line.get(kernel.ops[0][0], (_NO_OP,)))

    shares = divide(kernels, ops_of, planned_s)
    taken = {key: sum(s for s, _ in found) for key, found in shares.items()}
    return taken, taken.pop(_NO_OP, 0.0)
