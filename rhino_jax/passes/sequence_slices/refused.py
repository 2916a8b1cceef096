"""Errors of steps that cannot run slice by slice, with the op that is not causal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rhino_jax.errors import TokenSliceError
from rhino_jax.ir.program import Op, Program
from rhino_jax.passes.staged.apart import Apart
from rhino_jax.passes.staged.step import StagedTask


INSTEAD = 'plan with another schedule, as `schedule="1f1b"`'


def coupled(apart: Apart) -> TokenSliceError:
    return TokenSliceError(
        f"`{apart.cut.program.name}` has micro-batches that wait for one another, and"
        " sequence slices run over each only once.",
        where="; ".join(apart.cut.why),
        numbers=f"{apart.early} values are needed of all micro-batches",
        fix=f"{INSTEAD}; or take them from each micro-batch alone.",
    )


def no_sequence(apart: Apart, shapes: Sequence[tuple[int, ...]]) -> TokenSliceError:
    return TokenSliceError(
        f"`{apart.cut.program.name}` has no sequence that can be sliced.",
        where="its data",
        numbers=f"a micro-batch of its data has shapes {[*shapes]}",
        fix=f"give tokens as [batch, sequence]; or {INSTEAD}.",
    )


def not_causal(
    program: Program, length: int, op: Op, why: str, user: Op | None = None
) -> TokenSliceError:
    """Return the error of an op that mixes tokens, or needs all of another's result.

    Args:
      program: a micro-batch.
      length: of the sequence, in tokens.
      op: the op that mixes tokens.
      why: in words, after its name.
      user: op that then reads the result for every token; None: no such op.
    """
    shapes = [list(program.values[v].shape) for v in (*op.operands, *op.results)]
    reader = ""
    if user is not None:
        reader = f", and `{user.name}` at {user.source} reads it for every token"
    return TokenSliceError(
        f"`{program.name}` cannot run slice by slice: `{op.name}` {why}{reader}.",
        where=_where(program, op),
        numbers=f"sequence of {length} tokens; shapes {shapes}",
        fix="let every token see itself and none that is later: mask scores before"
        " their softmax by `causal = jnp.tril(jnp.ones((S, S), bool))`, of padded text"
        f" by `causal & (is_token | jnp.eye(S, dtype=bool))`; or {INSTEAD}.",
    )


def _where(program: Program, op: Op) -> str:
    """Return an op's source line in the user's code.

    An op that JAX itself traced has that of a neighbouring op.
    """
    if op.source.file:
        return str(op.source)
    read, made = {*op.operands}, {*op.results}
    near = [o for o in program.ops if o.source.file]
    readers = [o for o in near if made & {*o.operands}]
    makers = [o for o in near if read & {*o.results}]
    return str(next(iter([*readers, *reversed(makers)]), op).source)


def against_order(
    name: str, aval: Any, maker: StagedTask, reader: StagedTask, parts: int
) -> TokenSliceError:
    """Return the error of a model part that reads a later part's values.

    Args:
      name: of the program.
      aval: type of the value.
      maker, reader: tasks that compute and read it, of different slices.
      parts: how many parts the model has.
    """
    ends = [
        f"part {t.place % parts} of slice {t.place // parts}" for t in (reader, maker)
    ]
    return TokenSliceError(
        f"`{name}` cannot run slice by slice: what one part of the model makes of a"
        " slice is read by a part before it of another slice.",
        where=f"{reader.kind} pass of {ends[0]}",
        numbers=f"it reads {aval.str_short()}, which {ends[1]} makes; {parts} parts",
        fix="add up what slices leave (losses, metrics) in the last layers; or"
        f" {INSTEAD}.",
    )


def lengths_wrong(lengths: Sequence[int], length: int) -> TokenSliceError:
    return TokenSliceError(
        "Token slices do not make up the sequence.",
        where="`lengths`",
        numbers=f"{len(lengths)} slices of {sum(lengths)} tokens in all:"
        f" {[*lengths]}; the sequence has {length}",
        fix=f"give positive lengths that add up to {length}.",
    )
