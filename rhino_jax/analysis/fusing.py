"""The fusion behaviour of a compiler."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rhino_jax.hardware.target import Device, KernelRates


@dataclass(frozen=True, slots=True)
class Fusing:
    """The fusion behaviour of a compiler.

    Attributes:
      with_matmuls: whether elementwise producers and consumers fuse into a matmul.
      recomputes: names of expensive ops that this compiler recomputes where others
        store the result, and "name.dtype" where that holds for one element type
        (`Device.recomputes`).
      hoists_conversions: see `temporaries.find_hoisted`.
      parts_columns: whether the readers of a reduction over other dims than the last
        run in another fusion (`Device.parts_columns`).
      masks_groups, tiles_groups: see `temporaries.find_masked`.
      sinks_broadcasts, copies_stacks: as in `Device`.
      stacks_in_place: whether an elementwise value that is stacked is computed in the
        stack. XLA:CPU gives it a buffer: peaks of gpt-tiny in loops are predicted 7 %
        too low to 6 % too high with it, and 4 to 10 % too low without.
      by_bytes: as `Device.fuses_by_bytes`.
      pads_evenly: whether its convolutions pad both ends of a dim alike (cuDNN).
      ops_per_byte, rates: see `kernels.find_kernels`.
      on_chip_bytes, loops_on_chip: as in `Device`.
    """

    with_matmuls: bool = False
    recomputes: frozenset[str] = frozenset()
    hoists_conversions: bool = False
    parts_columns: bool = False
    masks_groups: bool = False
    tiles_groups: bool = False
    sinks_broadcasts: bool = False
    copies_stacks: bool = False
    stacks_in_place: bool = False
    by_bytes: bool = False
    pads_evenly: bool = False
    ops_per_byte: float = math.inf
    rates: KernelRates = field(default_factory=KernelRates)
    on_chip_bytes: int = 0
    loops_on_chip: bool = False

    @classmethod
    def of(cls, device: Device) -> Fusing:
        bytes_per_s = device.hbm_bytes_per_s * device.memory_efficiency
        rates = device.kernels
        return cls(
            device.fuses_matmuls,
            frozenset(device.recomputes),
            device.hoists_conversions,
            device.parts_columns,
            device.masks_groups,
            device.tiles_groups,
            device.sinks_broadcasts,
            device.copies_stacks,
            device.fuses_matmuls or device.copies_stacks,
            device.fuses_by_bytes,
            device.calls_cudnn,
            rates.vector_ops_per_s / bytes_per_s,
            rates,
            device.on_chip_bytes,
            device.loops_on_chip,
        )
