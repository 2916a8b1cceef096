"""Changing a value's sharding: the collectives, their bytes, and the specs on the way.

The steps follow XLA's SPMD partitioner for a value that is annotated with one spec and
read in another: first shard over axes not yet in use (free), then swap axes between
dims (all-to-all), then gather over the remaining axes; if only the order of axes
differs, permute.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

from rhino_jax.hardware.lowering import AS_WRITTEN, LoweringPolicy
from rhino_jax.ir.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, PERMUTE
from rhino_jax.ir.spec import Spec, axes_of, shards_per_dim


@dataclass(frozen=True, slots=True)
class ReshardStep:
    """One collective.

    Attributes:
      kind: name of one of `rhino_jax.ir.collectives.KINDS`.
      axes: mesh axes, by position.
      local_bytes: bytes on one device, as in `cost.collectives`.
      runs: how often it runs.
    """

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
    """Return the collectives that change a value's spec from `src` to `dst`.

    Args:
      src: spec of the value.
      dst: spec in which it is read.
      whole_bytes: bytes of the whole (unsharded) value.
      sizes: mesh axis sizes.
      lowering: how the compiler lowers shardings.
    Returns:
      Steps in order; empty if the change is local.
    """
    if _is_permutation(src, dst, sizes):
        # Equally many shards of every dim, on other devices.
        pairs = [(d, w) for d, w in zip(src, dst, strict=True) if d != w]
        axes = tuple(sorted({a for d, w in pairs for a in (*d, *w)}))
        cut = math.prod(sizes[a] for a in axes_of(src))
        return (ReshardStep(PERMUTE, axes, whole_bytes / cut),)
    return tuple(
        ReshardStep(kind, axes, whole_bytes / math.prod(sizes[a] for a in held))
        for kind, axes, held in _way(src, dst, lowering)[0]
    )


def reshard_route(
    src: Spec,
    dst: Spec,
    sizes: tuple[int, ...],
    lowering: LoweringPolicy = AS_WRITTEN,
) -> tuple[Spec, ...]:
    """Return the specs to pass through on the way from `src` to `dst`, `dst` last.

    XLA replicates a value if it cannot reach a spec in one collective ("involuntary
    full rematerialization"); with every waypoint annotated, it never has to.
    Unannotated, it gathers the last dim first, over whatever links; annotated, it
    gathers over slow links while the shard is small.
    """
    route: tuple[Spec, ...] = ()
    if not _is_permutation(src, dst, sizes):
        _, route = _way(src, dst, replace(lowering, annotates_waypoints=True))
    waypoints = [*route, dst]
    return tuple(
        s
        for s, before in zip(waypoints, [src, *waypoints], strict=False)
        if s != before
    )


def _is_permutation(src: Spec, dst: Spec, sizes: tuple[int, ...]) -> bool:
    """Whether two specs have equally many shards of every dim, on other devices."""
    return src != dst and shards_per_dim(src, sizes) == shards_per_dim(dst, sizes)


Move = tuple[str, tuple[int, ...], tuple[int, ...]]
"""(kind, axes, axes that shard the value then) of a collective."""


@functools.cache
def _way(
    src: Spec, dst: Spec, lowering: LoweringPolicy
) -> tuple[tuple[Move, ...], tuple[Spec, ...]]:
    """Return the collectives on any mesh on which the specs are no permutation of each
    other, and the specs before each exchange and gather, and at the end."""
    way = _Way([list(dim) for dim in src], dst)
    way.cut_free_axes()
    way.exchange()
    way.gather(lowering)
    return tuple(way.steps), tuple(way.route)


@dataclass(slots=True)
class _Way:
    """The state of a value on its way to another spec.

    Attributes:
      now: mesh axes that shard every dim at this point, by position.
      want: the spec to reach.
      steps: the collectives so far.
      route: the specs before each of them.
    """

    now: list[list[int]]
    want: Spec
    steps: list[Move] = field(default_factory=list)
    route: list[Spec] = field(default_factory=list)

    def step(self, kind: str, axes: tuple[int, ...]) -> None:
        self.steps.append((kind, axes, tuple(a for dim in self.now for a in dim)))

    def stop_here(self) -> None:
        self.route.append(tuple(map(tuple, self.now)))

    def cut_free_axes(self) -> None:
        """Shard over axes not in use yet; each device slices its own shard: free."""
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
        """Move axes between dims by all-to-alls.

        An axis moves if it is minor-most where it is and the next one where it must go.
        """
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
        """Gather over the remaining axes, one collective per dim.

        Major axes lie on the slower links: they come first, while the shard is small.
        Without waypoints XLA gathers the last dim first; if it gathers by axis, all at
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
            # Without an annotation, XLA gathers a part of an axis and permutes.
            self.stop_here()

    def _extras(self) -> dict[int, list[int]]:
        """Return dim → the minor axes that shard it now and must not."""
        extras = {}
        for i, (dim, goal) in enumerate(zip(self.now, self.want, strict=True)):
            keep = 0
            while keep < min(len(dim), len(goal)) and dim[keep] == goal[keep]:
                keep += 1
            if len(dim) > keep:
                extras[i] = dim[keep:]
        return extras
