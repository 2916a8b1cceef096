"""Prepare the processes of a plan of several stages to run it together."""

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
    """Return the results that are replicated over all processes, with their shardings.

    These are small and not state, such as the loss. All others are on the devices of
    their stage alone.
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
    """Return the controller that runs a step with the other processes of a mesh.

    Args:
      alone: the controller of this process.
      mesh: the mesh.
      processes: indices of its processes.
      shown: sharding of each result that is replicated over all processes.
      name: name of the function.
    Raises:
      ProcessError: the processes' tasks or their order differ, or a process is lost.
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
    """Return everything that the processes must agree on, in order."""
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
            lines.append(AgreedItem(key.label, text))
    lines += [AgreedItem("send", str(send)) for send in of.step.sends]
    return lines
