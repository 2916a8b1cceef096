"""Instances of the contest on intra-operator parallelism, read from its files.

JSON, gzipped or not: `problem.nodes` with `intervals` (half-open), `costs` and `usages`
(one list of strategies per node), `problem.edges` with `nodes` (pairs) and `costs`
(tables, the second node's strategy fastest), `problem.usage_limit`.

Source: the ASPLOS 2025 / EuroSys 2025 contest, github.com/google/iopddl.

The error of instances that cannot be read.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rhino_jax.errors import RhinoError
from rhino_jax.solver.problem import NodeUsage, PairTable, Problem


class InstanceError(RhinoError, ValueError):
    """A malformed instance, or choices that do not belong to it."""


FORBIDDEN = 10**18
"""Costs from this value on forbid a strategy or a pair of strategies."""


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """Content of a file, with its integers unchanged.

    Attributes:
      name: name of the problem.
      costs, usages: of every node, one integer per strategy.
      intervals: of every node, [start, stop) in which it uses memory.
      edges: pairs of nodes; several may join the same two.
      tables: of every edge, costs of pairs of strategies, the second node's fastest.
      limit: limit of the memory in use at any time.
    """

    name: str
    costs: Sequence[Sequence[int]]
    usages: Sequence[Sequence[int]]
    intervals: Sequence[tuple[int, int]]
    edges: Sequence[tuple[int, int]]
    tables: Sequence[Sequence[int]]
    limit: int

    def problem(self) -> Problem:
        """Return the instance in floats; forbidden strategies cost infinity."""
        costs = [_floats(cost) for cost in self.costs]
        return Problem(
            costs,
            [
                PairTable(i, j, _floats(cells).reshape(len(costs[i]), len(costs[j])))
                for (i, j), cells in zip(self.edges, self.tables, strict=True)
            ],
            [
                NodeUsage(i, np.array(usage, float), start, stop)
                for i, ((start, stop), usage) in enumerate(
                    zip(self.intervals, self.usages, strict=True)
                )
                if start < stop and any(usage)
            ],
            limit=self.limit,
            end=max([stop for _, stop in self.intervals], default=0) + 1,
        )


def _floats(values: Sequence[int]) -> np.ndarray:
    found = np.array(values, dtype=float)
    found[found >= FORBIDDEN] = np.inf
    return found


def read_instance(file: str | Path) -> Instance:
    """Read a file of the contest's format.

    Raises:
      InstanceError: it cannot be read, or is malformed.
    """
    path = Path(file)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        values = json.loads(data)
    except (OSError, EOFError, ValueError) as error:
        raise InstanceError(
            "`solve`: the file cannot be read as JSON, gzipped or not.",
            where=str(path),
            numbers=str(error),
            fix="give a file of the contest's format; see rhino_jax.contest.instance.",
        ) from None
    return parse_instance(values, str(path))


def parse_instance(values: Any, where: str = "") -> Instance:
    """Return the instance of parsed JSON.

    Args:
      values: the parsed JSON.
      where: the file, for errors.

    Raises:
      InstanceError: a part is missing or does not match the others.
    """
    place = _Place(where)
    problem = place.table(values, "problem", "the file")
    nodes = place.table(problem, "nodes", "problem")
    edges = place.table(problem, "edges", "problem")
    costs = place.rows(nodes, "costs", "problem.nodes")
    usages = place.rows(nodes, "usages", "problem.nodes")
    intervals = place.rows(nodes, "intervals", "problem.nodes")
    pairs = place.rows(edges, "nodes", "problem.edges")
    tables = place.rows(edges, "costs", "problem.edges")
    limit = problem.get("usage_limit")
    if type(limit) is not int:
        raise place.fail("problem.usage_limit is not a whole number", repr(limit))
    for name, found in (("usages", usages), ("intervals", intervals)):
        if len(found) != len(costs):
            raise place.fail(
                "problem.nodes has lists of different lengths",
                f"{len(costs)} costs, {len(found)} {name}",
            )
    if len(pairs) != len(tables):
        raise place.fail(
            "problem.edges has lists of different lengths",
            f"{len(pairs)} nodes, {len(tables)} costs",
        )
    for i, (cost, usage, interval) in enumerate(
        zip(costs, usages, intervals, strict=True)
    ):
        if not cost or len(cost) != len(usage):
            raise place.fail(
                f"node {i} needs as many usages as costs, and at least one",
                f"{len(cost)} costs, {len(usage)} usages",
            )
        if min(usage) < 0:
            raise place.fail(f"node {i} has a usage below 0", str(min(usage)))
        if len(interval) != 2 or not 0 <= interval[0] <= interval[1]:
            raise place.fail(
                f"node {i} has no interval [start, stop) with 0 ≤ start ≤ stop",
                str(interval),
            )
    for e, (pair, table) in enumerate(zip(pairs, tables, strict=True)):
        if len(pair) != 2 or not all(0 <= i < len(costs) for i in pair):
            raise place.fail(
                f"edge {e} does not join two of the {len(costs)} nodes", str(pair)
            )
        cells = len(costs[pair[0]]) * len(costs[pair[1]])
        if len(table) != cells:
            raise place.fail(
                f"edge {e} has not one cost per pair of strategies",
                f"{len(table)} costs, {cells} pairs",
            )
    return Instance(
        name=str(problem.get("name", "")),
        costs=costs,
        usages=usages,
        intervals=[(a, b) for a, b in intervals],
        edges=[(i, j) for i, j in pairs],
        tables=tables,
        limit=limit,
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """Source of an instance, for error messages."""

    where: str

    def fail(self, what: str, numbers: str) -> InstanceError:
        return InstanceError(
            f"`solve`: the instance is malformed: {what}.",
            where=self.where,
            numbers=numbers,
            fix="write it as the contest does; see rhino_jax.contest.instance.",
        )

    def table(self, values: Any, key: str, inside: str) -> Mapping[str, Any]:
        found = values.get(key) if isinstance(values, Mapping) else None
        if not isinstance(found, Mapping):
            raise self.fail(f"{inside} has no table `{key}`", type(found).__name__)
        return found

    def rows(self, values: Mapping[str, Any], key: str, inside: str) -> list[list[int]]:
        """Return a list of lists of integers, checked."""
        found = values.get(key)
        if not isinstance(found, list):
            raise self.fail(f"{inside} has no list `{key}`", type(found).__name__)
        for i, row in enumerate(found):
            if not isinstance(row, list) or any(type(x) is not int for x in row):
                raise self.fail(
                    f"{inside}.{key}[{i}] is not a list of whole numbers",
                    repr(row)[:60],
                )
        return found
