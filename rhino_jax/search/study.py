"""What is known of a program on some hardware before it is laid over a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rhino_jax.hardware.target import Target
from rhino_jax.ir.program import Program
from rhino_jax.search.alike import Alike, find_alike
from rhino_jax.search.classes import Classes, Roles, find_classes, find_roles
from rhino_jax.search.flatten import flatten
from rhino_jax.search.graph import Graph
from rhino_jax.search.lanes import dims_off_lanes
from rhino_jax.search.liveness import Liveness, analyse
from rhino_jax.search.padding import matmul_dims
from rhino_jax.search.slack import Slack
from rhino_jax.search.stored import Fusing


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """What the models of all meshes share.

    Attributes:
      graph: the program.
      target: where it runs.
      liveness: when its values are in memory, and what is read and launched.
      slack: which collectives something waits for, as far as the compiler makes use
        of it.
      classes, roles: what its dims and inputs are.
      padded_dims: sizes of dims that may be cut unevenly.
      off_lanes: value → its dims that never lie on lanes (see `lanes`).
      alike: what has the same options on every mesh.
    """

    graph: Graph
    target: Target
    liveness: Liveness
    slack: Slack
    classes: Classes
    roles: Roles
    padded_dims: frozenset[int]
    off_lanes: Mapping[int, tuple[int, ...]]
    alike: Alike

    @classmethod
    def of(cls, program: Program, target: Target) -> Study:
        graph, device = flatten(program), target.device
        classes = find_classes(graph)
        liveness = analyse(graph, Fusing.of(device))
        off_lanes = dims_off_lanes(graph, classes) if device.tile else {}
        return cls(
            graph,
            target,
            liveness,
            liveness.slack.where(device.free_share is not None),
            classes,
            find_roles(graph, classes),
            matmul_dims(graph),
            off_lanes,
            find_alike(graph, liveness, off_lanes),
        )
