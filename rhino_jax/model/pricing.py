"""The numbers by which options are listed and priced that no hardware gives."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """Attributes:
    tie_s: price in seconds of any change of layout that costs nothing else, so that
        ties are broken towards no change; far below the nanosecond in which
        objectives are compared.
    slice_factor: times the price of resharding each slice inside a loop, that of
        resharding the whole stack before it: the same bytes, but the whole stack is
        then held, and nothing hides it. Just enough to break the tie.
    small_share: resharded copies of fewer bytes than this share of the memory limit
        are not counted towards the peak: a thousand of them at once would be 10 %, and
        few live at once.
    most_padded: an uneven cut is an option where the shards, all as large as the
        largest, add up to no more than this many times the dim. What the padding costs
        is priced as well; this only keeps hopeless options out.
    most_cells: entries of different tables of the problem up to which all options are
        searched together on meshes of three and more axes; 120 MB, as of a U-Net.
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


PRICING = Pricing()
