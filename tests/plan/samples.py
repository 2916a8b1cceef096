"""Plans made by hand, for tests of what is done with plans."""

from __future__ import annotations

import collections
import math
from dataclasses import replace
from typing import Any

import jax

from rhino_jax.explain.plan import Plan
from rhino_jax.ir.spec import Spec
from rhino_jax.ir.transform import Transform
from rhino_jax.plan.decisions import Decisions
from rhino_jax.plan.plan import Leaf
from rhino_jax.plan.records import (
    Collective,
    Coverage,
    PeakValue,
    Predicted,
    SearchReport,
    Variant,
)
from rhino_jax.plan.stages import StagePlan


Moments = collections.namedtuple("Moments", ["count", "mu"])

ARGS = (
    {"w2": 1, "w1": 2, "act": "gelu"},
    [Moments(count=3, mu={"w1": 4, "w2": 5}), None],
    6,
)
"""Arguments of the sample program; arrays are numbers, 'gelu' is no array."""

SPECS: dict[str, Spec] = {
    "params['w1']": ((), (1,)),
    "params['w2']": ((1,), ()),
    "opt_state[0].count": (),
    "opt_state[0].mu['w1']": ((0,), (1,)),
    "opt_state[0].mu['w2']": ((1, 0), ()),
    "batch": ((0,), ()),
}
SHAPES = {
    "params['w1']": (128, 512),
    "params['w2']": (512, 128),
    "opt_state[0].count": (),
    "opt_state[0].mu['w1']": (128, 512),
    "opt_state[0].mu['w2']": (512, 128),
    "batch": (64, 128),
}


def leaf(path: str, shape: tuple[int, ...], spec: Spec, count: int = 1) -> Leaf:
    return Leaf(path, shape, "float32", spec, 4 * count)


PREDICTED = Predicted(12.3e-3, 10e-3, 2.3e-3, 3 * 2**30, 1.5e12)


COLLECTIVES = (
    Collective(
        "all-reduce",
        ("data",),
        1536,
        2,
        1.5e-3,
        "dot_general %7",
        "model.py:12 (mlp)",
        "partial sum over batch",
    ),
    Collective("all-gather", ("model",), 700, 1, 0.8e-3, "add %9", "model.py:20 (mlp)"),
)


def sample_stage(**changes: Any) -> StagePlan:
    """The stage of `sample_plan`, with other decisions."""
    decisions = Decisions(
        values={0: ((), (1,)), 1: ((1,), ()), 7: ((0,), (1,))},
        operands={(3, 1): ((), ())},
        region_outputs={(4, 0, 2): ((0,), ())},
        outputs=(((), (1,)), ((1,), ()), ()),
    )
    return StagePlan(
        mesh_axes=(("data", 4), ("model", 2)),
        devices=tuple(range(8)),
        decisions=replace(decisions, **changes),
        predicted=PREDICTED,
    )


def sample_plan(**changes: Any) -> Plan:
    """A plan of a two-matrix MLP on data=4 × model=2."""
    in_leaves, in_tree = jax.tree.flatten((ARGS, {}))
    result = (ARGS[0], 7.0)
    _, out_tree = jax.tree.flatten(result)
    inputs = tuple(
        Leaf(
            path,
            SHAPES[path],
            "int32" if not SHAPES[path] else "float32",
            spec,
            4 * 1024 * (1 + i),
        )
        for i, (path, spec) in enumerate(SPECS.items())
    )
    fields: dict[str, Any] = {
        "program_name": "train_step",
        "fingerprint": "0123456789abcdef" * 4,
        "mesh_axes": (("data", 4), ("model", 2)),
        "hardware": "v5e",
        "inputs": inputs,
        "outputs": (
            Leaf("[0]['w1']", (128, 512), "float32", ((), (1,)), 131072),
            Leaf("[0]['w2']", (512, 128), "float32", ((1,), ()), 131072),
            Leaf("[1]", (), "float32", (), 4),
        ),
        "stages": (sample_stage(),),
        "transforms": (Transform("dead code", 40, 38),),
        "variants": (
            Variant("baseline", math.inf, 20 << 30),
            Variant("4 micro-batches", 0.25, 9 << 30, is_chosen=True),
        ),
        "predicted": PREDICTED,
        "collectives": COLLECTIVES,
        "search": SearchReport("optimal", 12.3e-3, 12.2e-3, 0.008, 1.5, 42, "best"),
        "coverage": Coverage(0.99, 1.0, 0.98, (("my_kernel", 3),)),
        "recipes": {
            "dp": Predicted(15e-3, 10e-3, 5e-3, 20 * 2**30, 1.5e12),
            "fsdp": Predicted(13e-3, 10e-3, 3e-3, 2 * 2**30, 1.5e12),
            "megatron": None,
        },
        "memory_budget_bytes": 16 * 2**30,
        "at_peak": (
            PeakValue("params['w1']", 2**30, "model.py:3 (init)"),
            PeakValue("dot_general %7", 2**29, "model.py:12 (mlp)"),
        ),
        "pins": {"params['w1']": "P(None, 'model')"},
        "meshes": (((4, 2), 12.3e-3), ((8,), 15e-3)),
        "notes": ("`my_kernel` has no rule: it is replicated.",),
        "in_tree": in_tree,
        "out_tree": out_tree,
        "in_leaf_positions": tuple(
            i for i, x in enumerate(in_leaves) if not isinstance(x, str)
        ),
        "out_leaf_positions": (1, 2, 3),
    }
    return Plan(**{**fields, **changes})
