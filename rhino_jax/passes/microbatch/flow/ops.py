"""Transfer functions of single ops, for complete, sliced and partial operands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rhino_jax.frontend.rules.shape import of_blocks
from rhino_jax.ir.axes import FactorSpan, locate, place
from rhino_jax.ir.factor import FactorKind
from rhino_jax.ir.program import Program
from rhino_jax.ir.traits import OpKind
from rhino_jax.passes.microbatch.flow.states import (
    Partial,
    RowsState,
    State,
    WholeState,
    in_loop,
    is_free,
    is_own,
    known_after,
)
from rhino_jax.rewrite.flat import FlatOp, FlatProgram


@dataclass(frozen=True, slots=True)
class Ran:
    """States in which an op runs, inside a loop or outside of all.

    Attributes:
      uses: state in which each operand is read.
      results: states of the results.
    """

    uses: tuple[State, ...]
    results: tuple[State, ...]


@dataclass(frozen=True, slots=True)
class Needs:
    """Operands that an op needs in full.

    Attributes:
      operands: positions of the operands.
      why: the reason, in words, as "it sorts over the batch".
    """

    operands: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True)
class DimSizes:
    """Size of the batch, and limits on computing values in full to avoid a loop.

    Attributes:
      rows: size of the batch.
      cheap_bytes: maximum bytes of a value that is computed in full for that.
      kept_bytes: maximum bytes of the per-row values of all micro-batches that are
        saved to compute such a value.
    """

    rows: int
    cheap_bytes: int
    kept_bytes: int = 0


def run_plain(
    flat: FlatProgram, item: FlatOp, states: Sequence[State], sizes: DimSizes
) -> Ran | Needs:
    """Return how an op without regions runs, or the operands that it needs in full.

    Args:
      flat: the program.
      item: the op.
      states: states of its operands.
      sizes: size of the batch, and limits on cheap values.
    """
    if all(isinstance(s, WholeState) for s in states):
        return on_whole(item, states)
    if item.op.traits.kind is OpKind.IDENTITY and len(states) == len(item.results) > 1:
        phase = max(s.phase for s in states)
        return Ran(tuple(states), tuple(in_loop(s, phase) for s in states))
    found = (
        _on_partials(item, states)
        or _on_whole_batches(flat.program, item, states)
        or _on_cuts(item, states)
    )
    if isinstance(found, Needs):
        return found
    results = _priced(flat.program, item, states, found.results, sizes)
    return replace(found, results=results)


def together(states: Sequence[State]) -> WholeState | tuple[int, ...]:
    """Return the state of a result of complete operands.

    An op on values computed inside a loop runs in that loop, unless it also reads a
    value known only after the loop: it then runs after the loop, rather than in another
    one.

    Returns:
      The state; or positions of the operands that must be known in full first.
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


def on_whole(item: FlatOp, states: Sequence[State]) -> Ran | Needs:
    """Return how an op with complete operands runs."""
    made = together(states)
    if isinstance(made, tuple):
        return Needs(made, "it is used after the loop")
    zeros = [isinstance(s, WholeState) and s.is_zero for s in states]
    if any(zeros) and item.op.traits.keeps_zeros(zeros):
        made = WholeState(made.phase, True, made.is_inside)
    return Ran(tuple(states), (made,) * len(item.results))


def _on_partials(item: FlatOp, states: Sequence[State]) -> Ran | Needs | None:
    """Return how an op with partial operands runs.

    Returns:
      None where it has none, or scatters rows into a partial operand.
    """
    partials = {i: s for i, s in enumerate(states) if isinstance(s, Partial)}
    if not partials:
        return None
    at, traits = tuple(partials), item.op.traits
    reducer, phase = partials[at[0]].reducer, partials[at[0]].phase
    what = f"a {reducer} over the batch"
    if any(isinstance(s, RowsState) for s in states):
        if at == (0,) and traits.kind is OpKind.SCATTER and traits.reducer == reducer:
            return None
        return Needs(at, f"what it does to each row needs {what}")
    if len({(s.reducer, s.phase) for s in partials.values()}) > 1:
        return Needs(at, "it combines sums that are known one after the other")
    for group in traits.commutes_in(len(states), reducer):
        if not set(at) <= set(group):
            continue
        rest = [s for i, s in enumerate(states) if i not in at]
        others = [states[i] for i in group if i not in at]
        fits = all(
            isinstance(s, WholeState) and (s.is_zero or s.is_own) for s in others
        )
        if fits and (reducer == "sum" or set(group) == set(at)):
            if all(s.phase <= phase for s in rest):
                made = Partial(reducer, phase)
                # Per-micro-batch values are addends of their mean.
                uses = (
                    made if i in group and is_own(s) else s
                    for i, s in enumerate(states)
                )
                return Ran(tuple(uses), (made,) * len(item.results))
            return Needs(at, f"{what} meets what is known after it")
    return Needs(at, f"it is not linear in {what}")


