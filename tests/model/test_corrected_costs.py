"""Costs of options, corrected by what compiled programs took."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.cost.corrections import CostCorrections, CostFactors, OpTimes, op_key
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.layout import lay_out
from rhino_jax.model.build import MeshModel, build_model, sharding_of


def chain(x: jax.Array, w: jax.Array) -> jax.Array:
    y = x @ w
    z = jnp.sin(y) @ w
    for _ in range(2):
        z = z @ w
    return z


def model_with(corrections: CostCorrections) -> MeshModel:
    shape = jax.ShapeDtypeStruct((1024, 1024), "float32")
    target = load_target("h100:8")
    analysis = ProgramAnalysis.of(trace(chain, (shape, shape), {}).program, target)
    mesh = lay_out(target, (("x", 4), ("y", 2)))
    return build_model(analysis, mesh, {}, np.inf, corrections=corrections)


def first_line(model: MeshModel) -> str:
    lines = [str(n.op.source) for n in model.graph.nodes if n.op is not None]
    return min(lines, key=lambda line: int(line.split(":")[1].split(" ")[0]))


def test_ops_of_a_line_are_corrected_and_no_others() -> None:
    plain = model_with(CostCorrections())
    line = first_line(plain)
    times = OpTimes(line, "forward", "dot_general", "0", 1.0, 3.0)
    found = model_with(CostCorrections(1, (times,)))
    changed = 0
    pairs = zip(plain.graph.nodes, plain.options, found.options, strict=True)
    for node, before, after in pairs:
        is_it = node.op is not None and str(node.op.source) == line
        factor = 3.0 if is_it and node.is_matmul else 1.0
        changed += factor == 3.0
        assert after.compute_s == pytest.approx(factor * before.compute_s)
        # Collectives are those of the mesh.
        sent_s = before.cost_s - before.compute_s
        assert after.cost_s - after.compute_s == pytest.approx(sent_s)
    assert changed == 1


def test_equal_nodes_of_one_line_still_share_their_options() -> None:
    nodes = model_with(CostCorrections()).graph.nodes
    lines = Counter(str(n.op.source) for n in nodes if n.op is not None and n.is_matmul)
    line, _ = lines.most_common(1)[0]
    times = OpTimes(line, "forward", "dot_general", "0", 1.0, 3.0)
    found = model_with(CostCorrections(1, (times,)))
    repeated = [
        o
        for n, o in zip(found.graph.nodes, found.options, strict=True)
        if n.op is not None and n.is_matmul and str(n.op.source) == line
    ]
    assert len(repeated) == 2 and repeated[0] is repeated[1]


def test_kinds_of_sharding_have_factors_of_their_own() -> None:
    line = first_line(model_with(CostCorrections()))
    rows = OpTimes(line, "forward", "dot_general", "0", 1.0, 2.0)
    columns = OpTimes(line, "forward", "dot_general", "1", 1.0, 4.0)
    corrections = CostCorrections(2, (rows, columns))
    plain, found = model_with(CostCorrections()), model_with(corrections)
    factors, seen = CostFactors.of(corrections), set()
    for node, before, after in zip(
        plain.graph.nodes, plain.options, found.options, strict=True
    ):
        if node.op is None or str(node.op.source) != line or not node.is_matmul:
            continue
        key = op_key(node.op.source, node.op.name)
        for k, strategy in enumerate(before.strategies):
            factor = factors.of_op(key, sharding_of(strategy))
            seen.add(factor)
            assert after.compute_s[k] == pytest.approx(factor * before.compute_s[k])
    assert seen == {2.0, 3.0, 4.0}


def test_slower_links_scale_collectives() -> None:
    target = load_target("v5e:4x4")
    axes = (("x", 4), ("y", 4))
    plain, slow = (lay_out(t, axes) for t in (target, target.with_slower_links(3.0)))
    from rhino_jax.cost.collectives import collective_s

    for axes_of in ((0,), (1,), (0, 1)):
        seconds = [
            collective_s("all-gather", 1e6, m.over(axes_of)) for m in (plain, slow)
        ]
        assert seconds[1] == pytest.approx(3 * seconds[0])
