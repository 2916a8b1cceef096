"""Program passes as objects: what each applies, which choices a program allows, and how
the planner tries them. `apply.PASSES` lists all of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, TypeVar, cast

from rhino_jax.errors import MicrobatchError, check_keys
from rhino_jax.frontend.trace import Traced
from rhino_jax.ir.program import Program
from rhino_jax.ir.transform import Transform
from rhino_jax.utils.codec import from_json


Choice = TypeVar("Choice")


@dataclass(frozen=True, slots=True)
class ChoiceLimits:
    """Facts of a program that bound the choices of a pass.

    Attributes:
      least_bytes: bytes, on all devices together, of the smallest array that is worth a
        pass which saves memory.
      places: places where sums over the batch are taken over each micro-batch
        (`per_microbatch` of `rhino_jax.auto_shard`).
      counts: numbers of devices along mesh axes, for passes that divide arrays among
        them.
      pinned: ids of values whose layout the user fixed, for passes that change their
        dims.
    """

    least_bytes: float = 0.0
    places: Sequence[str] = ()
    counts: Iterable[int] = ()
    pinned: Iterable[int] = ()


NO_LIMITS = ChoiceLimits()


class TrialKind(Enum):
    """Ways in which the choices of a pass become variants.

    Attributes:
      BASIS: the first choice is planned, and passes that choose from it are tried on
        top of it, whether it is faster or not.
      WHILE_BETTER: one choice after the other is planned, while each is better than the
        one before.
      EACH: every choice is planned.
      SELECTED: the solver chooses values to recompute, under the shardings of a plan.
      REPEATED: more and more micro-batches, while memory limits every variant so far;
        values are selected again for each number of them.
    """

    BASIS = "basis"
    WHILE_BETTER = "while better"
    EACH = "each"
    SELECTED = "selected"
    REPEATED = "repeated"


class Gain(Enum):
    """Kinds of savings of passes, by which the planner knows where to try them.

    Attributes:
      MEMORY: memory, where that limits the program as it is.
      TIME: time, in any case.
      STACK_COPIES: time, and at most that of copies into and out of loops' stacks,
        where they take a share that is worth it.
    """

    MEMORY = "memory"
    TIME = "time"
    STACK_COPIES = "stack copies"


@dataclass(frozen=True, slots=True)
class Trial:
    """Description of how the planner tries a pass.

    Attributes:
      kind: how choices become variants.
      label: a choice → the name of its variant, for tables and messages; for a
        `SELECTED` pass, what follows the name of the solver's choice.
      option: the option of `rhino_jax.auto_shard` that leaves the pass to the planner
        where it is "auto"; None: the pass is always left to it.
      among: its part of the name of a variant with further passes; empty for none.
      gain: what it saves.
    """

    kind: TrialKind
    label: Callable[[Transform], str]
    option: str | None = None
    among: str = ""
    gain: Gain = Gain.MEMORY


@dataclass(frozen=True, slots=True)
class ProgramPass:
    """A rewrite of a program that keeps its arguments and results, from which the
    planner's variants are made.

    Attributes:
      name: the name of its `Transform`.
      apply: (closed jaxpr, the program imported from it, choice) → a closed jaxpr of
        the same arguments, constants and results; or that, and the choice as it was
        applied.
      choices: (traced call, limits) → the choices that the program allows, least change
        first; none for a pass whose choices depend on a plan of the program.
      trial: how the planner tries it; None: it is applied on request, or under a plan
        (`planner.cuts`, `planner.staging`).
      trips: place → trip count that its `while` loops are planned with.
    """

    name: str
    apply: Callable[[Any, Program, str], Any]
    choices: Callable[[Traced, ChoiceLimits], Iterable[Transform]] = (
        lambda traced, limits: ()
    )
    trial: Trial | None = None
    trips: Mapping[str, int] = field(default_factory=dict)


def read_choice(record: type[Choice], text: str, what: str) -> Choice:
    """Parse the choice of a pass that runs a step in a number of parts.

    Args:
      record: a dataclass with a `count`.
      text: JSON, as `{"count": 4}`.
      what: name of the choice, for messages.
    Raises:
      MicrobatchError: the text is no valid choice.
    """
    where = f"choice {text}"
    try:
        table = json.loads(text)
    except ValueError:
        table = None
    if not isinstance(table, dict) or not isinstance(table.get("count"), int):
        raise MicrobatchError(
            f"{what} is no table with a `count`.",
            where=where,
            fix='write {"count": 4}.',
        )
    names = [each.name for each in fields(cast(Any, record))]
    check_keys(MicrobatchError, what, table, names, where)
    return from_json(record, table)
