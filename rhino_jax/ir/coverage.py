"""Coverage: the share of a program that sharding rules cover, and the ops without a
rule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from rhino_jax.ir.program import Op, Program, Source


KERNELS = {
    "pallas_call": "name",
    "ffi_call": "target_name",
    "call_hi_primitive": "_prim",
}
"""Primitives that run arbitrary kernels → the parameter that names the kernel, or whose
type does."""


@dataclass(frozen=True, slots=True)
class Uncovered:
    """A primitive, or kernel, without a rule.

    Attributes:
      name: name under which a rule for it would be registered.
      flops, bytes: its share of the program's FLOPs and result bytes, in [0, 1].
      source: source line of the largest of its ops.
    """

    name: str
    flops: float
    bytes: float
    source: Source


def rule_name(op: Op) -> str:
    """Return the name under which a user registers a rule for this op."""
    return op.label if op.name in KERNELS and op.label else op.name


def _plain_ops(program: Program) -> Iterator[tuple[Op, float, float]]:
    """Yield every op without regions, with the FLOPs and result bytes of all its
    runs."""
    for op, count in program.walk():
        if op.call is None:
            size = sum(program.values[r].bytes for r in op.results)
            yield op, op.flops * count, size * count


def coverage_shares(program: Program) -> tuple[float, float, float, dict[str, int]]:
    """Return the covered shares of ops, FLOPs and result bytes, and the ops without a
    rule.

    Returns:
      Three shares in [0, 1], and primitive → number of its ops that have no rule.
    """
    unknown: dict[str, int] = defaultdict(int)
    ops, flops, size = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    for op, op_flops, op_bytes in _plain_ops(program):
        k = int(op.is_known)
        ops[k] += 1
        flops[k] += op_flops
        size[k] += op_bytes
        if not op.is_known:
            unknown[op.name] += 1

    def share(pair: list[float]) -> float:
        return 1.0 if not sum(pair) else pair[1] / sum(pair)

    return share(ops), share(flops), share(size), dict(unknown)


def uncovered(program: Program) -> tuple[Uncovered, ...]:
    """Return the primitives and kernels without a rule, the largest share first."""
    if all(op.is_known for op in program.ops):
        return ()
    found: dict[str, list[tuple[float, float, Source]]] = defaultdict(list)
    all_flops = all_bytes = 0.0
    for op, op_flops, op_bytes in _plain_ops(program):
        all_flops += op_flops
        all_bytes += op_bytes
        if not op.is_known:
            found[rule_name(op)].append((op_flops, op_bytes, op.source))
    shares = [
        Uncovered(
            name,
            sum(flops for flops, _, _ in ops) / all_flops if all_flops else 0.0,
            sum(size for _, size, _ in ops) / all_bytes if all_bytes else 0.0,
            max(ops, key=lambda op: op[0] + op[1])[2],
        )
        for name, ops in found.items()
    ]
    return tuple(sorted(shares, key=lambda u: -max(u.flops, u.bytes)))
