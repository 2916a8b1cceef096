"""Constraints on the values that a user's expressions produce and read."""

from __future__ import annotations

import ast
import itertools
import linecache
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rhino_jax.export.chains import Chain, Finder
from rhino_jax.export.places import (
    ExpressionPlace,
    Span,
    cotangents_of,
    made_inside,
    places_of,
)
from rhino_jax.frontend.trace import Traced
from rhino_jax.plan.decisions import Decisions


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
