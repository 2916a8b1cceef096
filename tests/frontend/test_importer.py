"""Jaxprs of every kind, imported: structure, provenance, constants, kernels."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from imported import program_of
from jax import lax

from rhino_jax._compat import is_literal, jaxpr_consts
from rhino_jax.errors import RuleError, TraceError
from rhino_jax.frontend import registry
from rhino_jax.frontend.importer import import_jaxpr, region_jaxprs, region_kind
from rhino_jax.frontend.regions import closed_region_jaxprs
from rhino_jax.frontend.trace import trace
from rhino_jax.ir.program import Op, Program, Region, RegionKind
from rhino_jax.ir.verifier import verify


def assert_mirrors(
    program: Program, region: Region, jaxpr: Any, *, is_top: bool = True
) -> None:
    """`region.ops[i]` is `jaxpr.eqns[i]`, all the way down."""
    assert [program.values[v].shape for v in region.inputs[: len(jaxpr.invars)]] == [
        tuple(v.aval.shape) for v in jaxpr.invars
    ]
    for value, atom in zip(region.outputs, jaxpr.outvars, strict=True):
        assert program.values[value].is_literal == is_literal(atom)
    for op_id, eqn in zip(region.ops, jaxpr.eqns, strict=True):
        op = program.ops[op_id]
        assert op.name == eqn.primitive.name
        for value, atom in zip(op.operands, eqn.invars, strict=True):
            is_inner_const = any(atom is v for v in jaxpr.constvars)
            is_fixed = is_literal(atom) or (is_inner_const and not is_top)
            assert program.values[value].is_literal == is_fixed
        assert [program.values[v].shape for v in op.results] == [
            tuple(v.aval.shape) for v in eqn.outvars
        ]
        bodies = region_jaxprs(eqn)
        if op.call is None:
            assert bodies == () and region_kind(eqn) is None
            continue
        assert op.call.kind is region_kind(eqn)
        for inner, body in zip(op.call.regions, bodies, strict=True):
            assert_mirrors(program, inner, body, is_top=False)


@jax.custom_vjp
def doubled(x: jax.Array) -> jax.Array:
    return x * 2


doubled.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))


@jax.jit
def affine(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ w)


def train_step(params: Any, batch: Any) -> Any:
    def loss(params: Any) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = jax.checkpoint(affine)(x, w)
            return y, y.sum()

        x, sums = lax.scan(layer, batch, params["layers"])
        x = lax.cond(x.sum() > 0, lambda a: a, lambda a: a * 2, doubled(x))
        return jnp.mean(x) + sums[-1]

    value, grads = jax.value_and_grad(loss)(params)
    _, norm = lax.while_loop(
        lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.sqrt(s[1])), (0, value)
    )
    return jax.tree.map(lambda p, g: p - 0.1 * g / norm, params, grads), value


PARAMS = {"layers": np.ones((5, 4, 4), np.float32)}
BATCH = np.ones((8, 4), np.float32)


def test_train_step_mirrors_its_jaxpr() -> None:
    program, jaxpr = program_of(train_step, PARAMS, BATCH)
    assert_mirrors(program, program.body, jaxpr)
    kinds = collections.Counter(op.call.kind for op in program.ops if op.call)
    assert kinds[RegionKind.SCAN] == 2  # forward and backward
    assert kinds[RegionKind.COND] >= 2
    assert kinds[RegionKind.WHILE] == 1
    assert any(op.call.is_remat for op in program.ops if op.call)
    assert {"custom_jvp_call", "jit"} & {op.name for op in program.ops if op.call}
    assert all(op.is_known for op in program.ops)
    assert sum(
        op.flops * n for op, n in program.walk() if op.name == "dot_general"
    ) == (
        # one product forward, one recomputed, two backward
        4 * 5 * 2 * 8 * 4 * 4
    )


def test_custom_vjp_without_gradient_is_a_call() -> None:
    program, jaxpr = program_of(doubled, BATCH)
    assert_mirrors(program, program.body, jaxpr)
    assert program.ops[0].name == "custom_vjp_call"
    assert program.ops[0].call is not None


def test_ops_are_numbered_as_they_are_met() -> None:
    program, _ = program_of(train_step, PARAMS, BATCH)
    assert [op.id for op, _ in program.walk()] == list(range(len(program.ops)))


def test_walk_counts_trips() -> None:
    def fn(x: jax.Array) -> jax.Array:
        outer = lambda c, _: (lax.fori_loop(0, 4, lambda i, y: jnp.sin(y), c), None)  # noqa: E731
        return lax.scan(outer, x, None, length=3)[0]

    program, _ = program_of(fn, BATCH)
    assert [n for op, n in program.walk() if op.name == "sin"] == [12]


def test_constants_are_the_last_inputs() -> None:
    table = np.arange(12, dtype=np.float32).reshape(3, 4)
    program, _ = program_of(lambda x: x @ jnp.asarray(table), np.ones((2, 3), "f"))
    assert [(i.path, i.is_const) for i in program.inputs] == [
        ("args[0]", False),
        ("const[0] f32[3,4]", True),
    ]


def test_constants_of_inner_jaxprs_are_literals() -> None:
    table = np.arange(4, dtype=np.float32)
    gradient = jax.grad(jax.jit(lambda x: jnp.sin(x * table).sum()))
    program, jaxpr = program_of(gradient, np.ones(4, "f"))
    inner = [j for eqn in jaxpr.eqns for j in closed_region_jaxprs(eqn)]
    assert any(jaxpr_consts(j) for j in inner)
    assert_mirrors(program, program.body, jaxpr)


def test_inputs_and_outputs_keep_what_they_are_given() -> None:
    closed = jax.make_jaxpr(lambda w, x: (w - x, x))(1.0, 2.0)
    program = import_jaxpr(
        closed,
        name="update",
        input_paths=["w", "x"],
        donated=[True, False],
        output_paths=["[0]", "[1]"],
        state_of=[0, None],
    )
    verify(program)
    assert [(i.path, i.is_donated) for i in program.inputs] == [
        ("w", True),
        ("x", False),
    ]
    assert [o.state_of for o in program.outputs] == [0, None]
    assert program.outputs[1].value == program.inputs[1].value


def test_wrong_number_of_paths_is_refused() -> None:
    closed = jax.make_jaxpr(jnp.sin)(1.0)
    with pytest.raises(ValueError, match="input_paths has 2 entries, the jaxpr 1"):
        import_jaxpr(
            closed,
            name="f",
            input_paths=["a", "b"],
            donated=[False],
            output_paths=["c"],
            state_of=[None],
        )


def test_literal_results_and_unused_results() -> None:
    def fn(x: jax.Array) -> tuple[Any, ...]:
        return 1.0, x, lax.top_k(x, 2)[0]

    program, jaxpr = program_of(fn, np.ones(4, "f"))
    assert_mirrors(program, program.body, jaxpr)
    assert program.values[program.outputs[0].value].is_literal
    assert len(program.ops[0].results) == 2


def test_shared_jaxprs_get_their_own_values() -> None:
    program, _ = program_of(
        lambda x, w: affine(affine(x, w), w), BATCH, np.ones((4, 4), "f")
    )
    first, second = (op.call.regions[0] for op in program.ops if op.name == "jit"
                     and op.label == "affine")  # fmt: skip
    assert not set(first.inputs) & set(second.inputs)
    assert len(first.ops) == len(second.ops)


def test_source_is_the_users_line() -> None:
    def fn(x: jax.Array) -> jax.Array:
        with jax.named_scope("layer"):
            return jnp.tanh(x)

    program, _ = program_of(fn, BATCH)
    (op,) = program.ops
    assert op.source.file == __file__
    assert op.source.function == "fn"
    assert op.source.name_stack == "layer"
    assert op.source.line == fn.__code__.co_firstlineno + 2


def test_ops_of_library_calls_have_the_callers_line() -> None:
    optax = pytest.importorskip("optax")
    optimizer = optax.adamw(1e-3)
    state = optimizer.init(PARAMS)

    def update(grads: Any, state: Any) -> Any:
        return optimizer.update(grads, state, PARAMS)

    program, _ = program_of(update, PARAMS, state)
    assert {op.source.file for op in program.ops} == {__file__}


def test_ops_without_a_line_have_that_of_the_call_around_them() -> None:
    program, _ = program_of(lambda k: jax.random.normal(k, (4,)), jax.random.key(0))
    assert {op.source.file for op in program.ops} == {__file__}


def test_unknown_primitive_is_replicated_and_said_to_be_unknown() -> None:
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    program, _ = program_of(
        lambda x: jax.pure_callback(np.sin, shape, x), np.ones(4, "f")
    )
    (op,) = program.ops
    assert (op.is_known, str(op.rule), op.flops) == (False, "_ -> _", 0.0)


def pallas_add(x: jax.Array, name: str = "add") -> jax.Array:
    from jax.experimental import pallas as pl

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = x_ref[...] + 1.0

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    block = pl.BlockSpec((2, 128), lambda i: (i, 0))
    return pl.pallas_call(
        kernel, out_shape=shape, name=name, grid=(4,), in_specs=[block],
        out_specs=block,
    )(x)  # fmt: skip


def test_pallas_kernel_has_the_rule_of_its_grid_whatever_it_is_called() -> None:
    program, _ = program_of(pallas_add, np.ones((8, 128), "f"))
    (op,) = program.ops
    assert op.is_known
    assert str(op.rule) == "(a b!) c! -> (a d!) e!"
    assert op.flops == 8 * 128


def test_registered_rules_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_USER_RULES", set())
    with pytest.raises(RuleError, match="unexpected '-' in 'a ->'"):
        registry.register_rule("my_kernel", "a b -> a ->")
    registry.register_rule("my_kernel", "a b -> a b!")
    registry.register_rule("my_target", "a, a -> a", flops=lambda ctx: 7.0)
    program, _ = program_of(
        lambda x: pallas_add(x, "my_kernel"), np.ones((8, 128), "f")
    )
    assert str(program.ops[0].rule) == "a b! -> a b!"
    assert program.ops[0].is_known
    call = jax.ffi.ffi_call("my_target", jax.ShapeDtypeStruct((4,), np.float32))
    program, _ = program_of(lambda x: call(x, x), np.ones(4, "f"))
    assert (str(program.ops[0].rule), program.ops[0].flops) == ("a, a -> a", 7.0)
    with pytest.raises(RuleError, match="my_target"):
        program_of(call, np.ones(4, "f"))


def test_rule_function_with_wrong_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_USER_RULES", set())
    wrong = registry.OpRule(registry.parse_rule("a -> a", [(4,)], [(4,)]))
    registry.register_rule("sin", lambda ctx: wrong)
    with pytest.raises(RuleError, match="gives 1 dims to operand 0, which has 2"):
        program_of(jnp.sin, BATCH)


def test_shard_map_has_the_rule_of_its_specs_and_its_flops_count() -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("x")
    fn = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=spec, out_specs=spec)
    program, _ = program_of(fn, np.ones((8, 4), "f"))
    (op,) = program.ops
    assert (op.name, op.is_known) == ("shard_map", True)
    assert op.manual is not None and op.manual.operands == ((("x",), ()),)
    assert op.flops == 2 * (2 * 4 * 4 * 4)


def test_linear_solves_count() -> None:
    arguments = np.eye(4, dtype="f"), np.ones((4, 2), "f")
    program = trace(jnp.linalg.solve, arguments, {}).program
    solves = [op for op in program.ops if op.name == "triangular_solve"]
    assert len(solves) == 2 and all(op.flops == 4 * 4 * 2 for op in solves)


def test_references_are_imported_as_unknown_ops() -> None:
    def fn(x: jax.Array) -> jax.Array:
        ref = jax.new_ref(x)
        ref[...] += 1.0
        return jax.freeze(ref)

    program, jaxpr = program_of(fn, np.ones(4, "f"))
    assert_mirrors(program, program.body, jaxpr)
    assert not all(op.is_known for op in program.ops)


def test_symbolic_dims_are_refused() -> None:
    from jax import export

    shape = export.symbolic_shape("b, 4")
    with pytest.raises(TraceError, match="not a number"):
        program_of(jnp.sin, jax.ShapeDtypeStruct(shape, np.float32))


def test_float0_and_keys_have_names() -> None:
    def fn(i: jax.Array, key: jax.Array) -> tuple[Any, ...]:
        return jax.jvp(lambda n: n * 2, (i,), (np.zeros((), jax.dtypes.float0),)), key

    program, _ = program_of(fn, 3, jax.random.key(0))
    dtypes = {program.values[o.value].dtype for o in program.outputs}
    assert "float0" in dtypes and "key<fry>" in dtypes


def by_name(program: Program, name: str) -> Op:
    return next(op for op in program.ops if op.name == name)


def test_cond_and_while_counts() -> None:
    def fn(i: jax.Array, x: jax.Array, n: jax.Array) -> Any:
        y = lax.switch(i, [jnp.sin, jnp.cos, jnp.tan], x)
        return lax.while_loop(
            lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * x), (0, y)
        )

    program, jaxpr = program_of(fn, 1, BATCH, 9)
    assert_mirrors(program, program.body, jaxpr)
    cond, loop = by_name(program, "cond").call, by_name(program, "while").call
    assert cond is not None and len(cond.regions) == 3
    assert loop is not None
    assert (loop.num_cond_consts, loop.num_consts, loop.num_carry) == (1, 1, 2)
    assert not loop.is_trip_count_known
