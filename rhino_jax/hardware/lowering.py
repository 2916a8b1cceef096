"""What a compiler makes of a sharded program: the facts that prices and plans share.

XLA lowers shardings through one of two passes with habits of their own: TPU's takes
one mesh axis at a time, GPU's and CPU's one dim at a time. What a hardware file says of
it (`Device`) is read here once; the cost model prices by it (`rhino_jax.cost.reshard`,
`rhino_jax.cost.combine`), and plans annotate by it (`rhino_jax.runtime.constraints`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweringPolicy:
    """Which collectives a change of sharding becomes.

    Attributes:
      gathers_by_axis: all-gathers run over one mesh axis at a time only; of several
        at once becomes an all-reduce, for twice the bytes.
      scatters_by_axis: the same of reduce-scatters.
      combines: collectives that nothing waits for become few, with kernels that pack
        and unpack them (`rhino_jax.model.packing`).
      annotates_waypoints: whether the program is annotated with every spec on the way
        from one to another, or only with the last.
    """

    gathers_by_axis: bool = False
    scatters_by_axis: bool = False
    combines: bool = False
    annotates_waypoints: bool = True

    @property
    def loops_matmuls(self) -> bool:
        """Whether large matmuls whose result is scattered become loops that scatter
        over all axes at once, waypoints or not: seen on tori of two dims (GPT 1.3B on
        v5e:4x4), not of three, where all-gathers run by axis."""
        return self.scatters_by_axis and not self.gathers_by_axis

    @property
    def routes(self) -> LoweringPolicy:
        """Only what routes between specs depend on, which is all that a plan keeps."""
        return replace(self, scatters_by_axis=False, combines=False)

    def without_waypoints(self) -> LoweringPolicy:
        """The same compiler, told only where values end up."""
        return replace(self, annotates_waypoints=False)


AS_WRITTEN = LoweringPolicy()
"""A compiler that does in one collective what one collective can do."""