def _on_whole_batches(
    program: Program, item: FlatOp, states: Sequence[State]
) -> Ran | None:
    """Return how an op runs that joins, takes apart, takes or pads whole batches along
    their dim, as the chosen and the rejected sequences of pairs.

    Each micro-batch then has its rows of every batch. Values known in full, as of
    generated images, are joined by their rows, too.

    Returns:
      None for other ops.
    """
    spans = {replace(s.span, outer=1) for s in states if isinstance(s, RowsState)}
    if len(spans) != 1 or any(isinstance(s, Partial) for s in states):
        return None
    (span,) = spans
    block = span.size * span.inner
    if not of_blocks(item.op.name, item.eqn.params, span.dim, block, block):
        return None
    # The value that a pad fills with is no array of rows.
    joined = [v for v in item.operands if program.values[v].rank > span.dim]
    lengths = [program.values[v].shape[span.dim] for v in (*joined, *item.results)]
    if not all(lengths) or any(n % block for n in lengths) or len({*lengths}) == 1:
        return None
    rows = [replace(span, outer=n // block) for n in lengths]
    phase, results = max(s.phase for s in states), len(item.results)
    uses = (
        s if isinstance(s, RowsState) else RowsState(at, is_own=is_own(s))
        for s, at in zip(states, rows[:-results], strict=False)
    )
    made = (RowsState(at, phase) for at in rows[-results:])
    return Ran((*uses, *states[len(rows) - results :]), tuple(made))


def _on_cuts(item: FlatOp, states: Sequence[State]) -> Ran | Needs:
    """Return how an op with sliced operands runs."""
    rule = item.rule
    cuts = {i: s for i, s in enumerate(states) if isinstance(s, RowsState)}
    spots = {i: locate(rule, rule.operands[i], s.span) for i, s in cuts.items()}
    if item.op.manual is not None or item.op.traits.kind is OpKind.KERNEL:
        return Needs(tuple(cuts), "it is not looked into")
    stuck = [
        i for i, spot in spots.items() if spot is None or not is_free(rule, spot.factor)
    ]
    if stuck:
        at = [spot for i in stuck if (spot := spots[i]) is not None]
        found = {rule.factors[spot.factor].kind for spot in at}
        if item.op.traits.kind is OpKind.MOVEMENT:
            why = "it takes rows of the batch by their position, or moves them"
        elif FactorKind.INDEX in found:
            why = "it looks up rows of the batch"
        elif FactorKind.HALO in found:
            why = "a window slides over the batch"
        else:
            why = "its rows need one another"
        return Needs(tuple(stuck), why)
    kinds = sorted({spot for spot in spots.values() if spot})
    if len(kinds) > 1:
        # Those of one dim stay sliced; others are read in full, where they are cheap.
        costly = {i for i, s in cuts.items() if s.cheap is None or s.cheap > s.phase}
        kept = spots[min(costly)] if costly else spots[max(cuts)]
        others = tuple(i for i in cuts if spots[i] != kept)
        is_costly = not costly.isdisjoint(others)
        return Needs(
            tuple(cuts) if is_costly else others, "two of its dims are the batch"
        )
    return _at(item, states, kinds[0])


def _at(item: FlatOp, states: Sequence[State], spot: FactorSpan) -> Ran | Needs:
    """Return how an op runs with all operands and results sliced that hold the batch.

    Args:
      item: the op.
      states: states of its operands.
      spot: position of the batch in the op's factors.
    """
    rule, phase = item.rule, max(s.phase for s in states)
    uses: list[State] = [
        state
        if isinstance(state, RowsState) or (at := place(rule, layout, spot)) is None
        else RowsState(at, is_own=is_own(state))
        for state, layout in zip(states, rule.operands, strict=True)
    ]
    reducer = rule.factors[spot.factor].reducer
    results: list[State] = []
    for layout in rule.results:
        made = place(rule, layout, spot)
        if made is not None:
            results.append(RowsState(made, phase))
        elif reducer is not None:
            results.append(Partial(reducer, phase))
        else:
            cuts = tuple(i for i, s in enumerate(states) if isinstance(s, RowsState))
            return Needs(cuts, "it has a result without the batch")
    if item.op.traits.kind is OpKind.SCATTER and isinstance(results[0], Partial):
        uses[0] = results[0]
    return Ran(tuple(uses), tuple(results))


def _priced(
    program: Program,
    item: FlatOp,
    states: Sequence[State],
    results: Sequence[State],
    sizes: DimSizes,
) -> tuple[State, ...]:
    """Mark results that may be computed in full without a loop.

    They are functions of data alone, or of few bytes per row that earlier loops saved.
    """
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
    return tuple(
        s if cheap > s.phase or isinstance(s, WholeState) else replace(s, cheap=cheap)
        for s in results
    )
