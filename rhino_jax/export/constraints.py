"""What a plan says of the values that a user's expressions make and read."""

from __future__ import annotations

import ast
import itertools
import linecache
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rhino_jax.export.places import Place, Span, made_inside, places_of
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.ir.spec import Spec
from rhino_jax.plan.decisions import Decisions


@dataclass(frozen=True, slots=True)
class Constraint:
    """A layout for the value of an expression.

    Attributes:
      file, span: the expression; columns count bytes, as of `ast`.
      text: the expression, on one line.
      value: the value's id; of several the first.
      spec: its layout.
      shape: its shape.
      others: in how many other layouts it is, where it is met more than once; such a
        value is left to the compiler.
    """

    file: str
    span: Span
    text: str
    value: int
    spec: Spec
    shape: tuple[int, ...]
    others: int = 0

    @property
    def line(self) -> int:
        return self.span[0]


def constraints_of(traced: Traced, decisions: Decisions) -> list[Constraint]:
    """Constraints that say at the user's expressions what a plan decided.

    Matmuls, gathers, reductions and all that is more than elementwise are told how they
    are held; what is elementwise, only where it is laid out otherwise than what it
    reads. Operands are told how they are read where that is not how they are held.

    Args:
      traced: the function, with the passes done that the plan chose.
      decisions: of the plan.
    """
    finder = _Finder(traced.program, decisions, made_inside(traced.program))
    found = [
        c
        for place in places_of(traced.closed_jaxpr, traced.program)
        for c in finder.at(place)
    ]
    unique = {(c.file, c.span): c for c in reversed(found)}
    return sorted(unique.values(), key=lambda c: (c.file, c.span))


@dataclass(frozen=True, slots=True)
class _Finder:
    program: Program
    decisions: Decisions
    inside: dict[int, int]

    def at(self, place: Place) -> Iterator[Constraint]:
        node = node_at(place.file, place.span)
        if node is None:
            return
        held = list(self.held(place))
        is_new = any(place.read) or any(any(spec) for _, spec in held)
        if held and is_new and (not place.is_elementwise or self.changes(place, held)):
            yield from self.constraint(place, node, held)
        for arg, read in self.arguments(place, node):
            yield from self.constraint(place, arg, read)

    def held(self, place: Place) -> Iterator[tuple[int, Spec]]:
        """What an expression makes, and how that is held; nothing where it makes
        several arrays that are not held alike."""
        if place.is_loop:
            return
        for made in place.values:
            specs = {self.spec(v) for v in made}
            if len(specs) == 1 and (spec := specs.pop()) is not None:
                yield made[0], spec

    def spec(self, value: int) -> Spec | None:
        """How a value is held; None of scalars and where nothing is said."""
        found = self.decisions.values.get(value)
        while found is None and value in self.inside:
            value = self.inside[value]
            found = self.decisions.values.get(value)
        rank = self.program.values[value].rank
        return found if found is not None and len(found) == rank > 0 else None

    def changes(self, place: Place, held: Sequence[tuple[int, Spec]]) -> bool:
        read = {self.spec(v) for reads in place.read for v, _, _ in reads}
        return any(spec not in read for _, spec in held)

    def arguments(
        self, place: Place, node: ast.expr
    ) -> Iterator[tuple[ast.expr, list[tuple[int, Spec]]]]:
        """Operands of an expression that are read otherwise than they are held."""
        args = _operands(node)
        found: dict[int, list[tuple[int, Spec]]] = {}
        for reads in place.read:
            order = self.matched(node, [v for v, _, _ in reads], len(args))
            for value, op, position in reads:
                spec = self.decisions.operands.get((op, position))
                if spec and value in order and spec != self.spec(value):
                    found.setdefault(order.index(value), []).append((value, spec))
        for index, read in found.items():
            yield args[index], read

    def matched(self, node: ast.expr, read: Iterable[int], count: int) -> list[int]:
        """Which value each of the operands of an expression is; empty where that is
        not known."""
        values = list(dict.fromkeys(read))
        if len(values) != count:
            return []
        dims = _einsum_dims(node)
        if dims is None or len(dims) != count:
            return values
        fits = [
            order
            for order in itertools.permutations(values)
            if _is_consistent(dims, [self.program.values[v].shape for v in order])
        ]
        return list(fits[0]) if len(fits) == 1 else []

    def constraint(
        self, place: Place, node: ast.expr, held: Sequence[tuple[int, Spec]]
    ) -> Iterator[Constraint]:
        counts = Counter(spec for _, spec in held)
        (spec, _), *rest = counts.most_common()
        value = next(v for v, s in held if s == spec)
        assert node.end_lineno is not None and node.end_col_offset is not None
        span = node.lineno, node.col_offset, node.end_lineno, node.end_col_offset
        shape = self.program.values[value].shape
        text = " ".join(ast.unparse(node).split())
        yield Constraint(place.file, span, text, value, spec, shape, len(rest))


def node_at(file: str, span: Span) -> ast.expr | None:
    """The expression of a source file at a span; None where there is none."""
    return _nodes(file, "".join(linecache.getlines(file))).get(span)


def written_around(file: str, span: Span) -> ast.expr | None:
    """The sharding that the user wrote for the value of an expression, in a call of
    `with_sharding_constraint` or `reshard` around it; None where there is none."""
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
    except SyntaxError:  # a notebook's cell with magics
        tree = ast.Module([], [])
    found: dict[Span, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and not isinstance(node, ast.Starred):
            end = node.end_lineno or 0, node.end_col_offset or 0
            found.setdefault((node.lineno, node.col_offset, *end), node)
    _known[file] = source, found
    return found


def _operands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.Call) and _einsum_dims(node) is not None:
        return [a for a in node.args[1:] if not isinstance(a, ast.Starred)]
    return []


def _einsum_dims(node: ast.expr) -> list[str] | None:
    """As ["bsd", "df"] of `jnp.einsum("bsd,df->bsf", x, w)`."""
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
