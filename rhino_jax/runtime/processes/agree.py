"""Agree on one plan in all processes of a mesh: the first makes it, the others take it.

Programs and plans are compared before anything is compiled. Where the mesh is of one
process, nothing is communicated.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


@contextlib.contextmanager
def attending(mesh: Any | None) -> Iterator[None]:
    """Send heartbeats to other processes meanwhile, if the mesh is of several.

    Args:
      mesh: the mesh; None: not chosen yet, possibly over all devices.
    """
    client = coordination_client()
    is_shared = not is_alone()
    if is_shared and mesh is not None:
        is_shared = bool(processes_of_mesh(mesh))
    with (
        at_work(client, jax.process_index()) if is_shared else contextlib.nullcontext()
    ):
        yield


def made_by_first(
    traced: Traced,
    processes: tuple[int, ...],
    asked: Mapping[str, str],
    make: Callable[[], PlanData],
    what: str,
) -> PlanData:
    """Return the first process's plan, in all processes.

    Args:
      traced: the traced function.
      processes: result of `processes_of`; empty: this process plans for itself.
      asked: the user's options, as name → value; must be equal in all processes.
      make: makes the plan, without trees and mesh.
      what: name of the calling API, for messages.
    Raises:
      ProcessError: programs differ, or a process is lost; in every process. Errors of
        `make` in the first process are raised in the others, too.
    """
    if not processes:
        return make()
    meeting = Meeting(coordination_client(), processes, what, traced.name)
    meeting.compare("program", listing.of_program(traced, asked))
    read = functools.partial(plan_from_json, what=what)
    plan = _by_first(meeting, make, plan_to_json, read)
    try:
        found = fingerprint(traced.program, plan.mesh_axes)
        check_fits(plan, found, plan.mesh_axes, program=traced.program, what=what)
    except Exception as error:
        meeting.fail(error)
    meeting.compare("plan", _lines_of(plan, traced))
    meeting.end()
    return plan


def decided_by_first(
    traced: Sequence[Traced],
    processes: tuple[int, ...],
    asked: Mapping[str, str],
    decide: Callable[[], Any],
    what: str,
) -> Any:
    """Return the first process's decision on several functions, in all processes.

    Args:
      traced: the traced functions.
      processes, asked, what: as for `made_by_first`.
      decide: makes the decision; returns a JSON value.
    Raises:
      ProcessError: as for `made_by_first`. Errors of `decide` in the first process are
        raised in the others, too.
    """
    if not processes:
        return decide()
    names = ", ".join(t.name for t in traced)
    meeting = Meeting(coordination_client(), processes, what, names)
    lines = [line for t in traced for line in listing.of_program(t, asked)]
    meeting.compare("program", lines)
    decided = _by_first(meeting, decide, json.dumps, json.loads)
    # Only then have all read it, so that its keys may be deleted.
    text = json.dumps(decided)
    meeting.compare("plan", [listing.AgreedItem("shared state", text)])
    meeting.end()
    return decided


def _by_first(
    meeting: Meeting,
    make: Callable[[], Agreed],
    write: Callable[[Agreed], str],
    read: Callable[[str], Agreed],
) -> Agreed:
    """Return what the first process makes, in all processes."""
    if not meeting.is_first:
        return read(meeting.wait("made", meeting.first, "to plan").decode())
    try:
        made = make()
    except Exception as error:
        meeting.fail(error)
    meeting.put("made", write(made).encode())
    return made


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
