"""The second truth: XLA's partitioner, given the shardings that a rule names.

One factor at a time is cut over all devices of a mesh. Operands are placed and
results constrained as the rule says. The compiled op must give what the unsharded
op gives, and must not move more than the rule leads one to expect: nothing where a
factor is parallel, neighbours' borders where a window slides, partial results where
they are combined. A factor that is not the major one of its dim is a strided cut,
which no NamedSharding can say, and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhino_jax._compat import bind_eqn
from rhino_jax.errors import RuleError
from rhino_jax.frontend.check.run import as_array, to_numpy, walk
from rhino_jax.frontend.check.shards import ShardMismatch, compare, is_legal
from rhino_jax.frontend.importer import rule_of
from rhino_jax.ir.factor import FactorKind, Layout, Rule


_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)"
    r"(?:-start)?\("
)


@dataclass(frozen=True, slots=True)
class Moved:
    """A collective that a rule does not lead one to expect.

    Attributes:
      op: the primitive's name.
      rule: its rule, as text.
      factor: the factor that was cut.
      kinds: the kinds of collectives in the compiled op.
    """

    op: str
    rule: str
    factor: str
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class XlaReport:
    """What XLA made of the cuts that rules allow.

    Attributes:
      num_strategies: how many were compiled and gave the right result.
      moved: those for which XLA moves more than the rule says.
    """

    num_strategies: int
    moved: tuple[Moved, ...]


def check_with_xla(fn: Callable[..., Any], *args: Any, mesh: Mesh) -> XlaReport:
    """Compile every op of `fn(*args)` under every cut of one factor over `mesh`.

    Args:
      fn: a function of arrays.
      args: example arguments, pytrees of arrays.
      mesh: at least two devices; all its axes are used as one.
    Raises:
      RuleError: a compiled op gives something else than the unsharded op.
    """
    flat_mesh = Mesh(mesh.devices.reshape(-1), ("shards",))
    leaves, tree = jax.tree.flatten(args)
    leaves = [as_array(x) for x in leaves]
    closed = jax.make_jaxpr(lambda *flat: fn(*jax.tree.unflatten(tree, flat)))(*leaves)
    visited: list[tuple[Any, Sequence[Any]]] = []
    walk(closed, leaves, lambda *x: visited.append(x), needs_results=False)
    num_strategies, moved = 0, []
    for eqn, operands in visited:
        op_rule, is_known = rule_of(eqn)
        rule = op_rule.rule
        shapes = [tuple(v.aval.shape) for v in (*eqn.invars, *eqn.outvars)]
        for factor, whole in enumerate(rule.factors):
            is_even = is_legal(rule, factor, flat_mesh.size, shapes)
            if not (is_known and is_even and _is_major(rule, factor)):
                continue
            num_strategies += 1
            kinds = _compile(eqn, operands, rule, factor, flat_mesh)
            if set(kinds) - _expected(rule, factor):
                moved.append(Moved(eqn.primitive.name, str(rule), whole.name, kinds))
    return XlaReport(num_strategies, tuple(moved))


def _compile(
    eqn: Any, operands: Sequence[Any], rule: Rule, factor: int, mesh: Mesh
) -> tuple[str, ...]:
    """Run the compiled op, compare, and return the kinds of its collectives."""
    placed = [
        jax.device_put(x, _sharding(mesh, layout, factor))
        for x, layout in zip(operands, rule.operands, strict=True)
    ]
    compiled = (
        jax.jit(
            lambda *xs: bind_eqn(eqn, xs, eqn.params),
            out_shardings=[_sharding(mesh, x, factor) for x in rule.results],
        )
        .lower(*placed)
        .compile()
    )
    expected = bind_eqn(eqn, operands, eqn.params)
    for i, (got, whole) in enumerate(zip(compiled(*placed), expected, strict=True)):
        try:
            compare(to_numpy(got), to_numpy(whole), f"result {i} differs")
        except ShardMismatch as error:
            name = rule.factors[factor].name
            raise RuleError(
                f"XLA's `{eqn.primitive.name}`, cut along factor `{name}`, gives"
                f" another result: {error.why}.",
                where=str(rule),
                numbers=f"largest difference {error.difference}",
                fix=f"mark the factor whole (`{name}!`).",
            ) from None
    return tuple(sorted(set(_COLLECTIVE.findall(compiled.as_text() or ""))))


def _expected(rule: Rule, factor: int) -> set[str]:
    kinds = set()
    if rule.factors[factor].kind is FactorKind.HALO:
        kinds.add("collective-permute")
    if rule.partial_results(factor):
        kinds.add("all-reduce")
    return kinds


def _is_major(rule: Rule, factor: int) -> bool:
    """Whether a cut of `factor` is a contiguous block wherever it appears."""
    layouts = (*rule.operands, *rule.results)
    return all(
        factor not in dim or dim[0] == factor for layout in layouts for dim in layout
    )


def _sharding(mesh: Mesh, layout: Layout, factor: int) -> NamedSharding:
    spec = ["shards" if factor in dim else None for dim in layout]
    return NamedSharding(mesh, PartitionSpec(*spec))
