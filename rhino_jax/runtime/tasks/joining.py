"""The processes of a plan of several stages, made ready to run it together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhino_jax._compat import coordination_client, own_host
from rhino_jax.ir.program import Program
from rhino_jax.passes.staged.after import LIGHT_BYTES
from rhino_jax.runtime.processes.agree import attending
from rhino_jax.runtime.processes.listing import AgreedItem
from rhino_jax.runtime.processes.meeting import Meeting
from rhino_jax.runtime.processes.running import Running
from rhino_jax.runtime.tasks.controller import Controller
from rhino_jax.runtime.tasks.exchange import Exchange
from rhino_jax.runtime.tasks.processes import ProcessController
from rhino_jax.runtime.tasks.transfers import TransferPort, server_of


WHAT = "a step in stages"


def shown_results(program: Program, mesh: Mesh) -> dict[int, NamedSharding]:
    """Results that all processes get whole, such as the loss: small, and no state.

    All others are where their stage is, and nothing of them elsewhere.
    """
    inputs = {entry.value for entry in program.inputs}
    everywhere = NamedSharding(mesh, PartitionSpec())
    return {
        i: everywhere
        for i, end in enumerate(program.outputs)
        if end.state_of is None and end.value not in inputs
        if program.values[end.value].bytes <= LIGHT_BYTES
    }


def join(
    alone: Controller,
    mesh: Mesh,
    processes: Sequence[int],
    shown: Mapping[int, NamedSharding],
    name: str,
) -> ProcessController:
    """What runs the step of `alone` with the other processes of a mesh.

    Args:
      processes: those of the mesh.
      shown: results that all get.
      name: of the function.
    Raises:
      ProcessError: they would not do the same in the same order, or one is lost.
    """
    client, me = coordination_client(), jax.process_index()
    with attending(mesh):
        meeting = Meeting(client, processes, WHAT, name)
        meeting.compare("order", _lines(alone))
        own = next(d for d in mesh.devices.flat if d.process_index == me)
        server = server_of(own.client, own_host())
        meeting.put(f"address/{me}", server.address().encode())
        addresses = {
            p: meeting.wait(f"address/{p}", p, "to connect").decode()
            for p in processes
            if p != me
        }
        meeting.end()
    running = Running(client, processes, WHAT, meeting.name_of("run"))
    base = hashlib.sha256(meeting.name_of("run").encode()).digest()
    exchange = Exchange(
        alone.step,
        alone.programs,
        alone.is_emulated,
        running,
        TransferPort(server, addresses),
        int.from_bytes(base[:8], "big"),
    )
    return ProcessController(
        alone.step,
        alone.programs,
        alone.order,
        alone.is_emulated,
        exchange=exchange,
        shown=dict(shown),
        name=name,
    )


def _lines(of: Controller) -> list[AgreedItem]:
    """All that the processes do together, in order."""
    lines = [AgreedItem("order", " ".join(f"{k}{s}.{m}" for k, s, m, *_ in of.order))]
    for programs in of.programs:
        ids = " ".join(str(d.id) for d in programs.mesh.devices.flat)
        lines.append(AgreedItem(f"group {programs.group}", ids))
        for i, task in enumerate(programs.of.tasks):
            replaced = [key.number for key in programs.replaced(i)]
            text = f"reads {task.reads} makes {task.makes} replaces {replaced}"
            lines.append(AgreedItem(f"task {task.name}", text))
        for key, sharding in sorted(programs.shardings.items()):
            aval = of.step.types[key]
            text = f"{aval.dtype}{list(aval.shape)} {sharding.spec}"
            lines.append(AgreedItem(f"{key.kind} {key.number}", text))
    lines += [AgreedItem("send", str(send)) for send in of.step.sends]
    return lines
