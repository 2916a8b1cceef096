"""A micro-batch with calls inlined: layer scans unrolled, `jax.checkpoint` removed.

Recomputed regions are inlined in the backward pass, and compute the same values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax import lax

from rhino_jax._compat import (
    bind_eqn,
    eqn_context,
    hide_frames,
    is_literal,
    jaxpr_consts,
    open_jaxpr,
    scan_counts,
    tagged,
    untagged,
)
from rhino_jax.frontend.importer import import_jaxpr
from rhino_jax.frontend.regions import closed_region_jaxprs, region_kind
from rhino_jax.ir.program import Op, Program, RegionKind
from rhino_jax.passes.retraced import retraced
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.sides import sides_of


hide_frames(__file__)

MAX_LAYERS = 128
"""Largest number of steps of a scan over layers.

The deepest of the models that are planned here has 118 (PaLM 540B), GPT-3 96.
"""


@dataclass(frozen=True, eq=False)
class OpenedProgram:
    """A micro-batch with calls inlined.

    Attributes:
      closed: closed jaxpr of the arguments and results of `Apart.piece`.
      program: imported from it.
      sources: for every equation the equation of `Apart.piece` that it is a part of.
      is_backward: for every equation, whether it is in the backward pass.
      weights: positions of the inputs that depend on other arrays than the data.
    """

    closed: Any
    program: Program
    sources: tuple[int, ...]
    is_backward: tuple[bool, ...]
    weights: frozenset[int]

    @cached_property
    def eqns(self) -> tuple[Any, ...]:
        return tuple(open_jaxpr(self.closed).eqns)

    def op(self, equation: int) -> Op:
        return self.program.ops[self.program.body.ops[equation]]


def opened(apart: Apart, lengths: Collection[int]) -> OpenedProgram:
    """Inline a micro-batch's calls and unroll its layer scans.

    Args:
      apart: the step.
      lengths: scans with so many steps may be over the sequence, and are not unrolled.
    """
    sides = sides_of(apart)
    walk = _OpeningWalk(frozenset(lengths))
    closed, tags = untagged(retraced(apart.piece, lambda *xs: walk.top(apart, xs)))
    sources = tuple(int(str(tag)) for tag in tags)
    before = sides.program
    program = import_jaxpr(
        closed,
        name=before.name,
        input_paths=[e.path for e in before.inputs if not e.is_const],
        donated=[False for e in before.inputs if not e.is_const],
        captured_paths=[e.path for e in before.inputs if e.is_const],
        output_paths=[e.path for e in before.outputs],
        state_of=[None for _ in before.outputs],
        while_trips=before.while_trips,
    )
    inputs = enumerate(sides.lines.inputs)
    return OpenedProgram(
        closed,
        program,
        sources,
        tuple(sides.is_backward[i] for i in sources),
        frozenset(i for i, v in inputs if v in sides.parameters),
    )


@dataclass(eq=False)
class _Stack:
    """The slices that a scan stacks, until they are read as one array."""

    parts: list[Any]

    @cached_property
    def whole(self) -> Any:
        return lax.concatenate([lax.expand_dims(x, [0]) for x in self.parts], 0)


@dataclass(frozen=True)
class _OpeningWalk:
    lengths: frozenset[int]

    def top(self, apart: Apart, arrays: Sequence[Any]) -> list[Any]:
        jaxpr = open_jaxpr(apart.piece)
        env = dict(zip((*jaxpr.invars, *jaxpr.constvars), arrays, strict=True))
        maker: dict[Any, int] = {}
        for i, eqn in enumerate(jaxpr.eqns):
            with tagged(str(i)):
                self.eqn(eqn, env)
            maker.update(dict.fromkeys(eqn.outvars, i))
        results = []
        for v in jaxpr.outvars:
            at = None if is_literal(v) else maker.get(v)
            with tagged(str(at)):
                results.append(_array(v, env))
        return results

    def block(self, closed: Any, arrays: Sequence[Any]) -> list[Any]:
        jaxpr = open_jaxpr(closed)
        env = dict(zip(jaxpr.invars, arrays, strict=True))
        env.update(zip(jaxpr.constvars, jaxpr_consts(closed), strict=False))
        for eqn in jaxpr.eqns:
            self.eqn(eqn, env)
        return [v.val if is_literal(v) else env[v] for v in jaxpr.outvars]

    def eqn(self, eqn: Any, env: dict[Any, Any]) -> None:
        kind = region_kind(eqn) if self._is_open(eqn) else None
        if kind is RegionKind.CALL:
            (body,) = closed_region_jaxprs(eqn)
            with _inside(eqn):
                results = self.block(body, [_array(v, env) for v in eqn.invars])
        elif kind is RegionKind.SCAN:
            with _inside(eqn):
                results = self.scan(eqn, env)
        else:
            with eqn_context(eqn):
                args = [_array(v, env) for v in eqn.invars]
                results = bind_eqn(eqn, args, eqn.params)
        env.update(zip(eqn.outvars, results, strict=True))

    def _is_open(self, eqn: Any) -> bool:
        bodies = closed_region_jaxprs(eqn)
        if any(np.ndim(c) for body in bodies for c in jaxpr_consts(body)):
            return False  # arrays would become constants of the program
        if region_kind(eqn) is RegionKind.SCAN:
            length = eqn.params["length"]
            return length <= MAX_LAYERS and length not in self.lengths
        return region_kind(eqn) is RegionKind.CALL

    def scan(self, eqn: Any, env: dict[Any, Any]) -> list[Any]:
        (body,) = closed_region_jaxprs(eqn)
        num_consts, num_carry = scan_counts(eqn.params)
        first = num_consts + num_carry
        consts = [_array(v, env) for v in eqn.invars[:num_consts]]
        carry = [_array(v, env) for v in eqn.invars[num_consts:first]]
        stacks = [v if is_literal(v) else env[v] for v in eqn.invars[first:]]
        order = range(eqn.params["length"])
        made: dict[int, list[Any]] = {}
        for i in reversed(order) if eqn.params["reverse"] else order:
            results = self.block(body, [*consts, *carry, *(_at(x, i) for x in stacks)])
            carry, made[i] = results[:num_carry], results[num_carry:]
        rows = zip(*(made[i] for i in order), strict=True)
        return [*carry, *(_Stack([*parts]) for parts in rows)]


def _array(v: Any, env: dict[Any, Any]) -> Any:
    if is_literal(v):
        return v.val
    x = env[v]
    return x.whole if isinstance(x, _Stack) else x


def _at(x: Any, i: int) -> Any:
    if isinstance(x, _Stack):
        return x.parts[i]
    return lax.index_in_dim(x, i, 0, keepdims=False)


@contextlib.contextmanager
def _inside(eqn: Any) -> Iterator[None]:
    """Enter the name scope and source line of a call."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(eqn_context(eqn))
        if eqn.params.get("name"):
            stack.enter_context(jax.named_scope(str(eqn.params["name"])))
        yield
