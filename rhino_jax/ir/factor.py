"""Factors: the named index ranges that an op's operands and results are made of.

The rule of an op is written like an einsum. `b s d, d f -> b s f` says that a matmul
has four factors, of which `d` appears in no result and is therefore summed away. A dim
in parentheses is a product of factors, major to minor, so a reshape is
`(b s) h -> b s h`. One mark may follow a factor's name:

    !   whole   must not be sharded (a sorted dim, an FFT dim)
    ~   halo    a window slides over it: neighbours exchange borders
    @   index   addressed by indices: each shard handles those that fall
                into it, and contributes zero (or leaves alone) for the others
    ^   merge   each shard sends a few of its own results to all others, which
                merge them (top-k, positions of maxima, running sums); of rules
                built in, as `runtime.ops_on_shards` does it

and `_` is a dim that has no factor (size one, or never worth a name).

Source: the notation follows einsum and Shardy's op sharding rules
(openxla.org/shardy/sharding_representation, "sharding rule").
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


class FactorKind(enum.Enum):
    """The effect that sharding a factor has on the op."""

    PARALLEL = ""
    REDUCE = "+"
    HALO = "~"
    INDEX = "@"
    MERGE = "^"
    WHOLE = "!"


@dataclass(frozen=True, slots=True)
class Factor:
    """One index range of an op.

    Attributes:
      name: a short name, unique within the rule.
      size: number of indices; of a HALO factor, those of the result.
      kind: the effect of sharding it.
      reducer: how the partial results of shards combine, where sharding this factor
        leaves a result partial: "sum", "max", "min", "prod", "and", "or". None where
        the result is complete.
      halo: for HALO, how many operand elements a shard needs from its lower and its
        upper neighbour.
      slides_over: for HALO, size of the operand's dim over which the window slides; its
        shards must be of one size as well. None where that is left to the compiler.
      sent_items: for MERGE, number of elements of each array that a shard sends, for
        one index of the other factors; no more than the shard has.
      sent_item_bytes: for MERGE, bytes per element of each array that is sent.
      is_received: for HALO, whether an earlier op reads the same elements of the same
        operand, so that they are sent once for both.
      shift: for HALO factors of ops that move elements (slices, pads, concatenations):
        element i of the result's dim is at position `stride` · i + `shift`, where
        element j of the operand's dim is at `dilation` · j; at others there is none.
        Both dims may have shards of unequal sizes. None for windows.
      stride, dilation: steps of the result's and of the operand's elements; see
        `shift`.
    """

    name: str
    size: int
    kind: FactorKind = FactorKind.PARALLEL
    reducer: str | None = None
    halo: tuple[int, int] = (0, 0)
    slides_over: int | None = None
    is_received: bool = False
    sent_items: int = 0
    sent_item_bytes: tuple[int, ...] = ()
    shift: int | None = None
    stride: int = 1
    dilation: int = 1

    @property
    def is_cuttable(self) -> bool:
        return self.kind is not FactorKind.WHOLE and self.size > 1

    def moved_range(self, first: int, count: int) -> tuple[int, int]:
        """Return the range [begin, end) of the operand's elements that are among some
        consecutive elements of the result.

        Args:
          first: the first of them.
          count: number of them, at least one.
        """
        assert self.shift is not None and self.slides_over is not None
        last = (first + count - 1) * self.stride + self.shift
        begin = -(-(first * self.stride + self.shift) // self.dilation)
        limits = 0, self.slides_over
        return (
            min(max(begin, limits[0]), limits[1]),
            min(max(last // self.dilation + 1, limits[0]), limits[1]),
        )

    def border(self, pieces: int) -> tuple[int, int]:
        """Return how many elements of the operand a shard needs from its lower and its
        upper neighbour.

        The shards of dims of n and n - 2 elements begin at different positions: the
        elements between these are part of the border.

        Args:
          pieces: number of devices that shard the HALO factor.
        """
        if self.shift is None or self.slides_over is None:
            return self.halo
        made, held = -(-self.size // pieces), -(-self.slides_over // pieces)
        lower = upper = 0
        for shard in range(pieces):
            count = min(made, self.size - shard * made)
            if count <= 0:
                continue
            start, stop = self.moved_range(shard * made, count)
            if start < stop:
                lower = max(lower, shard * held - start)
                upper = max(upper, stop - (shard + 1) * held)
        return lower, upper


Dim = tuple[int, ...]
"""The factors (positions in the rule) whose product is one dim."""

Layout = tuple[Dim, ...]
"""The dims of one operand or result."""


def dim_of(layout: Layout, factor: int) -> int | None:
    """Return the dim of a layout that is exactly a factor.

    It is -1 where no dim has the factor, None where it is a part of a dim, or in
    several.
    """
    found = [d for d, dim in enumerate(layout) if factor in dim]
    if not found:
        return -1
    return found[0] if len(found) == 1 and len(layout[found[0]]) == 1 else None


@dataclass(frozen=True, slots=True)
class Rule:
    """The factors of an op, and the dims that each appears in.

    Attributes:
      factors: all factors.
      operands: [operands][dims][factors], positions of the factors of each dim, major
        first.
      results: [results][dims][factors], likewise.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]

    def __str__(self) -> str:
        operands = ", ".join(self._layout_str(x) for x in self.operands)
        results = ", ".join(self._layout_str(x) for x in self.results)
        return f"{operands} -> {results}"

    def _layout_str(self, layout: Layout) -> str:
        if not layout:
            return "·"
        return " ".join(self._dim_str(dim) for dim in layout)

    def _dim_str(self, dim: Dim) -> str:
        if not dim:
            return "_"
        names = [self._factor_str(f) for f in dim]
        return names[0] if len(names) == 1 else "(" + " ".join(names) + ")"

    def _factor_str(self, index: int) -> str:
        factor = self.factors[index]
        mark = factor.kind.value if factor.kind is not FactorKind.REDUCE else ""
        return factor.name + mark

    def partial_results(self, factor: int) -> tuple[int, ...]:
        """Return the positions of the results that are partial when `factor` is
        sharded: those that do not contain it."""
        if self.factors[factor].reducer is None:
            return ()
        return tuple(
            i
            for i, layout in enumerate(self.results)
            if all(factor not in dim for dim in layout)
        )


