"""Random instances, small enough to try every choice."""

import itertools
import json
from pathlib import Path

import numpy as np

from rhino_jax.contest.command import check
from rhino_jax.contest.instance import FORBIDDEN, Instance, parse_instance


def random_instance(
    seed: int,
    *,
    nodes: int = 7,
    most: int = 3,
    edges: int = 9,
    tightness: float = 0.6,
    forbidden: float = 0.25,
) -> Instance:
    """Nodes with up to `most` strategies; memory may be what decides.

    Args:
      tightness: the limit's place between the least and the most that is ever held.
      forbidden: share of forbidden pairs; some edges are one-to-one.
    """
    return parse_instance(random_values(seed, nodes, most, edges, tightness, forbidden))


def random_values(seed, nodes, most, edges, tightness, forbidden):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most + 1, nodes)
    starts = rng.integers(0, 10, nodes)
    values = {
        "intervals": [[int(a), int(a + rng.integers(0, 8))] for a in starts],
        "costs": [rng.integers(0, 50, k).tolist() for k in sizes],
        "usages": [rng.integers(0, 20, k).tolist() for k in sizes],
    }
    pairs, tables = [], []
    for _ in range(edges):
        i, j = rng.integers(0, nodes, 2).tolist()
        table = rng.integers(0, 60, (sizes[i], sizes[j]))
        if rng.random() < 0.3 and sizes[i] == sizes[j]:
            table = np.where(np.eye(sizes[i], dtype=bool), table, FORBIDDEN)
        table = np.where(rng.random(table.shape) < forbidden, FORBIDDEN, table)
        pairs.append([i, j])
        tables.append(table.ravel().tolist())
    held = [
        sum(
            pick(u)
            for (a, b), u in zip(values["intervals"], values["usages"], strict=True)
            if a <= t < b
        )
        for pick in (min, max)
        for t in range(20)
    ]
    least, largest = max(held[:20]), max(held[20:])
    limit = int(least + tightness * (largest - least))
    return {
        "problem": {
            "name": f"random {seed}",
            "nodes": values,
            "edges": {"nodes": pairs, "costs": tables},
            "usage_limit": limit,
        }
    }


def write(tmp_path: Path, values) -> str:
    file = tmp_path / "instance.json"
    file.write_text(json.dumps(values))
    return str(file)


def best_by_trying(instance: Instance) -> int | None:
    """The least objective of all choices that fit; None where none does."""
    every = itertools.product(*(range(len(c)) for c in instance.costs))
    found = (check(instance, choices) for choices in every)
    return min((c.objective for c in found if c.fits), default=None)
