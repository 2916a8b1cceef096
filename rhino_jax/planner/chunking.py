"""Choice of the numbers of chunks in which to try a chunked loss."""

from __future__ import annotations

import math

from rhino_jax.errors import MicrobatchError
from rhino_jax.passes.chunks import may_chunk
from rhino_jax.planner.variant_search import Search


CHUNK_COUNTS = (4, 16)
"""Numbers of chunks to try: with the fewest, the rest of the logits of 50,000 classes
is about one layer's activations; more chunks are worth a try where the logits still
make the peak. Every chunk reads the head's weights and accumulates their gradient once
more."""

MIN_SHARE = 0.05
"""Minimum share of the logits in the peak, were they sharded over all devices."""


def counts_of_chunks(search: Search, peak_bytes: int) -> list[int]:
    """Return the numbers of chunks in which the loss is worth a try; empty where its
    rows do not matter to the peak, or cannot be chunked.

    Args:
      search: the search of the program.
      peak_bytes: the peak of one device.
    """
    running = search.running
    cut = may_chunk(running.closed_jaxpr, running.program, CHUNK_COUNTS[0])
    if isinstance(cut, MicrobatchError):
        return []
    (loop,), program = cut.loops, cut.program
    made = (v for op in loop.ops for v in program.ops[op].results)
    longest = max(program.values[v].bytes for v in made)
    devices = math.prod(size for _, size in search.meshes[0])
    if longest <= MIN_SHARE * peak_bytes * devices:
        return []
    return [count for count in CHUNK_COUNTS if count <= cut.rows]
