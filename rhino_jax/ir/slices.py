"""A part of a program as a program of its own: some ops of its body, in order.

What enters a slice are its inputs, what others read of it its outputs. Ops and values
are numbered anew, as the laws of the IR ask, and carry their source lines along; a
`Slice` knows the numbers that they have in the whole. All analyses and the planner take
a slice's program as they take any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rhino_jax.ir.program import Input, Op, Output, Program, Region
from rhino_jax.ir.verifier import verify


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a program.

    Attributes:
      program: the part. Inputs and outputs that the whole has keep their tree paths;
        others are named `cut[17]`, after the value in the whole.
      ops: op id → its id in the whole.
      values: value id → its id in the whole.
    """

    program: Program
    ops: tuple[int, ...]
    values: tuple[int, ...]

    def ops_of_whole(self) -> tuple[Op, ...]:
        """The ops with the numbers that they have in the whole."""
        ops, values = dict(enumerate(self.ops)), dict(enumerate(self.values))
        return tuple(_renumbered(op, ops, values) for op in self.program.ops)


def slice_of(program: Program, ops: Iterable[int]) -> Slice:
    """The slice of these ops.

    Args:
      program: the whole.
      ops: ids of ops of its body, in any order; regions come with their op.
    Raises:
      ValueError: an op is not of the body; or another would have to run in between,
        which reads what some of these make, and makes what others of them read.
    """
    asked = set(ops)
    wrong = sorted(asked - set(program.body.ops))
    if wrong:
        raise ValueError(f"slice of {program.name}: not ops of its body: {wrong[:5]}")
    _check_nothing_between(program, asked)
    chosen = [program.ops[i] for i in program.body.ops if i in asked]
    others = [program.ops[i] for i in program.body.ops if i not in asked]
    inside = [op for top in chosen for op in _with_regions(program, top)]
    inputs = _inputs(program, chosen, others)
    outputs = _outputs(program, chosen, others, [e.value for e in inputs])
    values = {v: i for i, v in enumerate(sorted({v for op in inside for v in _of(op)}))}
    numbers = {op.id: i for i, op in enumerate(inside)}
    part = Program(
        name=program.name,
        values=tuple(replace(program.values[v], id=i) for v, i in values.items()),
        ops=tuple(_renumbered(op, numbers, values) for op in inside),
        inputs=tuple(replace(e, value=values[e.value]) for e in inputs),
        outputs=tuple(replace(e, value=values[e.value]) for e in outputs),
        body=Region(
            inputs=tuple(values[e.value] for e in inputs),
            ops=tuple(numbers[op.id] for op in chosen),
            outputs=tuple(values[e.value] for e in outputs),
        ),
        transforms=program.transforms,
    )
    verify(part)
    return Slice(part, tuple(numbers), tuple(values))


def slice_between(program: Program, start: int, stop: int) -> Slice:
    """The slice of the ops at these positions of the body, `stop` excluded."""
    return slice_of(program, program.body.ops[start:stop])


def _check_nothing_between(program: Program, asked: set[int]) -> None:
    made: set[int] = set()  # by the slice
    through: dict[int, Op] = {}  # value that needs these → the other op that makes it
    for op_id in program.body.ops:
        op = program.ops[op_id]
        between = next((through[v] for v in op.operands if v in through), None)
        if op_id not in asked:
            if between is not None or not made.isdisjoint(op.operands):
                through.update(dict.fromkeys(op.results, op))
            continue
        if between is not None:
            raise ValueError(
                f"slice of {program.name}: {between.name} #{between.id}"
                f" ({between.source}) is not in it, but needs what it makes, and"
                f" {op.name} #{op.id} ({op.source}), which is in it, needs that."
            )
        made.update(op.results)


def _inputs(
    program: Program, chosen: Sequence[Op], others: Sequence[Op]
) -> list[Input]:
    """What the slice reads and does not make: the whole's inputs, then cut values.

    Donated is what no other op reads and the whole does not return.
    """
    made = {v for op in chosen for v in op.results}
    kept = {v for op in others for v in op.operands}
    kept |= {e.value for e in program.outputs}
    read = {v for op in chosen for v in op.operands} - made
    found = [
        replace(e, is_donated=e.is_donated and e.value not in kept)
        for e in program.inputs
        if e.value in read
    ]
    own = {e.value for e in program.inputs}
    return found + [
        Input(v, cut_path(v), is_donated=v not in kept)
        for v in sorted(read - own)
        if not program.values[v].is_literal
    ]


def _outputs(
    program: Program,
    chosen: Sequence[Op],
    others: Sequence[Op],
    inputs: Sequence[int],
) -> list[Output]:
    """What the slice makes and the whole returns, then what other ops read."""
    made = {v for op in chosen for v in op.results}
    found = []
    for e in program.outputs:
        if e.value in made:
            old = None if e.state_of is None else program.inputs[e.state_of].value
            is_here = old is not None and old in inputs
            state_of = inputs.index(old) if is_here and old is not None else None
            found.append(replace(e, state_of=state_of))
    read = {v for op in others for v in op.operands}
    cut = (made & read) - {e.value for e in found}
    return found + [Output(v, cut_path(v)) for v in sorted(cut)]


def cut_path(value: int) -> str:
    """The tree path of a value of the whole, where it enters or leaves a slice."""
    return f"cut[{value}]"


def _with_regions(program: Program, op: Op) -> Iterator[Op]:
    """An op, and all inside of it, as they are met."""
    yield op
    for region in () if op.call is None else op.call.regions:
        for inner in region.ops:
            yield from _with_regions(program, program.ops[inner])


def _of(op: Op) -> Iterator[int]:
    """The values that an op and its regions name."""
    yield from (*op.operands, *op.results)
    for region in () if op.call is None else op.call.regions:
        yield from (*region.inputs, *region.outputs)


def _renumbered(op: Op, ops: Mapping[int, int], values: Mapping[int, int]) -> Op:
    call = op.call
    if call is not None:
        regions = tuple(
            Region(
                inputs=tuple(values[v] for v in region.inputs),
                ops=tuple(ops[i] for i in region.ops),
                outputs=tuple(values[v] for v in region.outputs),
            )
            for region in call.regions
        )
        call = replace(call, regions=regions)
    return replace(
        op,
        id=ops[op.id],
        operands=tuple(values[v] for v in op.operands),
        results=tuple(values[v] for v in op.results),
        call=call,
    )
