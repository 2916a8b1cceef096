"""What a pipeline runs: tasks of groups of devices, transfers between them, links."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


class PassKind(enum.StrEnum):
    """What a task does with its micro-batch."""

    AHEAD = "ahead"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    INPUT_GRADIENT = "input-gradient"
    WEIGHT_GRADIENT = "weight-gradient"
    BETWEEN = "between"
    EXCHANGE = "exchange"
    UPDATE = "update"

    @property
    def letter(self) -> str:
        """As timelines show it."""
        return _LETTERS[self]

    @property
    def is_per_micro_batch(self) -> bool:
        """Whether it runs once for every micro-batch, and not once for every step."""
        return self not in (PassKind.BETWEEN, PassKind.EXCHANGE, PassKind.UPDATE)


_LETTERS = {
    PassKind.AHEAD: "A", PassKind.FORWARD: "F", PassKind.LOSS: "L", PassKind.BACKWARD:
    "B", PassKind.INPUT_GRADIENT: "I", PassKind.WEIGHT_GRADIENT: "W", PassKind.BETWEEN:
    "M", PassKind.EXCHANGE: "X", PassKind.UPDATE: "U",
}  # fmt: skip

Key = tuple[PassKind, int, int, int]
"""Kind, chunk, micro-batch and slice: what names a task."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Memory that a task takes at its start, and others give back.

    Attributes:
      bytes: of one device of the group.
      until: tasks of the same graph; freed when all of them have ended. Without any,
        freed at the end of the step.
    """

    bytes: int
    until: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One program that a group runs once, for one micro-batch or for the whole step.

    Attributes:
      kind: what it does.
      group: the group of devices that runs it.
      chunk: which part of the model, as its place along the forward pass; a group that
        has several runs interleaved. Of tasks of the whole step, the group's first.
      micro_batch: which one; 0 of tasks of the whole step.
      slice: which part of the sequence, where sequences are cut into slices.
      seconds: how long it runs.
      holds: what it takes at its start beyond its own end.
      working_bytes: what it takes while it runs.
      after: tasks that end before it starts, apart from those whose results are sent.
    """

    kind: PassKind
    group: int
    chunk: int
    micro_batch: int = 0
    slice: int = 0
    seconds: float
    holds: tuple[Hold, ...] = ()
    working_bytes: int = 0
    after: tuple[int, ...] = ()

    @property
    def key(self) -> Key:
        return self.kind, self.chunk, self.micro_batch, self.slice

    def __str__(self) -> str:
        if not self.kind.is_per_micro_batch:
            return f"{self.kind} of group {self.group}"
        return f"{self.kind} of {_place(self.chunk, self.micro_batch, self.slice)}"


def _place(chunk: int, micro_batch: int, part: int) -> str:
    of_slice = f", slice {part}" if part else ""
    return f"micro-batch {micro_batch}{of_slice} in chunk {chunk}"


