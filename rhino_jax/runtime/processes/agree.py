"""Agree on one plan in all processes of a mesh: the first makes it, the others take it.

Programs and plans are compared before anything is compiled. Where the mesh is of one
process, nothing is communicated.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh

from rhino_jax._compat import coordination_client, is_compile_only
from rhino_jax.frontend.trace import Traced
from rhino_jax.passes.apply import apply_passes
from rhino_jax.plan.files.store import plan_from_json, plan_to_json
from rhino_jax.plan.fingerprint import fingerprint
from rhino_jax.plan.fits import check_fits
from rhino_jax.plan.plan import PlanData
from rhino_jax.runtime.processes import listing
from rhino_jax.runtime.processes.meeting import Meeting
from rhino_jax.runtime.processes.signs import at_work


Agreed = TypeVar("Agreed")


def processes_of(devices: Iterable[Any]) -> tuple[int, ...]:
    """Return the indices of the processes that own devices and must agree on a plan.

    Empty for devices of one process, for compile-only ones, and in processes that
    have none of them.
    """
    if is_alone():
        return ()
    every = list(devices)
    if any(map(is_compile_only, every[:1])):
        return ()
    found = tuple(sorted({int(d.process_index) for d in every}))
    return found if len(found) > 1 and jax.process_index() in found else ()


def is_alone() -> bool:
    """Whether there are no other processes: JAX was not started as one of several."""
    return coordination_client() is None or jax.process_count() < 2


def processes_of_mesh(mesh: Any) -> tuple[int, ...]:
    """Return `processes_of` a mesh's devices; empty for an abstract mesh."""
    return processes_of(mesh.devices.flat) if isinstance(mesh, Mesh) else ()


def attending(mesh: Any | None) -> contextlib.AbstractContextManager[None]:
    """Send heartbeats to other processes meanwhile, if the mesh is of several.

    Args:
      mesh: the mesh; None: not chosen yet, possibly over all devices.
    """
    if is_alone() or (mesh is not None and not processes_of_mesh(mesh)):
        return contextlib.nullcontext()
    return at_work(coordination_client())


def made_by_first(
    traced: Traced,
    processes: tuple[int, ...],
    asked: Mapping[str, str],
    make: Callable[[], PlanData],
    what: str,
) -> PlanData:
    """Return the first process's plan, in all processes; see `decided_by_first`.

    Args:
      traced: the traced function.
      make: makes the plan, without trees and mesh.
    """

    def lines(plan: PlanData) -> list[listing.AgreedItem]:
        found = fingerprint(traced.program, plan.mesh_axes)
        check_fits(plan, found, plan.mesh_axes, program=traced.program, what=what)
        return _lines_of(plan, traced)

    texts = plan_to_json, functools.partial(plan_from_json, what=what)
    return decided_by_first([traced], processes, asked, make, what, texts, lines)


def decided_by_first(
    traced: Sequence[Traced],
    processes: tuple[int, ...],
    asked: Mapping[str, str],
    decide: Callable[[], Agreed],
    what: str,
    texts: tuple[Callable[[Agreed], str], Callable[[str], Agreed]] = (
        json.dumps,
        json.loads,
    ),
    lines: Callable[[Agreed], Sequence[listing.AgreedItem]] = lambda decided: [
        listing.AgreedItem("shared state", json.dumps(decided))
    ],
) -> Agreed:
    """Return the first process's decision on some functions, in all processes.

    Args:
      traced: the traced functions.
      processes: result of `processes_of`; empty: this process decides for itself.
      asked: the user's options, as name → value; must be equal in all processes.
      decide: makes the decision.
      what: name of the calling API, for messages.
      texts: write a decision as text, and read it.
      lines: checks a decision, and lists what must be equal in all processes.
    Raises:
      ProcessError: programs differ, or a process is lost; in every process. Errors of
        `decide` in the first process are raised in the others, too.
    """
    if not processes:
        return decide()
    names, (write, read) = ", ".join(t.name for t in traced), texts
    meeting = Meeting(coordination_client(), processes, what, names)
    programs = (listing.of_program(t, asked) for t in traced)
    meeting.compare("program", [line for of in programs for line in of])
    if not meeting.is_first:
        decided = read(meeting.wait("made", meeting.first, "to plan").decode())
    try:
        if meeting.is_first:
            decided = decide()
            meeting.put("made", write(decided).encode())
        equal = lines(decided)
    except Exception as error:
        meeting.fail(error)
    # Only then have all read it, so that its keys may be deleted.
    meeting.compare("plan", equal)
    meeting.end()
    return decided


def agreed(
    traced: Traced, processes: tuple[int, ...], plan: PlanData, what: str
) -> None:
    """Check that all processes have this plan, of this program.

    Raises:
      ProcessError: they do not, or a process is lost.
    """
    if not processes:
        return
    meeting = Meeting(coordination_client(), processes, what, traced.name)
    meeting.compare("program", listing.of_program(traced, {}))
    meeting.compare("plan", _lines_of(plan, traced))
    meeting.end()


def _lines_of(plan: PlanData, traced: Traced) -> list[listing.AgreedItem]:
    """List what a plan specifies for the program that runs."""
    return listing.of_plan(plan, apply_passes(traced, plan.transforms).program)
