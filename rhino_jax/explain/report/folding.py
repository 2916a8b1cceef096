"""Folding of repeated layers: one row for values that differ only in a number.

`params['h'][0]['w']` … `params['h'][11]['w']` with the same shape, dtype and spec
become `params['h'][0..11]['w']`, 12 times.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


_NUMBER = re.compile(r"\d+")
MIN_REPEATS = 3
"""Minimum number of equivalent paths that are folded; fewer are shown one by one."""


@dataclass(frozen=True, slots=True)
class Fold:
    """Paths that are shown as one row.

    Attributes:
      label: the path, with the numbers that differ written as a range.
      members: positions of the folded paths.
    """

    label: str
    members: tuple[int, ...]


def fold(items: Iterable[tuple[str, Hashable]]) -> tuple[Fold, ...]:
    """Fold paths that differ only in numbers.

    Args:
      items: (path, key): only paths with equal keys are folded; for example shape and
        spec.

    Returns:
      Folds, in order of their first member.
    """
    paths: list[str] = []
    groups: dict[Hashable, list[int]] = {}
    for i, (path, rest) in enumerate(items):
        paths.append(path)
        groups.setdefault((_NUMBER.sub("#", path), rest), []).append(i)
    folds = []
    for members in groups.values():
        if len(members) < MIN_REPEATS:
            folds += [Fold(paths[i], (i,)) for i in members]
        else:
            folds.append(Fold(_label([paths[i] for i in members]), tuple(members)))
    return tuple(sorted(folds, key=lambda f: f.members[0]))


def _label(paths: Sequence[str]) -> str:
    """Return the common path, with the numbers that differ as ranges or lists."""
    columns = list(zip(*(_NUMBER.findall(p) for p in paths), strict=True))
    ranges = iter([_range(column) for column in columns])
    return _NUMBER.sub(lambda _: next(ranges), paths[0])


def _range(column: Sequence[str]) -> str:
    numbers = sorted({int(x) for x in column})
    low, high = numbers[0], numbers[-1]
    if low == high:
        return column[0]
    if len(numbers) == high - low + 1:
        return f"{low}..{high}"
    step = numbers[1] - low
    if all(b - a == step for a, b in itertools.pairwise(numbers)):
        return f"{low},{numbers[1]}..{high}" if len(numbers) > 2 else f"{low},{high}"
    return "*"
