"""What ops are is said by their rules, and nowhere else by primitives' names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import rhino_jax as rhino
from rhino_jax.frontend import registry
from rhino_jax.frontend.trace import trace
from rhino_jax.ir.program import Op
from rhino_jax.ir.traits import OpKind, Traits
from rhino_jax.plan.files.cache import told_of


PACKAGE = Path(rhino.__file__).parent

WORDS = frozenset({
    "add", "and", "complex", "copy", "empty", "name", "max", "min", "or", "pad",
    "reduce", "reshape", "round", "scatter", "slice", "sort", "split", "stack", "stage",
    "sub", "tile", "transpose", "xor",
})  # fmt: skip
"""Names of primitives that are words of other things too."""

TOLD_APART = {
    "frontend/pallas.py": "how often the bodies of kernels run",
    "ir/collectives.py": "which kind of collective a primitive is",
    "runtime/ops_on_shards.py": "how what shards find of each is merged",
    "export/constraints.py": "functions of JAX that users lay out values with",
    "frontend/tracing/windows.py": "parameters say where a window lies",
    "frontend/tracing/integers.py": "ops that make integers in steps",
    "frontend/tracing/open_moves.py": "the ops that a rotation is made of, that fill"
    " what a pad adds, that keep row numbers and join indices",
    "frontend/known_values.py": "arithmetic on constants: loop bounds, windows",
    "ir/coverage.py": "in which parameter the names of kernels stand",
    "frontend/tracing/sliced_products.py": "the ops whose parameters it changes",
    "attention/masks.py": "NumPy's functions on masks and their bounds",
    "attention/softmax.py": "the ops that a softmax is made of",
    "attention/written.py": "the op whose parameters say which dims are summed",
    "passes/microbatch/flow/analysis.py": "sums that only differentiation makes",
    "bench/probe/functions.py": "names of functions that are probed",
    "models/moe.py": "a field of a configuration is called top_k",
    "models/mixture.py": "a field of a configuration is called top_k",
}
"""Where names are needed, as what differs is not what an op is: file → what for."""


def op_of(fn: Any, *args: Any, name: str) -> Op:
    ops = trace(fn, args, {}).program.ops
    (found,) = [op for op in ops if op.name == name]
    return found


def test_every_primitive_with_a_rule_says_what_it_is() -> None:
    assert set(registry.registered()) <= set(registry._TRAITS)


def names_in(tree: ast.AST, names: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Strings in collections, keys, comparisons and patterns that are such names."""
    for node in ast.walk(tree):
        inside: list[ast.expr | None] = []
        if isinstance(node, ast.Set | ast.Tuple | ast.List):
            inside = [*node.elts]
        elif isinstance(node, ast.Dict):
            inside = node.keys
        elif isinstance(node, ast.Compare):
            inside = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            inside = [node.value]
        for part in inside:
            if isinstance(part, ast.Constant) and part.value in names:
                yield str(part.value), part.lineno


def test_no_file_but_the_rules_tells_ops_apart_by_name() -> None:
    names = frozenset(registry.registered()) - WORDS
    found = {}
    for file in PACKAGE.rglob("*.py"):
        place = str(file.relative_to(PACKAGE))
        # HLO's opcodes are not JAX's primitives.
        if place.startswith(("frontend/rules/", "_compat", "verify/hlo/")):
            continue
        for name, line in names_in(ast.parse(file.read_text()), names):
            if not place.startswith(tuple(TOLD_APART)):
                found[f"{place}:{line}"] = name
    assert found == {}


@pytest.mark.parametrize("place", TOLD_APART)
def test_exceptions_are_needed(place: str) -> None:
    names, path = frozenset(registry.registered()) - WORDS, PACKAGE / place
    files = path.rglob("*.py") if path.is_dir() else [path]
    assert any(any(names_in(ast.parse(f.read_text()), names)) for f in files)


def test_a_ragged_product_is_a_contraction() -> None:
    def product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return lax.ragged_dot(x, w, sizes)

    args = jnp.ones((8, 4)), jnp.ones((2, 4, 6)), jnp.array([3, 5], jnp.int32)
    ops = [op for op in trace(product, args, {}).program.ops if op.rule is not None]
    assert any(op.traits.is_contraction and "ragged" in op.name for op in ops)


def test_a_rule_may_say_more_of_one_op() -> None:
    def conv(groups: int) -> Traits:
        def fn(x: jax.Array, w: jax.Array) -> jax.Array:
            return lax.conv_general_dilated(
                x, w, (1, 1), "SAME", feature_group_count=groups
            )

        args = jnp.ones((2, 8, 8, 8)), jnp.ones((8, 8 // groups, 3, 3))
        return op_of(fn, *args, name="conv_general_dilated").traits

    assert conv(4).is_gathered
    assert not conv(1).is_gathered
    assert conv(1).kind is OpKind.CONVOLUTION


def test_users_say_what_their_ops_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for table in ("_RULES", "_TRAITS"):
        monkeypatch.setattr(registry, table, dict(getattr(registry, table)))
    monkeypatch.setattr(registry, "_USER_RULES", set())
    traits = rhino.Traits(rhino.OpKind.CONTRACTION, is_expensive=True)
    rhino.register_rule("tanh", "a -> a", traits=traits)
    assert op_of(jnp.tanh, jnp.ones(4), name="tanh").traits is traits
    rhino.register_rule("sin", "a -> a")
    assert op_of(jnp.sin, jnp.ones(4), name="sin").traits.is_expensive
    with pytest.raises(rhino.RuleError, match=r"traits="):
        rhino.register_rule("sin", "a -> a", traits="contraction")  # type: ignore[arg-type]


def test_plans_depend_on_traits() -> None:
    program = trace(jnp.tanh, (jnp.ones(4),), {}).program
    (op,) = program.ops
    other = replace(program, ops=(replace(op, traits=Traits()),))
    assert told_of(other) != told_of(program)


def test_a_kernels_traits_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TRAITS", dict(registry._TRAITS))
    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    monkeypatch.setattr(registry, "_USER_RULES", set())
    rhino.register_rule("my_matmul", "a -> a", traits=Traits(OpKind.CONTRACTION))
    assert registry.traits_of("pallas_call", "my_matmul").is_contraction
    assert registry.traits_of("pallas_call", "another").kind is OpKind.KERNEL
    # A kernel that is called as a primitive is not that primitive.
    assert registry.traits_of("pallas_call", "dot_general").kind is OpKind.KERNEL