_TOKEN = re.compile(r"\(([^()]*)\)|([A-Za-z][A-Za-z0-9]*[!~@]?)|(_)|(·)|(\S)")
_KINDS = {"!": FactorKind.WHOLE, "~": FactorKind.HALO, "@": FactorKind.INDEX}


def _parse_layout(text: str) -> list[list[str]]:
    dims: list[list[str]] = []
    for group, name, blank, scalar, junk in _TOKEN.findall(text):
        if junk:
            raise ValueError(f"unexpected {junk!r} in {text.strip()!r}")
        if scalar:
            continue
        dims.append([] if blank else group.split() if group else [name])
    return dims


def _split_sides(text: str) -> tuple[list[list[list[str]]], list[list[list[str]]]]:
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ValueError("the rule has no '->'")
    sides = [
        [_parse_layout(part) for part in side.split(",")] if side.strip() else []
        for side in (left, right)
    ]
    return sides[0], sides[1]


def check_text(text: str) -> None:
    """Refuse the text of a rule that fits no op.

    Raises:
      ValueError: the text cannot be parsed; the message says where.
    """
    _split_sides(text)


def parse_rule(
    text: str,
    in_shapes: Sequence[Sequence[int]],
    out_shapes: Sequence[Sequence[int]],
    *,
    sizes: Mapping[str, int] | None = None,
    reducers: Mapping[str, str] | None = None,
    halos: Mapping[str, tuple[int, int]] | None = None,
) -> Rule:
    """Build a rule from its text and the shapes of one op.

    Args:
      text: for example `"b s d, d f -> b s f"`; a scalar is written `·`.
      in_shapes: shapes of the operands.
      out_shapes: shapes of the results.
      sizes: factor name → size, for factors whose size no dim determines.
      reducers: factor name → how its partial results combine, for factors that no
        result contains and for INDEX factors (default "sum" where a factor appears in
        no result).
      halos: factor name → elements needed from the lower and the upper neighbour, for
        factors marked `~`.

    Returns:
      The rule, its factors in order of first appearance.

    Raises:
      ValueError: the text does not fit the shapes; the message names the dim and why.
    """
    operands, results = _split_sides(text)
    _check_ranks(text, "operands", operands, in_shapes)
    _check_ranks(text, "results", results, out_shapes)
    kinds: dict[str, FactorKind] = {}  # in order of first appearance

    def clean(token: str) -> str:
        name = token.rstrip("!~@")
        kind = _KINDS.get(token[-1], FactorKind.PARALLEL)
        if name not in kinds or kind is not FactorKind.PARALLEL:
            kinds[name] = kind
        return name

    ins = [[[clean(t) for t in dim] for dim in layout] for layout in operands]
    outs = [[[clean(t) for t in dim] for dim in layout] for layout in results]
    # Results first: the size of a HALO factor is the result's.
    dims = [*_dims(outs, out_shapes), *_dims(ins, in_shapes)]
    found = dict(sizes or {})
    for dim, size in dims:
        if len(dim) == 1:
            found.setdefault(dim[0], size)
    for dim, size in dims:
        _solve_product(text, dim, size, found, kinds)
    in_result = {name for layout in outs for dim in layout for name in dim}
    slides_over = {
        dim[0]: size
        for dim, size in reversed([*_dims(ins, in_shapes)])
        if len(dim) == 1 and kinds[dim[0]] is FactorKind.HALO
    }
    factors = tuple(
        _factor(
            name, found[name], kinds[name], name in in_result,
            (reducers or {}).get(name), (halos or {}).get(name, (0, 0)),
            slides_over.get(name),
        )
        for name in kinds
    )  # fmt: skip
    position = {name: i for i, name in enumerate(kinds)}
    return Rule(
        factors,
        tuple(tuple(tuple(position[n] for n in d) for d in lay) for lay in ins),
        tuple(tuple(tuple(position[n] for n in d) for d in lay) for lay in outs),
    )


