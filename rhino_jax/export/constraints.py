"""Constraints on the values that a user's expressions produce and read.

A chain has the layouts that a plan gives the value of an expression, one after the
other, and those of its cotangent.
"""

from __future__ import annotations

import ast
import itertools
import linecache
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rhino_jax.export.places import (
    ExpressionPlace,
    Read,
    Span,
    cotangents_of,
    is_transposed,
    made_inside,
    places_of,
)
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec
from rhino_jax.ir.traits import OpKind
from rhino_jax.plan.decisions import Decisions
from rhino_jax.runtime.constraints import stops


Chain = tuple[Spec, ...]
"""Layouts that a value passes through, one collective each; the last one is final."""


@dataclass(frozen=True, slots=True)
class Finder:
    """Lookup of layouts in a plan's decisions.

    Attributes:
      program: the program.
      decisions: decisions on its values.
      sizes: sizes of the mesh axes.
      inside: result of a call → the value inside of the call that it is.
      readers: value → its reads.
    """

    program: Program
    decisions: Decisions
    sizes: tuple[int, ...]
    inside: Mapping[int, int]
    readers: Mapping[int, Sequence[Read]]

    def shape(self, value: int) -> tuple[int, ...]:
        return self.program.values[value].shape

    def spec(self, value: int) -> Spec | None:
        """Return the layout of a value; None for scalars, and without a decision."""
        found = self.decisions.values.get(value)
        while found is None and value in self.inside:
            value = self.inside[value]
            found = self.decisions.values.get(value)
        rank = self.program.values[value].rank
        return found if found is not None and len(found) == rank > 0 else None

    def made(self, value: int) -> Chain:
        """Return the layouts up to a value's final one; empty if `spec` is None."""
        held = self.spec(value)
        if held is None:
            return ()
        return (*self.decisions.waypoints.get(value, ()), held)

    def read(self, read: Read) -> Chain:
        """Return the layouts from a value's own to a reader's; empty if equal."""
        value, op, position = read
        held = self.spec(value)
        if held is None:
            return ()
        on_the_way = self.decisions.through.get((op, position), ())
        places = [*on_the_way, self.decisions.operands.get((op, position), held)]
        chain: list[Spec] = []
        for place in places:
            before = chain[-1] if chain else held
            if len(place) != len(before):
                return ()
            if place != before:
                chain += stops(before, place, self.sizes, self.decisions.lowering)
        return tuple(chain) or self._read_turned(op)

    def _read_turned(self, op: int) -> Chain:
        """Return how the result of a transpose is read, in dims of its operand.

        Empty for other ops, and for results with several readers.
        """
        at = self.program.ops[op]
        if at.traits.kind is not OpKind.MOVEMENT or at.rule is None:
            return ()
        before, after = at.rule.operands[0], at.rule.results[0]
        readers = self.readers.get(at.results[0], ())
        if len(readers) != 1 or sorted(before) != sorted(after):
            return ()
        order = [after.index(dim) for dim in before]
        return tuple(tuple(spec[i] for i in order) for spec in self.read(readers[0]))

    def is_read_otherwise(self, value: int) -> bool:
        """Whether any op reads a value in another layout than its own."""
        held = self.spec(value)
        return held is not None and any(
            self.decisions.operands.get((op, i), held) != held
            for _, op, i in self.readers.get(value, ())
        )

    def is_gathered(self, read: Read) -> bool:
        """Whether an op gathers rows of a value."""
        _, op, position = read
        return self.program.ops[op].traits.kind is OpKind.LOOKUP and position == 0

    def is_recomputed(self, place: ExpressionPlace) -> bool:
        """Whether the backward pass rematerializes an expression.

        It does so if it reads inner values (of a gather the indices) in other layouts
        than the forward pass stores.
        """
        if not place.is_cheap or not place.cotangents:
            return False
        return any(
            self.is_read_otherwise(v)
            and any(is_transposed(self.program.ops[op]) for _, op, _ in reads)
            for v in place.inner
            if (reads := self.readers.get(v))
        )

    def held(self, place: ExpressionPlace) -> Iterator[tuple[int, Chain]]:
        """Yield a value of an expression with its layouts, for each run of it.

        Yields nothing for loops, and for runs whose several arrays have different
        layouts.
        """
        if place.is_loop:
            return
        for made in place.values:
            chains = {self.made(v) for v in made}
            if len(chains) == 1 and (chain := chains.pop()):
                yield made[0], chain

    def is_said(
        self,
        place: ExpressionPlace,
        held: Sequence[tuple[int, Chain]],
        back: Chain | None,
    ) -> bool:
        """Whether an expression needs a constraint.

        It does if its layout does not follow from its operands, or differs from that of
        its readers or cotangent.

        Args:
          place: the expression.
          held: its values with their layouts, see `held`.
          back: layouts of its cotangent, see `cotangent`.
        """
        if not place.is_elementwise or place.is_contracted:
            return True
        if back is not None and any(back != chain[::-1] for _, chain in held):
            return True
        if any(self.is_read_otherwise(v) for made in place.values for v in made):
            return True
        read = {self.spec(v) for reads in place.read for v, _, _ in reads}
        return any(chain[-1] not in read for _, chain in held)

    def cotangent(
        self, place: ExpressionPlace, shapes: set[tuple[int, ...]]
    ) -> Chain | None:
        """Return the layouts of the cotangent of an expression's value.

        The layout of the reads is included if all are equal.

        Returns:
          None if there is no cotangent; empty if its layout is not unique.
        """
        found = {
            self._passed(reads, v in place.passed_on)
            for v, reads in place.cotangents.items()
            if self.shape(v) in shapes
        }
        if not found:
            return None
        return found.pop() if len(found) == 1 else ()

    def _passed(self, reads: Sequence[Read], is_known: bool) -> Chain:
        made = () if is_known else self.made(reads[0][0])
        read = {self.read(r) for r in reads}
        if len(read) > 1:
            return made
        return made if is_known else (*made, *read.pop())

    def given(
        self, place: ExpressionPlace, shapes: set[tuple[int, ...]]
    ) -> Chain | None:
        """Return the layouts of the cotangents of an expression's operands.

        Args:
          place: the expression.
          shapes: shapes of the operands in question.

        Returns:
          None if there are no cotangents; empty if their layout is not unique.
        """
        if not place.given:
            return None
        made = {self.made(v) for v in place.given if self.shape(v) in shapes}
        return made.pop() if len(made) == 1 else ()


