"""The result of `plan.check`: differences of two runs."""

from __future__ import annotations

from dataclasses import dataclass

from rhino_jax.explain.report.displayed import Displayed
from rhino_jax.explain.report.line import format_mesh
from rhino_jax.explain.report.section import Section, Table
from rhino_jax.ir.printer import format_array
from rhino_jax.units import format_count, format_seconds
from rhino_jax.verify.comparison import ROUNDINGS, ComparedLeaf


TOP_LEAVES = 10


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Check(Displayed):
    """The results of a sharded program compared with those of one device.

    Attributes:
      program_name: name of the planned function.
      mesh_axes: (name, size) of every mesh axis, major first.
      devices: devices that the plan ran on, as "8 emulated cpu devices".
      leaves: comparison of every array of the result, the largest differences first.
      not_compared: (tree path, reason) of leaves that could not be compared.
      seconds: wall time of compiling and running both programs.
    """

    program_name: str
    mesh_axes: tuple[tuple[str, int], ...]
    devices: str
    leaves: tuple[ComparedLeaf, ...]
    not_compared: tuple[tuple[str, str], ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether no compared leaf differs beyond its tolerance."""
        return all(leaf.ok for leaf in self.leaves)

    def _line(self) -> str:
        """Return one line with program, mesh, and whether the results agree."""
        bad = sum(not leaf.ok for leaf in self.leaves)
        said = "ok" if self.ok else f"{format_count(bad)} differ"
        arrays = f"{format_count(len(self.leaves))} arrays"
        return (
            f"Check({self.program_name} on {format_mesh(self.mesh_axes)}, run on"
            f" {self.devices} compared with one: {arrays}, {said})"
        )

    def _sections(self, *, full: bool) -> tuple[Section, ...]:
        bad = [leaf for leaf in self.leaves if not leaf.ok]
        result = f"{format_count(len(self.leaves))} arrays agree"
        if bad:
            result = f"{len(bad)} of {len(self.leaves)} arrays differ"
        head = Section(
            f"check of {self.program_name}",
            facts=(
                ("mesh", format_mesh(self.mesh_axes)),
                ("run on", f"{self.devices}, and on one of them"),
                ("result", result),
                ("took", format_seconds(self.seconds)),
            ),
        )
        count = len(self.leaves) if full else max(TOP_LEAVES, len(bad))
        shown = self.leaves[:count]
        rest = len(self.leaves) - len(shown)
        lines = (f"and {format_count(rest)} more, with less",) * bool(rest)
        table = Table(
            ("array", "type", "absolute", "relative", "allowed", "worst at", ""),
            tuple(_row(leaf) for leaf in shown),
            "<<>>><<",
            marked=frozenset(i for i, leaf in enumerate(shown) if not leaf.ok),
        )
        left = Section(
            "not compared",
            table=Table(("what", "why"), self.not_compared, "<<"),
        )
        return (
            head,
            Section("largest differences", table=table, lines=lines),
            *([left] if self.not_compared else []),
        )


def _allowed(leaf: ComparedLeaf) -> str:
    """Format a leaf's tolerance: relative, and absolute for rounded 16-bit floats."""
    rounding = f" or ±{ROUNDINGS * leaf.rounding:.2g}" if leaf.rounding else ""
    return f"{leaf.tolerance:.2g}{rounding}"


def _row(leaf: ComparedLeaf) -> tuple[str, ...]:
    exact = not leaf.tolerance
    return (
        leaf.path,
        format_array(leaf.dtype, leaf.shape),
        f"{leaf.absolute:.2g}",
        "" if exact else f"{leaf.relative:.2g}",
        "equal" if exact else _allowed(leaf),
        f"[{', '.join(map(str, leaf.worst))}]" if leaf.relative else "",
        "" if leaf.ok else f"{format_count(leaf.differing)} differ",
    )
