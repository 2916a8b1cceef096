"""The loop over micro-batches on one stage: its layers, its share of all else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from rhino_jax._compat import at_line_of
from rhino_jax.frontend.rules.reduce import COMBINE, identity
from rhino_jax.passes.microbatch.emit import combined
from rhino_jax.passes.spmd_pipeline.along import StageAxis, StageValues, either, is_key
from rhino_jax.passes.spmd_pipeline.body import EquationPhase, MicrobatchBody
from rhino_jax.rewrite.flat import FlatOp


class StageRun(StageValues):
    """The loop over micro-batches on one stage, inside `shard_map`.

    m micro-batches, S stages, T ticks, L layers.

    Attributes:
      env: values that are the same for all micro-batches.
      rows: value → [m/S, …], of this stage's own micro-batches, whole.
      ticks: stack → [T, L/S, …], of its layers and all micro-batches, and whether the
        scan that computed it is reversed.
      sums: carry → accumulated output of micro-batches, on this stage.
    """

    def __init__(
        self, body: MicrobatchBody, axis: StageAxis, arrays: Sequence[Any]
    ) -> None:
        inputs, call = body.region.inputs, body.loop.call
        consts = zip(call.consts(inputs), call.consts(arrays), strict=True)
        super().__init__(axis, body, dict(consts))
        self.body, self.given = body, call.carries(arrays)
        own = zip(call.sliced(inputs), call.sliced(arrays), strict=True)
        self.rows: dict[int, Any] = dict(own)
        self.ticks: dict[int, tuple[Any, bool]] = {}
        self.sums: dict[int, Any] = {}
        self._readers = _readers(body)

    def results(self) -> list[Any]:
        """Return outputs of the loop: sums, and slices of this stage's own rows."""
        body = self.body
        for i, place in enumerate(body.places):
            if place is EquationPhase.ONCE:
                self._do(i, self.env, self.read)
        for level in range(len(body.loops) + 1):
            self._rows(level)
            if level < len(body.loops):
                self._loop(level)
        left = [
            self.given[k] if s.part is None else self.sums[k]
            for k, s in enumerate(body.sums)
        ]
        return [*left, *map(self._slices, body.loop.call.stacked(body.region.outputs))]

    # Values of micro-batches.

    def _all(self, value: int) -> Any:
        """Return a value of all micro-batches, [m, …], whole."""
        if value not in self.gathered:
            with self.line(value):
                self.gathered[value] = self.axis.whole(self._own_rows(value))
        return self.gathered[value]

    def _own_rows(self, value: int) -> Any:
        if value not in self.rows:
            with self.line(value):
                self.rows[value] = self.axis.rows_of_stack(*self.ticks[value])
        return self.rows[value]

    def read(self, value: int, as_stack: bool) -> Any:
        with self.line(value):
            return super().read(value, as_stack)

    def _do(self, i: int, env: dict[int, Any], read: Any) -> None:
        """Run the op at a position, and add its results to `env`."""
        each = self.body.region.ops[i]
        env.update(zip(each.results, self.run(each, read), strict=True))

    # Between scans: a stage's own micro-batches.

    def _rows(self, level: int) -> None:
        body, region = self.body, self.body.region
        todo = body.at(EquationPhase.ROWS, level)
        sums = body.sums_at(level, is_stacked=False)
        parts = [p for k in sums if (p := body.sums[k].part) is not None]
        made, read = region.made_by(todo), region.read_by(todo) | set(parts)
        enter = sorted((read - made) & body.varies)
        leave = self._read_elsewhere(todo)
        if not (leave or sums):
            return
        xs = [self._own_rows(v) for v in enter]
        for v in read - made - body.varies:
            self.read(v, False)  # gathered outside of the loop

        def step(so_far: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            env = dict(zip(enter, slices, strict=True))

            def read(value: int, as_stack: bool) -> Any:
                return env[value] if value in env else self.read(value, as_stack)

            for i in todo:
                self._do(i, env, read)
            more = [
                combined(body.sums[k].how, x, read(p, False))
                for k, x, p in zip(sums, so_far, parts, strict=True)
            ]
            return more, [env[v] for v in leave]

        starts = [
            x if how == "unchanged" else lax.full_like(x, identity(how, x.dtype))
            for x, how in ((self.given[k], body.sums[k].how) for k in sums)
        ]
        own = self.axis.count // self.axis.stages
        ends, left = lax.scan(step, starts, xs, length=own)
        self.rows.update(zip(leave, left, strict=True))
        for k, x in zip(sums, ends, strict=True):
            how, given = body.sums[k].how, self.given[k]
            if how != "unchanged":
                with self.line(body.sums[k].part):
                    x = COMBINE[how](given, self.axis.together(x, how))
            self.sums[k] = x

    def _read_elsewhere(self, ops: Sequence[int]) -> list[int]:
        """Return the results of some ops that are read by others."""
        made = self.body.region.made_by(ops)
        return sorted(v for v in made if self._readers.get(v, set()).difference(ops))

    # Scans over layers: a micro-batch on every tick.

    def _loop(self, number: int) -> None:
        body, axis, at = self.body, self.axis, self.body.loops[number]
        each = body.region.ops[at]
        is_reversed = bool(each.eqn.params["reverse"])
        here = (at, *body.at(EquationPhase.TAIL, number + 1))
        carried = each.results[: each.call.num_carry]
        sums = body.sums_at(number + 1, is_stacked=True)
        made = body.region.made_by(here)
        leave = self._read_elsewhere(here)
        whole = each.operands[: each.call.first_slice]
        for v in body.region.read_by(here) - made:
            # Gathered before the scan, if it is read whole in it.
            if v in body.varies:
                if v in whole or v not in body.stacks:
                    self._all(v)
            elif v in whole and v in body.stacks:
                self.read(v, False)
        with at_line_of(each.eqn):
            starts = self._operands(each, lambda v, s: self._at(v, s, 0))
            # What is sent before the first micro-batch is never read.
            sent = each.call.carries(starts)
            nothing = (x if is_key(x) else jnp.zeros_like(x) for x in sent)
            begin = [self.given[k] for k in sums]
            (_, ends), stacks = lax.scan(
                self._tick(each, here, sums, leave),
                ([*nothing], begin),
                lax.iota("int32", axis.ticks),
            )
            self.sums.update(zip(sums, ends, strict=True))
            for v, x in zip(leave, stacks, strict=True):
                if v in carried:
                    self.rows[v] = axis.rows_of_last(x, is_reversed)
                elif v in body.stacks:
                    self.ticks[v] = x, is_reversed
                else:
                    reducer = body.stacked[
                        body.region.ops[body.region.maker[v]]
                    ].reducer
                    self.rows[v] = axis.rows_of_parts(x, is_reversed, reducer)

    def _tick(
        self,
        each: FlatOp,
        here: Sequence[int],
        sums: Sequence[int],
        leave: Sequence[int],
    ) -> Callable[[Any, Any], tuple[Any, list[Any]]]:
        """Return the scan body of a tick: the stage runs what it has received.

        Args:
          each: the scan over layers.
          here: its position, and those of TAIL ops on its results.
          sums: carries that it accumulates.
          leave: values that are stacked over ticks.
        """
        body, axis = self.body, self.axis
        params, call = each.eqn.params, each.call
        is_reversed = bool(params["reverse"])
        place = axis.place(is_reversed)
        params = {**params, "length": call.trip_count // axis.stages}

        def tick(state: Any, t: Any) -> tuple[Any, list[Any]]:
            received, so_far = state
            j = t - place
            is_there = (j >= 0) & (j < axis.count)
            j = jnp.clip(j, 0, axis.count - 1)
            env: dict[int, Any] = {}

            def read(value: int, as_stack: bool) -> Any:
                return env[value] if value in env else self._at(value, as_stack, j)

            args = self._operands(each, read)
            args[call.num_consts : call.first_slice] = [
                either(place == 0, jnp.asarray(x), y)
                for x, y in zip(call.carries(args), received, strict=True)
            ]
            outs = each.bind(args, params)
            env.update(zip(each.results, outs, strict=True))
            for i in here[1:]:
                self._do(i, env, read)
            more = [
                either(
                    is_there,
                    combined(body.sums[k].how, x, read(body.sums[k].part or 0, True)),
                    x,
                )
                for k, x in zip(sums, so_far, strict=True)
            ]
            with at_line_of(each.eqn):
                ends = outs[: call.num_carry]
                sent = [axis.handed_on(x, is_reversed) for x in ends]
            return (sent, more), [env[v] for v in leave]

        return tick

    def _operands(self, each: FlatOp, read: Any) -> list[Any]:
        """Return operands of a scan over layers; stacks are this stage's part."""
        args = []
        for k, v in enumerate(each.operands):
            is_slice = k >= each.call.first_slice
            x = read(v, is_slice)
            if is_slice and v not in self.body.stacks:
                x = self.part(x)
            args.append(x)
        return args

    def _at(self, value: int, as_stack: bool, j: Any) -> Any:
        """Return a value of one micro-batch.

        Args:
          value: its id.
          as_stack: whether a stack is wanted as this stage's part, instead of whole.
          j: number of the micro-batch, traced.
        """
        if value not in self.body.varies:
            return self.read(value, as_stack)
        if as_stack and value in self.body.stacks:
            ticks, is_reversed = self.ticks[value]
            x, at = ticks, j + self.axis.place(is_reversed)
        else:
            x, at = self._all(value), j
        return lax.dynamic_index_in_dim(x, at, 0, keepdims=False)

    # Outputs.

    def _slices(self, value: int) -> Any:
        region = self.body.region
        own = self.axis.count // self.axis.stages
        if value in self.body.varies:
            return self._own_rows(value)
        is_const = value in region.consts
        x = region.result(value, {}) if is_const else self.read(value, False)
        return jnp.broadcast_to(x, (own, *jnp.shape(x)))


def _readers(body: MicrobatchBody) -> dict[int, set[int]]:
    """Return value → ops that read it; -1: an output, or a sum elsewhere."""
    readers, steps = body.region.readers.items(), body.in_sums
    found = {v: {*at} - steps for v, at in readers}
    for left in body.loop.call.stacked(body.region.outputs):
        found.setdefault(left, set()).add(-1)
    for s in body.sums:
        at = None if s.part is None else body.region.maker.get(s.part)
        is_of_rows = at is None or body.places[at] is EquationPhase.ROWS
        if s.part is not None and not (body.is_stacked_sum(s) or is_of_rows):
            found.setdefault(s.part, set()).add(-1)
    return found