@dataclass(frozen=True, slots=True)
class Constraint:
    """A layout for the value of an expression.

    Attributes:
      file, span: the expression; columns count bytes, as in `ast`.
      text: the expression, on one line.
      value: the value's id; of several the first.
      forward: layouts of the value; empty if the expression already has them.
      backward: layouts of its cotangent; None if they follow (JAX gives a cotangent the
        layout of its value), empty if they are left to the compiler.
      shape: its shape.
      is_recomputed: whether the backward pass rematerializes the expression: it reads
        inner values in other layouts than the stored ones, which no other annotation
        can express.
      others: number of other layouts, if the expression runs several times with
        different ones; such a value is left to the compiler.
    """

    file: str
    span: Span
    text: str
    value: int
    forward: Chain
    backward: Chain | None
    shape: tuple[int, ...]
    is_recomputed: bool = False
    others: int = 0

    @property
    def line(self) -> int:
        return self.span[0]


def constraints_of(
    traced: Traced, decisions: Decisions, sizes: Sequence[int]
) -> list[Constraint]:
    """Return constraints that express a plan's decisions at the user's expressions.

    Matmuls, gathers, reductions and all ops that are more than elementwise get the
    layouts of their results and operands. Elementwise expressions get that of the
    result only, and only where it or its cotangent differs from the operands. Operands
    are constrained where they are read in another layout than their own.

    Args:
      traced: the function, after the plan's program passes.
      decisions: decisions of the plan.
      sizes: sizes of the mesh axes.
    """
    program = traced.program
    cotangents = cotangents_of(program)
    finder = Finder(
        program, decisions, tuple(sizes), made_inside(program), cotangents.readers
    )
    found = [
        c
        for place in places_of(traced.closed_jaxpr, program, cotangents)
        for c in _at(place, finder)
    ]
    unique = {(c.file, c.span): c for c in reversed(found)}
    return sorted(unique.values(), key=lambda c: (c.file, c.span))


def _at(place: ExpressionPlace, finder: Finder) -> Iterator[Constraint]:
    node = node_at(place.file, place.span)
    if node is None:
        return
    held = list(finder.held(place))
    back = finder.cotangent(place, {finder.shape(v) for v, _ in held})
    cut = [*(c[-1] for _, c in held), *(back or ())]
    is_new = any(place.read) or any(any(spec) for spec in cut)
    if held and is_new and finder.is_said(place, held, back):
        for c in _constraint(place, node, finder, held, back):
            yield replace(c, is_recomputed=finder.is_recomputed(place))
    for arg, read, given in _arguments(place, node, finder):
        yield from _constraint(place, arg, finder, read, given)


