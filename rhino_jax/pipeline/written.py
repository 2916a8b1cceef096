"""Orders of tasks as text, so that plans store searched schedules."""

from __future__ import annotations

from rhino_jax.pipeline.tasks import PassKind, Schedule, TaskGraph


_KINDS = {kind.letter: kind for kind in PassKind}


def written_orders(schedule: Schedule) -> tuple[str, ...]:
    """Return each group's tasks: letter, chunk, micro-batch, as `F0.2 B1.0 U0.0`."""
    words = [f"{t.kind.letter}{t.chunk}.{t.micro_batch}" for t in schedule.graph.tasks]
    return tuple(" ".join(words[i] for i in order) for order in schedule.orders)


def read_order(graph: TaskGraph, text: str) -> tuple[int, ...]:
    """Parse a group's text of `written_orders` to positions in a graph."""

    def position(word: str) -> int:
        chunk, batch = map(int, word[1:].split("."))
        return graph.find(_KINDS[word[0]], chunk, batch)

    return tuple(map(position, text.split()))
