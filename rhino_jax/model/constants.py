"""Constants of the cost model and of the enumeration of options that depend on no
hardware."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConstants:
    """Constants that no hardware file states.

    Attributes:
      tie_s: cost in seconds of any change of layout that costs nothing else, so that
        ties are broken towards no change; far below the nanosecond in which objectives
        are compared.
      slice_factor: factor on the cost of resharding a whole stack before a loop,
        relative to resharding each slice inside it: the same bytes, but the whole stack
        is then live, and nothing overlaps with it. Just enough to break the tie.
      small_share: resharded copies of fewer bytes than this share of the memory limit
        are not counted towards the peak: a thousand of them at once would be 10 %, and
        few are live at once.
      most_padded: an uneven sharding is an option where the shards, all as large as the
        largest, add up to no more than this many times the dim. The cost of the padding
        is estimated as well; this only excludes hopeless options.
      most_cells: number of entries of the problem's distinct tables up to which all
        options are searched at once on meshes of three and more axes; 120 MB, as for a
        U-Net.
      sector_bytes: bytes that a GPU reads at once, so that a border of single columns
        takes as long as one of as many whole sectors (CUDA C++ Best Practices Guide,
        "Coalesced Access to Global Memory"). TPUs read tiles; hardware files give them.
    """

    tie_s: float = 1e-12
    slice_factor: float = 1.001
    small_share: float = 1e-4
    most_padded: float = 1.5
    most_cells: int = 15_000_000
    sector_bytes: int = 32


CONSTANTS = ModelConstants()
