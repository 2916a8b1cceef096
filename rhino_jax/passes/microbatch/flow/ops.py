"""What one op makes of whole, cut and partial operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rhino_jax.frontend.rules.scatter import REDUCERS as SCATTERS
from rhino_jax.ir.factor import FactorKind, Rule
from rhino_jax.ir.program import Program
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.microbatch.flow.blocks import Flat, Item
from rhino_jax.passes.microbatch.flow.linear import JOINING, groups_of, is_kept_zero
from rhino_jax.passes.microbatch.flow.row_numbers import ByRows, by_rows
from rhino_jax.passes.microbatch.flow.states import (
    Partial,
    RowsState,
    Spot,
    State,
    WholeState,
    is_free,
    is_own,
    known_after,
    locate,
    placed,
)


@dataclass(frozen=True, slots=True)
class Ran:
    """An op done inside a loop, or outside of all.

    Attributes:
      uses: how each operand is read.
      results: what is made.
      by_rows: where it is a look-up in which each row finds itself, how.
    """

    uses: tuple[State, ...]
    results: tuple[State, ...]
    by_rows: ByRows | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """An op that needs operands in full.

    Attributes:
      operands: positions.
      why: in words, as "it sorts over the batch".
    """

    operands: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class DimSizes:
    """Attributes:
    rows: indices of the batch.
      cheap_bytes: values of more are not made in full only to avoid a loop.
    kept_bytes: nor are rows of more kept, of all pieces, for what is made of them.
    """

    rows: int
    cheap_bytes: int
    kept_bytes: int = 0


def run_plain(
    flat: Flat, item: Item, states: Sequence[State], sizes: DimSizes
) -> Ran | Needs:
    """What an op without regions does.

    Args:
      flat: its program.
      item: the op.
      states: of its operands.
      sizes: of the batch.
    """
    if all(isinstance(s, WholeState) for s in states):
        return _whole(item, states)
    if item.op.name in JOINING and len(states) == len(item.results):
        phase = max(s.phase for s in states)
        passed = (
            WholeState(phase, s.is_zero, True, s.is_own)
            if isinstance(s, WholeState)
            else replace(s, phase=phase, cheap=None)
            for s in states
        )
        return Ran(tuple(states), tuple(passed))
    found = _on_partials(item, states) or _on_own_rows(flat, item, states)
    if found is None:
        found = _on_cuts(item, states, sizes)
    if isinstance(found, Needs):
        return found
    results = _priced(flat.program, item, states, found.results, sizes)
    return replace(found, results=results)


def together(states: Sequence[State]) -> WholeState | tuple[int, ...]:
    """What an op on whole values makes; or the operands that must be known first.

    What is made inside a loop stays there, unless something that is known only after
    the loop is needed as well: then it is no reason for another loop.
    """
    phase = max((s.phase for s in states), default=0)
    insides = [
        i for i, s in enumerate(states) if isinstance(s, WholeState) and s.is_inside
    ]
    own = any(map(is_own, states))
    if not insides:
        return WholeState(phase, is_own=own)
    first = max(states[i].phase for i in insides)
    late = any(s.phase > first for s in states)
    return tuple(insides) if late else WholeState(first, is_inside=True, is_own=own)


def _whole(item: Item, states: Sequence[State]) -> Ran | Needs:
    made = together(states)
    if isinstance(made, tuple):
        return Needs(made, "it is used after the loop")
    zeros = [isinstance(s, WholeState) and s.is_zero for s in states]
    if any(zeros) and is_kept_zero(item, zeros):
        made = WholeState(made.phase, True, made.is_inside)
    return Ran(tuple(states), (made,) * len(item.results))


def _on_partials(item: Item, states: Sequence[State]) -> Ran | Needs | None:
    """An op with partial operands; None where it has none, or they are of no matter."""
    at = [i for i, s in enumerate(states) if isinstance(s, Partial)]
    if not at:
        return None
    cuts = [i for i, s in enumerate(states) if isinstance(s, RowsState)]
    partials = [s for s in states if isinstance(s, Partial)]
    reducer, phase = partials[0].reducer, partials[0].phase
    alike = all(s.reducer == reducer and s.phase == phase for s in partials)
    what = {"sum": "a sum"}.get(reducer, f"a {reducer}") + " over the batch"
    if cuts:
        if at == [0] and SCATTERS.get(item.op.name) == reducer:
            return None
        return Needs(tuple(at), f"what it does to each row needs {what}")
    if not alike:
        return Needs(tuple(at), "it combines sums that are known one after the other")
    for group in groups_of(item, reducer):
        if not set(at) <= set(group):
            continue
        rest = [s for i, s in enumerate(states) if i not in at]
        others = [states[i] for i in group if i not in at]
        fits = all(_is_zero(s) or is_own(s) for s in others)
        if fits and (reducer == "sum" or set(group) == set(at)):
            if all(s.phase <= phase for s in rest):
                made = Partial(reducer, phase)
                # Pieces' own values are parts of their mean.
                uses = (
                    made if i in group and is_own(s) else s
                    for i, s in enumerate(states)
                )
                return Ran(tuple(uses), (made,) * len(item.results))
            return Needs(tuple(at), f"{what} meets what is known after it")
    return Needs(tuple(at), f"it is not linear in {what}")


def _on_own_rows(flat: Flat, item: Item, states: Sequence[State]) -> Ran | None:
    """A look-up in which each row finds itself."""
    found = by_rows(flat, item, states)
    if found is None:
        return None
    cut = next(s for s in states if isinstance(s, RowsState))
    phase = max(s.phase for s in states)
    made = RowsState(found.result, cut.outer, cut.inner, phase)
    uses = (
        s if isinstance(s, RowsState) else RowsState(d, cut.outer, cut.inner)
        for s, d in zip(states, found.operands, strict=True)
    )
    return Ran(tuple(uses), (made,), found)


def _is_zero(state: State) -> bool:
    return isinstance(state, WholeState) and state.is_zero


def _on_cuts(item: Item, states: Sequence[State], sizes: DimSizes) -> Ran | Needs:
    """An op with operands of which a piece has its rows."""
    rule = item.op.rule
    cuts = {i: s for i, s in enumerate(states) if isinstance(s, RowsState)}
    assert rule is not None
    spots = {i: locate(rule, rule.operands[i], s, sizes.rows) for i, s in cuts.items()}
    if item.op.manual is not None or item.op.traits.kind is OpKind.KERNEL:
        return Needs(tuple(cuts), "it is not looked into")
    stuck = [
        i for i, spot in spots.items() if spot is None or not is_free(rule, spot.factor)
    ]
    if stuck:
        return Needs(tuple(stuck), _coupling(item, rule, [spots[i] for i in stuck]))
    kinds = sorted({spot for spot in spots.values() if spot}, key=_order)
    if len(kinds) > 1:
        return Needs(_others(cuts, spots), "two of its dims are the batch")
    return _at(item, states, kinds[0])


def _order(spot: Spot) -> tuple[int, int, int]:
    return spot.factor, spot.outer, spot.inner


def _coupling(item: Item, rule: Rule, spots: Sequence[Spot | None]) -> str:
    kinds = {rule.factors[s.factor].kind for s in spots if s is not None}
    if item.op.traits.kind is OpKind.MOVEMENT:
        return "it takes rows of the batch by their position, or moves them"
    if FactorKind.INDEX in kinds:
        return "it looks up rows of the batch"
    if FactorKind.HALO in kinds:
        return "a window slides over the batch"
    return "its rows need one another"


def _others(
    cuts: dict[int, RowsState], spots: dict[int, Spot | None]
) -> tuple[int, ...]:
    """Operands that are cheap in full, so that the others can stay cut; or all."""
    costly = {i for i, s in cuts.items() if s.cheap is None or s.cheap > s.phase}
    kept = spots[min(costly)] if costly else spots[max(cuts)]
    others = tuple(i for i in cuts if spots[i] != kept)
    return tuple(cuts) if costly & set(others) else others


def _at(item: Item, states: Sequence[State], spot: Spot) -> Ran | Needs:
    """All that hold this factor are cut there."""
    rule, phase = item.op.rule, max(s.phase for s in states)
    assert rule is not None
    uses: list[State] = []
    for state, layout in zip(states, rule.operands, strict=True):
        want = placed(rule, layout, spot)
        if want is None or isinstance(state, RowsState):
            uses.append(state)
        else:
            uses.append(replace(want, is_own=is_own(state)))
    reducer = rule.factors[spot.factor].reducer
    results: list[State] = []
    for layout in rule.results:
        made = placed(rule, layout, spot)
        if made is not None:
            results.append(RowsState(made.dim, made.outer, made.inner, phase))
        elif reducer is not None:
            results.append(Partial(reducer, phase))
        else:
            at = tuple(i for i, s in enumerate(states) if isinstance(s, RowsState))
            return Needs(at, "it has a result without the batch")
    if item.op.name in SCATTERS and isinstance(results[0], Partial):
        uses[0] = results[0]
    return Ran(tuple(uses), tuple(results))


def _priced(
    program: Program,
    item: Item,
    states: Sequence[State],
    results: Sequence[State],
    sizes: DimSizes,
) -> tuple[State, ...]:
    """The results, with how they may be had in full without a loop: of data alone, or
    of what loops before left, be it of a few numbers of every row."""
    values = program.values
    is_small = all(values[v].bytes <= sizes.cheap_bytes for v in item.results)
    insides = any(isinstance(s, WholeState) and s.is_inside for s in states)
    is_kept = all(
        values[v].bytes <= sizes.kept_bytes
        for v, s in zip(item.operands, states, strict=True)
        if isinstance(s, RowsState) and s.cheap is None
    )
    if insides or item.op.traits.is_contraction or not (is_small and is_kept):
        return tuple(results)
    cheap = max(map(known_after, states), default=0)
    return tuple(s if cheap > s.phase else _cheaply(s, cheap) for s in results)


def _cheaply(state: State, cheap: int) -> State:
    if isinstance(state, RowsState):
        return RowsState(state.dim, state.outer, state.inner, state.phase, cheap)
    if isinstance(state, Partial):
        return Partial(state.reducer, state.phase, cheap)
    return state


def with_own(
    flat: Flat, item: Item, states: Sequence[State], needs: Needs, is_inside: bool
) -> list[State] | None:
    """The operands of an op that is asked to take what it needs from a piece's own
    rows; None where that is no sum of floats over the batch.

    Args:
      flat: its program.
      item: the op.
      states: of its operands.
      needs: what it needs in full.
      is_inside: whether it is no op of a region.
    """
    found = list(states)
    for i in needs.operands:
        state, dtype = states[i], flat.program.values[item.operands[i]].dtype
        if not isinstance(state, Partial) or state.reducer != "sum":
            return None
        if not ("float" in dtype or "complex" in dtype):
            return None
        found[i] = WholeState(state.phase, is_inside=is_inside, is_own=True)
    return found


def in_full(state: State) -> WholeState:
    """The same value once it is known in full."""
    return WholeState(known_after(state))
