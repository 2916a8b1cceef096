"""Facts on the values of a program: which are constant, and which are the steps of
softmax(scale * q . k + masks) . v, from the scores to the probabilities.

A fact follows from the op and the facts of its operands, whatever it is called: scores
are any product of two operands over one dim, their rows the dim over which maxima and
sums are taken and a second product is summed. An op that is no step of attention ends
the chain: dropout, a learned temperature, sinks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rhino_jax._compat import is_literal
from rhino_jax.attention.masks import LOW, Bounds, evaluated, exactly
from rhino_jax.frontend.known_values import IDENTITIES


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """A value that no input changes.

    Attributes:
      bounds: returns its bounds; None if they are not known.
    """

    bounds: Callable[[], Bounds | None]

    @property
    def array(self) -> np.ndarray | None:
        """The value, with size 1 in dims along which it does not change; None if it is
        not known."""
        found = self.bounds()
        return found.low if found is not None and found.is_exact else None

    @classmethod
    def of(cls, eqn: Any, operands: Sequence[Constant]) -> Constant:
        """Return the result of an equation, which is computed when it is asked for."""

        @functools.cache
        def bounds() -> Bounds | None:
            with jax.ensure_compile_time_eval():
                return evaluated(eqn, [operand.bounds() for operand in operands])

        return cls(bounds)


@dataclass(frozen=True, slots=True, eq=False)
class Repeated:
    """A value that is another, repeated along new dims.

    Attributes:
      value: the other.
      dims: for each of its dims the dim that it is.
    """

    value: TracedValue
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TracedValue:
    """A value of a program that is looked at, or run.

    Attributes:
      aval: its type.
      array: the array, if the program runs.
      fact: `Constant`, `Repeated` or `Scores`; None: unknown.
    """

    aval: Any
    array: Any = None
    fact: Any = None


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """A product of two operands over one dim of each.

    Attributes:
      operands: left and right.
      dims: of each operand, the id of every dim; `DEPTH`: the one that is summed.
      batch: ids of the batch dims.
    """

    operands: tuple[TracedValue, TracedValue]
    dims: tuple[tuple[int, ...], ...]
    batch: frozenset[int]


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A term of scores.

    Attributes:
      value: True where scores are replaced by `fill`; without it, what is added.
      dims: the ids of its dims.
      fill: see `value`.
      keeps: whether `value` is True where scores are kept instead.
    """

    value: TracedValue
    dims: tuple[int | None, ...]
    fill: float | None = None
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of a softmax, or what is computed of them.

    Attributes:
      product: of queries and keys.
      dims: the ids of the value's dims; None: it does not change along it.
      stage: what has been computed, as "exponentials".
      row: id of the dim that is reduced; None before.
      scale: factor of the product.
      masks: terms, in their order.
    """

    product: Product
    dims: tuple[int | None, ...]
    stage: str = "scores"
    row: int | None = None
    scale: float = 1.0
    masks: tuple[Mask, ...] = ()

    @property
    def is_done(self) -> bool:
        """Whether these are the probabilities."""
        return self.stage == "probabilities"

    def is_of(self, other: Scores) -> bool:
        """Whether another value is computed of the same scores, over the same rows."""
        return (
            self.product is other.product
            and (self.scale, self.masks) == (other.scale, other.masks)
            and self.row in (None, other.row)
        )


DEPTH = -1
"""Id of the dim over which the first product sums, and of the features of values."""


def fact_of(eqn: Any, operands: Sequence[TracedValue]) -> Any:
    """Return the fact of the only result of an equation.

    Args:
      eqn: the equation.
      operands: of it.
    """
    facts = [v.fact for v in operands]
    if all(isinstance(f, Constant) for f in facts):
        return Constant.of(eqn, facts)
    name, aval = eqn.primitive.name, eqn.outvars[0].aval
    if name == "dot_general":
        return _product(eqn, operands) if _is_product(eqn) else None
    found = [f for f in facts if isinstance(f, Scores)]
    if not found:
        is_repeated = name == "broadcast_in_dim"
        dims = eqn.params["broadcast_dimensions"] if is_repeated else ()
        return Repeated(operands[0], dims) if is_repeated else None
    if name in IDENTITIES:
        # Gradients of scores do not stop; those of maxima add up to zero.
        is_stopped = name == "stop_gradient" and found[0].stage != "maxima"
        is_float = jnp.issubdtype(aval.dtype, np.floating)
        return found[0] if is_float and not is_stopped else None
    dims = _moved(eqn, found[0].dims, operands[0].aval.shape, aval.shape)
    if dims is not None:
        return replace(found[0], dims=dims)
    if name in ("reduce_max", "reduce_sum"):
        return _reduced(found[0], name, eqn.params["axes"])
    if name == "exp" and found[0].stage == "differences":
        return replace(found[0], stage="exponentials")
    if len(found) == len(facts) == 2:
        return _pair(name, *found)
    return _with_other(name, operands, found[0])


def _is_product(eqn: Any) -> bool:
    """Whether an equation is a product over one dim, in the default precision."""
    (summed, _), _ = eqn.params["dimension_numbers"]
    is_default = eqn.params["precision"] is None
    wide = any(v.aval.dtype.itemsize > 2 for v in eqn.invars)
    return len(summed) == 1 and (is_default or not wide)


def _product(eqn: Any, operands: Sequence[TracedValue]) -> Scores:
    (summed, batch) = eqn.params["dimension_numbers"]
    shape = eqn.outvars[0].aval.shape
    ids, dims = iter(range(len(shape))), list[tuple[int, ...]]()
    batch_ids = [next(ids) for _ in batch[0]]
    for operand, over, of in zip(operands, summed, batch, strict=True):
        named = dict(zip((*over, *of), (DEPTH, *batch_ids), strict=True))
        every = range(len(operand.aval.shape))
        dims.append(tuple(named[d] if d in named else next(ids) for d in every))
    left, right = operands
    product = Product((left, right), tuple(dims), frozenset(batch_ids))
    return Scores(product, tuple(d if n > 1 else None for d, n in enumerate(shape)))


def _moved(
    eqn: Any,
    dims: tuple[int | None, ...],
    before: Sequence[int],
    after: Sequence[int],
) -> tuple[int | None, ...] | None:
    """Return the dims of a result that has the elements of its operand, in another
    order or repeated; None for other ops.

    Args:
      eqn: the equation.
      dims: ids of the operand's dims.
      before, after: shapes of the operand and of the result.
    """
    match eqn.primitive.name:
        case "transpose":
            return tuple(dims[d] for d in eqn.params["permutation"])
        case "broadcast_in_dim":
            found: list[int | None] = [None] * len(after)
            for dim, to in zip(dims, eqn.params["broadcast_dimensions"], strict=True):
                found[to] = dim
            return tuple(found)
        case "reshape" | "squeeze" | "expand_dims":
            kept = [d for d, size in zip(dims, before, strict=True) if size > 1]
            if [n for n in before if n > 1] != [n for n in after if n > 1]:
                return None
            left = iter(kept)
            return tuple(next(left) if size > 1 else None for size in after)
    return None


def _reduced(of: Scores, name: str, axes: Sequence[int]) -> Scores | None:
    """Return the fact of maxima of scores, or of sums of exponentials, over rows."""
    stage = {"scores": "reduce_max", "exponentials": "reduce_sum"}.get(of.stage)
    if stage != name or len(axes) != 1 or of.dims[axes[0]] is None:
        return None
    row = of.dims[axes[0]]
    if of.row not in (None, row):
        return None
    dims = tuple(d for i, d in enumerate(of.dims) if i != axes[0])
    return replace(of, dims=dims, row=row, stage="maxima" if of.row is None else "sums")


def _pair(name: str, left: Scores, right: Scores) -> Scores | None:
    """Return the fact of a binary op of two values of one softmax."""
    steps = {
        ("sub", "scores", "maxima"): "differences",
        ("div", "exponentials", "sums"): "probabilities",
    }
    stage = steps.get((name, left.stage, right.stage))
    rows = all(
        a == b or (b is None and a == right.row)
        for a, b in zip(left.dims, right.dims, strict=True)
    )
    if stage is None or not left.is_of(right) or not rows:
        return None
    return replace(left, stage=stage, row=right.row)


def _with_other(
    name: str, operands: Sequence[TracedValue], of: Scores
) -> Scores | None:
    """Return the fact of an op of scores and of one value that is none."""
    at = next(i for i, v in enumerate(operands) if v.fact is of)
    if of.stage == "maxima" and name == "max":
        return of if _number(operands[1 - at]) == -math.inf else None
    if of.stage != "scores":
        return None
    if name in ("mul", "div"):
        factor = _number(operands[1 - at])
        is_scale = factor is not None and not of.masks and (name == "mul" or not at)
        if not is_scale or not factor:
            return None
        scale = of.scale * (factor if name == "mul" else 1 / factor)
        return replace(of, scale=scale)
    if name == "add":
        term = _mask(operands[1 - at], of)
    elif name == "select_n" and len(operands) == 3 and at:
        fill = _number(operands[3 - at])
        if fill is None or fill > LOW:
            return None
        term = _mask(operands[0], of, fill, keeps=at == 2)
    else:
        return None
    return replace(of, masks=(*of.masks, term))


def _mask(
    value: TracedValue, of: Scores, fill: float | None = None, *, keeps: bool = False
) -> Mask:
    if isinstance(value.fact, Repeated):
        dims = tuple(of.dims[d] for d in value.fact.dims)
        return Mask(value.fact.value, dims, fill, keeps)
    return Mask(value, of.dims if value.aval.shape else (), fill, keeps)


def _number(value: TracedValue) -> float | None:
    """Return the number that a constant is everywhere; None for others."""
    if not isinstance(value.fact, Constant):
        return None
    array = value.fact.array
    return float(array.min()) if array is not None and array.size == 1 else None


def literal_value(array: Any, atom: Any) -> TracedValue:
    """Return the value of a literal, or of a constant of a jaxpr."""
    is_known = is_literal(atom) or isinstance(array, np.ndarray)
    known = Constant(functools.partial(exactly, array)) if is_known else None
    return TracedValue(atom.aval, array, known)
