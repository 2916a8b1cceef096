"""Recognise unrolled windowed einsums by the dataflow of their permutes.

Of an unrolled "windowed dot general" only the permutes are left, all of the same
operation. If they pass one value on unchanged until every device has seen that of every
other one, they are an all-gather. If something is added to a value before it is sent
on, they are a reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence

from rhino_jax.verify.hlo.collectives.permutes import Permute, is_of_product, origin
from rhino_jax.verify.hlo.module import Instruction


_COMPUTES = ("convolution", "custom-call", "dot", "fusion")
_SUMS = ("add", "fusion")
_FILLS = ("broadcast", "constant")


def find_gathers(group: Sequence[Permute]) -> tuple[int, list[Permute]]:
    """Return the number of all-gathers among equivalent permutes, and the rest."""
    by_name = {permute.name: permute for permute in group}
    trees: dict[str, list[Permute]] = {}
    shown: dict[str, list[tuple[int, ...]]] = {}
    roots: dict[str, Instruction] = {}
    for permute in group:
        path = [permute]
        while (source := path[-1].source).name in by_name:
            path.append(by_name[source.name])
        roots[source.name] = source
        trees.setdefault(source.name, []).append(permute)
        shown.setdefault(source.name, []).append(_comes_from(path))
    found = [name for name in roots if _is_gather(roots[name], shown[name], group[0])]
    used = {permute.name for name in found for permute in trees[name]}
    return len(found), [permute for permute in group if permute.name not in used]


def _comes_from(path: Sequence[Permute]) -> tuple[int, ...]:
    """Return the device whose value each device has at the start of a path.

    `path` has the last permute first.
    """
    whose = {device: device for device in path[0].shift}
    for permute in reversed(path):
        whose = {target: whose[source] for source, target in permute.shift.items()}
    return tuple(whose[device] for device in sorted(whose))


def _is_gather(
    root: Instruction, shown: Sequence[tuple[int, ...]], permute: Permute
) -> bool:
    """Whether each device sees the root's value of every other one, once."""
    if root.opcode in _FILLS or (is_of_product(root) and root.opcode in _COMPUTES):
        return False
    own = tuple(sorted(permute.shift))
    others = {x for x in shown if all(a != b for a, b in zip(x, own, strict=True))}
    return len(others) == len(shown) == permute.ring_size - 1


def find_scatters(group: Sequence[Permute]) -> int:
    """Return the number of reduce-scatters that equivalent permutes implement, or 0."""
    names = {permute.name for permute in group}
    ends = set(names)
    for permute in group:
        source = permute.source
        if source.name in names:
            return 0
        if source.opcode in _SUMS:
            for operand in source.operands:
                ends.discard(origin(permute.computation, operand).name)
    # With both ring directions, each collective ends with one permute per direction.
    ways = len({tuple(permute.shift.items()) for permute in group})
    count, rest = divmod(len(ends), ways) if ways else (0, 0)
    # Sums that start from zeros may send these first, in both directions.
    size = group[0].ring_size if group else 0
    is_scatter = count * (size - 1) <= len(group) <= count * (size + 1)
    return count if is_scatter and not rest else 0