def _factor(
    name: str,
    size: int,
    kind: FactorKind,
    is_in_result: bool,
    reducer: str | None,
    halo: tuple[int, int],
    slides_over: int | None,
) -> Factor:
    if not is_in_result and kind in (FactorKind.PARALLEL, FactorKind.INDEX):
        reducer = reducer or "sum"
        if kind is FactorKind.PARALLEL:
            kind = FactorKind.REDUCE
    return Factor(name, size, kind, reducer, halo, slides_over)


def _check_ranks(
    text: str,
    side: str,
    layouts: Sequence[Sequence[Sequence[str]]],
    shapes: Sequence[Sequence[int]],
) -> None:
    if len(layouts) != len(shapes):
        raise ValueError(
            f"rule {text!r} has {len(layouts)} {side}, the op has {len(shapes)}"
        )
    for layout, shape in zip(layouts, shapes, strict=True):
        if len(layout) != len(shape):
            raise ValueError(
                f"rule {text!r} gives {len(layout)} dims to a value of shape"
                f" {tuple(shape)}"
            )


def _dims(
    layouts: Sequence[Sequence[Sequence[str]]], shapes: Sequence[Sequence[int]]
) -> Iterator[tuple[Sequence[str], int]]:
    """Yield the factor names and the size of every dim."""
    for layout, shape in zip(layouts, shapes, strict=True):
        for dim, size in zip(layout, shape, strict=True):
            yield dim, int(size)


def _solve_product(
    text: str,
    dim: Sequence[str],
    size: int,
    found: dict[str, int],
    kinds: Mapping[str, FactorKind],
) -> None:
    """Check a dim's size against its factors' sizes, and infer at most one missing
    size."""
    if not dim:
        return
    missing = [name for name in dim if name not in found]
    known = math.prod(found[name] for name in dim if name in found)
    if len(missing) > 1:
        raise ValueError(f"rule {text!r}: sizes of {missing} cannot be told apart")
    if missing:
        if known == 0 or size % known:
            raise ValueError(f"rule {text!r}: {size} is no multiple of {known}")
        found[missing[0]] = size // known
    elif known != size and not any(
        kinds[n] in (FactorKind.HALO, FactorKind.WHOLE) for n in dim
    ):
        raise ValueError(
            f"rule {text!r}: dim ({' '.join(dim)}) has size {size},"
            f" its factors give {known}"
        )
