"""Tasks of groups of devices, transfers between them, and links."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from rhino_jax.passes.staged.step import TaskKind as TaskKind


LETTERS = {
    TaskKind.FORWARD: "F", TaskKind.BACKWARD: "B", TaskKind.INPUT_GRADIENT: "I",
    TaskKind.WEIGHT_GRADIENT: "W", TaskKind.BETWEEN: "M", TaskKind.UPDATE: "U",
}  # fmt: skip
"""The letters that stand for tasks in timelines."""

Key = tuple[TaskKind, int, int, int]
"""(kind, chunk, micro-batch, slice), which identifies a task."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Memory that a task allocates at its start, and other tasks free.

    Attributes:
      bytes: bytes of one device of the group.
      until: positions of the tasks that use it: it is freed when all of them have
        ended. If empty, at the end of the step.
    """

    bytes: int
    until: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A program that a group runs once, for one micro-batch or for the whole step.

    Attributes:
      kind: kind of its work.
      group: position of the group of devices that runs it.
      chunk: position of its part of the model along the forward pass; a group with
        several chunks runs them interleaved. For tasks of the whole step, the group's
        first chunk.
      micro_batch: position of the micro-batch; 0 for tasks of the whole step.
      slice: position of the sequence slice; 0 without slices.
      seconds: duration.
      holds: memory that it allocates at its start and that outlives it.
      working_bytes: temporary memory while it runs, in bytes of one device.
      after: tasks that end before it starts, apart from those whose results are
        transferred.
    """

    kind: TaskKind
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
        part = f", slice {self.slice}" if self.slice else ""
        return (
            f"{self.kind} of micro-batch {self.micro_batch}{part} in chunk {self.chunk}"
        )


@dataclass(frozen=True, slots=True)
class TransferLink:
    """A link that carries transfers one at a time, in the order in which they are
    ready.

    Attributes:
      name: name for people, as `0 → 1`.
      bytes_per_s: bandwidth; infinite if transfers take no time beyond latency.
      latency_s: latency of one transfer.
    """

    name: str
    bytes_per_s: float = float("inf")
    latency_s: float = 0.0

    def seconds(self, size_bytes: float) -> float:
        return self.latency_s + size_bytes / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A transfer of a task's result to tasks of another group, or to or from a host.

    For transfers to and from host memory see `pipeline.offload`.

    Attributes:
      source: the task that computes it; the transfer is ready when it ends.
      targets: tasks of one group that wait for it. Its bytes are live there from the
        start of the transfer until the last of them starts, whose own memory includes
        them. For a transfer to the host, tasks of the sender that wait until it has
        arrived, if any.
      link: position among the graph's links.
      bytes: bytes of one device.
      seconds: duration on the link.
      after: transfers that complete before it starts.
      is_to_host: whether it goes to host memory: its bytes are live on its source's
        group from that task's start until the transfer ends.
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
    """All tasks and transfers of one step, without an order.

    Attributes:
      groups: number of groups of devices.
      tasks: tasks, identified by their positions.
      transfers: transfers between tasks of different groups, or with hosts.
      links: links of the transfers.
      fixed_bytes: bytes live on every group's devices throughout the step, as
        parameters.
      limit_bytes: memory limit of every group's devices; empty: no limits.
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
        self, kind: TaskKind, chunk: int, micro_batch: int = 0, slice: int = 0
    ) -> int:
        """Return the position of a task."""
        return self.by_key[kind, chunk, micro_batch, slice]

    @property
    def nodes(self) -> tuple[Task | Transfer, ...]:
        """Its tasks, then its transfers: nodes are numbered so."""
        return (*self.tasks, *self.transfers)

    @cached_property
    def seconds(self) -> tuple[float, ...]:
        """Durations of all nodes."""
        return tuple(node.seconds for node in self.nodes)

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """By node, the nodes that end before it starts, whatever the schedule."""
        count = len(self.tasks)
        found = [[*task.after] for task in self.tasks]
        for i, t in enumerate(self.transfers, count):
            found.append([t.source, *(count + earlier for earlier in t.after)])
            for target in t.targets:
                found[target].append(i)
        return tuple(map(tuple, found))

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """By node, the nodes that wait for its end, whatever the schedule."""
        found: list[list[int]] = [[] for _ in self.before]
        for node, earlier in enumerate(self.before):
            for other in earlier:
                found[other].append(node)
        return tuple(map(tuple, found))

    def transfers_to(self, task: int) -> list[int]:
        """Return the positions of the transfers that a task waits for."""
        count = len(self.tasks)
        return [node - count for node in self.before[task] if node >= count]

    def receiver(self, transfer: Transfer) -> int:
        """Return the group whose device, or host, receives a transfer."""
        return self.tasks[(*transfer.targets, transfer.source)[0]].group

    def sources(self, task: int) -> list[int]:
        """Return the tasks that must end before a task starts."""
        received = (self.transfers[t].source for t in self.transfers_to(task))
        return [*self.tasks[task].after, *received]

    @property
    def base_bytes(self) -> tuple[int, ...]:
        """Bytes live on every group's devices throughout the step."""
        return self.fixed_bytes or (0,) * self.groups

    @cached_property
    def last_kind(self) -> TaskKind:
        """Kind of the task with which the backward pass of a micro-batch ends."""
        kinds = {task.kind for task in self.tasks} & {TaskKind.WEIGHT_GRADIENT}
        return max(kinds, default=TaskKind.BACKWARD)


@dataclass(frozen=True)
class Schedule:
    """The order in which every group runs its tasks.

    Attributes:
      name: name of the family, as `1f1b`.
      graph: the tasks.
      orders: by group, its tasks as positions in the graph.
    """

    name: str
    graph: TaskGraph
    orders: tuple[tuple[int, ...], ...]

    @property
    def is_split(self) -> bool:
        """Whether weight gradients are separate tasks."""
        return self.graph.last_kind is TaskKind.WEIGHT_GRADIENT

    def __str__(self) -> str:
        lines = []
        for group, order in enumerate(self.orders):
            tasks = (self.graph.tasks[i] for i in order)
            lines.append(f"{group}: " + " ".join(map(label, tasks)))
        return "\n".join(lines)


def label(task: Task) -> str:
    """Return a short label of a task: `F3`, or `B3.1` for slice 1."""
    if not task.kind.is_per_micro_batch:
        return LETTERS[task.kind]
    of_slice = f".{task.slice}" if task.slice else ""
    return f"{LETTERS[task.kind]}{task.micro_batch}{of_slice}"
