"""Check of one rule: shards are run, combined as the rule states, and compared with the
whole.

`check_rule(fn, *args)` runs every op of a function once unsharded, and once for every
way in which its rule allows it to be sharded: slices of the operands (of windows and
indices, operands without what a shard lacks) go through the same primitive, and the
results are combined as the rule states. No devices are needed.

Along most factors a shard is a part of the op's dims, on which the primitive runs with
parameters of that part. Where a built-in op slides windows, moves elements or follows
indices, positions in the whole dim count: there it runs on the whole dim, in which
other values replace the elements that the shard lacks, and the shard's part of the
result is taken. A rule whose shards need more than they hold gives wrong results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from rhino_jax._compat import fused_attention_traced
from rhino_jax.errors import RuleError
from rhino_jax.frontend.check.run import (
    Call,
    as_array,
    runner_of,
    to_numpy,
    walk,
)
from rhino_jax.frontend.check.shards import (
    Shard,
    ShardMismatch,
    Strategy,
    combine,
    compare,
    legal_strategies,
    shard_operand,
    shards_of,
)
from rhino_jax.frontend.importer import rule_of
from rhino_jax.frontend.pallas import grid_of, kernel_name, local_params as local_kernel
from rhino_jax.frontend.parameters import check_callable
from rhino_jax.frontend.registry import (
    is_built_in,
    local_params,
    lookup_user,
    traits_of,
)
from rhino_jax.frontend.rules.opaque import CUSTOM_PARTITIONING
from rhino_jax.frontend.rules.reduce import identity
from rhino_jax.ir.factor import Dim, FactorKind, Rule
from rhino_jax.ir.traits import OpKind


Results = list[np.ndarray]

Finish = Callable[[Results], Results]
"""A function from the primitive's results on a shard to the shard's results."""

_PLACED = (FactorKind.HALO, FactorKind.INDEX)


def localise(
    eqn: Any, operands: Sequence[np.ndarray], shard: Shard
) -> tuple[Call, Finish]:
    """Return the run of an equation's primitive on one shard, and a function that takes
    the shard's results from those of the run.

    Args:
      eqn: the equation.
      operands: its operands; PRNG keys as words, in trailing dims.
      shard: the shard.

    Raises:
      ShardMismatch: the op cannot run on this part.
    """
    rule, name = shard.rule, eqn.primitive.name
    in_place = _in_place(name, shard)
    cut = shard.only(set(range(len(rule.factors))) - in_place)
    sizes = tuple(replace(f, size=cut.size(i)) for i, f in enumerate(rule.factors))
    rest = replace(shard.only(in_place), rule=replace(rule, factors=sizes))
    # A kernel's taps are sharded without halo, only the image needs borders.
    kind = traits_of(name).kind
    is_conv = kind is OpKind.CONVOLUTION
    blocks = []
    for i, (x, layout) in enumerate(zip(operands, rule.operands, strict=True)):
        has_halo = i == 0 or not is_conv
        block = shard_operand(x, layout, cut, has_halo)
        blocks.append(_masked(block, layout, rest, has_halo))
    for axis, place in zip(shard.strategy, shard.coordinates, strict=True):
        factor = rule.factors[axis.factor]
        if kind is OpKind.SCATTER and factor.kind is FactorKind.REDUCE and place:
            # The operand enters the sum of partial results once.
            empty = identity(factor.reducer or "sum", blocks[0].dtype)
            blocks[0] = np.full_like(blocks[0], empty)
    layouts = zip(rule.results, eqn.outvars, strict=True)
    outs = [cut.local_shape(layout, v.aval.shape) for layout, v in layouts]
    ins = [x.shape[: len(dims)] for x, dims in zip(blocks, rule.operands, strict=True)]
    params = local_params(name, eqn.params, ins, outs)
    if is_conv:
        params |= _groups(eqn, shard)
    if "grid_mapping" in params:
        params = _on_part_of_grid(eqn, (*ins, *outs))
    if "fill_value" in params and any(map(rest.start, in_place)):
        params["fill_value"] = 0  # the first shard looks up indices that are outside

    def finish(results: Results) -> Results:
        pairs = zip(results, rule.results, strict=True)
        return [shard_operand(x, layout, rest, False) for x, layout in pairs]

    return (blocks, params), finish


def _in_place(name: str, shard: Shard) -> set[int]:
    """Return the sharded factors whose elements keep their positions in the whole dim:
    of windows, shifts and indices; and, where an op moves elements or generates them by
    their positions, those of its result alone."""
    rule, kind = shard.rule, traits_of(name).kind
    if kind is OpKind.KERNEL or not is_built_in(name):
        return set()
    layouts = rule.operands[: 1 if kind is OpKind.GENERATOR else None]
    read = {f for layout in layouts for dim in layout for f in dim}
    is_placing = kind in (OpKind.GENERATOR, OpKind.MOVEMENT)
    return {
        f
        for f, factor in enumerate(rule.factors)
        if factor.kind in _PLACED or (is_placing and f not in read)
    }


def _masked(x: np.ndarray, layout: Sequence[Dim], shard: Shard, has_halo: bool) -> Any:
    """Return an operand with other values in place of the elements that a shard lacks:
    the identity where results are combined, else values that would be seen in them."""
    for d, dim in enumerate(layout):
        for f in dim:
            factor = shard.rule.factors[f]
            if not shard.is_sharded(f) or factor.kind not in _PLACED or not x.size:
                continue
            begin, end = shard.start(f), shard.start(f) + shard.size(f)
            if factor.kind is FactorKind.HALO and has_halo:
                begin, end = shard.halo_range(f, x.shape[d])
            at = np.arange(x.shape[d]).reshape(-1, *[1] * (x.ndim - d - 1))
            other = ~x if x.dtype == np.bool_ else x.max() + 1
            if factor.reducer is not None:
                other = identity(factor.reducer, x.dtype)
            x = np.where((begin <= at) & (at < end), x, other)
    return x


def _groups(eqn: Any, shard: Shard) -> dict[str, int]:
    """Return the numbers of groups of a convolution on one shard."""
    dims, rule = eqn.params["dimension_numbers"], shard.rule
    changed = {}
    for key, lhs_dim in (
        ("batch_group_count", dims.lhs_spec[0]),
        ("feature_group_count", dims.lhs_spec[1]),
    ):
        for f in {*rule.operands[1][dims.rhs_spec[0]]} & {*rule.operands[0][lhs_dim]}:
            shards = rule.factors[f].size // shard.size(f)
            if eqn.params[key] % shards:
                raise ShardMismatch(
                    f"{eqn.params[key]} groups do not divide by {shards}"
                )
            changed[key] = eqn.params[key] // shards
    return changed


def _on_part_of_grid(eqn: Any, local: Sequence[tuple[int, ...]]) -> dict[str, Any]:
    """Return the parameters of a Pallas kernel, whatever its name, on the grid of a
    shard.

    Args:
      eqn: the equation.
      local: shapes of the shard's operands and results.
    """
    grid = grid_of(eqn.params)
    if grid is None:
        return {**eqn.params}
    pieces = [1] * len(grid.sizes)
    whole = [v.aval.shape for v in (*eqn.invars, *eqn.outvars)]
    moves = (*grid.operands, *grid.results)
    for axes, *shapes in zip(moves, whole, local, strict=True):
        for axis, size, part in zip(axes, *shapes, strict=True):
            if axis is not None:
                pieces[axis] = size // part
    return local_kernel(eqn.params, grid, pieces)


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
    """Turn a mismatch into an error that names the wrong part of a rule, and the
    fix."""
    try:
        yield
        return
    except ShardMismatch as mismatch:
        error = mismatch
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
    raise RuleError(
        f"the rule of `{kernel_name(eqn) or eqn.primitive.name}` is not true when a"
        f" mesh cuts {cuts}:"
        f" {error.why}.",
        where=str(rule),
        numbers=numbers,
        fix=", or ".join(fixes) + ".",
    ) from error.__cause__
