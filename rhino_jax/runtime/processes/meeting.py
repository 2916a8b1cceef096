"""Meetings of processes: values that each sets and the others wait for."""

from __future__ import annotations

import contextlib
import itertools
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax

from rhino_jax.errors import ProcessError, RhinoError
from rhino_jax.runtime.processes.listing import (
    AgreedItem,
    digest,
    first_difference,
    from_bytes,
    to_bytes,
)
from rhino_jax.runtime.processes.service import Service
from rhino_jax.runtime.processes.signs import HeartbeatWatch, lost_after_s


POLL_S = 0.5
"""Seconds between checks of the service, for heartbeats and errors of others."""

HEARD_S = 5.0
"""Seconds that the first process waits for the others before it raises an error."""

MOMENT_S = 1.0
"""Seconds that it then leaves them to report the error.

Where it is process 0, JAX ends them with it.
"""

MAX_BYTES = 1 << 20
"""Largest message; longer ones are sent in parts."""


_numbers: dict[tuple[int, ...], Iterator[int]] = defaultdict(itertools.count)


class Meeting:
    """One exchange between the processes of a mesh, before one program is compiled.

    Every process holds the same sequence of meetings, so that their numbers serve as
    names.

    Args:
      client: client of JAX's coordination service.
      processes: indices of the processes that meet; the first one plans.
      what: name of the calling API, for messages.
      name: name of the function.
    """

    def __init__(
        self, client: Any, processes: Sequence[int], what: str, name: str
    ) -> None:
        self._service = Service(client, lost_after_s(), what)
        self.processes = tuple(sorted(processes))
        self.what, self.name, self.me = what, name, jax.process_index()
        self.first, *self.others = self.processes
        number = next(_numbers[self.processes])
        group = "-".join(map(str, self.processes))
        if len(group) > 64:
            group = f"{len(self.processes)}-{zlib.crc32(group.encode()):08x}"
        self._root = f"rhino_jax/plan/{group}"
        self._prefix = f"{self._root}/{number}"
        self._before = f"{self._root}/{number - 1}" if number else None

    def name_of(self, what: str) -> str:
        """Return a key prefix unique to this meeting, and equal in its processes."""
        return f"rhino_jax/{what}/{self._prefix.removeprefix('rhino_jax/plan/')}"

    @property
    def is_first(self) -> bool:
        return self.me == self.first

    def put(self, key: str, data: bytes) -> None:
        """Set a value for the others."""
        parts = [data[i : i + MAX_BYTES] for i in range(0, len(data), MAX_BYTES)]
        for i, part in enumerate(parts):
            self._service.put(f"{self._prefix}/{key}/{i}", part)
        self._service.put(f"{self._prefix}/{key}/count", str(len(parts)).encode())

    def wait(self, key: str, process: int, doing: str) -> bytes:
        """Wait for a value that a process sets, and return it.

        Raises:
          ProcessError: that process is lost, or another one reported an error.
        """
        watch = HeartbeatWatch(self._service, self.what)
        while True:
            count = self._service.get(f"{self._prefix}/{key}/count", POLL_S)
            if count is not None:
                break
            self._raise_reported()
            watch.look_at_planner(process, doing)
        keys = [f"{self._prefix}/{key}/{i}" for i in range(int(count))]
        return b"".join(self._service.get(k, POLL_S) or b"" for k in keys)

    def compare(self, kind: str, lines: Sequence[AgreedItem]) -> None:
        """Check that all processes have the same lines.

        Args:
          kind: what is compared: "program" or "plan".
          lines: this process's lines.
        Raises:
          ProcessError: the lines of some process differ; names the first difference; in
            every process.
        """
        mine = digest(lines).encode()
        if self.is_first:
            self.put(f"{kind}/lines", to_bytes(lines))
            self.put(f"{kind}/digest", mine)
            for process in self.others:
                self.wait(f"{kind}/same/{process}", process, f"to compare the {kind}")
            self.put(f"{kind}/all", b"same")
            return
        if self.wait(f"{kind}/digest", self.first, "to plan") != mine:
            theirs = from_bytes(self.wait(f"{kind}/lines", self.first, "to plan"))
            self.fail(self._difference(kind, theirs, lines))
        self.put(f"{kind}/same/{self.me}", b"same")
        self.wait(f"{kind}/all", self.first, f"to compare the {kind} with others")

    def fail(self, error: Exception) -> NoReturn:
        """Raise an error in every process."""
        told = error
        if not isinstance(told, RhinoError):
            told = ProcessError(
                f"{self.what}: process {self.me} failed while it planned.",
                where=f"process {self.me}",
                numbers=f"{type(error).__name__}: {error}"[:1000],
                fix=f"see the output of process {self.me}.",
            )
        with contextlib.suppress(ProcessError):
            # Unless another process has reported one first.
            self._service.report(self._prefix, told)
            self._hear()
        raise error

    def _hear(self) -> None:
        """Acknowledge an error; the first process waits for all acknowledgements."""
        until = time.monotonic() + HEARD_S
        self._service.put(f"{self._prefix}/heard/{self.me}", b"yes")
        if not self.is_first:
            return
        for process in self.processes:
            left_s = max(0.0, until - time.monotonic())
            self._service.get(f"{self._prefix}/heard/{process}", left_s)
        time.sleep(MOMENT_S)

    def end(self) -> None:
        """Delete the keys that no process needs any more.

        What the first process made is among them, so a comparison must follow it: a
        process that is still waiting for it would never find it.
        """
        if not self.is_first:
            return
        # All others are past the previous meeting; they may still read the last keys
        # of this one.
        gone = [f"{self._prefix}/{key}/" for key in ("program/lines", "plan/lines")]
        gone.append(f"{self._prefix}/made/")
        if self._before is not None:
            gone.append(f"{self._before}/")
        for key in gone:
            with contextlib.suppress(ProcessError):
                self._service.delete(key)

    def _raise_reported(self) -> None:
        """Raise the error that another process reported, if any."""
        found = self._service.reported(self._prefix)
        if found is None:
            return
        with contextlib.suppress(ProcessError):
            self._hear()
        raise found[1]

    def _difference(
        self, kind: str, theirs: Sequence[AgreedItem], mine: Sequence[AgreedItem]
    ) -> ProcessError:
        found = first_difference(theirs, mine)
        assert found is not None
        (a, b), first, me = found, f"process {self.first}", f"process {self.me}"
        name = a.name if a.name == b.name else f"{a.name} in {first}, {b.name} in {me}"
        wheres = {f"{a.where} in {first}": a.where, f"{b.where} in {me}": b.where}
        where = "; ".join(text for text, line in wheres.items() if line)
        made = "traced another program" if kind == "program" else "has another plan"
        return ProcessError(
            f"{self.what}: {me} {made} of `{self.name}` than {first}.",
            where=f"{name}: {where}" if where else name,
            numbers=f"{first}: {a.name} {a.value}; {me}: {b.name} {b.value}",
            fix="run the same code with the same settings in every process; what"
            " differs (data, seeds, jax.process_index()) must be an argument."
            if kind == "program"
            else "give every process the same plan, or let process 0 make one.",
        )