def _arguments(
    place: ExpressionPlace, node: ast.expr, finder: Finder
) -> Iterator[tuple[ast.expr, list[tuple[int, Chain]], Chain | None]]:
    """Yield operands read in another layout than their own, or with other cotangents.

    Yields:
      (expression of the operand, (value, layouts of the read) pairs, layouts of the
      cotangent).
    """
    args = _operands(node)
    found: dict[int, list[tuple[int, Chain]]] = {}
    for reads in place.read:
        known = [r for r in reads if not is_gather(node) or finder.is_gathered(r)]
        order = _matched(node, [v for v, _, _ in known], len(args), finder)
        for read in known:
            if read[0] in order:
                chain = finder.read(read)
                found.setdefault(order.index(read[0]), []).append((read[0], chain))
    for index, read_as in found.items():
        shapes = {finder.shape(v) for v, _ in read_as}
        given = finder.given(place, shapes)
        held = {finder.spec(v) for v, _ in read_as}
        has_moved = any(chain for _, chain in read_as)
        # Compilers give the result of a gather's transpose the layout of its indices.
        if has_moved or (given and (held != {given[0]} or is_gather(node))):
            yield args[index], read_as, given


def _matched(
    node: ast.expr, read: Iterable[int], count: int, finder: Finder
) -> list[int]:
    """Return the value of each operand of an expression; empty if that is not known."""
    values = list(dict.fromkeys(read))
    if len(values) != count:
        return []
    dims = _einsum_dims(node)
    if dims is None or len(dims) != count:
        return values
    fits = [
        order
        for order in itertools.permutations(values)
        if _is_consistent(dims, [finder.shape(v) for v in order])
    ]
    return list(fits[0]) if len(fits) == 1 else []


def _constraint(
    place: ExpressionPlace,
    node: ast.expr,
    finder: Finder,
    held: Sequence[tuple[int, Chain]],
    back: Chain | None,
) -> Iterator[Constraint]:
    counts = Counter(chain for _, chain in held)
    (chain, _), *rest = counts.most_common()
    value = next(v for v, c in held if c == chain)
    assert node.end_lineno is not None and node.end_col_offset is not None
    span = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
    text = " ".join(ast.unparse(node).split())
    if back == chain[::-1]:
        back = None
    shape = finder.shape(value)
    yield Constraint(
        place.file, span, text, value, chain, back, shape, others=len(rest)
    )


def node_at(file: str, span: Span) -> ast.expr | None:
    """Return the expression of a source file at a span; None if there is none."""
    return _nodes(file, "".join(linecache.getlines(file))).get(span)


def written_around(file: str, span: Span) -> ast.expr | None:
    """Return the sharding of the user's own constraint around an expression.

    The call is one of `with_sharding_constraint` or `reshard`. None if there is no such
    call.
    """
    wanted = node_at(file, span)
    for node in _nodes(file, "".join(linecache.getlines(file))).values():
        if not isinstance(node, ast.Call) or len(node.args) < 2:
            continue
        name = ast.unparse(node.func).rpartition(".")[2]
        if node.args[0] is wanted and name in ("with_sharding_constraint", "reshard"):
            return node.args[1]
    return None


_known: dict[str, tuple[str, dict[Span, ast.expr]]] = {}


def _nodes(file: str, source: str) -> dict[Span, ast.expr]:
    before = _known.get(file)
    if before is not None and before[0] == source:
        return before[1]
    try:
        tree: ast.AST = ast.parse(source)
    except SyntaxError:  # a notebook cell with magics
        tree = ast.Module([], [])
    found: dict[Span, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and not isinstance(node, ast.Starred):
            end = node.end_lineno or 0, node.end_col_offset or 0
            found.setdefault((node.lineno, node.col_offset, *end), node)
    _known[file] = source, found
    return found


def is_gather(node: ast.expr) -> bool:
    """Whether an expression is a subscript, as `table[rows]`."""
    return isinstance(node, ast.Subscript)


def _operands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.Subscript):
        return [node.value]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.Call) and _einsum_dims(node) is not None:
        return [a for a in node.args[1:] if not isinstance(a, ast.Starred)]
    return []


def _einsum_dims(node: ast.expr) -> list[str] | None:
    """Return the dims of einsum operands, as ["bsd", "df"]; None for other calls."""
    if not isinstance(node, ast.Call) or not node.args:
        return None
    first = node.args[0]
    if not isinstance(first, ast.Constant) or not isinstance(first.value, str):
        return None
    return first.value.replace(" ", "").partition("->")[0].split(",")


def _is_consistent(dims: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> bool:
    sizes: dict[str, int] = {}
    for letters, shape in zip(dims, shapes, strict=True):
        if len(letters) != len(shape):
            return False
        for letter, size in zip(letters, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                return False
    return True
