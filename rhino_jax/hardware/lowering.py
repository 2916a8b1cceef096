"""Lowering of shardings by compilers: facts that cost estimates and plans share.

XLA lowers shardings through one of two passes with behaviour of their own: TPU's
handles one mesh axis at a time, GPU's and CPU's one dim at a time. A hardware file
states which (`Device`); the cost model estimates by it (`rhino_jax.cost.reshard`,
`rhino_jax.cost.combine`), and plans annotate by it (`rhino_jax.runtime.constraints`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweringPolicy:
    """The rules by which a compiler turns a change of sharding into collectives.

    Attributes:
      gathers_by_axis: whether all-gathers run over one mesh axis at a time only; a
        gather over several axes at once becomes an all-reduce, for twice the bytes.
      scatters_by_axis: whether reduce-scatters run over one mesh axis at a time only,
        with the same fallback.
      combines: whether independent collectives are combined into fewer, larger ones,
        with kernels that pack and unpack them (`rhino_jax.model.packing`).
      annotates_waypoints: whether the program is annotated with every spec on the way
        from one to another, or only with the last.
    """

    gathers_by_axis: bool = False
    scatters_by_axis: bool = False
    combines: bool = False
    annotates_waypoints: bool = True

    @property
    def loops_matmuls(self) -> bool:
        """Whether large matmuls with a scattered result become loops of matmuls.

        Such loops scatter over all axes at once, with or without annotated waypoints:
        seen on tori of two dims (GPT 1.3B on v5e:4x4), not of three, where all-gathers
        run by axis.
        """
        return self.scatters_by_axis and not self.gathers_by_axis

    @property
    def routes(self) -> LoweringPolicy:
        """This policy reduced to what routes between specs depend on; for plans."""
        return replace(self, scatters_by_axis=False, combines=False)

    def without_waypoints(self) -> LoweringPolicy:
        """Return the same policy for programs with final specs alone annotated."""
        return replace(self, annotates_waypoints=False)


AS_WRITTEN = LoweringPolicy()
"""A compiler that uses a single collective wherever one suffices."""
