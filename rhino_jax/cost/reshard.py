"""Changing a value's sharding: which collectives, how many bytes, how long.

The steps follow what XLA's SPMD partitioner does for a value that is pinned to
one spec and read in another: first cut what is not yet cut (free), then swap
axes between dims (all-to-all), then gather over the axes that are left; where only the
order of axes differs, permute.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

from rhino_jax.cost.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    PERMUTE,
)
from rhino_jax.hardware.lowering import AS_WRITTEN, LoweringPolicy
from rhino_jax.ir.spec import Spec, axes_of, shards_per_dim


@dataclass(frozen=True, slots=True)
class ReshardStep:
    """One collective: its kind, mesh axes (by position), `local_bytes`, and how often
    it runs."""

    kind: str
    axes: tuple[int, ...]
    local_bytes: float
    runs: int = 1


@functools.lru_cache(maxsize=1 << 14)
def reshard_steps(
    src: Spec,
    dst: Spec,
    whole_bytes: int,
    sizes: tuple[int, ...],
    lowering: LoweringPolicy = AS_WRITTEN,
) -> tuple[ReshardStep, ...]:
    """The collectives that turn `src` into `dst`.

    Args:
      src: spec in which the value is held.
      dst: spec in which it is wanted.
      whole_bytes: bytes of the whole value.
      sizes: mesh axis sizes.
      lowering: what the compiler makes of it.
    Returns:
      Steps in order; empty where the change is local.
    """
    steps, _ = _reshard(src, dst, whole_bytes, sizes, lowering)
    return tuple(steps)


def reshard_route(
    src: Spec,
    dst: Spec,
    sizes: tuple[int, ...],
    lowering: LoweringPolicy = AS_WRITTEN,
) -> tuple[Spec, ...]:
    """The specs to pass through on the way from `src` to `dst`, which is the last.

    XLA replicates a value where it cannot reach a spec in one collective
    ("involuntary full rematerialization"); told every stop, it never has to. It
    gathers the last dim first, whatever links that takes; told every stop, it
    gathers over slow links while the shard is small.
    """
    _, route = _reshard(src, dst, 1, sizes, replace(lowering, annotates_waypoints=True))
    waypoints = [*route, dst]
    return tuple(
        s
        for s, before in zip(waypoints, [src, *waypoints], strict=False)
        if s != before
    )


def _reshard(
    src: Spec,
    dst: Spec,
    whole_bytes: int,
    sizes: tuple[int, ...],
    lowering: LoweringPolicy,
) -> tuple[list[ReshardStep], list[Spec]]:
    """Steps, and the specs before each all-to-all and gather, and behind the last."""
    if src == dst:
        return [], []
    if shards_per_dim(src, sizes) == shards_per_dim(dst, sizes):
        # As many pieces of every dim, on other devices: they trade places.
        pairs = [(d, w) for d, w in zip(src, dst, strict=True) if d != w]
        axes = tuple(sorted({a for d, w in pairs for a in (*d, *w)}))
        cut = math.prod(sizes[a] for a in axes_of(src))
        return [ReshardStep(PERMUTE, axes, whole_bytes / cut)], []
    way = _Way([list(dim) for dim in src], dst, whole_bytes, sizes)
    way.cut_free_axes()
    way.exchange()
    way.gather(lowering)
    return way.steps, way.route


@dataclass(slots=True)
class _Way:
    """A value on its way to another spec.

    Attributes:
      now: the axes that cut every dim, at this point.
      want: those that shall.
      whole_bytes: bytes of the whole value.
      sizes: mesh axis sizes.
      steps: the collectives so far.
      route: the specs before each of them.
    """

    now: list[list[int]]
    want: Spec
    whole_bytes: int
    sizes: tuple[int, ...]
    steps: list[ReshardStep] = field(default_factory=list)
    route: list[Spec] = field(default_factory=list)

    def step(self, kind: str, axes: tuple[int, ...]) -> None:
        cut = math.prod(self.sizes[a] for dim in self.now for a in dim)
        self.steps.append(ReshardStep(kind, axes, self.whole_bytes / cut))

    def stop_here(self) -> None:
        self.route.append(tuple(map(tuple, self.now)))

    def cut_free_axes(self) -> None:
        """Cut by axes that are not in use yet; each device keeps its part: free."""
        used = {a for dim in self.now for a in dim}
        for dim, goal in zip(self.now, self.want, strict=True):
            while (
                len(dim) < len(goal)
                and tuple(dim) == goal[: len(dim)]
                and goal[len(dim)] not in used
            ):
                used.add(goal[len(dim)])
                dim.append(goal[len(dim)])

    def exchange(self) -> None:
        """Move by an all-to-all every axis that is minor-most where it is and next in
        line where it must go."""
        now, want = self.now, self.want
        home = {a: i for i, dim in enumerate(want) for a in dim}
        moved = True
        while moved:
            moved = False
            for i, dim in enumerate(now):
                if not dim or tuple(dim) == want[i][: len(dim)]:
                    continue
                axis = dim[-1]
                j = home.get(axis)
                if j is None or j == i:
                    continue
                if tuple(now[j]) != want[j][: want[j].index(axis)]:
                    continue
                self.stop_here()
                self.step(ALL_TO_ALL, (axis,))
                now[j].append(axis)
                dim.pop()
                moved = True
            if moved:
                self.cut_free_axes()

    def gather(self, lowering: LoweringPolicy) -> None:
        """Gather over what is left, one collective per dim.

        Major axes lie on the slower links: they come first, while the shard is small.
        XLA left to itself gathers the last dim first; where it gathers by axis, all at
        once with an all-reduce.
        """
        now = self.now
        extras = self._extras()
        every = tuple(a for extra in extras.values() for a in extra)
        is_told, by_axis = lowering.annotates_waypoints, lowering.gathers_by_axis
        if by_axis and not is_told and len(every) > 1:
            for i, extra in extras.items():
                del now[i][-len(extra) :]
            self.step(ALL_REDUCE, every)
            return
        for i, extra in sorted(
            extras.items(), key=lambda e: min(e[1]) if is_told else -e[0]
        ):
            for group in [[a] for a in reversed(extra)] if by_axis else [extra]:
                self.stop_here()
                del now[i][-len(group) :]
                self.step(ALL_GATHER, tuple(group))
        if extras and tuple(map(tuple, now)) != self.want:
            # Not told, XLA gathers a part of an axis and permutes.
            self.stop_here()

    def _extras(self) -> dict[int, list[int]]:
        """Dim → the minor axes that cut it and shall not."""
        extras = {}
        for i, (dim, goal) in enumerate(zip(self.now, self.want, strict=True)):
            keep = 0
            while keep < min(len(dim), len(goal)) and dim[keep] == goal[keep]:
                keep += 1
            if len(dim) > keep:
                extras[i] = dim[keep:]
        return extras
