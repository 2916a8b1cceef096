"""The work of chunks in a row, by hand."""

from __future__ import annotations

from collections.abc import Sequence

from rhino_jax.pipeline.tasks import TransferLink
from rhino_jax.pipeline.work import Chunk, ChunkEdge, StepWork, links_of
from rhino_jax.plan.stages import StageCost


def chain(
    costs: Sequence[StageCost | Sequence[StageCost]],
    micro_batches: int,
    *,
    groups: int | None = None,
    is_v: bool = False,
    sent_bytes: int = 0,
    link: TransferLink | None = None,
    limit_bytes: Sequence[int] = (),
) -> StepWork:
    """Return the work of chunks each of which feeds the next.

    Args:
      costs: cost of every chunk, or of every chunk's slices.
      micro_batches: number of micro-batches.
      groups: number of groups of devices; None: as many as chunks.
      is_v: whether chunks are placed up to the last group and back, instead of
        round-robin.
      sent_bytes: bytes from chunk to chunk, and back, for a micro-batch, over all its
        slices.
      link: link of every pair of groups that send to one another, per direction; None:
        transfers take no time.
      limit_bytes: of every group, as in `StepWork`.
    """
    groups = len(costs) if groups is None else groups
    round_trip = [*range(groups), *reversed(range(groups))] if is_v else range(groups)
    chunks = tuple(
        Chunk(
            round_trip[i % len(round_trip)],
            (cost,) if isinstance(cost, StageCost) else tuple(cost),
        )
        for i, cost in enumerate(costs)
    )
    slices = len(chunks[0].costs)
    sizes = (sent_bytes // slices,) * slices
    edges = tuple(ChunkEdge(i, i + 1, sizes, sizes) for i in range(len(chunks) - 1))
    sent = [(chunks[e.source].group, chunks[e.target].group) for e in edges]
    links, routes = links_of([(a, b, link) for a, b in sent] if link else [])
    return StepWork(
        chunks=chunks,
        edges=edges,
        micro_batches=micro_batches,
        links=links,
        routes=routes,
        limit_bytes=tuple(limit_bytes),
    )
