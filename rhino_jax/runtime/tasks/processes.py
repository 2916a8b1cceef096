"""Dispatch the tasks of a step whose submeshes span several processes.

Every process iterates over all tasks in one order, runs those of the submeshes in which
it has devices, and takes part in the transfers that these need. A step is atomic: state
is donated only after all processes have run all tasks before.

`join` prepares the processes of a plan of several stages to run it together.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rhino_jax._compat import coordination_client, own_host
from rhino_jax.errors import ProcessError
from rhino_jax.ir.program import Program
from rhino_jax.passes.staged.after import LIGHT_BYTES
from rhino_jax.passes.staged.step import ValueKey, ValueKind
from rhino_jax.runtime.processes.across import away, placed
from rhino_jax.runtime.processes.agree import attending
from rhino_jax.runtime.processes.listing import AgreedItem
from rhino_jax.runtime.processes.meeting import Meeting
from rhino_jax.runtime.processes.running import Running
from rhino_jax.runtime.tasks.controller import Controller, Place
from rhino_jax.runtime.tasks.moves import Way
from rhino_jax.runtime.tasks.transfers import HEARD_S, Exchange, TransferPort, server_of


AHEAD = 4
"""Tasks that a process may have dispatched before they end.

One runs, the next is queued behind it, and two more cover short ones. Their results
allocate memory ahead of time.
"""


@dataclass(eq=False)
class ProcessController(Controller):
    """Runs steps over several processes.

    Attributes:
      exchange: transfers values between submeshes.
      shown: sharding of each result that is replicated over all processes.
      name: name of the function.
    """

    exchange: Exchange = field(kw_only=True)
    shown: dict[int, NamedSharding] = field(kw_only=True)
    name: str = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.running = self.exchange.running
        self._replaced: dict[Place, Sequence[ValueKey]] = {
            place: p.replaced(i) for place, (p, i, _) in self._at.items()
        }
        self._gone: list[ValueKey] = []
        self._before: deque[tuple[str, Sequence[int], Any]] = deque()
        self._is_committed = False

    # The step.

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Run one step in all processes.

        Args:
          arrays: the step's inputs; those whose home is elsewhere are not read.
        Raises:
          ProcessError: a task failed, or a process is lost; in every process.
        """
        self.exchange.begin()
        self._is_committed = False
        self._gone.clear()
        try:
            found = self._whole(self._run(arrays))
            if not self._is_committed:
                self._commit()
            self._wait_for_all()
            for key in self._gone:
                # Donated in another process: deleted here, too.
                arrays[key.number].delete()
        except Exception as error:
            told = self._failed(error)
            self.running.failed(told)
            raise told from (None if told is error else error)
        finally:
            self._before.clear()
            self.exchange.arriving.clear()
        return found

    def _whole(self, results: Sequence[Any]) -> list[Any]:
        """Return the results, with those in `shown` replicated over all processes."""
        found = []
        for i, (x, output) in enumerate(zip(results, self.step.outputs, strict=True)):
            if i in self.shown and isinstance(output, tuple):
                group, key = output
                x = self.exchange.show(x, group, key, self.shown[i])
            elif i in self.shown:
                (x,) = placed([np.asarray(output)], [self.shown[i]])
            found.append(x)
        return found

    def _result(
        self, output: Any, once: Sequence[dict[ValueKey, Any]], arrays: Any
    ) -> Any:
        if isinstance(output, tuple):
            group, key = output
            if key.kind is not ValueKind.INPUT and not self.exchange.mine[group]:
                return away(self.step.types[key], self.programs[group].shardings[key])
        return super()._result(output, once, arrays)

    def _commit(self) -> None:
        """Wait until all processes have run all tasks before state is replaced.

        No process may have failed before; from here on, state is replaced.
        """
        self._wait_for_all()
        self._task = "the end of the micro-batches"
        self.running.meet("at the end of the micro-batches")
        self._is_committed = True

    # Tasks.

    def _takes_part(self, place: Place, group: int) -> bool:
        replaced = self._replaced.get(place, ())
        if replaced and not self._is_committed:
            self._commit()
        if not self.exchange.mine[group]:
            self._gone += replaced
        return self.exchange.mine[group]

    def _start(self, name: str, group: int, arrays: Sequence[Any]) -> None:
        arriving = self.exchange.arriving
        if arriving:
            for x in arrays:
                if id(x) in arriving:
                    self.exchange.arrived(x, f"for what `{name}` reads")
        self._task = name
        self.exchange.meet(group, f"in `{name}`")

    def _dispatched(self, name: str, group: int, results: Sequence[Any]) -> None:
        if self.is_emulated:
            self._wait(results, self.exchange.on[group], name)
            return
        if results:
            # The last result stands for all: only its buffer stays live a bit longer.
            self._before.append((name, self.exchange.on[group], results[-1]))
        while len(self._before) > AHEAD:
            self._wait_for_first()

    def _wait_for_first(self) -> None:
        name, on, x = self._before.popleft()
        if not x.is_deleted():
            self._wait([x], on, name)

    def _wait_for_all(self) -> None:
        while self._before:
            self._wait_for_first()
        for x, _ in list(self.exchange.arriving.values()):
            self.exchange.arrived(x, f"after `{self._task}`")

    def _wait(self, arrays: Sequence[Any], on: Sequence[int], name: str) -> None:
        """Wait for the results of a task, and attribute errors to it."""
        self._task = name
        if len(on) < 2:
            jax.block_until_ready(arrays)
            return
        doing = f"in `{name}`"
        try:
            self.running.wait(partial(jax.block_until_ready, arrays), on, doing)
        except jax.errors.JaxRuntimeError:
            # If another process of the submesh has failed, that is the cause.
            told = self.running.reported_within(HEARD_S)
            if told is not None:
                raise told from None
            raise

    # Transfers.

    def _moved(self, way: Way, arrays: Sequence[Any]) -> Sequence[Any]:
        return self.exchange.move(way, arrays)

    # What goes wrong.

    def _failed(self, error: Exception) -> ProcessError:
        """Return the error that this process raises and reports to the others."""
        if isinstance(error, ProcessError):
            return error
        me = self.running.me
        state = (
            "State was being replaced: restart from the last checkpoint."
            if self._is_committed
            else "State is as it was before the step."
        )
        return ProcessError(
            f"{self.running.what}: `{self._task}` of `{self.name}` failed in process"
            f" {me}. {state}",
            where=f"process {me}, step {self.running.step}, task `{self._task}`",
            numbers=f"{type(error).__name__}: {error}"[:1000],
            fix=f"see the output of process {me}.",
        )


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
    port = TransferPort(server, addresses, int.from_bytes(base[:8], "big"))
    exchange = Exchange(alone.step, alone.programs, alone.is_emulated, running, port)
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
