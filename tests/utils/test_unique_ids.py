"""What is alike has one number, and is looked at once."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rhino_jax.analysis.program_analysis import ProgramAnalysis
from rhino_jax.bench.planning import trace_workload
from rhino_jax.frontend.trace import trace
from rhino_jax.hardware.files import load_target
from rhino_jax.hardware.layout import lay_out
from rhino_jax.ir.traits import OpKind, Traits
from rhino_jax.model.build import build_model, with_kernels
from rhino_jax.models import registry
from rhino_jax.utils.union_find import for_each, groups, number, number_rows
from tests.cases import covering


def test_rows_are_numbered_as_their_tuples_are() -> None:
    rng = np.random.default_rng(0)
    # The product of the ranges is beyond 64 bits.
    ranges = (7, 2**40, 3, 2**30, 2)
    columns = [rng.integers(0, 3, 200) * (r // 3) for r in ranges]
    found = number_rows(*columns, columns[0] > 2)
    rows = list(zip(*(c.tolist() for c in columns), strict=True))
    same = [[a == b for b in rows] for a in rows]
    assert ((found[:, None] == found) == same).all()
    assert set(found.tolist()) == set(range(found.max() + 1))
    assert number_rows(np.zeros(0, dtype=np.int64)).tolist() == []


def test_groups_and_what_is_made_for_each() -> None:
    numbers = number("abcab")
    assert numbers.tolist() == [0, 1, 2, 0, 1]
    assert [g.tolist() for g in groups(numbers)] == [[0, 3], [1, 4], [2]]
    assert groups(numbers[:0]) == []
    made: list[int] = []
    found = for_each(numbers, lambda at: made.append(at) or "abcab"[at])  # type: ignore[func-returns-value]
    assert "".join(found) == "abcab" and made == [0, 1, 2]


@pytest.mark.parametrize("name", covering(["moe-tiny", "rnn-tiny", "unet-tiny"], 2))
def test_nodes_that_are_alike_have_options_of_their_own_as_the_shared_ones(
    name: str,
) -> None:
    program = trace_workload(registry.get(name)).program
    target = load_target("v5e:4x2")
    analysis = ProgramAnalysis.of(program, target)
    mesh = lay_out(target, (("x", 4), ("y", 2)))
    model = build_model(analysis, mesh, {}, target.device.hbm_bytes)
    assert len(set(map(id, model.options))) < len(model.options) / 2
    options = model.builder.build()
    # Shared are those of the first; here is what the last of each has by itself.
    last = dict(zip(analysis.alike.nodes.tolist(), analysis.graph.nodes, strict=True))
    for node in last.values():
        shared = options[node.id]
        own = replace(model.builder, _drafts={}, _ports={}).of_node(node)
        assert own.strategies == shared.strategies
        np.testing.assert_array_equal(own.cost_s, shared.cost_s)
        np.testing.assert_array_equal(own.compute_s, shared.compute_s)
        np.testing.assert_array_equal(own.flops, shared.flops)
        for mine, other in zip(
            (*own.ins, *own.outs), (*shared.ins, *shared.outs), strict=True
        ):
            assert mine is other
    # So have the costs of the kernels that are added to them.
    for node, own in enumerate(
        with_kernels(analysis, mesh, model.builder.sizes, list(map(replace, options)))
    ):
        np.testing.assert_array_equal(own.cost_s, model.options[node].cost_s)
        np.testing.assert_array_equal(own.compute_s, model.options[node].compute_s)


def test_complex_inputs_of_other_types_are_taken_apart_at_costs_of_their_own() -> None:
    x = jax.ShapeDtypeStruct((256, 256), jnp.complex64)
    program = trace(lambda x, y: (jnp.sin(x), jnp.sin(y)), (x, x), {}).program
    values = list(program.values)
    second = program.inputs[1].value
    values[second] = replace(values[second], dtype="complex128")
    target = load_target("v5e:4x2")
    analysis = ProgramAnalysis.of(replace(program, values=tuple(values)), target)
    mesh = lay_out(target, (("x", 8),))
    narrow, wide = build_model(analysis, mesh, {}, target.device.hbm_bytes).options[:2]
    assert narrow.ins[0] is wide.ins[0]
    np.testing.assert_allclose(wide.cost_s, 2 * narrow.cost_s)


def test_a_kernel_is_no_matmul_though_its_rule_is() -> None:
    x = jax.ShapeDtypeStruct((4104, 4104), jnp.float32)
    program = trace(lambda x, y: (x @ y, y @ x), (x, x), {}).program
    first, second = program.ops
    kernel = replace(second, name="my_kernel", traits=Traits(OpKind.KERNEL))
    target = load_target("v5e:4x2")
    analysis = ProgramAnalysis.of(replace(program, ops=(first, kernel)), target)
    model = build_model(
        analysis, lay_out(target, (("x", 8),)), {}, target.device.hbm_bytes
    )
    matmul, other = (
        options
        for node, options in zip(analysis.graph.nodes, model.options, strict=True)
        if node.op is not None
    )
    # The matrix unit's padding is the matmul's alone: 4,104 are 33 arrays of 128. Cut
    # in eight, both wait for memory.
    assert matmul.compute_s[0] > other.compute_s[0]
    assert (matmul.compute_s >= other.compute_s).all()


def test_values_that_are_pinned_alike_share_their_options() -> None:
    program = trace(lambda *xs: sum(xs), (jnp.ones((8, 8)),) * 4, {}).program
    target = load_target("v5e:4x2")
    analysis = ProgramAnalysis.of(program, target)
    pins = {0: ((0,), ()), 1: ((0,), ()), 2: ((), (0,))}
    held = {n: ((0, spec),) for n, spec in pins.items()}
    model = build_model(
        analysis, lay_out(target, (("x", 8),)), held, target.device.hbm_bytes
    )
    a, b, c, d = model.options[:4]
    assert a is b and a.strategies[0].results == (pins[0],)
    assert c.strategies[0].results == (pins[2],)
    assert len(a.strategies) == len(c.strategies) == 1 < len(d.strategies)


def test_matmuls_of_another_type_are_not_alike() -> None:
    def dot(x: jax.Array) -> jax.Array:
        return jnp.matmul(x, x, preferred_element_type=jnp.float32)

    wide = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    narrow = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    program = trace(lambda x, y: (dot(x), dot(y)), (wide, narrow), {}).program
    analysis = ProgramAnalysis.of(program, load_target("v5e:4x2"))
    dots = [n.id for n in analysis.graph.nodes if n.is_matmul]
    assert len(dots) == len(set(analysis.alike.nodes[dots].tolist())) == 2
