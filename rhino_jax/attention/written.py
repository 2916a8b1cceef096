"""Attention that is written out: softmax(scale * q . k + masks) . v in a jaxpr, as a
call of a function of its operands that other forms compute as well."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from rhino_jax.attention.masks import LOW
from rhino_jax.attention.softmax import (
    DEPTH,
    Constant,
    Mask,
    Scores,
    TracedValue,
)
from rhino_jax.frontend.forms.attention import FORMS


MIN_LENGTH = 128
"""Fewest queries and keys of attention that is worth a kernel."""

AS_WRITTEN = "as written"

_Dims = Sequence[int | None]


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """A product of probabilities with values, which ends a written attention.

    Attributes:
      scores: of the probabilities.
      value: the values.
      value_dims: ids of their dims.
      out_dims: ids of the result's dims.
      out: type of the result.
      sizes: id of a dim → size.
      queries, heads, batch: ids of the dims of queries, the longest first; of heads,
        of which there is one or none; and of those before.
      is_masked: for each mask, whether it is causal, False where it keeps all, and None
        where another form has to read it.
    """

    scores: Scores
    value: TracedValue
    value_dims: _Dims
    out_dims: _Dims
    out: Any
    sizes: Mapping[int | None, int]
    queries: Sequence[int]
    heads: Sequence[int]
    batch: Sequence[int]
    is_masked: Sequence[bool | None] = ()

    @classmethod
    def at(cls, eqn: Any, operands: Sequence[TracedValue]) -> Attention | None:
        """Return the attention that an equation ends; None where it ends none that
        another form can compute."""
        if eqn.primitive.name != "dot_general":
            return None
        is_end = [isinstance(v.fact, Scores) and v.fact.is_done for v in operands]
        if sum(is_end) != 1:
            return None
        at = is_end.index(True)
        of, value = operands[at].fact, operands[1 - at]
        product, (summed, batch) = of.product, eqn.params["dimension_numbers"]
        pairs = [*zip(*summed, strict=True), *zip(*batch, strict=True)]
        ids = {pair[1 - at]: of.dims[pair[at]] for pair in pairs}
        value_dims = [ids.get(d, DEPTH) for d in range(len(value.aval.shape))]
        taken = {pair[at] for pair in pairs}
        own = [d for i, d in enumerate(of.dims) if i not in taken]
        free = [DEPTH] * value_dims.count(DEPTH)
        out_dims = [of.dims[d] for d in batch[at]]
        out_dims += free + own if at else own + free
        # The operand of the first product that keys are.
        key = int(of.row in product.dims[1])
        values = [
            *zip(product.operands, product.dims, strict=True),
            (value, value_dims),
        ]
        sizes = {
            d: n for v, dims in values for d, n in zip(dims, v.aval.shape, strict=True)
        }

        def large(value: TracedValue, dims: _Dims) -> list[Any]:
            return [d for d, n in zip(dims, value.aval.shape, strict=True) if n > 1]

        query_dims = large(*values[1 - key])
        queries = [d for d in query_dims if d != DEPTH and d not in product.batch]
        queries.sort(key=lambda d: -sizes[d])
        shared = [d for d in query_dims if d in product.batch]
        depths = [
            v.aval.shape[list(dims).index(DEPTH)] for v, dims in values if DEPTH in dims
        ]
        has_dims = (
            [of.dims[d] for d in summed[at]] == [of.row]
            and of.row not in product.batch
            and len(free) == 1
            and set(depths) == {sizes[DEPTH]}
            and value.aval.dtype.itemsize
            <= product.operands[1 - key].aval.dtype.itemsize
            and {*large(*values[key])} == {*large(*values[2])}
            and {*large(*values[2])} == {of.row, DEPTH, *shared}
        )
        if (
            not has_dims
            or not queries
            or min(sizes[queries[0]], sizes[of.row]) < MIN_LENGTH
        ):
            return None
        split = max(1, len(shared) - 1)
        found = cls(
            of,
            value,
            value_dims,
            out_dims,
            eqn.outvars[0].aval,
            sizes,
            queries,
            shared[split:],
            shared[:split],
        )
        return replace(found, is_masked=found._read_masks())

    @property
    def operands(self) -> list[TracedValue]:
        """The operands of the first product, the values, and the terms of scores."""
        masks = (mask.value for mask in self.scores.masks)
        return [*self.scores.product.operands, self.value, *masks]

    def _read_masks(self) -> list[bool | None]:
        """Return `is_masked`."""
        found: list[bool | None] = []
        lengths = self.sizes[self.queries[0]], self.sizes[self.scores.row]
        for mask in self.scores.masks:
            kept = self._kept(mask)
            if kept is None:
                found.append(None)
            elif kept.all():
                found.append(False)
            else:
                is_square = kept.shape == lengths[:1] * 2
                causal = is_square and np.array_equal(
                    kept, np.tri(*lengths, dtype=bool)
                )
                found.append(True if causal else None)
        return found

    @property
    def types(self) -> str:
        """Text that differs between calls that are not alike."""
        groups = self._groups()
        of_queries, of_keys = (
            [math.prod(self.sizes[d] for d in group) for group in groups[i]]
            for i in (0, 1)
        )
        kind = "causal" if any(self.is_masked) else "full"
        count = list(self.is_masked).count(None)
        dtype = self.scores.product.operands[0].aval.dtype
        return f"{dtype}{of_queries}, {of_keys}, {kind}, biases: {count}"

    def forms(self) -> dict[str, Callable[..., Any]]:
        """Return form → a function of the arrays of `operands`, which returns the
        result as it is written."""
        named = {AS_WRITTEN: "xla", "cudnn": "cudnn", "splash": "splash"}
        return {name: self._as(FORMS[form]) for name, form in named.items()}

    def _groups(self) -> tuple[list[Sequence[Any]], ...]:
        """Return the dims of queries, keys (and values) and scores, as groups that are
        a dim each of `jax.nn.dot_product_attention`."""
        first, *groups = self.queries
        rows, heads = [self.scores.row], [*self.heads, *groups]
        return (
            [self.batch, [first], heads, [DEPTH]],
            [self.batch, rows, self.heads, [DEPTH]],
            [self.batch, heads, [first], rows],
        )

    def _as(self, form: Callable[..., Any]) -> Callable[..., Any]:
        of, is_masked = self.scores, self.is_masked
        key = int(of.row in of.product.dims[1])
        first, *groups = self.queries

        def run(*arrays: Any) -> Any:
            value, masks = arrays[2], arrays[3 : 3 + len(of.masks)]
            of_queries, of_keys, of_scores = self._groups()
            dims = of.product.dims
            q = self._laid(arrays[1 - key], dims[1 - key], of_queries)
            k = self._laid(arrays[key], dims[key], of_keys)
            v = self._laid(value, self.value_dims, of_keys)
            bias = None
            for mask, array, known in zip(of.masks, masks, is_masked, strict=True):
                if known is not None:
                    continue
                if mask.fill is not None:
                    fill = max(mask.fill, float(jnp.finfo(q.dtype).min) / 2)
                    kept = array if mask.keeps else jnp.logical_not(array)
                    array = jnp.where(kept, 0.0, fill)
                array = self._laid(array, mask.dims, of_scores).astype(q.dtype)
                bias = array if bias is None else bias + array
            if bias is not None:
                # cuDNN's has a bias for every query and key.
                lengths = self.sizes[first], self.sizes[of.row]
                bias = jnp.broadcast_to(bias, (*bias.shape[:2], *lengths))
            more = {"scale": of.scale, "is_causal": any(is_masked)}
            result = form(q, k.astype(q.dtype), v.astype(q.dtype), bias, **more)
            order = [*self.batch, first, *self.heads, *groups, DEPTH]
            result = result.reshape([self.sizes[d] for d in order])
            wanted = [d for d in self.out_dims if d in order]
            result = result.transpose([order.index(d) for d in wanted])
            return result.reshape(self.out.shape).astype(self.out.dtype)

        return run

    def _laid(self, array: Any, dims: _Dims, groups: Sequence[Sequence[Any]]) -> Any:
        """Return an array with one dim for each group of dims, in their order; of size
        1 where it has none of them."""
        kept = [d for d, size in zip(dims, array.shape, strict=True) if size > 1]
        order = [d for group in groups for d in group]
        array = array.reshape([size for size in array.shape if size > 1])
        array = array.transpose([kept.index(d) for d in order if d in kept])
        array = array.reshape([self.sizes[d] if d in kept else 1 for d in order])
        whole = [
            [self.sizes[d] if any(e in kept for e in group) else 1 for d in group]
            for group in groups
        ]
        repeat = np.broadcast_to if isinstance(array, np.ndarray) else jnp.broadcast_to
        array = repeat(array, [size for group in whole for size in group])
        return array.reshape([*map(math.prod, whole)])

    def _kept(self, mask: Mask) -> np.ndarray | None:
        """Return [queries, keys], whether a constant mask keeps each score; None for
        other terms."""
        fact = mask.value.fact
        array = fact.array if isinstance(fact, Constant) else None
        if array is None:
            return None
        if mask.fill is not None:
            kept = array.astype(bool) == mask.keeps
        elif ((array == 0) | (array <= LOW)).all():
            kept = array == 0
        else:
            return None
        lengths = self.queries[0], self.scores.row
        dims = mask.dims or (None,) * kept.ndim
        if any(
            n > 1 and d not in lengths for n, d in zip(kept.shape, dims, strict=True)
        ):
            return None
        return self._laid(kept, dims, [[lengths[0]], [lengths[1]]])
