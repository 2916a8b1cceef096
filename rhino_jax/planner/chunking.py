"""Whether the loss of a program is worth being made in chunks."""

from __future__ import annotations

import math

from rhino_jax.errors import MicrobatchError
from rhino_jax.passes.chunks import may_chunk
from rhino_jax.planner.variant_search import Search


CHUNK_COUNTS = (4, 16)
"""Numbers of chunks that are tried: of the fewest, what is left of the logits of 50,000
classes is about a layer's activations; more is worth a try where it is the peak still.
Every chunk reads the weights of the head and adds to their gradient once more."""

MIN_SHARE = 0.05
"""Of the peak that logits must have, were they cut over all devices."""


def counts_of_chunks(search: Search, peak_bytes: int) -> list[int]:
    """In how many chunks the loss is worth a try; none where it makes no rows that
    matter to the peak, or cannot be cut.

    Args:
      search: of the program.
      peak_bytes: of one device.
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