@dataclass(frozen=True, slots=True)
class TransferLink:
    """What carries transfers, one at a time, in the order in which they are ready.

    Attributes:
      name: for people, as `0 → 1`.
      bytes_per_s: what it carries; infinite for none that counts.
      latency_s: of one transfer, beyond its bytes.
      buffers: how many transfers may have arrived, or be on their way, whose readers
        have not started; 0 for any number. Where receivers have few buffers, senders
        wait, and a schedule may deadlock that would not otherwise.
    """

    name: str
    bytes_per_s: float = float("inf")
    latency_s: float = 0.0
    buffers: int = 0

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A result of one task that tasks of another group read; or what leaves a device
    for its host's memory, or comes back (`pipeline.offload`).

    Attributes:
      source: the task that makes it; it is ready when that ends.
      targets: tasks of one group that wait for it. Its bytes are held there from when
        it sets out until the last of them starts: what these hold includes it. Behind
        them, tasks of the sender's that wait until it has arrived, if any do.
      link: position among the graph's links.
      bytes: of one device.
      seconds: on the link, by itself.
      after: transfers that are there before it sets out.
      is_to_host: whether it leaves the device: its bytes are held by its source's
        group from when that starts until they are there.
    """

    source: int
    targets: tuple[int, ...]
    link: int
    bytes: int
    seconds: float
    after: tuple[int, ...] = ()
    is_to_host: bool = False


@dataclass(frozen=True)
class TaskGraph:
    """All that is to run in one step, whatever the order.

    Attributes:
      groups: how many groups of devices.
      tasks: named by their positions.
      transfers: between tasks of different groups.
      links: what carries them.
      fixed_bytes: held on every group's devices all the time, as parameters.
      limit_bytes: of every group's devices; empty for no limit.
    """

    groups: int
    tasks: tuple[Task, ...]
    transfers: tuple[Transfer, ...] = ()
    links: tuple[TransferLink, ...] = ()
    fixed_bytes: tuple[int, ...] = ()
    limit_bytes: tuple[int, ...] = ()

    @cached_property
    def by_key(self) -> dict[Key, int]:
        return {task.key: i for i, task in enumerate(self.tasks)}

    def find(
        self, kind: PassKind, chunk: int, micro_batch: int = 0, slice: int = 0
    ) -> int:
        """Position of a task."""
        return self.by_key[kind, chunk, micro_batch, slice]

    @cached_property
    def incoming(self) -> tuple[tuple[int, ...], ...]:
        """Of every task the transfers that it waits for."""
        found: list[list[int]] = [[] for _ in self.tasks]
        for i, transfer in enumerate(self.transfers):
            for target in transfer.targets:
                found[target].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def outgoing(self) -> tuple[tuple[int, ...], ...]:
        """Of every task the transfers that it is the source of."""
        found: list[list[int]] = [[] for _ in self.tasks]
        for i, transfer in enumerate(self.transfers):
            found[transfer.source].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def followers(self) -> tuple[tuple[int, ...], ...]:
        """Of every transfer those that wait for it."""
        found: list[list[int]] = [[] for _ in self.transfers]
        for i, transfer in enumerate(self.transfers):
            for earlier in transfer.after:
                found[earlier].append(i)
        return tuple(map(tuple, found))

    def receiver(self, transfer: Transfer) -> int:
        """The group whose device, or host, gets it."""
        return self.tasks[(*transfer.targets, transfer.source)[0]].group

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """Of every task those that wait for its end without a transfer."""
        found: list[list[int]] = [[] for _ in self.tasks]
        for i, task in enumerate(self.tasks):
            for earlier in task.after:
                found[earlier].append(i)
        return tuple(map(tuple, found))

    def sources(self, task: int) -> Iterator[int]:
        """All tasks whose ends a task waits for."""
        yield from self.tasks[task].after
        for transfer in self.incoming[task]:
            yield self.transfers[transfer].source

    @property
    def base_bytes(self) -> tuple[int, ...]:
        """Held by every group all the time."""
        return self.fixed_bytes or (0,) * self.groups


@dataclass(frozen=True)
class Schedule:
    """In which order every group runs its tasks.

    Attributes:
      name: of the family, as `1f1b`.
      graph: what is to run.
      orders: of every group its tasks, as positions in the graph.
    """

    name: str
    graph: TaskGraph
    orders: tuple[tuple[int, ...], ...]

    @property
    def is_split(self) -> bool:
        """Whether gradients of weights are tasks of their own."""
        return any(t.kind is PassKind.WEIGHT_GRADIENT for t in self.graph.tasks)

    def __str__(self) -> str:
        lines = []
        for group, order in enumerate(self.orders):
            tasks = (self.graph.tasks[i] for i in order)
            lines.append(f"{group}: " + " ".join(map(label, tasks)))
        return "\n".join(lines)


def label(task: Task) -> str:
    """A task in few letters: `F3`, or `B3.1` for slice 1."""
    if not task.kind.is_per_micro_batch:
        return task.kind.letter
    of_slice = f".{task.slice}" if task.slice else ""
    return f"{task.kind.letter}{task.micro_batch}{of_slice}"
