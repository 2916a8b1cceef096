"""Check of one rule: shards are run, combined as the rule states, and compared with the
whole.

`check_rule(fn, *args)` runs every op of a function once unsharded, and once for every
way in which its rule allows it to be sharded: slices of the operands (of windows and
indices, operands without what a shard lacks) go through the same primitive, and the
results are combined as the rule states. No devices are needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from rhino_jax._compat import fused_attention_traced
from rhino_jax.errors import RuleError
from rhino_jax.frontend.check.local import Finish, localise
from rhino_jax.frontend.check.run import (
    Call,
    as_array,
    runner_of,
    to_numpy,
    walk,
)
from rhino_jax.frontend.check.shards import (
    ShardMismatch,
    Strategy,
    combine,
    compare,
    legal_strategies,
    shards_of,
)
from rhino_jax.frontend.importer import rule_of
from rhino_jax.frontend.pallas import kernel_name
from rhino_jax.frontend.parameters import check_callable
from rhino_jax.frontend.registry import lookup_user
from rhino_jax.frontend.rules.opaque import CUSTOM_PARTITIONING
from rhino_jax.ir.factor import FactorKind, Rule


BATCH = 64
"""Number of runs of an op that are compiled together."""


@dataclass(frozen=True, slots=True)
class RuleReport:
    """The strategies that a check found correct.

    Attributes:
      strategies: for every op that has a rule, its name, its rule as text, and how many
        strategies were found correct.
      unknown: names of primitives without a rule, which are replicated.
    """

    strategies: tuple[tuple[str, str, int], ...]
    unknown: tuple[str, ...]

    @property
    def num_strategies(self) -> int:
        return sum(count for *_, count in self.strategies)

    def __str__(self) -> str:
        lines = [
            f"{name}: {rule}: {count} strategies true"
            for name, rule, count in self.strategies
        ]
        lines += [f"{name}: no rule, replicated" for name in self.unknown]
        return "\n".join(lines)


def check_rule(
    fn: Callable[..., Any],
    *args: Any,
    num_shards: Sequence[int] = (2, 4),
    max_pairs: int = 6,
    only: Collection[str] = (),
) -> RuleReport:
    """Check the rule of every op that `fn(*args)` runs.

    Ops with equal types and parameters are run once.

    Args:
      fn: a function of arrays. If it is a single op with a rule registered by the user,
        its shards are run through `fn` itself; otherwise through the primitive with the
        equation's parameters.
      args: example arguments, pytrees of arrays.
      num_shards: numbers of shards to test for each factor, where they divide it.
      max_pairs: number of strategies that shard two factors at once to test for each
        op.
      only: names of the ops to check; all, where none is given.

    Returns:
      The number of strategies that were checked, for every op.

    Raises:
      RuleError: a rule is wrong.
    """
    check_callable("`check_rule`", fn)
    leaves, tree = jax.tree.flatten(args)
    leaves = [as_array(x) for x in leaves]

    def call(*flat: Any) -> Any:
        return fn(*jax.tree.unflatten(tree, flat))

    visited: list[tuple[Any, Sequence[Any]]] = []
    with fused_attention_traced():
        closed = jax.make_jaxpr(call)(*leaves)
    walk(closed, leaves, lambda *x: visited.append(x), needs_results=False)
    checked: list[tuple[str, str, int]] = []
    unknown: dict[str, None] = {}
    seen: set[str] = set()
    for eqn, operands in visited:
        name = kernel_name(eqn) or eqn.primitive.name
        types = [str(v.aval) for v in eqn.invars]
        key = f"{name} {types} {sorted(eqn.params.items())}"
        if key in seen or (only and name not in only):
            continue
        seen.add(key)
        if not rule_of(eqn)[1]:
            unknown[name] = None
            continue
        if eqn.primitive.name == CUSTOM_PARTITIONING:
            continue  # its body is traced for whole shapes, and does not run on shards
        is_alone = len(visited) == 1 and [*map(jax.typeof, operands)] == [
            *map(jax.typeof, leaves)
        ]
        run = call if is_alone and lookup_user(name) is not None else None
        rule, count = check_eqn(
            eqn, operands, num_shards=num_shards, max_pairs=max_pairs, run=run
        )
        checked.append((name, str(rule), count))
    return RuleReport(tuple(checked), tuple(unknown))


def check_eqn(
    eqn: Any,
    args: Sequence[Any],
    *,
    num_shards: Sequence[int] = (2, 4),
    max_pairs: int = 6,
    run: Callable[..., Any] | None = None,
) -> tuple[Rule, int]:
    """Check the rule of one equation on concrete operands.

    Args:
      eqn: an equation of a jaxpr; its primitive has a rule.
      args: its operands.
      num_shards, max_pairs: as in `check_rule`.
      run: runs the op on arrays of any size; None: the equation's primitive does.

    Returns:
      The rule, and the number of strategies that were checked.

    Raises:
      RuleError: the rule is wrong.
    """
    rule = rule_of(eqn)[0].rule
    in_shapes = tuple(tuple(v.aval.shape) for v in eqn.invars)
    out_shapes = tuple(tuple(v.aval.shape) for v in eqn.outvars)
    strategies = legal_strategies(rule, in_shapes + out_shapes, num_shards, max_pairs)
    operands = [to_numpy(x) for x in args]
    runner = runner_of(eqn, args, run)
    calls: list[Call] = [(operands, eqn.params)]
    finishes: list[Finish] = []
    for strategy in strategies:
        for shard in shards_of(rule, strategy):
            with _blaming(eqn, rule, strategy):
                local, finish = localise(eqn, operands, shard)
            calls.append(local)
            finishes.append(finish)
    batches = [calls[i : i + BATCH] for i in range(0, len(calls), BATCH)]
    whole, *outcomes = [outcome for batch in batches for outcome in runner(batch)]
    if isinstance(whole, Exception):
        raise whole
    done = zip(outcomes, finishes, strict=True)
    for strategy in strategies:
        with _blaming(eqn, rule, strategy):
            parts: list[dict[tuple[int, ...], np.ndarray]] = [{} for _ in whole]
            for shard in shards_of(rule, strategy):
                outcome, finish = next(done)
                if isinstance(outcome, Exception):
                    text = str(outcome).strip() or type(outcome).__name__
                    raise ShardMismatch(
                        f"the op does not run on a shard: {text.splitlines()[0]}"
                    ) from outcome
                for i, result in enumerate(finish(outcome)):
                    parts[i][shard.coordinates] = result
            for i, expected in enumerate(whole):
                got = combine(rule, strategy, i, out_shapes[i], parts[i])
                compare(got, expected, f"result {i} differs from the unsharded op's")
    return rule, len(strategies)


@contextlib.contextmanager
def _blaming(eqn: Any, rule: Rule, strategy: Strategy) -> Iterator[None]:
    """Turn a mismatch into an error that names op, factor and fix."""
    try:
        yield
    except ShardMismatch as error:
        raise _untrue(eqn, rule, strategy, error) from error.__cause__


def _untrue(
    eqn: Any, rule: Rule, strategy: Strategy, error: ShardMismatch
) -> RuleError:
    """Return the error that names the wrong part of a rule, and the fix."""
    names = [rule.factors[cut.factor].name for cut in strategy]
    cuts = " and ".join(
        f"factor `{n}` into {cut.count}" for n, cut in zip(names, strategy, strict=True)
    )
    factor = rule.factors[strategy[0].factor]
    fixes = [f"mark `{factor.name}` whole (`{factor.name}!`)"]
    if factor.kind is FactorKind.HALO:
        fixes.append(f"correct its halo, now {factor.halo}")
    elif factor.reducer is not None:
        fixes.append(f"correct its reducer, now {factor.reducer!r}")
    elif not rule.partial_results(strategy[0].factor):
        fixes.append("give it a reducer, if shards' results are to be combined")
    shapes = ", ".join(str(tuple(v.aval.shape)) for v in eqn.invars)
    numbers = f"operands {shapes}"
    if error.difference is not None:
        numbers = f"largest difference {error.difference:.3g}; {numbers}"
    return RuleError(
        f"the rule of `{kernel_name(eqn) or eqn.primitive.name}` is not true when a"
        f" mesh cuts {cuts}:"
        f" {error.why}.",
        where=str(rule),
        numbers=numbers,
        fix=", or ".join(fixes) + ".",
    )
